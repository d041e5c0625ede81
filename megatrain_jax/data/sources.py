"""Files of text in, records out: what format a file has, and every record of it in one of three shapes."""

from __future__ import annotations

import glob
import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from megatrain_jax.config import UserError
from megatrain_jax.data.records import (
    BadRecord,
    Completion,
    Conversation,
    Record,
    Text,
    Unreadable,
    check_text,
    kind,
)

SUFFIXES = (".jsonl", ".json", ".txt")
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}


def expand(path: str, key: str = "dataset.path") -> list[pathlib.Path]:
    """Files that a path stands for: a file, or those of a folder or glob, sorted by name.

    Raises:
      UserError: nothing is there, or a file is of a kind that cannot be read.
    """
    here, kinds = pathlib.Path(path), " ".join(SUFFIXES)
    if here.is_dir():
        files = sorted(file for file in here.iterdir() if file.suffix in SUFFIXES)
        if not files:
            raise UserError(f"{key}: no {kinds} file in folder '{path}'")
        return files
    files = [here] if here.is_file() else sorted(filter(pathlib.Path.is_file, map(pathlib.Path, glob.glob(path))))
    if not files:
        raise UserError(f"{key}: no such file '{path}'")
    for file in files:
        if file.suffix not in SUFFIXES:
            raise UserError(f"{key}: cannot read '{file}'; the kinds read are {kinds}")
    return files


def read(config: Any, path: str, key: str = "dataset.path") -> Iterator[tuple[str, Record | Unreadable]]:
    """Every record of the files at `path`, with the format it was read as; "" and `Unreadable` for one to be left out.

    Args:
      config: a `DatasetConfig`; `format`, `text_field`, `query_field`, `response_field` and `on_bad_record` are read.
      path: see `expand`.
      key: the setting that `path` came from, for messages.

    Raises:
      UserError: a file is missing or malformed, with file and line.
    """
    for file in expand(path, key):
        if file.suffix == ".txt":
            if config.format not in ("auto", "text"):
                raise UserError(f"dataset.format: '{file}' is plain text, not '{config.format}'; use 'auto' or 'text'")
            yield "text", Text(f"{file}:1", check_text(_read_text(file), f"{file}:1", "the file"))
            continue
        form = config.format
        for line, row in _rows(file):
            where = f"{file}:{line}"
            try:
                if not isinstance(row, dict):
                    raise BadRecord(where, f"expected an object with named columns, found {kind(row)}")
                if form == "auto":
                    form = recognise(row, config, where)
                yield form, normalise(row, form, config, where)
            except BadRecord as error:
                if config.on_bad_record == "error":
                    raise
                yield "", Unreadable(where, error.reason)


def recognise(row: dict[str, Any], config: Any, where: str) -> str:
    """Name of the format whose columns `row` has."""
    for form, alternatives in _columns(config).items():
        if any(set(columns) <= set(row) for columns in alternatives):
            return form
    raise BadRecord(where, f"no known format has the columns {_names(row)}; name them in dataset.text_field, "
                    "dataset.query_field and dataset.response_field, or see dataset.format")  # fmt: skip


def normalise(row: dict[str, Any], form: str, config: Any, where: str) -> Record:
    """`row` of format `form` as a record.

    Raises:
      UserError: columns are missing, a conversation is empty or out of order, or text is not text.
    """
    alternatives = _columns(config)[form]
    columns = next((columns for columns in alternatives if set(columns) <= set(row)), None)
    if columns is None:
        wanted = " or ".join(" and ".join(f"'{name}'" for name in columns) for columns in alternatives)
        raise BadRecord(where, f"format '{form}' needs the columns {wanted}; found {_names(row)}")
    if form == "text":
        return Text(where, check_text(row[columns[0]], where, f"'{columns[0]}'"))
    if form == "prompt_completion":
        prompt, completion = row[columns[0]], row[columns[1]]
        if not (isinstance(prompt, list) and isinstance(completion, list)):
            return Completion(where, check_text(prompt, where, f"'{columns[0]}'"),
                              check_text(completion, where, f"'{columns[1]}'"))  # fmt: skip
        if not completion:
            raise BadRecord(where, f"'{columns[1]}' is an empty conversation")
        return _conversation(row, prompt + completion, where, completion_start=len(prompt))
    if form == "alpaca":
        return _conversation(row, _alpaca_turns(row, where), where)
    turns = row[columns[0]]
    if not isinstance(turns, list):
        raise BadRecord(where, f"'{columns[0]}' must be a list of turns, found {kind(turns)}")
    return _conversation(row, turns, where)


def _columns(config: Any) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Columns that tell a format, in order of recognition; each format may have several spellings."""
    return {
        "messages": (("messages",),),
        "sharegpt": (("conversations",),),
        "alpaca": (("instruction", "output"),),
        "prompt_completion": (("prompt", "completion"), (config.query_field, config.response_field)),
        "text": ((config.text_field,),),
    }


def _alpaca_turns(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    asked = [check_text(row[name], where, f"'{name}'") for name in ("instruction", "input") if row.get(name)]
    history = row.get("history") or []
    if not (isinstance(history, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in history)):
        raise BadRecord(where, "'history' must be a list of [instruction, output] pairs")
    texts = [*itertools.chain.from_iterable(history), "\n".join(asked), row["output"]]
    return [{"role": role, "content": text} for role, text in zip(itertools.cycle(("user", "assistant")), texts)]


def _conversation(row: dict, turns: list, where: str, completion_start: int | None = None) -> Conversation:
    if not turns:
        raise BadRecord(where, "empty conversation")
    messages = [_message(turn, f"{where}: turn {i + 1}") for i, turn in enumerate(turns)]
    if row.get("system") and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": check_text(row["system"], where, "'system'")})
        completion_start = None if completion_start is None else completion_start + 1
    before = None
    for i, role in enumerate(message["role"] for message in messages):
        if role == before and role != "tool":
            raise BadRecord(where, f"turn {i + 1}: two turns of '{role}' in a row; join them or remove one")
        if role == "system" and i > 0:
            raise BadRecord(where, f"turn {i + 1}: 'system' may only come first")
        if role == "tool" and before not in ("assistant", "tool"):
            raise BadRecord(where, f"turn {i + 1}: 'tool' must follow the assistant's call, not '{before}'")
        before = role
    if completion_start is None:
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        completion_start = answers[-1] if answers else len(messages)
    tools = row.get("tools") or None
    if isinstance(tools, str):
        tools = _parse(tools, f"{where}: 'tools'")
    return Conversation(where, tuple(messages), completion_start, tools)


def _message(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise BadRecord(where, f"expected an object with role and content, found {kind(turn)}")
    role_key, content_key = ("from", "value") if "from" in turn else ("role", "content")
    name = turn.get(role_key)
    if not isinstance(name, str) or name not in ROLES:
        raise BadRecord(where, f"unknown role {name!r}; known are {', '.join(ROLES)}")
    rest = {k: v for k, v in turn.items() if k not in (role_key, content_key) and v is not None}
    content = turn.get(content_key)
    if content is None and rest.get("tool_calls"):
        content = ""
    content = check_text(content, where, f"'{content_key}'")
    if name == "function_call":
        calls = _parse(content, f"{where}: function_call")
        calls = calls if isinstance(calls, list) else [calls]
        if not all(isinstance(call, dict) and {"name", "arguments"} <= set(call) for call in calls):
            raise BadRecord(where, "function_call must be JSON with 'name' and 'arguments'")
        content, rest = "", {"tool_calls": [{"type": "function", "function": call} for call in calls]}
    return {"role": ROLES[name], "content": content, **rest}


def _rows(file: pathlib.Path) -> Iterator[tuple[int, Any]]:
    """Line number and value of each record: elements of a JSON array, or one JSON value a line."""
    text = _read_text(file)
    if file.suffix == ".json" and text.lstrip().startswith("["):
        yield from _array_rows(file, text)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, _parse(line, f"{file}:{number}")


def _array_rows(file: pathlib.Path, text: str) -> Iterator[tuple[int, Any]]:
    decoder, line, counted = json.JSONDecoder(), 1, 0

    def skip(position: int) -> int:
        while position < len(text) and text[position] in " \t\r\n":
            position += 1
        return position

    position, separator = skip(0), "["
    while text[position : position + 1] == separator:
        position = skip(position + 1)
        if separator == "[" and text[position : position + 1] == "]":
            break
        line, counted = line + text.count("\n", counted, position), position
        try:
            row, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise UserError(f"{file}:{error.lineno}: not valid JSON ({error.msg}, column {error.colno})") from None
        yield line, row
        position, separator = skip(position), ","
    if text[position : position + 1] != "]" or text[position + 1 :].strip():
        line += text.count("\n", counted, position)
        raise UserError(f"{file}:{line}: not valid JSON (expected ',' between records and ']' at the end)")


def _read_text(file: pathlib.Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{file}:{line}: not UTF-8 text; convert the file to UTF-8") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRecord(where, f"not valid JSON ({error.msg}, column {error.colno})") from None


def _names(row: dict[str, Any]) -> str:
    return ", ".join(f"'{name}'" for name in row) or "(none)"
