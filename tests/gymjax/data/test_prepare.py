import itertools
import json

import numpy as np
import pytest

import gymjax.data
from gymjax.data.errors import DataError
from gymjax.data.prepare import prepare
from gymjax.data.preview import preview


@pytest.fixture
def tokenizer(make_tokenizer):
    return make_tokenizer("chatml")


def test_counts_and_lines(tokenizer, write, chat, settings):
    path = write("d.jsonl", [chat("q", "one"), chat("q", "two", "r"), chat("q", "three")])
    prepared = prepare(settings(path), tokenizer)
    report = prepared.report
    assert (report.train.read, report.train.kept) == (3, 2)
    assert prepared.train.sources == (f"{path}:1", f"{path}:3")
    assert [drop.source for drop in report.train.dropped] == [f"{path}:2"]
    assert report.train.tokens == len(prepared.train.ids)
    assert report.train.supervised == prepared.train.supervised > 0
    assert report.eval is prepared.eval is None
    assert report.lines() == [
        f"train: 3 rows read, 2 examples, {report.train.tokens} tokens, {report.train.supervised} trained "
        f"({report.train.supervised / report.train.tokens:.0%})",
        f"train: 1 rows dropped, the last turn is user, nothing answers it: {path}:2",
    ]
    assert gymjax.data.DataReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    assert prepared.chat_template == tokenizer.chat_template


def test_preview_shows_what_is_trained(tokenizer, write, chat, settings):
    train = prepare(settings(write("d.jsonl", [chat("What", "one")])), tokenizer).train
    shown = preview(train, 0, tokenizer)
    assert (
        "".join(text for text, _ in shown) == "<|im_start|>user\nWhat<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
    )
    assert "".join(text for text, on in shown if on) == "one<|im_end|>"
    with pytest.raises(DataError, match="row 1 does not exist; the dataset has rows 0 to 0"):
        preview(train, 1, tokenizer)


def test_long_rows_are_cut_and_rows_whose_answer_is_cut_away_are_dropped_and_listed(tokenizer, write, chat, settings):
    path = write("d.jsonl", [chat("q", "one"), chat("q", "two " * 99), chat("what " * 99, "a"), chat("r", "x")])
    prepared = prepare(settings(path, cutoff_len=32), tokenizer)
    report = prepared.report.train
    assert prepared.train.sources == tuple(f"{path}:{line}" for line in (1, 2, 4))
    assert report.truncated == [f"{path}:2"]
    assert [(drop.source, drop.reason) for drop in report.dropped] == [
        (f"{path}:3", "its answer lies beyond cutoff_len 32")
    ]
    assert prepared.train.lengths.max() == 32
    assert f"train: 1 rows cut to cutoff_len, first {path}:2" in report.lines("train")
    whole = prepare(settings(path, cutoff_len=1024), tokenizer).train
    np.testing.assert_array_equal(prepared.train[1].ids, whole[1].ids[:32])


def test_formats_are_recognised_file_by_file(tokenizer, write, chat, settings, tmp_path):
    write("mixed/a.jsonl", [chat("q", "one")])
    write("mixed/b.json", [{"instruction": "q", "output": "one"}])
    write("mixed/c.jsonl", [{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "one"}]}])
    write("mixed/d.csv", "instruction,input,output\nq,,one\n")
    train = prepare(settings(tmp_path / "mixed"), tokenizer).train
    assert len(train) == 4
    for index in range(1, 4):
        np.testing.assert_array_equal(train[index].ids, train[0].ids)
        np.testing.assert_array_equal(train[index].weights, train[0].weights)


def test_val_size_and_eval_dataset(tokenizer, write, chat, settings):
    path = write("d.jsonl", [chat("q", f"answer {number}") for number in range(20)])
    shared = prepare(settings(path, val_size=0.2), tokenizer, seed=1)
    assert (len(shared.train), len(shared.eval)) == (16, 4)
    assert not set(shared.train.sources) & set(shared.eval.sources)
    assert shared.eval.sources == prepare(settings(path, val_size=4), tokenizer, seed=1).eval.sources
    assert shared.eval.sources != prepare(settings(path, val_size=4), tokenizer, seed=2).eval.sources
    other = write("e.jsonl", [chat("q", "held")])
    both = prepare(settings(path, eval_dataset=str(other)), tokenizer)
    assert (len(both.train), len(both.eval)) == (20, 1)
    alone = prepare(settings("", eval_dataset=[str(other)]), tokenizer)
    assert (alone.train, len(alone.eval)) == (None, 1)


def test_mixing_never_repeats_held_out_rows(tokenizer, write, chat, settings):
    many = write("a.jsonl", [chat("q", f"a{number}") for number in range(30)])
    few = write("b.jsonl", [chat("q", f"b{number}") for number in range(5)])
    mixed = settings(f"{many},{few}", val_size=8, mix_strategy="interleave_over", interleave_probs="0.5,0.5")
    prepared = prepare(mixed, tokenizer)
    assert len(prepared.eval) == 8
    assert not set(prepared.train.sources) & set(prepared.eval.sources)
    assert len(set(prepared.train.sources)) == 27 < len(prepared.train)


def test_num_samples_and_max_samples(tokenizer, write, chat, settings, tmp_path):
    write("a.jsonl", [chat("q", f"a{number}") for number in range(10)])

    def count(num_samples, **changes):
        entry = {"file_name": "a.jsonl"} | ({"num_samples": num_samples} if num_samples else {})
        write("dataset_info.json", json.dumps({"mine": entry}))
        train = prepare(settings("mine", dataset_dir=str(tmp_path), **changes), tokenizer).train
        return len(train), len(set(train.sources))

    assert count(None) == (10, 10)
    assert count(None, max_samples=4) == (4, 4)
    assert count(6) == (6, 6)
    assert count(6, max_samples=4) == (4, 4)
    assert count(25) == (25, 10)
    assert count(25, max_samples=12) == (12, 10)
    assert count(6, val_size=2) == (4, 4)
    assert count(25, val_size=2) == (25, 8)


def test_max_samples_stops_reading(tokenizer, write, chat, settings):
    path = write("d.jsonl", json.dumps(chat("q", "a")) + "\nnot json\n")
    assert len(prepare(settings(path, max_samples=1), tokenizer).train) == 1


def test_pretraining_splits_long_documents_without_losing_a_target(make_tokenizer, write, settings):
    tokenizer = make_tokenizer(None, bos="<s>", eos="</s>", adds_bos=True)
    texts = ["one two", "What is gymjax? " * 20, "é"]
    prepared = prepare(settings(write("d.jsonl", [{"text": t} for t in texts]), cutoff_len=16), tokenizer, stage="pt")
    assert prepared.packing
    assert prepared.chat_template is None
    assert prepared.report.train.read == 3
    assert prepared.train.lengths.max() <= 16
    for line, text in enumerate(texts, start=1):
        whole = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        pieces = [prepared.train[i].ids for i, s in enumerate(prepared.train.sources) if s.endswith(f":{line}")]
        assert [int(token) for piece in pieces for token in piece[1:]] == whole[1:]
        assert all(one[-1] == two[0] for one, two in itertools.pairwise(pieces))
    targets = sum(len(tokenizer(text)["input_ids"]) for text in texts)
    assert prepared.train.supervised == targets


def test_pretraining_leaves_out_what_trains_nothing(make_tokenizer, write, settings):
    """A document of one token predicts none; of a long prompt only the piece that reaches the completion is trained."""
    tokenizer = make_tokenizer(None, eos="</s>")
    texts = [{"text": "</s>"}, {"text": "one two"}]
    prepared = prepare(settings(write("d.jsonl", texts)), tokenizer, stage="pt")
    assert (prepared.report.train.kept, len(prepared.report.train.dropped)) == (1, 1)
    pair = write("p.jsonl", [{"prompt": "What is gymjax? " * 20, "completion": "one"}])
    assert len(prepare(settings(pair, cutoff_len=16), tokenizer, stage="pt").train) == 1
    bad(tokenizer, settings(write("e.jsonl", texts[:1])), "no row is left to use; 1 dropped: no token", stage="pt")


def test_plain_text_needs_no_template_in_sft(make_tokenizer, write, settings):
    tokenizer = make_tokenizer(None, eos="</s>")
    train = prepare(settings(write("d.txt", "one\ntwo\n")), tokenizer).train
    assert [tokenizer.decode(train[index].ids) for index in range(2)] == ["one</s>", "two</s>"]
    assert not prepare(settings(write("d.txt", "one\n")), tokenizer).packing


def test_prompt_and_completion_texts_come_with_a_note(tokenizer, write, settings):
    prepared = prepare(settings(write("d.jsonl", [{"prompt": "1+1=", "completion": "2"}])), tokenizer)
    assert any("trained as they are, without the chat template" in note for note in prepared.report.notes)


def test_factory_template_name_comes_with_a_note(tokenizer, write, chat, settings):
    prepared = prepare(settings(write("d.jsonl", [chat("q", "a")]), template="qwen"), tokenizer)
    assert prepared.report.lines()[0] == "data: template: qwen selects the tokenizer's own chat template"


def test_packing_follows_the_config(tokenizer, write, chat, settings):
    path = write("d.jsonl", [chat("q", "a")])
    assert prepare(settings(path, packing=True), tokenizer).packing
    assert not prepare(settings(path), tokenizer).packing


def bad(tokenizer, config, message, **call):
    with pytest.raises(DataError, match=message):
        prepare(config, tokenizer, **call)


def test_bad_stage(tokenizer, write, chat, settings):
    path = write("d.jsonl", [chat("q", "a")])
    bad(tokenizer, settings(path), "stage must be one of sft, pt for now, found 'dpo'", stage="dpo")
    bad(
        tokenizer,
        settings(path),
        r"d\.jsonl:1: stage pt trains plain text, .*use stage: sft, or give rows a",
        stage="pt",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": None}, "dataset is not set; give a path"),
        ({"eval_dataset": "x", "val_size": 0.1}, "eval_dataset is set, so val_size must be 0, found 0.1"),
        ({"val_size": 2.5}, "val_size must be a share below 1 or a whole number of rows, found 2.5"),
        ({"val_size": -1}, "val_size must be a share"),
        ({"val_size": 0.01}, "val_size 0.01 takes 0 of 3 rows"),
        ({"cutoff_len": 1}, "cutoff_len must be at least 2, found 1"),
        ({"train_on_prompt": True, "mask_history": True}, "train_on_prompt trains every token and mask_history only"),
        ({"mix_strategy": "concatenate"}, "mix_strategy must be one of"),
        ({"interleave_probs": "0.5,0.5"}, "interleave_probs needs mix_strategy"),
        ({"template": "gone.jinja"}, "the file gone.jinja does not exist"),
        ({"cutoff_len": 8}, "no row is left to use; 3 dropped: its answer lies beyond cutoff_len 8"),
        ({"max_samples": 0}, "hold no rows"),
    ],
)
def test_bad_settings(tokenizer, write, chat, settings, changes, message):
    path = write("d.jsonl", [chat("q", "a")] * 3)
    bad(tokenizer, settings(**({"dataset": path} | changes)), message)


def test_bad_cache_folder(tokenizer, write, chat, settings):
    data = write("d.jsonl", [chat("q", "a")])
    bad(
        tokenizer,
        settings(data),
        r"tokenized_path: .*d\.jsonl cannot be written .*File exists.*; give a",
        cache_dir=data,
    )


def test_bad_empty_file(tokenizer, write, settings):
    bad(tokenizer, settings(write("d.jsonl", "")), r"its files \(.*d\.jsonl\) hold no rows")


def test_bad_every_answer_untrained(tokenizer, write, chat, settings):
    row = chat("q", "a", "r", "b")
    row["messages"][-1]["train"] = False
    path = write("d.jsonl", [row])
    bad(tokenizer, settings(path, mask_history=True), "1 dropped: no token is trained")


def test_bad_tokenizer_without_offsets(write, chat, settings):
    class Slow:
        is_fast = False

    bad(
        Slow(),
        settings(write("d.jsonl", [chat("q", "a")])),
        "the tokenizer has no character offsets; use a fast tokenizer",
    )


def test_bad_conversations_for_a_tokenizer_without_template(make_tokenizer, write, chat, settings):
    path = write("d.jsonl", [chat("q", "a")])
    bad(make_tokenizer(None), settings(path), r"d\.jsonl:1: the tokenizer has no chat template, .*set template: chatml")
