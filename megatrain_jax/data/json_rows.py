"""JSON as rows: lines, an array, or values one after the other, of which little more than one is in memory."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

from megatrain_jax.data.records import BadRecord
from megatrain_jax.data.streams import characters, decoded, line_of, lines

_BLANK = " \t\r\n"
_LONGEST_TOKEN = 16  # characters; a fault this close to the end of what was read may be that of a word that goes on


def parse_json(text: str, where: str) -> Any:
    """The value of JSON `text`.

    Raises:
      BadRecord: it is not JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _fault(where, f"{error.msg}, column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise _fault(where, _reason(error)) from None


def json_lines(file: pathlib.Path) -> Iterator[tuple[int, Any]]:
    """Line number and value of every line that is not blank; a `BadRecord` stands for one that cannot be read."""
    try:
        for number, line in lines(file):
            if line.strip():
                yield number, _parsed(line, f"{file}:{number}", number)
    except BadRecord as error:
        yield line_of(error), error


def json_values(file: pathlib.Path) -> Iterator[tuple[int, Any]]:
    """Elements of an array; else values one after the other, by line if the first line is a value.

    With each comes the line where it begins. After a fault, which a `BadRecord` stands for, no more come, unless the file
    is read by line.
    """
    try:
        text = _Text(characters(file), str(file))
        if text.next_character() == "[":
            yield from _elements(text)
        elif _first_line_is_a_value(file):
            yield from json_lines(file)
        else:
            while text.next_character():
                yield text.line, text.value()
    except BadRecord as error:
        yield line_of(error), error


def _elements(text: _Text) -> Iterator[tuple[int, Any]]:
    text.skip()
    more = text.next_character() != "]"
    while more:
        yield text.line, text.value()
        more = text.next_character() == ","
        if more:
            text.skip()
            if text.next_character() in ("", "]"):
                more, closed = False, False
                break
    else:
        closed = text.next_character() == "]"
    if closed:
        text.skip()
    if not closed or text.next_character():
        raise _fault(text.where, "expected ',' between records and ']' at the end")


class _Text:
    """Characters that are read as far as a value needs them, and forgotten behind it.

    Attributes:
      line: from 1, of the next character.
    """

    def __init__(self, source: Iterator[str], name: str):
        self._source, self._name = source, name
        self._held, self._at = "", 0
        self._damage: BadRecord | None = None  # what the file ends with instead of its end
        self.line, self._column = 1, 0

    @property
    def where(self) -> str:
        return f"{self._name}:{self.line}"

    def next_character(self) -> str:
        """The next one that is not blank, which is not passed over; empty at the end."""
        while True:
            begin = self._at
            while self._at < len(self._held) and self._held[self._at] in _BLANK:
                self._at += 1
            self._pass(begin)
            if self._at < len(self._held):
                return self._held[self._at]
            if not self._read():
                if self._damage:
                    raise self._damage
                return ""

    def skip(self) -> None:
        """Passes over one character, which is no end of a line."""
        self._at, self._column = self._at + 1, self._column + 1

    def value(self) -> Any:
        """The value that begins with the next character.

        Raises:
          BadRecord: it is not JSON.
        """
        decoder = json.JSONDecoder()
        while True:
            try:
                value, end = decoder.raw_decode(self._held, self._at)
                if end <= len(self._held) - _LONGEST_TOKEN or not self._read():  # a number may go on
                    break
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos > len(self._held) - _LONGEST_TOKEN
                if not cut or not self._read():
                    raise (cut and self._damage) or self._located(error) from None
            except (ValueError, RecursionError) as error:
                raise _fault(self.where, _reason(error)) from None
        begin, self._at = self._at, end
        self._pass(begin)
        return value

    def _read(self) -> bool:
        """Reads on, at least as much as is held, so that a long value is tried a few times only; False, and nothing, at the end."""
        wanted, pieces = max(len(self._held) - self._at, 1), []
        try:
            while wanted > 0 and (piece := next(self._source, None)) is not None:
                pieces.append(piece)
                wanted -= len(piece)
        except BadRecord as error:
            self._damage = error
        if any(pieces):
            self._held, self._at = "".join([self._held[self._at :], *pieces]), 0
        return any(pieces)

    def _pass(self, begin: int) -> None:
        """Counts the lines from `begin` to here."""
        passed = self._held.count("\n", begin, self._at)
        self.line += passed
        last = self._held.rfind("\n", begin, self._at) + 1 if passed else begin
        self._column = self._at - last + (0 if passed else self._column)

    def _located(self, error: json.JSONDecodeError) -> BadRecord:
        """The fault at its line and column in the file."""
        begin = self._at
        self._at = error.pos
        self._pass(begin)
        return _fault(self.where, f"{error.msg}, column {self._column + 1}")


def _parsed(line: bytes, where: str, number: int) -> Any:
    try:
        return parse_json(decoded(line, where, number), where)
    except BadRecord as error:
        return error


def _first_line_is_a_value(file: pathlib.Path) -> bool:
    first = next((row for _, row in json_lines(file)), None)
    return not isinstance(first, BadRecord)


def _fault(where: str, reason: str) -> BadRecord:
    return BadRecord(where, f"not valid JSON ({reason})")


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)
