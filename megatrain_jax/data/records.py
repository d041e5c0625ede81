"""What a data set consists of, whatever it was spelt like: records of a few shapes, and the fault of a bad one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from megatrain_jax.config import UserError


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Turns of a dialogue.

    Attributes:
      where: ``file:line``, for messages.
      messages: turns as chat templates want them, ``{"role": system|user|assistant|tool, "content": str, ...}``.
      completion_start: index of the first message that answers rather than asks.
      tools: JSON schemas of the functions that the assistant may call, or None.
      weights: by index, what a turn's tokens weigh in the loss; only of the turns that say so themselves.
      times: how often an epoch has the record.
    """

    where: str
    messages: tuple[dict[str, Any], ...]
    completion_start: int
    tools: list[Any] | None = None
    weights: Mapping[int, float] = dataclasses.field(default_factory=dict)
    times: int = 1


@dataclasses.dataclass(frozen=True)
class Completion:
    """A prompt and what should follow it, as plain strings."""

    where: str
    prompt: str
    completion: str
    times: int = 1


@dataclasses.dataclass(frozen=True)
class Text:
    """A document to be learnt as a whole, or a piece of one.

    Attributes:
      begins, ends: whether the document does so with this text.
    """

    where: str
    text: str
    times: int = 1
    begins: bool = True
    ends: bool = True


@dataclasses.dataclass(frozen=True)
class Tokens:
    """What was tokenised before, and which of it is to be learnt."""

    where: str
    token_ids: tuple[int, ...]
    supervised: tuple[bool, ...]
    times: int = 1


Record = Conversation | Completion | Text | Tokens


def size(record: Record | Unreadable) -> int:
    """About how many characters it has, by which one can tell what is a lot."""
    if isinstance(record, Conversation):
        return sum(len(message["content"]) for message in record.messages)
    if isinstance(record, Completion):
        return len(record.prompt) + len(record.completion)
    return len(record.text) if isinstance(record, Text) else len(getattr(record, "token_ids", ()))


def weighted(record: Record, times: int) -> Record:
    """`record`, to be seen so often in an epoch."""
    return record if times == 1 else dataclasses.replace(record, times=times)


@dataclasses.dataclass(frozen=True)
class Unreadable:
    """Stands for a record that is left out because it cannot be read; `reason` is short enough to be counted by."""

    where: str
    reason: str


class BadRecord(UserError):
    """A fault of one record, which may be left out without harm to the others.

    Attributes:
      reason: the message without what differs from record to record.
    """

    def __init__(self, where: str, message: str):
        super().__init__(f"{where}: {message}")
        self.where = where
        self.reason = re.split(r"; | \(", re.sub(r"^turn \d+: ", "", message))[0]

    def __reduce__(self):
        return BadRecord, (self.where, str(self).removeprefix(f"{self.where}: "))


def check_text(text: Any, where: str, what: str) -> str:
    """`text` itself, if a tokenizer can read it."""
    if not isinstance(text, str):
        raise BadRecord(where, f"{what} must be text, found {kind(text)}")
    if "\0" in text:
        raise BadRecord(where, f"{what} contains a NUL character; remove it (is this a binary file?)")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRecord(where, f"{what} contains half of a surrogate pair; write the character itself") from None
    return text


def kind(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {type(None): "null", dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return names.get(type(value), "a number")
