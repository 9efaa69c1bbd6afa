"""Read rows from json, jsonl, csv, parquet, arrow and txt files; every row knows the place it came from."""

import csv
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from gymjax.data.errors import DataError

_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # escapes of the surrogates, which stand in pairs


@dataclass(frozen=True)
class Row:
    """One row: its fields, and its source as `file:line` (`file:row N` where a format has no lines)."""

    fields: dict[str, Any]
    source: str


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of one file, in order.

    Args:
        path: a file whose suffix is in READERS.

    Raises:
        DataError: the suffix is unknown, the file cannot be read, or a row is not an object; names file and line.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path}: files ending in {path.suffix or 'nothing'} are not read; use one of {', '.join(READERS)}"
        )
    try:
        yield from reader(path)
    except UnicodeDecodeError as error:
        raise DataError(f"{_not_utf8(path)} ({error.reason}); save the file as UTF-8") from error
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error}); check the path and its permissions"
        ) from error


def _not_utf8(path: Path) -> str:
    """Name the first byte that is not UTF-8 by its line; the decoder counts in the piece that it was given."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f"{path}:{number}: byte {error.start + 1} of the line is not UTF-8"
    return f"{path}: its text is not UTF-8"


def _read_json(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        first = file.read(1)
        while first.isspace():
            first = file.read(1)
        if first != "[":
            file.seek(0)
            yield from _json_lines(path, file)
            return
        file.seek(0)
        text = file.read()
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno}: not JSON at column {error.colno} ({error.msg}); "
            "a .json file holds one array of objects, or one object a line"
        ) from error
    halves = _HALF.search(text) is not None
    for number, fields in enumerate(rows, start=1):
        yield _object_row(fields, f"{path}:row {number}", halves=halves)


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        yield from _json_lines(path, file)


def _json_lines(path: Path, lines: Iterator[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}:{number}: not JSON at column {error.colno} ({error.msg}); each line holds one whole object"
            ) from error
        yield _object_row(fields, f"{path}:{number}", halves=_HALF.search(line) is not None)


def _object_row(fields: Any, source: str, *, halves: bool) -> Row:
    """Check a parsed row; `halves` tells that its text has escapes of half a character, which may or may not pair."""
    if not isinstance(fields, dict):
        raise DataError(f"{source}: a row must be a JSON object with named columns, found {type(fields).__name__}")
    if halves:
        try:
            json.dumps(fields, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{source}: holds {error.object[error.start]!r}, half of a character (an emoji that was cut in two); "
                "write the row again from its whole text, or drop it"
            ) from error
    return Row(fields, source)


def _read_csv(path: Path) -> Iterator[Row]:
    """Yield csv rows; every cell is text, and the line is the one its row ends on."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from _csv_rows(path, csv.DictReader(file, strict=True))
    finally:
        csv.field_size_limit(limit)


def _csv_rows(path: Path, reader: csv.DictReader) -> Iterator[Row]:
    begin = 1
    try:
        columns = reader.fieldnames or ()
        begin = reader.line_num + 1
        for fields in reader:
            source = f"{path}:{reader.line_num}"
            if None in fields or None in fields.values():
                raise DataError(
                    f"{source}: the row has more or fewer cells than the header's {len(columns)} "
                    "columns; quote cells that hold commas or line ends"
                )
            yield Row(dict(fields), source)
            begin = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path}:{begin}: the row that begins here is not csv ({error}); quote cells that hold commas or quotes"
        ) from error


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from _arrow_rows(path, file.iter_batches())
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a parquet file ({error}); download or write it again") from error


def _read_arrow(path: Path) -> Iterator[Row]:
    """Yield rows of an Arrow IPC file, or of the stream format that the datasets library writes."""
    with pyarrow.memory_map(str(path)) as memory:
        try:
            try:
                table = pyarrow.ipc.open_file(memory).read_all()
            except pyarrow.ArrowInvalid:
                memory.seek(0)
                table = pyarrow.ipc.open_stream(memory).read_all()
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{path}: not an Arrow file ({error}); download or write it again") from error
        yield from _arrow_rows(path, iter(table.to_batches()))


def _arrow_rows(path: Path, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for fields in batch.to_pylist():
            number += 1
            yield Row(fields, f"{path}:row {number}")


def _read_txt(path: Path) -> Iterator[Row]:
    """Yield one row of text for each line that is not blank."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield Row({"text": line.rstrip("\n")}, f"{path}:{number}")


READERS = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".txt": _read_txt,
}
