"""Files to rows: which files a path means, and every row of them, whatever they are stored as."""

from __future__ import annotations

import csv
import glob
import gzip
import importlib.util
import io
import json
import pathlib
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from megatrain_jax.config import UserError
from megatrain_jax.data.records import BadRecord

TEXT_KINDS, TABLE_KINDS, COMPRESSED = (".jsonl", ".json", ".csv", ".txt"), (".parquet", ".arrow"), (".gz", ".zst")
_NOT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
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
    form = kind(file)
    try:
        if form in TABLE_KINDS:
            yield from _table_rows(file, form)
        else:
            yield from _text_rows(file, form)
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error})") from None


def read_text(file: pathlib.Path) -> str:
    """The whole of a text file.

    Raises:
      BadRecord: it is not UTF-8, or its compressed stream is damaged.
    """
    lines = (_decoded(line, f"{file}:{number}", number) for number, line in _lines(file))
    return "".join(lines)


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


def _text_rows(file: pathlib.Path, form: str) -> Iterator[tuple[int, Any]]:
    if form == ".json":
        yield from _json_rows(file)
    elif form == ".csv":
        yield from _csv_rows(file)
    else:
        yield from _jsonl_rows(file)


def _jsonl_rows(file: pathlib.Path) -> Iterator[tuple[int, Any]]:
    try:
        for number, line in _lines(file):
            if line.strip():
                yield number, _parsed(line, f"{file}:{number}", number)
    except BadRecord as error:
        yield _line_of(error), error


def _parsed(line: bytes, where: str, number: int) -> Any:
    try:
        return parse_json(_decoded(line, where, number), where)
    except BadRecord as error:
        return error


def _json_rows(file: pathlib.Path) -> Iterator[tuple[int, Any]]:
    """Elements of an array; else values one after the other, by line if the first line is a value."""
    try:
        text = read_text(file)
    except BadRecord as error:
        yield _line_of(error), error
        return
    is_array = text.lstrip().startswith("[")
    first = next((line for line in text.split("\n") if line.strip()), "")
    if not is_array and _is_json(first):
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield number, _parsed(line.encode("utf-8", "surrogatepass"), f"{file}:{number}", number)
        return
    decoder, line, counted = json.JSONDecoder(), 1, 0

    def skip(position: int) -> int:
        while position < len(text) and text[position] in " \t\r\n":
            position += 1
        return position

    position = skip(skip(0) + 1) if is_array else skip(0)
    while position < len(text) and not (is_array and text[position] == "]"):
        line, counted = line + text.count("\n", counted, position), position
        try:
            row, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            line = getattr(error, "lineno", line)
            yield line, BadRecord(f"{file}:{line}", _json_fault(error))
            return
        yield line, row
        position = skip(position)
        if is_array and text[position : position + 1] == ",":
            position = skip(position + 1)
            if text[position : position + 1] == "]":
                break
        elif is_array:
            break
    closed = not is_array or (text[position : position + 1] == "]" and text[position - 1 :].lstrip()[0] != ",")
    if not closed or (is_array and text[position + 1 :].strip()):
        line += text.count("\n", counted, position)
        yield line, BadRecord(f"{file}:{line}", "not valid JSON (expected ',' between records and ']' at the end)")


def _csv_rows(file: pathlib.Path) -> Iterator[tuple[int, Any]]:
    reader = csv.reader((_decoded(line, f"{file}:{n}", n) for n, line in _lines(file)), strict=True)
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
        yield _line_of(error), error
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


def _lines(file: pathlib.Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines with their ends, decompressed.

    Raises:
      BadRecord: the compressed stream is damaged or ends early.
    """
    number = 0
    with _open(file) as stream:
        try:
            for number, line in enumerate(stream, 1):
                yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            fault = f"the {file.suffix} stream ends early or is damaged ({error}); fetch the file again"
            raise BadRecord(f"{file}:{number + 1}", fault) from None


def _open(file: pathlib.Path) -> BinaryIO:
    if file.suffix == ".gz":
        return gzip.open(file, "rb")
    if file.suffix == ".zst":
        return io.BufferedReader(_Pieces(_decompressed(file)))
    return open(file, "rb")


def _decompressed(file: pathlib.Path) -> Iterator[bytes]:
    if importlib.util.find_spec("zstandard") is None:
        raise UserError(f"{file}: .zst files need zstandard: pip install zstandard")
    import zstandard

    frame = None
    with open(file, "rb") as stream:
        try:
            while piece := stream.read(1 << 17):
                while piece:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    yield frame.decompress(piece)
                    piece, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        except zstandard.ZstdError as error:
            raise zlib.error(str(error)) from None
    if frame is not None:
        raise EOFError("no end of frame")


class _Pieces(io.RawIOBase):
    """A stream of what an iterator of bytes gives."""

    def __init__(self, pieces: Iterable[bytes]):
        self._pieces, self._left = iter(pieces), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._left:
            self._left = next(self._pieces, None)
            if self._left is None:
                self._left = b""
                return 0
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count


def _decoded(line: bytes, where: str, number: int) -> str:
    if number == 1:
        if line.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise BadRecord(where, "UTF-16 text; convert the file to UTF-8")
        line = line.removeprefix(b"\xef\xbb\xbf")
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise BadRecord(where, "not UTF-8 text; convert the file to UTF-8") from None


def parse_json(text: str, where: str) -> Any:
    """The value of JSON `text`.

    Raises:
      BadRecord: it is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRecord(where, _json_fault(error)) from None


def _json_fault(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON ({error.msg}, column {error.colno})"
    return "not valid JSON (nested too deeply)" if isinstance(error, RecursionError) else f"not valid JSON ({error})"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _line_of(error: BadRecord) -> int:
    return int(error.where.rpartition(":")[2])
