import json

import pyarrow
import pyarrow.parquet
import pytest

from gymjax.data.errors import DataError
from gymjax.data.read import read_rows

ROWS = [{"text": 'one, "two"\nthree'}, {"text": "é"}]


def read(path):
    return [(row.fields, row.source.removeprefix(str(path))) for row in read_rows(path)]


def test_json_array_and_lines(write):
    assert read(write("a.json", ROWS)) == [(ROWS[0], ":row 1"), (ROWS[1], ":row 2")]
    lines = "\n" + json.dumps(ROWS[0]) + "\n\n" + json.dumps(ROWS[1])
    expected = [(ROWS[0], ":2"), (ROWS[1], ":4")]
    assert read(write("b.json", lines)) == expected
    assert read(write("c.jsonl", lines)) == expected
    assert read(write("d.jsonl", "\ufeff" + lines.strip())) == [(ROWS[0], ":1"), (ROWS[1], ":3")]


def test_csv_names_the_line_a_row_ends_on(write):
    path = write("a.csv", 'text,label\n"one, ""two""\nthree",x\né,y\n')
    assert read(path) == [({**ROWS[0], "label": "x"}, ":3"), ({**ROWS[1], "label": "y"}, ":4")]


def test_csv_cell_longer_than_the_csv_module_allows(write):
    long = "x" * 200_000
    assert read(write("a.csv", f"text\n{long}\n"))[0][0] == {"text": long}


def test_parquet_and_arrow(tmp_path):
    table = pyarrow.table({"text": [row["text"] for row in ROWS]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.ipc.new_file(tmp_path / "b.arrow", table.schema) as file:
        file.write_table(table)
    with pyarrow.ipc.new_stream(tmp_path / "c.arrow", table.schema) as file:
        file.write_table(table)
    for name in ("a.parquet", "b.arrow", "c.arrow"):
        assert read(tmp_path / name) == [(ROWS[0], ":row 1"), (ROWS[1], ":row 2")]


def test_txt_is_a_row_a_line(write):
    assert read(write("a.txt", "one\n\n two \n")) == [({"text": "one"}, ":1"), ({"text": " two "}, ":3")]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.jsonl",
            '{"text": "x"}\n{"text": }\n',
            r"a\.jsonl:2: not JSON at column 10 .*each line holds one whole object",
        ),
        ("a.jsonl", '{"text": "x"}\n[1]\n', r"a\.jsonl:2: a row must be a JSON object .*found list"),
        ("a.json", '[{"text": "x"},\n {"text" "y"}]', r"a\.json:2: not JSON at column 10"),
        ("a.json", '["x"]', r"a\.json:row 1: a row must be a JSON object .*found str"),
        ("a.csv", "a,b\n1,2\n3\n", r"a\.csv:3: the row has more or fewer cells than the header's 2 columns; quote"),
        ("a.csv", 'a,b\n1,"2\n3,4\n', r"a\.csv:2: the row that begins here is not csv .*quote"),
        ("a.parquet", "PAR?", r"a\.parquet: not a parquet file .*write it again"),
        ("a.arrow", "nothing of the kind", r"a\.arrow: not an Arrow file"),
        ("a.xlsx", "x", r"files ending in \.xlsx are not read; use one of \.json, \.jsonl"),
    ],
)
def test_bad_file(write, name, text, message):
    path = write(name, text)
    with pytest.raises(DataError, match=message):
        list(read_rows(path))


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.json"])
def test_bad_encoding(tmp_path, name):
    """Named by line, in a file longer than the pieces that it is decoded in."""
    path = tmp_path / name
    path.write_bytes(b'{"text": "a"}\n' * 5000 + '{"text": "é"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=rf"{name}:5001: byte 11 of the line is not UTF-8 .*save the file as UTF-8"):
        list(read_rows(path))


@pytest.mark.parametrize("text", [r'{"text": "a \ud83d"}', r'[{"text": "\uDE00 b"}]', r'{"a": [{"\udbff": "c"}]}'])
def test_bad_half_of_a_character(tmp_path, text):
    """An emoji cut in two by whoever wrote the file: no tokenizer takes it."""
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"a\.json:(row )?1: holds .*(ud83d|ude00|udbff).*, half of a character"):
        list(read_rows(path))


def test_characters_in_two_escapes_are_whole(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(r'{"text": "\ud83d\ude00 \\ud83d"}')
    assert next(read_rows(path)).fields == {"text": "😀 \\ud83d"}


def test_bad_missing_file(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read \(No such file"):
        list(read_rows(tmp_path / "none.jsonl"))
