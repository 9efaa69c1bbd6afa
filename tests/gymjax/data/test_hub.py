"""Datasets of the hub, read from cache folders as huggingface_hub lays them out, without network."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import errors

from gymjax.config import load
from gymjax.data.errors import DataError
from gymjax.data.prepare import prepare
from gymjax.data.sources import resolve
from gymjax.data.splits import by_name, match
from gymjax.training.inputs import prepare_data

COMMIT = "a" * 40
CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/test.jsonl]
- config_name: other
  data_files: other/**/*.jsonl
---
# Text
"""
TWO_SUBSETS = {"README.md": CARD, "main/train-0.jsonl": "a", "main/train-1.jsonl": "b", "main/test.jsonl": "c",
               "other/x/1.jsonl": "d", "other/2.jsonl": "e"}  # fmt: skip


def save(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": [content]}), path)
    elif path.suffix in (".json", ".jsonl"):
        path.write_text(json.dumps({"text": content}) + "\n")
    else:
        path.write_text(content)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """hub(files, name=..., commit=..., absent=...) -> the cache folder; `absent` files are listed and not there."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def make(files, name="owner/name", commit=COMMIT, absent=(), revision="main"):
        folder = tmp_path / "hub" / f"datasets--{name.replace('/', '--')}"
        for file, content in files.items():
            save(folder / "snapshots" / commit / file, content)
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / revision).write_text(commit)
        if absent:
            tree = {file: {"size": 1, "blob_id": "0" * 40} for file in (*files, *absent)}
            (folder / "trees").mkdir(exist_ok=True)
            (folder / "trees" / f"{commit}.json").write_text(json.dumps({"format_version": 1, "files": tree}))
        return str(tmp_path / "hub")

    return make


@pytest.fixture
def names(tmp_path):
    """names(dataset, cache) -> the files that would be read, within the repository."""

    def make(dataset, cache):
        [source] = resolve([dataset], tmp_path, hub_cache=cache)
        return [file.as_posix().split(f"{COMMIT}/")[1] for file in source.files]

    return make


@pytest.mark.parametrize(
    ("files", "options", "expected"),
    [
        ({"rows.jsonl": "a", "README.md": "text", "LICENSE": "x", "dataset_infos.json": "{}"}, "", ["rows.jsonl"]),
        ({"train.csv": "a", "test.csv": "b"}, "", ["train.csv"]),
        (
            {"a_train_1.json": "a", "my.training.json": "b", "test.json": "c"},
            "",
            ["a_train_1.json", "my.training.json"],
        ),
        ({"train.csv": "a", "dev.csv": "b"}, "split=validation", ["dev.csv"]),
        (
            {"d/train/b.json": "a", "d/train/a.json": "b", "d/eval/test.json": "c"},
            "",
            ["d/train/a.json", "d/train/b.json"],
        ),
        ({"d/train/a.json": "b", "d/eval/train.json": "c"}, "split=test", ["d/eval/train.json"]),
        (
            {f"data/{split}-0000{i}-of-00002-7f.parquet": "a" for split in ("train_sft", "test_sft") for i in (0, 1)},
            "split=train_sft",
            ["data/train_sft-00000-of-00002-7f.parquet", "data/train_sft-00001-of-00002-7f.parquet"],
        ),
        ({"python/a.json": "a", "java/a.json": "b", "java/b.json": "b"}, "folder=java", ["java/a.json", "java/b.json"]),
        (
            {"a/gsm_train.json": "a", "a/b.json": "b"},
            "data_files=a/b.json&data_files=a/*_train*",
            ["a/b.json", "a/gsm_train.json"],
        ),
        ({"a/1.json": "a", "a/b/2.json": "b"}, "folder=a&data_files=*.json", ["a/1.json"]),
        ({"rows.json": "a", "rows.parquet": "b"}, "ds_type=parquet", ["rows.parquet"]),
        (TWO_SUBSETS, "subset=main", ["main/train-0.jsonl", "main/train-1.jsonl"]),
        (TWO_SUBSETS, "subset=main&split=test", ["main/test.jsonl"]),
        (TWO_SUBSETS, "subset=other", ["other/2.jsonl", "other/x/1.jsonl"]),
        (TWO_SUBSETS | {"README.md": CARD.replace("other\n", "default\n")}, "", ["other/2.jsonl", "other/x/1.jsonl"]),
        (
            TWO_SUBSETS | {"README.md": CARD.replace("main\n", "main\n  default: true\n")},
            "split=test",
            ["main/test.jsonl"],
        ),
        (
            {"README.md": "---\nconfigs: [{config_name: x, data_dir: b}]\n---\n", "a/train.csv": "", "b/train.csv": ""},
            "",
            ["b/train.csv"],
        ),
    ],
)
def test_files_of_a_split(hub, names, files, options, expected):
    assert names(f"owner/name?{options}" if options else "owner/name", hub(files)) == expected


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        (TWO_SUBSETS, "", "has several subsets, and none is chosen; set subset to one of main, other"),
        (
            TWO_SUBSETS,
            "subset=mian",
            r'there is no subset mian; Did you mean "main"\? set subset to one of main, other',
        ),
        ({"train.csv": ""}, "subset=en", "there is no subset en; its README.md describes none: remove subset"),
        (TWO_SUBSETS, "subset=main&split=dev", "there is no split dev; set split to one of train, test"),
        ({"test.csv": ""}, "", r"there is no split train \(the default\); set split to one of test"),
        (TWO_SUBSETS, "subset=main&folder=main", "subset main and folder or data_files both choose files; keep one"),
        ({"name.py": "", "README.md": ""}, "", r"is a loading script \(name\.py\), which is never run; .*convert"),
        ({"README.md": "", "a.png": ""}, "", r"holds no data file; .*convert it to \.json"),
        ({"train.jsonl.zst": ""}, "", r"split train: train\.jsonl\.zst cannot be read; choose others by data_files"),
        ({"a.json": "", "b.csv": ""}, "", r"several types \(a\.json, b\.csv\); set ds_type to one of csv, json"),
        ({"a.json": ""}, "ds_type=csv", "holds no file of ds_type csv"),
        ({"a.json": ""}, "ds_type=jsn", "ds_type must be one of json, parquet, csv, arrow, text, is jsn"),
        ({"a.json": ""}, "folder=python", r"folder python holds no data file; there is a\.json"),
        ({"a.json": ""}, "data_files=b.json", r'data_files b\.json matches no data file; Did you mean "a\.json"\?'),
        ({"a.json": "", "README.md": "---\nconfigs: [\n---\n"}, "", "README.md's metadata cannot be read"),
        ({"a.json": "", "README.md": "---\nconfigs: [x]\n---\n"}, "", "README.md's configs must be objects"),
        (
            {"a.csv": "", "README.md": "---\nconfigs:\n- {config_name: x, data_files: a.csv, sep: ;}\n---\n"},
            "",
            r"README\.md sets sep: ';' for x, which is not followed",
        ),
        (
            {"a.csv": "", "README.md": "---\nconfigs:\n- {config_name: x, data_files: [{split: train}]}\n---\n"},
            "",
            r"data_files must be patterns, or objects of split and path, are \[\{'split': 'train'\}\]",
        ),
        ({"a.json": ""}, "sbset=x", r'sbset is no option; Did you mean "subset"\?'),
        ({"a.json": ""}, "split=train&split=test", "split is given twice, as train and test; keep one"),
        ({"a.json": ""}, "split=train%2Btest", "split must be a name, or one with a part of its rows"),
    ],
)
def test_bad_choice(hub, names, files, options, message):
    with pytest.raises(DataError, match="dataset:? owner/name.*" + message):
        names(f"owner/name?{options}" if options else "owner/name", hub(files))


def test_described_in_dataset_info(hub, write, tmp_path):
    """The hub comes before file_name, as in LLaMA-Factory."""
    cache = hub(TWO_SUBSETS)
    entry = {"hf_hub_url": "owner/name", "ms_hub_url": "x/y", "subset": "main", "split": "train[1:]", "num_samples": 3,
             "file_name": "gone.jsonl", "columns": {"prompt": "text"}}  # fmt: skip
    write("dataset_info.json", json.dumps({"mine": entry, "bad": {"hf_hub_url": "owner/name", "subset": "x"}}))
    [source] = resolve("mine", tmp_path, hub_cache=cache)
    assert [file.name for file in source.files] == ["train-0.jsonl", "train-1.jsonl"]
    assert (source.part, source.num_samples, source.columns) == (("1", None), 3, {"prompt": "text"})
    with pytest.raises(DataError, match=r"dataset_info\.json: bad: hf_hub_url: owner/name: there is no subset x"):
        resolve("bad", tmp_path, hub_cache=cache)
    with pytest.raises(DataError, match=r"what is read of mine is said in .*dataset_info\.json; write it there"):
        resolve("mine?split=test", tmp_path, hub_cache=cache)


def test_names_and_paths_come_first(hub, write, tmp_path):
    cache = hub({"rows.json": "hub"})
    path = write("owner/name/rows.jsonl", [{"text": "x"}])
    assert resolve("owner/name", tmp_path, hub_cache=cache)[0].files == (path,)
    write("dataset_info.json", json.dumps({"owner/name": {"file_name": "owner/name/rows.jsonl", "num_samples": 1}}))
    assert resolve("owner/name", tmp_path, hub_cache=cache)[0].num_samples == 1


def test_options_of_a_path(write, tmp_path):
    one = write("d/a.jsonl", [{"text": "x"}])
    two = write("d/sub/b.jsonl", [{"text": "y"}])
    [source] = resolve(["d?data_files=**/*.jsonl&split=train[:1]"], tmp_path)
    assert (source.files, source.part) == ((one, two), (None, "1"))
    assert resolve("d?ds_type=json", tmp_path)[0].files == (one,)
    for options, message in (
        ("ds_type=csv", "holds no file of ds_type csv"),
        ("subset=en", "subset en applies to hub datasets only"),
        ("revision=1", "revision 1 applies to hub datasets only"),
    ):
        with pytest.raises(DataError, match=message):
            resolve(f"d?{options}", tmp_path)
    with pytest.raises(DataError, match=r"data_files choose from a folder, .*a\.jsonl is a file"):
        resolve("d/a.jsonl?data_files=a", tmp_path)


def test_revision_changes_the_cache_key(hub, make_tokenizer, settings, tmp_path):
    other = "b" * 40
    hub({"rows.jsonl": "one"})
    cache = hub({"rows.jsonl": "one two"}, commit=other, revision="v2")
    texts = []
    for dataset in ("owner/name", "owner/name?revision=v2", f"owner/name?revision={COMMIT}"):
        config = settings(dataset, dataset_dir=str(tmp_path))
        prepared = prepare(config, make_tokenizer(), cache_dir=tmp_path / "kept", hub_cache=cache)
        texts.append((prepared.train.sources[0].split("snapshots/")[1], len(list((tmp_path / "kept").iterdir()))))
    assert texts == [(f"{COMMIT}/rows.jsonl:1", 1), (f"{other}/rows.jsonl:1", 2), (f"{COMMIT}/rows.jsonl:1", 2)]


def test_copy_that_is_not_whole(hub, names):
    """A copy of the training files alone will do for those, and is never read as if it were all."""
    cache = hub({"train.csv": "a"}, absent=("test.csv",))
    assert names("owner/name", cache) == ["train.csv"]
    with pytest.raises(DataError, match=r"not whole in the hub cache.*`hf download --repo-type dataset owner/name"):
        names("owner/name?split=test", cache)


def test_bad_copy_without_its_card(hub, names):
    with pytest.raises(DataError, match=r"owner/name is not here.*hub cannot be reached \(IncompleteSnapshotError\)"):
        names("owner/name", hub({"train.csv": "a"}, absent=("README.md",)))


def test_bad_id_without_network(hub, write, tmp_path):
    cache = hub({"a.json": "a"})
    write("dataset_info.json", json.dumps({"ownr/name": {"file_name": "x"}}))
    message = (
        r"eval_dataset: ownr/nam is not here, .*the hub cannot be reached \(LocalEntryNotFoundError\)\. .*"
        r"`hf download --repo-type dataset ownr/nam --revision v1 --cache-dir .*hub`\. Did you mean \"ownr/name\"\?"
    )
    with pytest.raises(DataError, match=message):
        resolve("ownr/nam?revision=v1", tmp_path, key="eval_dataset", hub_cache=cache)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError, r"is gated; accept its terms at \S+/datasets/owner/name and run `hf auth login`"),
        (errors.RepositoryNotFoundError, "the hub has no dataset owner/name, or it is private; check the spelling"),
        (errors.RevisionNotFoundError, "the dataset owner/name has no revision v9"),
        (errors.HfHubHTTPError, r"the hub refuses owner/name \(why\)"),
    ],
)
def test_bad_answers_of_the_hub(monkeypatch, tmp_path, error, message):
    def refuse(*_, **__):
        raise error("why", response=SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(DataError, match="^dataset: .*" + message):
        resolve("owner/name?revision=v9", tmp_path)


def test_only_what_is_read_is_downloaded(monkeypatch, tmp_path):
    """A stand-in for the hub: a folder of which only the files that are asked for come."""
    for file, content in {**TWO_SUBSETS, "main/train-[x].jsonl": "f"}.items():
        save(tmp_path / "remote" / file, content)
    everything = [path.relative_to(tmp_path / "remote") for path in (tmp_path / "remote").rglob("*") if path.is_file()]
    here = tmp_path / COMMIT

    def download(name, *, allow_patterns, **_):
        chosen = huggingface_hub.utils.filter_repo_objects(map(str, everything), allow_patterns=allow_patterns)
        for file in chosen:
            (here / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tmp_path / "remote" / file, here / file)
        return str(here)

    listing = [SimpleNamespace(path=path.as_posix()) for path in everything]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "get_cached_repo_tree", lambda *_, **__: listing)
    [source] = resolve("owner/name?subset=main", tmp_path)
    expected = [here / "main" / name for name in ("train-0.jsonl", "train-1.jsonl", "train-[x].jsonl")]
    assert list(source.files) == expected
    assert sorted(path for path in here.rglob("*") if path.is_file()) == sorted([here / "README.md", *expected])


def test_patterns():
    names = ["a.csv", "d/b.csv", "d/e/c.csv", "x[1].csv", "x2.csv"]
    for pattern, found in {
        "*.csv": ["a.csv", "x[1].csv", "x2.csv"],
        "./d/*": ["d/b.csv"],
        "**": names,
        "**/?.csv": names[:3],
        "d/**/*.csv": names[1:3],
        "x[1].csv": ["x[1].csv"],
        "x[0-9].csv": ["x2.csv"],
        "[!a-w]2.csv": ["x2.csv"],
    }.items():
        assert match("it", [pattern], names) == found
    assert by_name(["contest.csv", "latest.csv"]) == {"train": ["contest.csv", "latest.csv"]}


def test_training_configuration_of_a_hub_id(hub, byte_tokenizer, tmp_path):
    """From Axolotl's keys to tokens: subset, split and share, with the model's cache_dir."""
    rows = {f"main/train-{i}.jsonl": text for i, text in enumerate(("one", "two", "three", "four"))}
    cache = hub({"README.md": CARD, "main/test.jsonl": "held", "data/other.parquet": "no", **rows})
    file = tmp_path / "run.yaml"
    file.write_text(
        f"base_model: none\ncache_dir: {cache}\ndataset_dir: {tmp_path}\ntokenized_path: {tmp_path / 'kept'}\n"
        "datasets:\n  - {path: owner/name, name: main, split: 'train[25%:75%]', type: completion}\n"
        "test_datasets:\n  - {path: owner/name, name: main, split: test}\noutput_dir: out\n"
    )
    config = load(file)
    assert config.data.dataset == ("owner/name?subset=main&split=train[25%:75%]",)
    prepared = prepare_data(config, byte_tokenizer)
    assert [Path(source).name for source in prepared.train.sources] == ["train-1.jsonl:1", "train-2.jsonl:1"]
    assert [Path(source).name for source in prepared.eval.sources] == ["test.jsonl:1"]
    assert byte_tokenizer.decode(prepared.train.ids[: prepared.train.lengths[0]], skip_special_tokens=True) == "two"


def test_parquet_rows(hub, make_tokenizer, settings, tmp_path):
    cache = hub({f"data/train-0000{i}-of-00002.parquet": text for i, text in enumerate(("one", "two"))})
    prepared = prepare(settings("owner/name", dataset_dir=str(tmp_path)), make_tokenizer(), hub_cache=cache)
    assert [source.split("data/")[1] for source in prepared.train.sources] == [
        "train-00000-of-00002.parquet:row 1",
        "train-00001-of-00002.parquet:row 1",
    ]
