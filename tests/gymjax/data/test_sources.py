import json

import pytest

from gymjax.data.errors import DataError
from gymjax.data.sources import resolve

ROW = [{"text": "x"}]


@pytest.fixture
def info(write):
    """info(name, entry) -> the folder whose dataset_info.json describes it."""

    def make(name, entry):
        return write("dataset_info.json", json.dumps({name: entry})).parent

    return make


def test_path_folder_and_name(write, tmp_path):
    one, two = write("one.jsonl", ROW), write("folder/b.jsonl", ROW)
    first = write("folder/a.json", ROW)
    write("folder/README.md", "no data")
    write("folder/dataset_info.json", "{}")
    write("dataset_info.json", json.dumps({"mine": {"file_name": "one.jsonl", "formatting": "sharegpt",
                                                    "tags": {"role_tag": "r"}, "num_samples": 3}}))  # fmt: skip
    sources = resolve(f"{one}, folder,mine", tmp_path)
    assert [source.files for source in sources] == [(one,), (first, two), (one,)]
    assert (sources[2].formatting, sources[2].tags, sources[2].num_samples) == ("sharegpt", {"role_tag": "r"}, 3)
    assert resolve(["mine"], tmp_path)[0].name == "mine"


def test_split_chooses_files(write, info, tmp_path):
    train, test = write("d/train-0.jsonl", ROW), write("d/test-0.jsonl", ROW)
    for split, file in (("train", train), ("test", test)):
        info("mine", {"file_name": "d", "split": split})
        assert resolve("mine", tmp_path)[0].files == (file,)


def test_folder_key_leads_to_the_file(write, info, tmp_path):
    path = write("sub/a.jsonl", ROW)
    info("mine", {"file_name": "a.jsonl", "folder": "sub"})
    assert resolve("mine", tmp_path)[0].files == (path,)


def test_bad_name_suggests_and_names_the_file(info):
    folder = info("identity", {"file_name": "identity.jsonl"})
    message = r'"identiti" is neither .* in .*dataset_info\.json, nor a hub id .*\. Did you mean "identity"\?'
    with pytest.raises(DataError, match=message):
        resolve("identiti", folder)


def test_bad_name_without_info_file(tmp_path, write):
    write("train.jsonl", ROW)
    message = r'\(which does not exist\), nor a hub id .*\. Did you mean "train\.jsonl"\? .*set dataset_dir'
    with pytest.raises(DataError, match=message):
        resolve("train.json", tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("x.jsonl", "must be an object such as"),
        ({}, "needs file_name"),
        ({"ms_hub_url": "x"}, "ms_hub_url is not read; set hf_hub_url"),
        ({"file_nam": "x"}, r'unknown key "file_nam"\. Did you mean "file_name"\?'),
        ({"file_name": "gone.jsonl"}, r"gone\.jsonl does not exist;.*correct file_name"),
        (
            {"file_name": "a.jsonl", "formatting": "chatml"},
            "formatting must be one of alpaca, sharegpt, openai, found 'chatml'",
        ),
        ({"file_name": "a.jsonl", "ranking": True}, "stage dpo, which is not supported yet"),
        (
            {"file_name": "a.jsonl", "columns": {"promt": "x"}},
            r'columns: unknown key "promt"\. Did you mean "prompt"\?',
        ),
        ({"file_name": "a.jsonl", "columns": {"prompt": 1}}, "prompt must be str, found 1"),
        ({"file_name": "a.jsonl", "tags": {"role": "x"}}, 'tags: unknown key "role"'),
        ({"file_name": "a.jsonl", "num_samples": 0}, "num_samples must be at least 1, found 0"),
        ({"file_name": "a.jsonl", "num_samples": "9"}, "num_samples must be int, found '9'"),
        ({"file_name": "a.jsonl", "split": "dev"}, 'split "dev" matches no file'),
        ({"file_name": "a.jsonl", "subset": "en"}, "subset applies to hub datasets only"),
        ({"file_name": 3}, "file_name must be str, found 3"),
    ],
)
def test_bad_entry(write, info, entry, message):
    write("a.jsonl", ROW)
    with pytest.raises(DataError, match=r"dataset_info\.json: mine.*" + message):
        resolve("mine", info("mine", entry))


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[]", "must hold one object .*found list")])
def test_bad_info_file(write, text, message):
    with pytest.raises(DataError, match=message):
        resolve("mine", write("dataset_info.json", text).parent)


def test_bad_folder(write, tmp_path):
    write("outer/inner/a.jsonl", ROW)
    with pytest.raises(DataError, match=r"holds no data file .*its subfolders are inner"):
        resolve("outer", tmp_path)
    write("mixed/train.jsonl", ROW)
    write("mixed/test.jsonl", ROW)
    with pytest.raises(DataError, match=r"holds held-out files \(test\.jsonl\) beside others"):
        resolve("mixed", tmp_path)
    with pytest.raises(DataError, match=r"data files end in"):
        resolve(str(write("a.pkl", "x")), tmp_path)


def test_bad_empty_list(tmp_path):
    with pytest.raises(DataError, match="names no data"):
        resolve(" , ", tmp_path)
