import copy
import dataclasses
import types

import pytest

from gymjax.config import GenerateConfig
from gymjax.inference import generate, stream
from gymjax.inference.generate import _answer as cut_answer
from gymjax.inference.prompts import encode, stop_tokens
from gymjax.inference.text import find_stop, settled, to_text

GREEDY = GenerateConfig(do_sample=False, max_new_tokens=24)
SAMPLED = GenerateConfig(do_sample=True, temperature=1.0, top_p=0.95, top_k=60, max_new_tokens=24)
PROMPTS = ["The quick brown fox", "a", "Hello, world! How are you?"]
CHAT = [{"role": "user", "content": "Who are you?"}]


def drain(generator):
    pieces = []
    while True:
        try:
            pieces.append(next(generator))
        except StopIteration as end:
            return pieces, end.value


def test_answers_do_not_depend_on_the_batch(model, tokenizer):
    settings = dataclasses.replace(SAMPLED, repetition_penalty=1.2)
    together = generate(model, tokenizer, PROMPTS, settings, seed=3)
    in_pairs = generate(model, tokenizer, PROMPTS, settings, seed=3, batch_size=1)
    assert together == in_pairs
    assert together != generate(model, tokenizer, PROMPTS, settings, seed=4)
    assert [answer.prompt_tokens for answer in together] == [len(prompt) for prompt in PROMPTS]
    assert all(len(answer.token_ids) == 24 or answer.finish_reason == "stop" for answer in together)


def test_pieces_joined_are_the_text(model, tokenizer):
    for settings in (SAMPLED, GREEDY):
        whole = generate(model, tokenizer, PROMPTS[:1], settings, seed=5)[0]
        pieces, answer = drain(stream(model, tokenizer, PROMPTS[0], settings, seed=5, chunk=5))
        assert "".join(pieces) == whole.text
        assert answer == whole
        assert len(pieces) > 1


def test_stop_text_cuts_the_answer_and_its_tokens(model, tokenizer):
    whole = generate(model, tokenizer, PROMPTS[:1], GREEDY)[0]
    stop = to_text(tokenizer, whole.token_ids[6:8])
    assert find_stop(whole.text, (stop,)) >= 0
    settings = dataclasses.replace(GREEDY, stop=(stop, "never said"))
    cut = generate(model, tokenizer, [PROMPTS[1], PROMPTS[0]], settings)[1]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert stop in to_text(tokenizer, cut.token_ids)
    assert stop not in to_text(tokenizer, cut.token_ids[:-1])
    pieces, answer = drain(stream(model, tokenizer, PROMPTS[0], settings, chunk=3))
    assert ("".join(pieces), answer.text) == (cut.text, cut.text)


def test_the_stop_text_that_ends_first_cuts_however_many_tokens_are_made_at_a_time(tokenizer):
    run = types.SimpleNamespace(tokenizer=tokenizer, settings=GenerateConfig(stop=("abcd", "bc")), stop_ids=())
    for made in ("say abc", "say abcd", "say abcd and more"):
        answer = cut_answer(run, tokenizer(made)["input_ids"], False, 1)
        assert (answer.text, to_text(tokenizer, answer.token_ids)) == ("say a", "say abc")


def test_stop_tokens_come_from_tokenizer_configuration_and_template(tokenizer):
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<|endoftext|>", "<|im_end|>", "<|im_start|>")}
    assert stop_tokens(tokenizer) == tuple(sorted((ids["<|endoftext|>"], ids["<|im_end|>"])))
    assert set(stop_tokens(tokenizer, generation_eos=[3, 4])) >= {3, 4}
    assert 7 in stop_tokens(tokenizer, generation_eos=7)
    assert ids["<|im_start|>"] in stop_tokens(tokenizer, texts=["<|im_start|>", "ab"])


def test_a_template_that_fails_does_not_keep_texts_from_being_continued(tokenizer):
    broken = copy.deepcopy(tokenizer)
    broken.chat_template = "{{ raise_exception('no') }}"
    assert stop_tokens(broken) == (tokenizer.eos_token_id,)
    with pytest.raises(ValueError, match="refuses these messages: no"):
        encode(broken, [CHAT])


def test_a_stop_token_is_no_part_of_the_text(model, tokenizer):
    whole = generate(model, tokenizer, PROMPTS[:1], GREEDY)[0]
    stop = whole.token_ids[5]
    cut = generate(model, tokenizer, PROMPTS[:1], GREEDY, generation_eos=stop)[0]
    end = whole.token_ids.index(stop)
    assert cut.token_ids == whole.token_ids[: end + 1]
    assert cut.text == to_text(tokenizer, whole.token_ids[:end])
    assert cut.finish_reason == "stop"


def test_chat_prompts_are_written_by_the_template(tokenizer):
    text = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
    assert encode(tokenizer, [CHAT]) == [tokenizer(text)["input_ids"]]
    system = encode(tokenizer, [CHAT], default_system="Be brief.")[0]
    assert tokenizer.decode(system) == "<|im_start|>system\nBe brief.<|im_end|>\n" + text


def test_no_piece_ends_inside_a_character_or_a_stop_text():
    assert settled("caf\ufffd", ()) == 3
    assert settled("one <|e", ("<|end|>",)) == 4
    assert settled("one <|e\ufffd", ("<|end|>",)) == 4
    assert settled("one two", ("<|end|>",)) == 7
    assert settled("aab", ("ab", "bcd")) == 2


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        (["fine", ""], GREEDY, "prompt 2 of 2: the prompt is empty"),
        ([[]], GREEDY, "prompt 1 of 1: the prompt is empty"),
        ([[{"role": "user"}]], GREEDY, "prompt 1 of 1: a turn must have role and content"),
        (
            ["x" * 250],
            GREEDY,
            "250 tokens + max_new_tokens 24 = 274 exceeds the model's 256 positions; set max_new_tokens to 6 or",
        ),
        (["x" * 256], GREEDY, "shorten the prompt"),
        (["x"], dataclasses.replace(GREEDY, top_p=2.0), "top_p must be above 0"),
    ],
)
def test_bad_requests_say_what_must_hold(model, tokenizer, prompts, settings, message):
    with pytest.raises(ValueError) as error:
        generate(model, tokenizer, prompts, settings)
    assert message in str(error.value)
