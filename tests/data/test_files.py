"""Every kind of file gives the same rows, and a damaged one says where."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import random

import pytest

from megatrain_jax.config import UserError
from megatrain_jax.data import files, streams
from megatrain_jax.data.records import BadRecord

ROWS = [{"text": f'row {i}, "quoted"\n\u2028 caf\u00e9 \U0001f600', "more": ["", "x"][i % 2]} for i in range(400)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def zst(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    half = len(data) // 2  # two frames, as of files that were put together
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:]))


def write(folder, name):
    """`ROWS` as a file of the kind that `name` ends in."""
    file, inner = folder / name, name.removesuffix(".gz").removesuffix(".zst")
    if inner.endswith((".parquet", ".arrow", ".stream.arrow")):
        pyarrow = pytest.importorskip("pyarrow")
        table = pyarrow.Table.from_pylist(ROWS)
        if inner.endswith(".parquet"):
            pytest.importorskip("pyarrow.parquet").write_table(table, file, row_group_size=64)
        else:
            make = pyarrow.ipc.new_stream if "stream" in inner else pyarrow.ipc.new_file
            with make(str(file), table.schema) as writer:
                writer.write_table(table, max_chunksize=64)
        return file
    if inner.endswith(".csv"):
        plain = folder / "plain.table"
        with open(plain, "w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, ["text", "more"])
            writer.writeheader()
            writer.writerows(ROWS)
        data = plain.read_bytes()
    else:
        data = {".jsonl": LINES, ".json": json.dumps(ROWS, indent=1).encode()}[inner[inner.rindex(".") :]]
    file.write_bytes(gzip.compress(data) if name.endswith(".gz") else zst(data) if name.endswith(".zst") else data)
    return file


KINDS = ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.arrow", "a.stream.arrow"]
KINDS += [f"a{kind}{compressed}" for kind in (".jsonl", ".json", ".csv") for compressed in (".gz", ".zst")]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_the_same_rows(name, tmp_path):
    assert [row for _, row in files.rows(write(tmp_path, name))] == ROWS


def test_pretty_printed_and_concatenated_values(tmp_path):
    file = tmp_path / "a.json"
    file.write_text("\n".join(json.dumps(row, indent=1) for row in ROWS[:3]))
    assert [row for _, row in files.rows(file)] == ROWS[:3]
    assert [line for line, _ in files.rows(file)] == [1, 5, 9]


def test_nulls_that_structs_are_filled_with_are_gone(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    turns = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}]
    table = pyarrow.Table.from_pylist(turns)
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    assert [row for _, row in files.rows(tmp_path / "a.parquet")] == turns


@pytest.mark.parametrize(("cut", "keeps"), [(0.5, True), (0.9, True), (0.02, False)])
@pytest.mark.parametrize("compressed", [".gz", ".zst"])
def test_a_compressed_file_that_ends_early(tmp_path, cut, keeps, compressed):
    file = write(tmp_path, f"a.jsonl{compressed}")
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * cut)])
    found = [row for _, row in files.rows(file)]
    *rows, last = found
    assert isinstance(last, BadRecord) and "stream ends early or is damaged" in str(last)
    assert rows == ROWS[: len(rows)]
    assert str(last).startswith(f"{file}:{len(rows) + 1}: ")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_damaged_file_gives_an_error_and_no_other_rows(tmp_path, name):
    file = write(tmp_path, name)
    whole = bytearray(file.read_bytes())
    for position in range(0, len(whole), max(len(whole) // 40, 1)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x5A
        file.write_bytes(damaged)
        try:
            found = [row for _, row in files.rows(file)]
        except UserError as error:
            assert str(file) in str(error) and "\n" not in str(error)
            continue
        # Tables have no checksum: a value may differ, but nothing is lost without a word.
        assert isinstance(found[-1], BadRecord) or len(found) == len(ROWS)
        assert "\n" not in str(found[-1]) or not isinstance(found[-1], BadRecord)


@pytest.mark.parametrize(
    ("name", "content", "line", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"te', 2, "not valid JSON"),
        ("a.jsonl", b'\n{"text": \xff}', 2, "not UTF-8 text"),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16"), 1, "UTF-16 text; convert the file to UTF-8"),
        ("a.jsonl", b"[" * 10**5, 1, r"not valid JSON \(nested too deeply\)"),
        ("a.jsonl", b"1" * 5000, 1, r"not valid JSON \(Exceeds the limit"),
        ("a.json", b'[{"a": 1},\n{"a": 2},\n', 3, r"not valid JSON \(expected ','"),
        ("a.json", b'{\n"a": 1}\n{"a"}', 3, "not valid JSON"),
        ("a.csv", b"a,b\n1,2\n3\n", 3, "1 cells in a table of 2 columns"),
        ("a.csv", b"a,a\n1,2\n", 1, "must give each column a name of its own"),
        ("a.csv", b'a,b\n1,"2\n', 2, "not a valid table"),
        ("a.csv", b"a,b\n1,\xff\n", 2, "not UTF-8 text"),
    ],
)
def test_faults_name_file_and_line(tmp_path, name, content, line, message):
    file = tmp_path / name
    file.write_bytes(content)
    [(number, fault)] = [(n, row) for n, row in files.rows(file) if isinstance(row, BadRecord)]
    assert number == line and str(fault).startswith(f"{file}:{line}: ")
    with pytest.raises(BadRecord, match=message):
        raise fault


def test_what_a_folder_is_read_for(tmp_path):
    for name in ("dataset_info.json", "state.json", "data-0.arrow", ".hidden.jsonl", "README.md"):
        (tmp_path / name).touch()
    assert [file.name for file in files.expand(str(tmp_path), "x")] == ["data-0.arrow"]


def test_splits_of_a_folder_do_not_mix(tmp_path):
    for name in ("train-00000.jsonl", "train-00001.jsonl", "my_test.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"x: folder '.*' holds the splits train, test; name the files of one"):
        files.expand(str(tmp_path), "x")
    assert [file.name for file in files.expand(str(tmp_path), "x", "test")] == ["my_test.jsonl"]
    assert len(files.expand(str(tmp_path), "x", "train")) == 2
    with pytest.raises(UserError, match="no file of split 'dev'"):
        files.expand(str(tmp_path), "x", "dev")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train").mkdir()
    with pytest.raises(UserError, match="it holds the folders train"):
        files.expand(str(tmp_path / "sub"), "x")


@pytest.mark.parametrize(
    ("name", "package"), [("a.parquet", "pyarrow"), ("a.arrow", "pyarrow"), ("a.txt.zst", "zstandard")]
)
def test_what_needs_a_package_says_which(tmp_path, monkeypatch, name, package):
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None)
    read = files.pieces if ".txt" in name else files.rows
    with pytest.raises(UserError, match=f"files need {package}: pip install {package}"):
        list(read(tmp_path / name))


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"none\.jsonl: cannot be read \(No such file"):
        list(files.rows(tmp_path / "none.jsonl"))


@pytest.mark.parametrize("chunk", [1, 3, 1 << 18])
@pytest.mark.parametrize(
    "text",
    ["", "short\n", "one\ntwo three\n\nfour five six seven\n" * 9, "no blank" * 20, "\n" * 50, "\u00e9 \u6f22\n" * 30],
)
def test_pieces_of_a_text_are_the_text(tmp_path, monkeypatch, text, chunk):
    monkeypatch.setattr(files, "PIECE", 16)
    monkeypatch.setattr(streams, "_CHUNK", chunk)
    file = tmp_path / "a.txt"
    file.write_bytes(text.encode())
    found = list(files.pieces(file))
    assert "".join(piece for _, piece, _ in found) == text
    assert [more for _, _, more in found] == [True] * (len(found) - 1) + [False]
    before = ""
    for line, piece, more in found:
        assert line == before.count("\n") + 1 and (0 < len(piece) <= 16 or not text)
        assert (
            not more or piece.endswith("\n") or "\n" not in piece[1:] and (piece.endswith(" ") or " " not in piece[1:])
        )
        before += piece


def test_a_text_that_is_damaged_is_kept_as_far_as_it_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE", 16)
    (tmp_path / "a.txt").write_bytes(b"line of text\n" * 5 + b"\xff\n")
    pieces = files.pieces(tmp_path / "a.txt")
    assert [next(pieces)[:2] for _ in range(4)] == [(i, "line of text\n") for i in range(1, 5)]
    with pytest.raises(BadRecord, match=r"a\.txt:6: not UTF-8 text"):
        list(pieces)


def as_json(line: bytes):
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError):
        return None


def as_table(data: bytes):
    """Rows up to the first fault that ends a table, those with too few or too many cells as None."""
    found = []
    with contextlib.suppress(csv.Error, UnicodeDecodeError):
        reader = csv.reader((line.decode() for line in io.BytesIO(data)), strict=True)
        header = next(reader, [])
        if len(set(header)) < len(header) or not all(header):
            return []
        for cells in filter(None, reader):
            found.append(dict(zip(header, cells)) if len(cells) == len(header) else None)
    return found


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_damaged_bytes_of_a_text_file_are_faults_or_what_is_read(tmp_path, name):
    """What the standard library reads in the damaged file is read, and where it reads nothing there is a fault."""
    rng, file = random.Random(0), write(tmp_path, name)
    lines, faults = file.read_bytes().splitlines(keepends=True)[:12], 0
    for _ in range(1000):
        data = bytearray(b"".join(lines))
        for _ in range(rng.choice([1, 1, 3])):
            place = rng.randrange(len(data))
            data[place : place + rng.choice([0, 1, 1, 9])] = rng.choice(
                [b"", b'"', b",", b"\n", b"\xc3", b"\0", b"{", b"\\", b"1"]
            )
        file.write_bytes(data)
        found = [None if isinstance(row, BadRecord) else row for _, row in files.rows(file)]
        if name == "a.csv":
            expected = as_table(bytes(data))
            assert found in (expected, [*expected, None])
        else:
            expected = [as_json(line) for line in bytes(data).split(b"\n") if line.strip()]
            assert found == expected
        faults += None in found
    assert 100 < faults < 1000
