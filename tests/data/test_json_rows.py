"""JSON that is read a little at a time is what json.loads makes of the whole, faults and their places too."""

from __future__ import annotations

import json
import random
import re

import pytest

from megatrain_jax.data import streams
from megatrain_jax.data.json_rows import json_values
from megatrain_jax.data.records import BadRecord

TEXTS = [
    "",
    "a",
    'quo"te',
    "back\\slash",
    "\u00e9\u2028",
    "\U0001f600",
    "[{,",
    "line\nline",
    "\ttab",
    "x" * 60,
    "null",
    "1e5",
]
NUMBERS = [0, -1, 12345678901234567890, 1.5, -2.5e-10, 1e300, True, False, None]


def random_value(rng, depth=0):
    choice = rng.random()
    if depth < 3 and choice < 0.3:
        return {rng.choice(TEXTS): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    if depth < 3 and choice < 0.5:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return rng.choice(TEXTS) if choice < 0.8 else rng.choice(NUMBERS)


def random_text(rng, values):
    """`values` as an array or one after the other, on few lines or many."""
    indent, ascii_only = rng.choice([None, 0, 1]), rng.random() < 0.5
    if rng.random() < 0.6:
        text = json.dumps(values, indent=indent, ensure_ascii=ascii_only)
    else:
        # The first on several lines, or the file is one of lines.
        text = "\n".join(json.dumps(value, indent=1, ensure_ascii=ascii_only) for value in [{"a": 1}, *values])
    return rng.choice(["", "\n", " \r\n\t"]) + text + rng.choice(["", "\n", "\n \n"])


def read(file, monkeypatch, chunk):
    monkeypatch.setattr(streams, "_CHUNK", chunk)
    return [(line, str(row) if isinstance(row, BadRecord) else row) for line, row in json_values(file)]


def test_values_are_those_of_the_whole(tmp_path, monkeypatch):
    rng, file = random.Random(0), tmp_path / "a.json"
    for _ in range(300):
        values = [random_value(rng) for _ in range(rng.randrange(6))]
        text = random_text(rng, values)
        file.write_bytes(text.encode())
        expected = values if text.lstrip().startswith("[") else [{"a": 1}, *values]
        for chunk in (1, 2, 7, 1 << 18):
            found = read(file, monkeypatch, chunk)
            assert [row for _, row in found] == expected, (text, chunk)
        lines = text.split("\n")
        assert all(json.dumps(row)[0] in lines[line - 1] for line, row in found)
        assert read(file, monkeypatch, 1) == read(file, monkeypatch, 3) == found


def test_faults_are_those_of_the_whole_wherever_it_is_cut(tmp_path, monkeypatch):
    rng, file, faults = random.Random(1), tmp_path / "a.json", 0
    for _ in range(600):
        text = list(random_text(rng, [random_value(rng) for _ in range(rng.randrange(1, 5))]))
        place, choice = rng.randrange(len(text)), rng.random()
        if choice < 0.3:
            del text[place:]
        elif choice < 0.6:
            del text[place]
        else:
            text[place] = rng.choice('[]{},:"\\1a\n\t ')
        text = "".join(text)
        file.write_bytes(text.encode())
        whole, *others = (read(file, monkeypatch, chunk) for chunk in (1 << 18, 1, 3, 50))
        assert all(other == whole for other in others), text
        for line, row in whole:
            found = isinstance(row, str) and re.fullmatch(rf"{file}:(\d+): not valid JSON \((.*), column (\d+)\)", row)
            if not found:
                continue
            faults += 1
            assert line == int(found[1])
            if text.lstrip().startswith("["):
                with pytest.raises(json.JSONDecodeError) as raised:
                    json.loads(text)
                fault = raised.value
                assert (fault.lineno, fault.msg, fault.colno) == (line, found[2], int(found[3])), text
    assert faults > 100


@pytest.mark.parametrize("chunk", [1, 5, 1 << 18])
@pytest.mark.parametrize(
    ("content", "rows", "fault"),
    [
        (b"", [], None),
        (b"[ ]\n", [], None),
        (b"[1,]", [1], "1: not valid JSON (expected ',' between records and ']' at the end)"),
        (b"[1 2]", [1], "1: not valid JSON (expected ',' between records and ']' at the end)"),
        (b"[1]\n\nx", [1], "3: not valid JSON (expected ',' between records and ']' at the end)"),
        (b"[", [], "1: not valid JSON (Expecting value, column 2)"),
        (b"[,1]", [], "1: not valid JSON (Expecting value, column 2)"),
        (b"[1.5,\n-2e3, 1" + b"0" * 40 + b"]", [1.5, -2e3, 10**40], None),
        (b'[{"a": 1},\n{"a": "\xff"}]', [{"a": 1}], "2: not UTF-8 text; convert the file to UTF-8"),
        (b'\xef\xbb\xbf[{"a": "\xc3\xa9"}]', [{"a": "\u00e9"}], None),
        (b"[" * 10**5, [], "1: not valid JSON (nested too deeply)"),
        (b"\xff\xfe[\0", [], "1: UTF-16 text; convert the file to UTF-8"),
    ],
)  # fmt: skip
def test_ends_and_edges(tmp_path, monkeypatch, content, rows, fault, chunk):
    if content.startswith(b"\xff\xfe") and chunk == 1:
        chunk = 2
    file = tmp_path / "a.json"
    file.write_bytes(content)
    found = [row for _, row in read(file, monkeypatch, chunk)]
    assert found == rows + ([] if fault is None else [f"{file}:{fault}"])
