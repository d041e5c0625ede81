"""YAML text in and out, and plain values as the types that annotations name."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TextIO

import yaml


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The numbers a key accepts: from `low` to `high`, both allowed unless `low_open` or `high_open` says so."""

    low: float = 0
    high: float = float("inf")
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, x: float) -> bool:
        above = x > self.low if self.low_open else x >= self.low
        return above and (x < self.high if self.high_open else x <= self.high)

    def __str__(self) -> str:
        text = f"{'>' if self.low_open else '>='} {self.low}"
        return text if self.high == float("inf") else f"{text} and {'<' if self.high_open else '<='} {self.high}"


@dataclasses.dataclass(frozen=True)
class Pattern:
    """The texts a key accepts: what `regex` matches from end to end, described to the user as `meaning`."""

    regex: str
    meaning: str


Count = Annotated[int, Bounds(low=1)]
Size = Annotated[int, Bounds()]
NonNegative = Annotated[float, Bounds()]
Positive = Annotated[float, Bounds(low_open=True)]
Share = Annotated[float, Bounds(high=1)]
Fraction = Annotated[float, Bounds(high=1, high_open=True)]


class _Loader(yaml.SafeLoader):
    """Safe YAML where 1e-5 is a number and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen |= {key.value} if isinstance(key, yaml.ScalarNode) else set()
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that `_Loader` takes for numbers, and writes shared values out in full."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+\Z"), list("-+.0123456789")
    )


def parse(text: str | bytes) -> Any:
    """The value that YAML `text` stands for. Raises ValueError, in one line with the line number, if it is not YAML."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        line = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{line}not valid YAML: {' '.join(problem.split())}") from error


def dump(tree: Any, file: TextIO) -> None:
    """Writes YAML that `parse` reads as `tree`: dicts in their order, lists, tuples, texts, numbers, None."""
    yaml.dump(tree, file, _Dumper, sort_keys=False, allow_unicode=True)


def convert(kind: Any, value: Any) -> Any:
    """`value`, as YAML gives it, as the type `kind`.

    A list becomes a tuple, as does a single text; a number with a point may stand for an int if it is whole.

    Args:
      kind: str, bool, int, float, None; Literal of texts; tuple[str, ...]; Mapping[str, x]; unions of these, tried in
        their order; Annotated with a `Bounds` or a `Pattern`.

    Raises:
      ValueError: `value` is of another type, not finite, or out of the range.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        value, limit = convert(arguments[0], value), arguments[1]
        if value in limit if isinstance(limit, Bounds) else re.fullmatch(limit.regex, value):
            return value
    elif origin in (typing.Union, types.UnionType):
        for option in arguments:
            with contextlib.suppress(ValueError):
                return convert(option, value)
    elif origin is Literal:
        if isinstance(value, str) and value in arguments:
            return value
    elif origin is tuple:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            return tuple(items)
    elif origin is Mapping:
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {key: item if arguments[1] is Any else convert(arguments[1], item) for key, item in value.items()}
    elif kind in (int, float):
        number = type(value) in (int, float) and math.isfinite(value)
        # 1.0 is no int: where fractions are allowed too it may well mean all of it.
        if number and kind(value) == value and (kind is float or type(value) is int or value != 1):
            return kind(value)
    elif type(value) is kind:
        return value
    raise ValueError(value)


def describe(kind: Any) -> str:
    """The values that `convert` accepts for `kind`, in words."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        limit = arguments[1]
        return f"{describe(arguments[0])} {limit}" if isinstance(limit, Bounds) else limit.meaning
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(option) for option in arguments)
    if origin is Literal:
        return " or ".join(arguments)
    if origin is tuple:
        return "a list of texts"
    if origin is Mapping:
        return "a mapping" if arguments[1] is Any else f"a mapping of names to {describe(arguments[1])}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "null"}
    return names[kind]
