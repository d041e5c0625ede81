"""What a data set section names, as a stream of records: files, folders, lists with weights, LLaMA-Factory's registry."""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from megatrain_jax.config import SourceConfig, UserError
from megatrain_jax.data import files
from megatrain_jax.data.formats import Spelling, normalise, recognised
from megatrain_jax.data.records import BadRecord, Record, Text, Unreadable, check_text, weighted

Paths = str | Sequence[SourceConfig]


def training_path(config: Any) -> Paths:
    """`dataset.path`, or what `dataset.name` stands for in the registry."""
    return config.path if config.name is None else registered(config.name, config.dataset_dir)


def expand(path: Paths, key: str = "dataset.path") -> list[pathlib.Path]:
    """All files of a path or of a list of sources, in order. See `files.expand`."""
    return [file for source in _sources(path) for file in files.expand(source.path, key, source.split)]


def read(config: Any, path: Paths, key: str = "dataset.path") -> Iterator[tuple[str, Record | Unreadable]]:
    """Every record of the files at `path`, with the format it was read as; "" and `Unreadable` for one to be left out.

    Args:
      config: a `DatasetConfig`; how rows are spelt, and `on_bad_record`, are read.
      path: a file, folder or glob, or a list of sources.
      key: the setting that `path` came from, for messages.

    Raises:
      UserError: a file is missing or malformed, with file and line.
    """
    for source in _sources(path):
        records = _records(source, config, key)
        if source.num_samples is not None:
            records = itertools.islice(records, source.num_samples)
        given, seen = 0, 0
        for form, record in records:
            if isinstance(record, Unreadable):
                yield form, record
                continue
            # The weighted count is kept exact at each record, so that no seed is needed.
            seen += 1
            times = int(seen * source.weight + 1e-9) - given
            given += times
            left_out = Unreadable(record.where, f"left out by the weight {source.weight:g}")
            yield (form, weighted(record, times)) if times else ("", left_out)


def registered(names: str, folder: str | None) -> tuple[SourceConfig, ...]:
    """Sources of the data sets that `names`, with commas between them, have in a folder's dataset_info.json.

    Raises:
      UserError: there is no such entry, or it is of a kind that cannot be read here.
    """
    if folder is None:
        raise UserError(f"dataset.dataset_dir: missing; give the folder whose dataset_info.json lists '{names}'")
    file = pathlib.Path(folder) / "dataset_info.json"
    try:
        registry = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"dataset.dataset_dir: cannot read '{file}' ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON ({error})") from None
    found = []
    for name in (each.strip() for each in names.split(",")):
        if not isinstance(registry, dict) or not isinstance(registry.get(name), dict):
            raise UserError(f"dataset.name: '{file}' has no data set '{name}'; it has {', '.join(registry)}")
        found.append(_entry(registry[name], pathlib.Path(folder), f"{file}: '{name}'"))
    return tuple(found)


def label(path: Paths) -> str:
    """A path or a list of sources in a few words."""
    return path if isinstance(path, str) else ", ".join(source.path for source in path)


def _entry(entry: dict[str, Any], folder: pathlib.Path, where: str) -> SourceConfig:
    if entry.get("ranking"):
        raise UserError(f"{where} is preference data ('ranking'), which cannot be trained on yet")
    if not isinstance(entry.get("file_name"), str):
        raise UserError(f"{where} has no 'file_name'; only files of this machine can be read, so fetch it first")
    formatting = entry.get("formatting", "alpaca")
    if formatting not in ("alpaca", "sharegpt"):
        raise UserError(f"{where}: 'formatting' must be alpaca or sharegpt, found {formatting!r}")
    columns, tags = entry.get("columns") or {}, entry.get("tags") or {}
    if not all(isinstance(each, dict) for each in (columns, tags)):
        raise UserError(f"{where}: 'columns' and 'tags' must be objects")
    form = "text" if set(columns) == {"prompt"} and formatting == "alpaca" else formatting
    columns = {"text": columns["prompt"]} if form == "text" else columns
    count, path = entry.get("num_samples"), folder / entry["file_name"]
    split = entry.get("split", "train") if path.is_dir() else None
    return SourceConfig(str(path), form, 1.0, columns, tags, split, count)


def _sources(path: Paths) -> Sequence[SourceConfig]:
    return [SourceConfig(path)] if isinstance(path, str) else path


def _records(source: SourceConfig, config: Any, key: str) -> Iterator[tuple[str, Record | Unreadable]]:
    form = source.format or config.format
    columns, tags = source.columns or config.columns, source.tags or config.tags
    fields = config.text_field, config.query_field, config.response_field
    for file in files.expand(source.path, key, source.split):
        spelling = Spelling(form, *fields, columns, tags)
        if files.kind(file) == ".txt":
            yield from _document(file, form, config.on_bad_record)
            continue
        for line, row in files.rows(file):
            where = f"{file}:{line}"
            try:
                if isinstance(row, BadRecord):
                    raise row
                spelling = recognised(row, spelling, where)
                yield spelling.form, normalise(row, spelling, where)
            except BadRecord as error:
                if config.on_bad_record == "error":
                    raise
                yield "", Unreadable(where, error.reason)


def _document(file: pathlib.Path, form: str, on_bad_record: str) -> Iterator[tuple[str, Record | Unreadable]]:
    if form not in ("auto", "text"):
        raise UserError(f"dataset.format: '{file}' is plain text, not '{form}'; use 'auto' or 'text'")
    begins, where = True, f"{file}:1"
    pieces = files.pieces(file)
    while True:
        try:
            line, text, goes_on = next(pieces, (0, "", None))
            if goes_on is None:
                return
            where = f"{file}:{line}"
            yield "text", Text(where, check_text(text, where, "the file"), begins=begins, ends=not goes_on)
        except BadRecord as error:
            if on_bad_record == "error":
                raise
            yield "", Unreadable(error.where, error.reason)
        begins = False
