"""YAML in and out, held against PyYAML's own reader; values as annotated types."""

import io
import random
import string
from collections.abc import Mapping
from typing import Annotated, Literal

import pytest
import yaml

from megatrain_jax.typed_yaml import Bounds, Pattern, convert, describe, dump, parse


@pytest.mark.parametrize("seed", range(20))
def test_a_dumped_tree_parses_to_itself(seed):
    rng = random.Random(seed)
    alphabet = string.digits + "eE+-. \t\n:#'\"{}[]&*!|>%@`~nyox_\u00e9\u2603"
    text = lambda: "".join(rng.choices(alphabet, k=rng.randrange(8)))  # noqa: E731
    number = lambda: rng.choice([rng.gauss(0, 1) * 10 ** rng.randrange(-30, 30), rng.randrange(-(10**9), 10**9)])  # noqa: E731
    tree = {text(): [text(), number(), {text(): number(), "x": None, "y": True}] for _ in range(50)}
    file = io.StringIO()
    dump(tree, file)
    assert parse(file.getvalue()) == tree


@pytest.mark.parametrize(
    "text", ["a: [1, 2.5, x, yes, null]\nb: {c: 0x10}", "- &a {x: 1}\n- {<<: *a, x: 2}", "2024-01-02"]
)
def test_ordinary_yaml_reads_as_ever(text):
    assert parse(text) == yaml.safe_load(text)


@pytest.mark.parametrize("text", ["1e-5", "1E5", "-2e+3", ".5e1", "3.e2", "+1.25E-07"])
def test_numbers_with_an_exponent_are_numbers(text):
    assert parse(text) == float(text)
    assert parse(f"'{text}'") == text


@pytest.mark.parametrize("text", ["e5", "1e", "1e5x", "1.2.3e4", "e", "1-e5"])
def test_what_only_looks_like_a_number_is_text(text):
    assert parse(text) == text


def test_a_key_given_twice_is_refused_at_any_depth():
    with pytest.raises(ValueError, match="^line 3: not valid YAML: b is given twice$"):
        parse("a:\n  b: 1\n  b: 1\n")


SHARE = Annotated[float, Bounds(high=1, high_open=True)]


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (int, [0, -3, (3.0, 3)], [True, "1", 0.5, None, 1.0, float("inf"), float("nan")]),
        (float, [0.5, (2, 2.0)], [False, "0.5", float("inf"), float("-inf"), float("nan")]),
        (bool, [True, False], [0, 1, "yes", None]),
        (str, ["", "x"], [1, None, ["x"]]),
        (SHARE, [0.0, 0.999], [1, -1e-9, 1.0]),
        (Annotated[float, Bounds(low_open=True)], [1e-300], [0, 0.0, -1]),
        (Annotated[int, Bounds(low=2, high=4)], [2, 3, 4], [1, 5]),
        (Annotated[str, Pattern("a+", "as")], ["a", "aaa"], ["", "ab", "ba", 1]),
        (int | None, [1, None], ["x", 0.5]),
        (Literal["auto"] | bool, ["auto", True], ["Auto", 1, None]),
        (tuple[str, ...], [([], ()), (["a", "b"], ("a", "b")), ("a", ("a",))], [1, [1], {"a": 1}, None]),
        (Mapping[str, SHARE], [{}, {"a": 0.5}], [{"a": 1.5}, {1: 0.5}, [], None]),
    ],
)
def test_conversion(kind, good, bad):
    for value in good:
        given, expected = value if isinstance(value, tuple) else (value, value)
        converted = convert(kind, given)
        assert (converted, type(converted)) == (expected, type(expected))
    for value in bad:
        with pytest.raises(ValueError):
            convert(kind, value)
    assert describe(kind)
