import os

import numpy as np
import pytest
from safetensors import SafetensorError

from gymjax.data import cache
from gymjax.data.errors import DataError
from gymjax.data.prepare import prepare


@pytest.fixture
def run(make_tokenizer, write, chat, settings, tmp_path):
    """run(...) -> prepared data of one file in the test's cache folder."""

    def make(rows=3, *, template="chatml", seed=0, name="d.jsonl", **changes):
        path = write(name, [chat(f"q{number}", f"answer {number}") for number in range(rows)])
        return prepare(settings(path, **changes), make_tokenizer(template), seed=seed, cache_dir=tmp_path / "cache")

    return make


def entries(tmp_path):
    return sorted((tmp_path / "cache").iterdir())


def test_a_hit_gives_the_same_data(run, tmp_path):
    first, second = run(rows=8, val_size=2), run(rows=8, val_size=2)
    assert len(entries(tmp_path)) == 1
    assert any("tokenized data read from" in note for note in second.report.notes)
    assert not any("tokenized data read from" in note for note in first.report.notes)
    for one, two in ((first.train, second.train), (first.eval, second.eval)):
        assert one.fingerprint() == two.fingerprint()
        assert one.sources == two.sources
    assert first.report.train == second.report.train
    assert first.report.eval == second.report.eval
    assert first.chat_template == second.chat_template


@pytest.mark.parametrize(
    "changes",
    [{"rows": 4}, {"template": "llama3"}, {"cutoff_len": 100}, {"mask_history": True}, {"train_on_prompt": True},
     {"default_system": "s"}, {"max_samples": 2}, {"val_size": 1}, {"name": "e.jsonl"}],
    ids=str,
)  # fmt: skip
def test_whatever_decides_the_tokens_makes_another_entry(run, tmp_path, changes):
    run()
    run(**changes)
    assert len(entries(tmp_path)) == 2


def test_the_seed_counts_only_where_rows_are_drawn(run, tmp_path):
    run(seed=0)
    run(seed=1)
    assert len(entries(tmp_path)) == 1
    run(seed=0, val_size=1)
    run(seed=1, val_size=1)
    assert len(entries(tmp_path)) == 3


def test_another_tokenizer_makes_another_entry(write, chat, settings, make_tokenizer, tmp_path):
    path = write("d.jsonl", [chat("q", "a")])
    for kind in ("bytes", "metaspace"):
        prepare(settings(path), make_tokenizer("chatml", kind=kind), cache_dir=tmp_path / "cache")
    assert len(entries(tmp_path)) == 2


def test_another_code_version_makes_another_entry(run, tmp_path, monkeypatch):
    run()
    monkeypatch.setattr(cache, "CODE_VERSION", cache.CODE_VERSION + 1)
    run()
    assert len(entries(tmp_path)) == 2


def test_overwrite_cache_makes_it_again(run, tmp_path):
    run()
    (entry,) = entries(tmp_path)
    os.utime(entry, (1, 1))
    again = run(overwrite_cache=True)
    assert entry.stat().st_mtime > 1
    assert not any("read from" in note for note in again.report.notes)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "text"])
def test_bad_entry_is_made_again_with_a_note(run, tmp_path, damage):
    first = run()
    (entry,) = entries(tmp_path)
    content = bytearray(entry.read_bytes())
    content[-3] ^= 1
    damaged = {"cut": content[: len(content) // 2], "flip": content, "empty": b"", "text": b"{}" * 50}
    entry.write_bytes(damaged[damage])
    again = run()
    assert any(note.startswith("cache rebuilt: ") for note in again.report.notes)
    assert again.train.fingerprint() == first.train.fingerprint()
    assert any("read from" in note for note in run().report.notes)


@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_nothing_half_written_stays(run, tmp_path, monkeypatch, kind):
    """The safetensors package passes on the system's errors under a name of its own."""

    def fail(*args, **kwargs):
        raise kind("No space left on device")

    monkeypatch.setattr(cache, "save_file", fail)
    with pytest.raises(DataError, match=r"tokenized_path: .* cannot be written \(No space left on device\); give a"):
        run()
    assert entries(tmp_path) == []


def test_without_cache_dir_nothing_is_written(make_tokenizer, write, chat, settings, tmp_path):
    prepared = prepare(settings(write("d.jsonl", [chat("q", "a")])), make_tokenizer("chatml"))
    assert len(prepared.train) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["d.jsonl"]


def test_arrays_of_a_hit_can_be_used_as_before(run):
    run()
    train = run().train
    assert train.ids.dtype == np.int32
    assert train.weights.dtype == np.float32
    assert train.offsets.dtype == np.int64
