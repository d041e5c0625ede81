"""Rows to records: how a row is spelt, and what it says."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from typing import Any

from megatrain_jax.data.json_rows import parse_json
from megatrain_jax.data.records import BadRecord, Completion, Conversation, Record, Text, Tokens, check_text, kind

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_TAGGED = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
_FLAGS = ("weight", "train")
_SMALLEST, _LARGEST = 1e-30, 1e30
# What `columns` calls the parts of a row, and what they are called by format.
_PARTS = {
    "messages": {"messages": "messages"},
    "sharegpt": {"messages": "conversations"},
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "history": "history"},
    "prompt_completion": {"prompt": "prompt", "response": "completion"},
    "text": {"text": "text"},
    "tokenized": {"input_ids": "input_ids", "labels": "labels", "attention_mask": "attention_mask"},
}
_IN_ALL = {"system": "system", "tools": "tools"}


@dataclasses.dataclass(frozen=True)
class Spelling:
    """How the rows of a source are written.

    Attributes:
      form: name of the format; "auto" until the first row has told it.
      text_field, query_field, response_field: columns of plain text and of pairs.
      columns: which column holds which part of a row, by the names of LLaMA-Factory's registry; empty for the usual ones.
      tags: what the keys and roles of a turn are called, by the names of the same registry.
    """

    form: str = "auto"
    text_field: str = "text"
    query_field: str = "query"
    response_field: str = "response"
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict)


def recognised(row: Any, spelling: Spelling, where: str) -> Spelling:
    """`spelling` with the format whose columns `row` has, if it was open."""
    _check_row(row, where)
    if spelling.form != "auto":
        return spelling
    if spelling.columns:
        known = ("messages", "sharegpt"), ("prompt", "alpaca"), ("input_ids", "tokenized"), ("text", "text")
        form = next((form for part, form in known if part in spelling.columns), None)
        if form is None:
            raise BadRecord(where, "dataset.columns names neither messages, prompt, text nor input_ids")
        return dataclasses.replace(spelling, form=form)
    if {"chosen", "rejected"} <= set(row):
        raise BadRecord(
            where, "preference data (chosen, rejected) cannot be trained on; make prompt and completion of it"
        )
    for form, alternatives in _needed(spelling).items():
        if any(set(columns) <= set(row) for columns in alternatives):
            return dataclasses.replace(spelling, form=form)
    raise BadRecord(where, f"no known format has the columns {_names(row)}; name them in dataset.columns, "
                    "dataset.text_field, dataset.query_field and dataset.response_field, or see dataset.format")  # fmt: skip


def normalise(row: Any, spelling: Spelling, where: str) -> Record:
    """`row` of the format `spelling.form` as a record.

    Raises:
      BadRecord: columns are missing, a conversation is empty or out of order, or text is not text.
    """
    _check_row(row, where)
    form = spelling.form
    found = _names(row)
    if spelling.columns:
        parts = _PARTS[form] | _IN_ALL
        unknown = [part for part in spelling.columns if part not in parts]
        if unknown:
            raise BadRecord(where, f"dataset.columns: format '{form}' has no '{unknown[0]}'; it has {', '.join(parts)}")
        row = {parts[part]: row[name] for part, name in spelling.columns.items() if name in row}
    alternatives = _needed(spelling)[form]
    columns = next((columns for columns in alternatives if set(columns) <= set(row)), None)
    if columns is None:
        wanted = " or ".join(" and ".join(f"'{name}'" for name in columns) for columns in alternatives)
        raise BadRecord(where, f"format '{form}' needs the columns {wanted}; found {found}")
    if form == "text":
        return Text(where, check_text(row[columns[0]], where, f"'{columns[0]}'"))
    if form == "tokenized":
        return _tokens(row, where)
    if form == "prompt_completion":
        return _pair(row, *columns, where)
    if form == "alpaca":
        return _conversation(row, _alpaca_turns(row, where), where)
    turns = row[columns[0]]
    turns = parse_json(turns, where) if isinstance(turns, str) and turns.lstrip().startswith("[") else turns
    if not isinstance(turns, list):
        raise BadRecord(where, f"'{columns[0]}' must be a list of turns, found {kind(turns)}")
    return _conversation(row, turns, where, tags=spelling.tags)


def _needed(spelling: Spelling) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Columns that tell a format, in order of recognition; each format may have several spellings."""
    text = "text" if spelling.columns else spelling.text_field
    return {
        "tokenized": (("input_ids",),),
        "messages": (("messages",),),
        "sharegpt": (("conversations",),),
        "alpaca": (("instruction", "output"),),
        "prompt_completion": (("prompt", "completion"), (spelling.query_field, spelling.response_field)),
        "text": ((text,),),
    }


def _check_row(row: Any, where: str) -> None:
    if not isinstance(row, dict):
        raise BadRecord(where, f"expected an object with named columns, found {kind(row)}")


def _tokens(row: dict[str, Any], where: str) -> Tokens:
    ids = _integers(row, "input_ids", where)
    if not ids:
        raise BadRecord(where, "'input_ids' is empty")
    if min(ids) < 0 or max(ids) >= 2**31:
        raise BadRecord(where, "'input_ids' has a number that is no token id")
    labels = ids if row.get("labels") is None else _integers(row, "labels", where)
    shown = [1] * len(ids) if row.get("attention_mask") is None else _integers(row, "attention_mask", where)
    if not len(ids) == len(labels) == len(shown):
        raise BadRecord(where, "'input_ids', 'labels' and 'attention_mask' differ in length")
    # Padding stands at the ends; a hole in between would change what attends to what.
    padding = "".join("1" if flag else "0" for flag in shown).strip("0")
    if "0" in padding:
        raise BadRecord(where, "'attention_mask' hides tokens between others")
    kept = [(i, label) for i, label, flag in zip(ids, labels, shown) if flag]
    if any(label not in (i, -100) for i, label in kept):
        raise BadRecord(where, "'labels' must repeat 'input_ids' where they are not -100; they are shifted by the loss")
    return Tokens(where, tuple(i for i, _ in kept), tuple(label != -100 for _, label in kept))


def _integers(row: dict[str, Any], column: str, where: str) -> list[int]:
    values = row[column]
    if not isinstance(values, list) or any(type(value) not in (int, bool) for value in values):
        raise BadRecord(where, f"'{column}' must be a list of whole numbers")
    return values


def _pair(row: dict[str, Any], asked: str, answered: str, where: str) -> Record:
    prompt, completion = row[asked], row[answered]
    if not isinstance(prompt, list) and not isinstance(completion, list):
        return Completion(
            where, check_text(prompt, where, f"'{asked}'"), check_text(completion, where, f"'{answered}'")
        )
    prompt = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    completion = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
    if not completion:
        raise BadRecord(where, f"'{answered}' is an empty conversation")
    return _conversation(row, prompt + completion, where, completion_start=len(prompt))


def _alpaca_turns(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    asked = [check_text(row[name], where, f"'{name}'") for name in ("instruction", "input") if row.get(name)]
    history = row.get("history") or []
    history = parse_json(history, where) if isinstance(history, str) else history
    if not (isinstance(history, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in history)):
        raise BadRecord(where, "'history' must be a list of [instruction, output] pairs")
    texts = [*itertools.chain.from_iterable(history), "\n".join(asked), row["output"]]
    return [{"role": role, "content": text} for role, text in zip(itertools.cycle(("user", "assistant")), texts)]


def _conversation(
    row: dict[str, Any],
    turns: list[Any],
    where: str,
    completion_start: int | None = None,
    tags: Mapping[str, str] = {},  # noqa: B006 (never written to)
) -> Conversation:
    if not turns:
        raise BadRecord(where, "empty conversation")
    messages, weights = [], {}
    if row.get("system"):
        messages.append({"role": "system", "content": check_text(row["system"], where, "'system'")})
    for i, turn in enumerate(turns):
        message, weight = _message(turn, f"{where}: turn {i + 1}", tags)
        if i == 0 and message["role"] == "system":
            messages.clear()  # the conversation's own comes before the row's
        if weight is not None:
            weights[len(messages)] = weight
        messages.append(message)
    added = len(messages) - len(turns)
    _check_order(messages, where, added)
    if completion_start is None:
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        completion_start = answers[-1] if answers else len(messages)
    else:
        completion_start += added
    return Conversation(where, tuple(messages), completion_start, _tools(row.get("tools"), where), weights)


def _check_order(messages: list[dict[str, Any]], where: str, added: int) -> None:
    before = None
    for i, role in enumerate(message["role"] for message in messages):
        turn = f"turn {i + 1 - added}"
        if role == before and role != "tool":
            raise BadRecord(where, f"{turn}: two turns of '{role}' in a row; join them or remove one")
        if role == "system" and i > 0:
            raise BadRecord(where, f"{turn}: 'system' may only come first")
        if role == "tool" and before not in ("assistant", "tool"):
            raise BadRecord(where, f"{turn}: 'tool' must follow the assistant's call, not '{before}'")
        before = role


def _message(turn: Any, where: str, tags: Mapping[str, str]) -> tuple[dict[str, Any], float | None]:
    """The turn as chat templates want it, and what it says that it weighs."""
    if not isinstance(turn, dict):
        raise BadRecord(where, f"expected an object with role and content, found {kind(turn)}")
    role_key, content_key = ("from", "value") if "from" in turn else ("role", "content")
    role_key, content_key = tags.get("role_tag", role_key), tags.get("content_tag", content_key)
    own = {tags[tag]: name for tag, name in _TAGGED.items() if tag in tags}
    name = turn.get(role_key)
    if not isinstance(name, str) or own.get(name, name) not in ROLES:
        raise BadRecord(where, f"unknown role {name!r}; known are {', '.join([*own, *ROLES])}")
    name = own.get(name, name)
    role = ROLES[name]
    rest = {k: v for k, v in turn.items() if k not in (role_key, content_key, *_FLAGS) and v is not None}
    content = turn.get(content_key)
    calls = rest.pop("tool_calls", None) or rest.pop("function_call", None)
    content = "" if content is None and calls else check_text(content, where, f"'{content_key}'")
    if name == "function_call":
        calls = parse_json(content, f"{where}: function_call")
        content, calls = "", calls or [calls]
    for key in ("reasoning_content", "thinking", "reasoning", "name", "tool_call_id"):
        if key in rest:
            check_text(rest[key], where, f"'{key}'")
    if calls:
        if role != "assistant":
            raise BadRecord(where, f"only the assistant calls functions, not '{role}'")
        rest["tool_calls"] = [_call(call, where) for call in (calls if isinstance(calls, list) else [calls])]
    _check_texts(rest, where, "the turn")
    return {"role": role, "content": content, **rest}, _weight(turn, role, where)


def _call(call: Any, where: str) -> dict[str, Any]:
    """A call as ``{"type": "function", "function": {"name": str, "arguments": dict}}``."""
    inner = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or "arguments" not in inner:
        raise BadRecord(where, "a function call must be an object with 'name' and 'arguments'")
    arguments = inner["arguments"]
    if isinstance(arguments, str):
        arguments = parse_json(arguments or "{}", f"{where}: arguments of '{inner['name']}'")
    if not isinstance(arguments, dict):
        raise BadRecord(where, f"arguments of '{inner['name']}' must be an object, found {kind(arguments)}")
    more = {k: v for k, v in call.items() if k not in ("function", "type", "name", "arguments")}
    return {**more, "type": "function", "function": {**inner, "arguments": arguments}}


def _weight(turn: dict[str, Any], role: str, where: str) -> float | None:
    """What the turn says its tokens weigh in the loss: `weight` (from 0), or `train` (true is 1, false is 0)."""
    weight, train = turn.get("weight"), turn.get("train")
    if weight is not None and not _is_weight(weight):
        raise BadRecord(where, f"'weight' must be 0 or a number from 1e-30 to 1e30 ({json.dumps(weight)})")
    if train is not None and train not in (0, 1):
        raise BadRecord(where, f"'train' must be true or false ({json.dumps(train)})")
    if weight is None and train is None:
        return None
    if None not in (weight, train) and bool(weight) != bool(train):
        raise BadRecord(where, "'weight' and 'train' contradict each other; keep one of them")
    value = float(train if weight is None else weight)
    if role == "assistant":
        return value
    if value:
        raise BadRecord(where, f"only turns of the assistant can be trained, not those of '{role}'")
    return None


def _is_weight(value: Any) -> bool:
    """Whether `value` is a weight that float32 can hold, and sums and means of it: 1e-60 would be 0, 1e60 infinite."""
    return type(value) in (int, float) and (value == 0 or _SMALLEST <= value <= _LARGEST)


def _tools(tools: Any, where: str) -> list[Any] | None:
    """Function schemas as ``{"type": "function", "function": {...}}``, or None."""
    tools = parse_json(tools, f"{where}: 'tools'") if isinstance(tools, str) and tools.strip() else tools
    if not tools:
        return None
    if not isinstance(tools, list):
        raise BadRecord(where, f"'tools' must be a list of function schemas, found {kind(tools)}")
    _check_texts(tools, where, "'tools'")
    schemas = []
    for tool in tools:
        inner = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise BadRecord(where, "'tools' must be a list of function schemas, each with a 'name'")
        schemas.append(tool if inner is not tool else {"type": "function", "function": tool})
    return schemas


def _check_texts(value: Any, where: str, what: str) -> None:
    """Refuses what a template could write but no tokenizer read."""
    check_text(json.dumps(value, ensure_ascii=False, default=str), where, what)


def _names(row: dict[str, Any]) -> str:
    return ", ".join(f"'{name}'" for name in row) or "(none)"
