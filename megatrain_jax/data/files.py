"""Files to rows: which files a path means, and every row of them, whatever they are stored as."""

from __future__ import annotations

import contextlib
import csv
import glob
import importlib.util
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from megatrain_jax.config import UserError
from megatrain_jax.data.json_rows import json_lines, json_values
from megatrain_jax.data.records import BadRecord
from megatrain_jax.data.streams import characters, decoded, line_of, lines

TEXT_KINDS, TABLE_KINDS, COMPRESSED = (".jsonl", ".json", ".csv", ".txt"), (".parquet", ".arrow"), (".gz", ".zst")
_NOT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
PIECE = 1 << 20  # characters of a text that are tokenised at once
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")

csv.field_size_limit(2**31 - 1)  # a cell may well be a document


def kind(file: pathlib.Path) -> str:
    """``.jsonl`` for rows.jsonl and rows.jsonl.gz; empty if the file cannot be read."""
    inner = file.with_suffix("") if file.suffix in COMPRESSED else file
    readable = TEXT_KINDS if file.suffix in COMPRESSED else TEXT_KINDS + TABLE_KINDS
    return inner.suffix if inner.suffix in readable else ""


def expand(path: str, key: str, split: str | None = None) -> list[pathlib.Path]:
    """Files that a path stands for: a file, or those of a folder or glob, sorted by name.

    Args:
      key: the setting that `path` came from, for messages.
      split: of a folder, only the files that have this word in their name.

    Raises:
      UserError: nothing is there, a file is of a kind that cannot be read, or a folder holds several splits.
    """
    here, kinds = pathlib.Path(path), " ".join((*TEXT_KINDS, *TABLE_KINDS))
    if here.is_dir():
        return _of_folder(here, key, split)
    found = [here] if here.is_file() else map(pathlib.Path, glob.glob(path, recursive=True))
    files = sorted(file for file in found if file.is_file())
    if not files:
        raise UserError(f"{key}: no such file '{path}'")
    for file in files:
        if not kind(file):
            raise UserError(f"{key}: cannot read '{file}'; the kinds read are {kinds}, of text also .gz and .zst")
    return files


def rows(file: pathlib.Path) -> Iterator[tuple[int, Any]]:
    """Line (of a table: row) from 1, and value of each row; a `BadRecord` stands for one that cannot be read.

    A row is an object with named columns, or whatever else was found in its place. After a fault that hides where the next
    row starts, no more come.
    """
    readers = {".jsonl": json_lines, ".json": json_values, ".csv": _csv_rows}
    form = kind(file)
    with _readable(file):
        yield from _table_rows(file, form) if form in TABLE_KINDS else readers[form](file)


def pieces(file: pathlib.Path) -> Iterator[tuple[int, str, bool]]:
    """A text file in pieces of at most `PIECE` characters, most files in one: line where it begins, text, whether more come.

    A piece ends with a line, where it has one; else with a blank.

    Raises:
      BadRecord: it is not UTF-8, or its compressed stream is damaged.
    """
    line, held = 1, ""
    with _readable(file):
        for text in characters(file):
            held += text
            while len(held) > PIECE:
                end = max(held.rfind("\n", 0, PIECE), 0) or max(held.rfind(" ", 0, PIECE), 0)
                piece, held = held[: end + 1 if end else PIECE], held[end + 1 if end else PIECE :]
                yield line, piece, True
                line += piece.count("\n")
    yield line, held, False


@contextlib.contextmanager
def _readable(file: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error})") from None


def _of_folder(folder: pathlib.Path, key: str, split: str | None) -> list[pathlib.Path]:
    files = sorted(file for file in folder.iterdir() if kind(file) and file.name not in _NOT_DATA and file.is_file())
    files = [file for file in files if not file.name.startswith((".", "_"))]
    if not files:
        inner = ", ".join(sorted(each.name for each in folder.iterdir() if each.is_dir()))
        hint = f"; it holds the folders {inner}" if inner else ""
        raise UserError(f"{key}: no {' '.join((*TEXT_KINDS, *TABLE_KINDS))} file in folder '{folder}'{hint}")
    words = {file: set(re.split(r"[^a-zA-Z]+", file.name)) for file in files}
    splits = [each for each in _SPLITS if any(each in found for found in words.values())]
    if split is None:
        if len(splits) > 1:
            raise UserError(f"{key}: folder '{folder}' holds the splits {', '.join(splits)}; name the files of one")
        return files
    if not splits and split == "train":
        return files
    chosen = [file for file in files if split in words[file]]
    if not chosen:
        raise UserError(f"{key}: no file of split '{split}' in folder '{folder}'")
    return chosen


def _csv_rows(file: pathlib.Path) -> Iterator[tuple[int, Any]]:
    reader = csv.reader((decoded(line, f"{file}:{n}", n) for n, line in lines(file)), strict=True)
    try:
        header = next(reader, [])
        if len(set(header)) < len(header) or not all(header):
            raise BadRecord(f"{file}:1", "the first line of a table must give each column a name of its own")
        for cells in reader:
            if not cells:
                continue
            where = f"{file}:{reader.line_num}"
            fits = len(cells) == len(header)
            fault = f"{len(cells)} cells in a table of {len(header)} columns; quote cells that have a comma"
            yield reader.line_num, dict(zip(header, cells)) if fits else BadRecord(where, fault)
    except BadRecord as error:
        yield line_of(error), error
    except csv.Error as error:
        yield reader.line_num, BadRecord(f"{file}:{reader.line_num}", f"not a valid table ({error})")


def _table_rows(file: pathlib.Path, form: str) -> Iterator[tuple[int, Any]]:
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError(f"{file}: {form} files need pyarrow: pip install pyarrow")
    import pyarrow

    number = 0
    try:
        for batch in _parquet_batches(file) if form == ".parquet" else _arrow_batches(file):
            batch.validate(full=True)  # offsets of a damaged file may point anywhere
            for row in batch.to_pylist():
                number += 1
                # Structs are filled up with nulls to have equal fields.
                yield number, {name: _without_nulls(value) for name, value in row.items()}
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise
        fault = f"not a readable {form} file ({' '.join(str(error).split())[:160]})"
        yield number + 1, BadRecord(f"{file}:{number + 1}", fault)


def _parquet_batches(file: pathlib.Path) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        yield from table.iter_batches(batch_size=256)


def _arrow_batches(file: pathlib.Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.ipc

    with open(file, "rb") as stream:
        is_file = stream.read(6) == b"ARROW1"
    with pyarrow.memory_map(str(file)) as source:
        if is_file:
            table = pyarrow.ipc.open_file(source)
            yield from map(table.get_batch, range(table.num_record_batches))
        else:
            yield from pyarrow.ipc.open_stream(source)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
