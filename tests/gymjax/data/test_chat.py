"""Token by token: what is trained, for templates like those of real models and three kinds of tokenizers."""

import numpy as np
import pytest

from gymjax.data.chat import Encoder
from gymjax.data.conversation import Conversation, Message, RawText
from gymjax.data.errors import DataError
from gymjax.data.template import chat_template

KINDS = ("bytes", "trimmed", "metaspace")
# Answers with spaces and line ends at their edges, characters of several bytes, and one that is a role's name.
ANSWERS = (" It trains\n models.", "é 日本", "\nassistant", "two  ", "x")


def conversation(*texts, system=None, weights=None):
    turns = [Message("system", system)] if system else []
    for index, text in enumerate(texts):
        weight = (weights or {}).get(index, 1.0)
        turns.append(Message("user", text) if index % 2 == 0 else Message("assistant", text, weight))
    return Conversation(tuple(turns), "d.jsonl:3")


def encoder(tokenizer, **flags):
    return Encoder(tokenizer, chat_template(tokenizer)[0], **flags)


def trained(tokenizer, row, **flags):
    """The trained tokens of a row, decoded, a string for each run of them."""
    example = encoder(tokenizer, **flags).encode([row])[0]
    on = example.weights > 0
    edges = np.flatnonzero(np.diff(np.concatenate([[False], on, [False]]).astype(int)))
    runs = [example.ids[start:end] for start, end in edges.reshape(-1, 2)]
    # A token in front, taken off again: decoders strip the first space of a text.
    first = tokenizer.convert_tokens_to_ids("<s>")
    return [tokenizer.decode([first, *run]).removeprefix("<s>") for run in runs]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "before", "end", "trim"),
    [
        ("chatml", "", "<|im_end|>", False),
        ("generation", "", "<|im_end|>", False),
        ("llama3", "", "<|eot_id|>", True),
        ("mistral", " ", "</s>", False),
    ],
)
def test_mask_is_the_answers_and_their_ends(make_tokenizer, kind, name, before, end, trim):
    tokenizer = make_tokenizer(name, kind=kind, bos="<s>", eos="</s>" if name == "mistral" else "<|im_end|>")
    for answer in ANSWERS:
        for last in ANSWERS:
            wanted = [before + (text.strip() if trim else text) + end for text in (answer, last)]
            found = trained(tokenizer, conversation("What is gymjax? ", answer, " one ", last))
            for text, exact in zip(found, wanted, strict=True):
                # One token may hold the header's line end and the answer's own: it is trained with the answer.
                assert text in (exact, "\n" + exact)
                assert text == exact or exact.startswith("\n")


@pytest.mark.parametrize("kind", KINDS)
def test_mask_without_merges_at_the_edges(make_tokenizer, kind):
    tokenizer = make_tokenizer("chatml", kind=kind)
    row = conversation("What is it?", "It trains models.", "one", "two é", system="You are")
    assert trained(tokenizer, row) == ["It trains models.<|im_end|>", "two é<|im_end|>"]
    assert trained(tokenizer, row, mask_history=True) == ["two é<|im_end|>"]


def test_the_two_ways_to_find_answers_agree(make_tokenizer):
    rows = [conversation("q", a, "r", b, system="s") for a in ANSWERS for b in ANSWERS]
    by_prefix = encoder(make_tokenizer("chatml")).encode(rows)
    by_marks = encoder(make_tokenizer("generation")).encode(rows)
    for one, two in zip(by_prefix, by_marks):
        np.testing.assert_array_equal(one.ids, two.ids)
        np.testing.assert_array_equal(one.weights, two.weights)


@pytest.mark.parametrize("name", ["chatml", "generation"])
def test_weights_of_turns(make_tokenizer, name):
    row = conversation("q", "one", "r", "two", "s", "three", weights={1: 0.0, 3: 0.25})
    example = encoder(make_tokenizer(name)).encode([row])[0]
    assert sorted(set(example.weights.tolist())) == [0.0, 0.25, 1.0]
    assert trained(make_tokenizer(name), row) == ["two<|im_end|>", "three<|im_end|>"]


def test_train_on_prompt_trains_all(make_tokenizer):
    example = encoder(make_tokenizer("chatml"), train_on_prompt=True).encode([conversation("q", "a")])[0]
    assert np.all(example.weights == 1)


def test_default_system_comes_first_where_there_is_none(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    with_default = encoder(tokenizer, default_system="Be brief")
    one, two = with_default.encode([conversation("q", "a"), conversation("q", "a", system="mine")])
    assert tokenizer.decode(one.ids).startswith("<|im_start|>system\nBe brief<|im_end|>")
    assert tokenizer.decode(two.ids).startswith("<|im_start|>system\nmine<|im_end|>")
    asked = [{"role": "system", "content": "mine"}, {"role": "user", "content": "q"}]
    for prompt, example in ((with_default.prompt(asked[1:]), one), (with_default.prompt(asked), two)):
        assert prompt == example.ids[: len(prompt)].tolist()


def test_pad_equal_to_eos_never_masks_the_end(make_tokenizer):
    tokenizer = make_tokenizer("chatml", pad="<|im_end|>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert trained(tokenizer, conversation("q", "a", "r", "b")) == ["a<|im_end|>", "b<|im_end|>"]


def test_bos_of_the_template_is_the_only_one(make_tokenizer):
    tokenizer = make_tokenizer("llama3", bos="<s>", eos="<|eot_id|>", adds_bos=True)
    example = encoder(tokenizer).encode([conversation("q", "a")])[0]
    assert (example.ids == tokenizer.bos_token_id).sum() == 1


def test_thinking_template_keeps_plain_answers(make_tokenizer):
    """Qwen3 writes an empty thought only before the last answer: plain earlier answers are still found."""
    tokenizer = make_tokenizer("thinking")
    row = conversation("q", "one", "r", "two")
    assert trained(tokenizer, row) == ["one<|im_end|>", "<think>\n\n</think>\n\ntwo<|im_end|>"]


def test_thinking_template_trains_the_last_thought_with_mask_history(make_tokenizer):
    row = conversation("q", "<think>\nhm\n</think>\n\none", "r", "<think>\nso\n</think>\n\ntwo")
    found = trained(make_tokenizer("thinking"), row, mask_history=True)
    assert found == ["<think>\nso\n</think>\n\ntwo<|im_end|>"]


def test_tool_calls_are_trained_and_tool_answers_are_not(make_tokenizer):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = (
        Message("user", "q"),
        Message("assistant", "", 1.0, {"tool_calls": [call]}),
        Message("tool", "2"),
        Message("assistant", "a", 1.0),
    )
    found = trained(make_tokenizer("tools"), Conversation(turns, "s", ({"name": "add"},)))
    assert found == ['{"name": "add", "arguments": {"a": 1}}<|im_end|>', "a<|im_end|>"]


@pytest.mark.parametrize("kind", KINDS)
def test_raw_text_ends_with_eos(make_tokenizer, kind):
    tokenizer = make_tokenizer(None, kind=kind, bos="<s>", eos="</s>", adds_bos=kind == "bytes")
    plain, ended, pair = Encoder(tokenizer).encode(
        [
            RawText((("one two", 1.0),), "s"),
            RawText((("one two</s>", 1.0),), "s"),
            RawText((("What is it?", 0.0), (" one", 1.0)), "s"),
        ]
    )
    begin = [tokenizer.bos_token_id] if kind == "bytes" else []
    assert plain.ids.tolist()[: len(begin)] == begin
    assert np.all(plain.weights[len(begin) :] == 1)
    assert plain.ids.tolist() == ended.ids.tolist()
    assert plain.ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(pair.ids[pair.weights > 0]).strip() == "one</s>"
    assert np.all(
        Encoder(tokenizer, train_on_prompt=True).encode([RawText((("q", 0.0), ("a", 1.0)), "s")])[0].weights[1:]
    )


def test_text_that_begins_with_bos_gets_no_second(make_tokenizer):
    tokenizer = make_tokenizer(None, bos="<s>", eos="</s>", adds_bos=True)
    example = Encoder(tokenizer).encode([RawText((("<s>one", 1.0),), "s")])[0]
    assert (example.ids == tokenizer.bos_token_id).sum() == 1


# --- bad inputs -------------------------------------------------------------------------------------------------------

HEAD = "{% for message in messages %}"
TAIL = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"


def error(make_tokenizer, template, row, **flags):
    with pytest.raises(DataError) as caught:
        encoder(make_tokenizer(template, bos="<s>", eos="</s>"), **flags).encode([row])
    return str(caught.value)


def test_bad_template_that_drops_thoughts(make_tokenizer):
    message = error(make_tokenizer, "thinking", conversation("q", "<think>\nhm\n</think>\n\none", "r", "two"))
    assert message.startswith("d.jsonl:3: the chat template (the tokenizer's own) writes turn 2 differently")
    assert "Set mask_history: true" in message
    assert "{% generation %}" in message


def test_bad_template_whose_generation_prompt_is_not_what_it_writes(make_tokenizer):
    template = HEAD + TURN + TAIL.replace("assistant\n", "assistant\n<think>\n")
    assert "d.jsonl:3: the chat template (the tokenizer's own) writes turn 2 diff" in error(
        make_tokenizer, template, conversation("q", "a")
    )


def test_bad_masked_end_of_turn_by_marks(make_tokenizer):
    template = HEAD + (
        "<|im_start|>{{ message.role + '\n' }}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
        "{% endgeneration %}{% else %}{{ message.content }}{% endif %}<|im_end|>\n"
    ) + TAIL  # fmt: skip
    message = error(make_tokenizer, template, conversation("q", "the answer"))
    assert "d.jsonl:3: the end of an assistant turn is not trained (the trained text ends in" in message
    assert (
        "the answer'), so the model would never stop; let the template end each answer with {{ eos_token }}" in message
    )


def test_bad_template_without_end_of_turn(make_tokenizer):
    template = (
        HEAD
        + "{{ message.role + ': ' + message.content + '\n' }}"
        + TAIL.replace("<|im_start|>assistant\n", "assistant: ")
    )
    assert "the end of an assistant turn is not trained" in error(make_tokenizer, template, conversation("q", "a"))


def test_bad_all_ones_mask(make_tokenizer):
    template = (
        "{{ bos_token }}{% generation %}" + HEAD + TURN.replace("\n' }}", "' }}") + "{% endfor %}{% endgeneration %}"
    )
    message = error(make_tokenizer, template, conversation("q", "a"))
    assert "d.jsonl:3: every token would be trained although the row has turns that are not the assistant's" in message


def test_bad_empty_mask(make_tokenizer):
    template = HEAD + "{% if message.role != 'assistant' %}" + TURN + "{% endif %}{% endfor %}"
    message = error(make_tokenizer, template, conversation("q", "a"))
    assert message.startswith("d.jsonl:3: the chat template writes nothing for an assistant turn, so no token would be")
    template = HEAD + TURN + "{% endfor %}{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    message = error(make_tokenizer, template, conversation("q", "a"))
    assert "marks 0 answers with {% generation %}, the row has 1 assistant turns" in message


def test_bad_double_bos(make_tokenizer):
    message = error(make_tokenizer, "{{ bos_token + bos_token }}" + HEAD + TURN + TAIL, conversation("q", "a"))
    assert message.startswith("d.jsonl:3: the text begins with two BOS tokens (<s>); the chat template writes one")


def test_bad_marks_do_not_match_turns(make_tokenizer):
    template = (
        HEAD
        + "{% if loop.last %}{% generation %}"
        + TURN
        + "{% endgeneration %}{% else %}"
        + TURN
        + "{% endif %}{% endfor %}"
    )
    row = conversation("q", "a", "r", "b")
    message = error(make_tokenizer, template, row, mask_history=True)
    assert "marks 1 answers with {% generation %}, the row has 2 assistant turns; mark each one once" in message


def test_bad_conversation_without_template(make_tokenizer):
    with pytest.raises(DataError, match=r"d\.jsonl:3: the tokenizer has no chat template"):
        Encoder(make_tokenizer(None)).encode([conversation("q", "a")])
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        Encoder(make_tokenizer(None)).prompt([{"role": "user", "content": "q"}])


def test_bad_roles_for_the_template(make_tokenizer):
    row = conversation("q", "a", system="s")
    assert error(make_tokenizer, "mistral", row) == (
        "d.jsonl:3: the chat template (the tokenizer's own) refuses these messages: roles must alternate user/assistant"
    )


def test_bad_tool_call_for_the_template(make_tokenizer):
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    row = Conversation((Message("user", "q"), Message("assistant", "", 1.0, {"tool_calls": [call]})), "d.jsonl:3")
    message = error(make_tokenizer, "chatml", row)
    assert message.startswith(
        "d.jsonl:3: turn 2 calls a tool, but the chat template (the tokenizer's own) does not write"
    )


def test_bad_tools_for_the_template(make_tokenizer):
    row = Conversation(conversation("q", "a").messages, "d.jsonl:3", ({"name": "add"},))
    assert "d.jsonl:3: the row describes tools, but the chat template" in error(make_tokenizer, "chatml", row)


@pytest.mark.parametrize("flags", [{}, {"train_on_prompt": True}])
def test_bad_template_that_leaves_a_turn_out(make_tokenizer, flags):
    template = HEAD + "{% if message.role != 'system' %}" + TURN + "{% endif %}" + TAIL
    message = error(make_tokenizer, template, conversation("q", "a", system="Be very brief."), **flags)
    assert (
        "d.jsonl:3: the chat template (the tokenizer's own) does not write the text of turn 1 (system, ends in"
        in message
    )


def test_bad_noncharacter(make_tokenizer):
    assert "turn 1 holds the noncharacter" in error(make_tokenizer, "chatml", conversation("a\ufdd0b", "a"))


def test_bad_raw_text_without_eos(make_tokenizer):
    with pytest.raises(DataError, match="the tokenizer has no EOS token, so documents cannot be ended"):
        Encoder(make_tokenizer(None, eos=None)).encode([RawText((("x", 1.0),), "s")])
