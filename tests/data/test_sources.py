"""Files to records: every format says the same, every fault is named with its file and line."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain_jax.config import SourceConfig, UserError
from megatrain_jax.data import files, sources
from megatrain_jax.data.records import Unreadable

ROOT = Path(__file__).parents[2]
USER, ASSISTANT = {"role": "user", "content": "Hi\nthere"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be kind."}


def records(config):
    return [record for _, record in sources.read(config, config.path)]


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("messages", {"messages": [SYSTEM, USER, ASSISTANT]}),
        ("messages", {"messages": [USER, ASSISTANT], "system": "Be kind."}),
        (
            "sharegpt",
            {"conversations": [{"from": "system", "value": "Be kind."}, {"from": "human", "value": "Hi\nthere"},
                               {"from": "gpt", "value": "Hello"}]},
        ),
        ("alpaca", {"instruction": "Hi", "input": "there", "output": "Hello", "system": "Be kind.", "history": []}),
        ("prompt_completion", {"prompt": [SYSTEM, USER], "completion": [ASSISTANT]}),
        ("prompt_completion", {"prompt": [USER], "completion": [ASSISTANT], "system": "Be kind."}),
    ],
)  # fmt: skip
def test_formats_tell_the_same_conversation(section, jsonl, form, row):
    [(found, record)] = sources.read(section(jsonl(row)), str(jsonl(row)))
    assert found == form
    assert record.messages == (SYSTEM, USER, ASSISTANT)
    assert record.completion_start == 2
    assert record.where == f"{jsonl(row)}:1"
    assert records(section(jsonl(row), format=form)) == [record]


def test_alpaca_history_comes_before_the_question(section, jsonl):
    row = {"instruction": "c", "input": "", "output": "d", "history": [["a", "b"]], "system": None}
    [record] = records(section(jsonl(row)))
    assert [message["content"] for message in record.messages] == ["a", "b", "c", "d"]
    assert [message["role"] for message in record.messages] == ["user", "assistant"] * 2
    assert record.completion_start == 3


def test_sharegpt_calls_and_their_results(section, jsonl):
    call = {"name": "add", "arguments": {"a": 1}}
    turns = [
        ("human", "1+1?"),
        ("function_call", json.dumps(call)),
        ("observation", "2"),
        ("observation", "II"),
        ("gpt", "Two"),
    ]
    row = {
        "conversations": [{"from": who, "value": text} for who, text in turns],
        "tools": json.dumps([{"name": "add"}]),
    }
    [record] = records(section(jsonl(row)))
    assert [message["role"] for message in record.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert record.messages[1]["tool_calls"] == [{"type": "function", "function": call}]
    assert record.tools == [{"type": "function", "function": {"name": "add"}}]


def test_pairs_under_configured_names(section, jsonl):
    config = section(jsonl({"q": "a", "r": "b"}), query_field="q", response_field="r")
    [(form, record)] = sources.read(config, config.path)
    assert (form, record.prompt, record.completion) == ("prompt_completion", "a", "b")


def test_text_under_a_configured_name(section, jsonl):
    [record] = records(section(jsonl({"body": "a"}), text_field="body"))
    assert record.text == "a"


@pytest.mark.parametrize("layout", ["array", "indented", "lines"])
def test_json_files_hold_an_array_or_lines(section, tmp_path, layout):
    rows = [{"text": f'[{i}],\u2028 \\" {{'} for i in range(3)]
    texts = {
        "array": json.dumps(rows),
        "indented": "\n" + json.dumps(rows, indent=1) + "\n",
        "lines": "\n".join(json.dumps(row, ensure_ascii=False) for row in rows),
    }
    file = tmp_path / "rows.json"
    file.write_text("\ufeff" + texts[layout], encoding="utf-8")
    assert [record.text for record in records(section(file))] == [row["text"] for row in rows]


def test_record_lines_of_an_indented_array(section, tmp_path):
    file = tmp_path / "rows.json"
    file.write_text('[\n {"text": "a"},\n\n {\n  "text": "b"\n }, {"text": "c"}\n]\n')
    assert [record.where for record in records(section(file))] == [f"{file}:2", f"{file}:4", f"{file}:6"]


def test_an_empty_array_has_no_records(section, tmp_path):
    file = tmp_path / "rows.json"
    file.write_text("[ ]\n")
    assert records(section(file)) == []


def test_folder_and_glob_read_in_order_of_name(section, tmp_path):
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name)
    assert [record.text for record in records(section(tmp_path))] == ["a.txt", "b.txt"]
    assert [record.text for record in records(section(tmp_path / "*.txt"))] == ["a.txt", "b.txt"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"messages": [}', r"not valid JSON \(Expecting value, column 15\)"),
        ("[1]", "expected an object with named columns, found a list"),
        ({"other": "a", "more": 1}, "no known format has the columns 'other', 'more'"),
        ({"messages": []}, "empty conversation"),
        ({"prompt": [USER], "completion": []}, "'completion' is an empty conversation"),
        ({"messages": "Hi"}, "'messages' must be a list of turns, found text"),
        ({"messages": ["Hi"]}, "turn 1: expected an object with role and content, found text"),
        ({"messages": [{"role": "user", "content": ["Hi"]}]}, "turn 1: 'content' must be text, found a list"),
        ({"messages": [{"role": "user"}]}, "turn 1: 'content' must be text, found null"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "turn 1: unknown role 'robot'"),
        ({"messages": [USER, USER]}, "turn 2: two turns of 'user' in a row"),
        ({"messages": [USER, ASSISTANT, ASSISTANT]}, "turn 3: two turns of 'assistant' in a row"),
        ({"messages": [USER, SYSTEM]}, "turn 2: 'system' may only come first"),
        ({"messages": [USER, {"role": "tool", "content": "2"}]}, "turn 2: 'tool' must follow the assistant's call"),
        (
            {"conversations": [{"from": "function_call", "value": "{}"}]},
            "turn 1: a function call must be an object with 'name'",
        ),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, "turn 1: function_call: not valid JSON"),
        ({"instruction": "a", "output": 1}, "turn 2: 'content' must be text, found a number"),
        ({"instruction": "a", "output": "b", "history": [["x"]]}, "'history' must be a list of"),
        ({"text": "a\0b"}, "'text' contains a NUL character"),
        ('{"text": "\\ud83d"}', "'text' contains half of a surrogate pair"),
        ({"prompt": "a", "completion": None}, "'completion' must be text, found null"),
    ],
)
def test_faults_are_named_with_file_and_line(section, jsonl, row, message):
    file = jsonl("", row)
    with pytest.raises(UserError, match=message) as caught:
        records(section(file))
    assert str(caught.value).startswith(f"{file}:2: ")
    assert "\n" not in str(caught.value)


def test_an_assistant_may_open_a_conversation(section, jsonl):
    [record] = records(section(jsonl({"messages": [ASSISTANT, USER]})))
    assert record.messages == (ASSISTANT, USER)


def test_missing_columns_of_a_format_asked_for(section, jsonl):
    with pytest.raises(UserError, match="format 'alpaca' needs the columns 'instruction' and 'output'; found 'text'"):
        records(section(jsonl({"text": "a"}), format="alpaca"))


@pytest.mark.parametrize(
    ("text", "line"),
    [('[\n{"text": 1},\n{"text"}]', 3), ('[{"text": "a"}\n\n{"text": "b"}]', 3), ('[{"text": "a"}]\n]', 2)],
)
def test_faults_of_an_array_are_named_with_the_line(section, tmp_path, text, line):
    file = tmp_path / "rows.json"
    file.write_text(text.replace('"text": 1', '"text": "1"'))
    with pytest.raises(UserError, match=rf"{file}:{line}: not valid JSON"):
        records(section(file))


def test_files_that_cannot_be_read(section, tmp_path):
    with pytest.raises(UserError, match=r"dataset\.path: no such file '.*none\.jsonl'"):
        records(section(tmp_path / "none.jsonl"))
    with pytest.raises(
        UserError, match=r"dataset\.path: no \.jsonl \.json \.csv \.txt \.parquet \.arrow file in folder"
    ):
        records(section(tmp_path))
    (tmp_path / "a.docx").write_text("a")
    with pytest.raises(UserError, match=r"cannot read '.*a\.docx'; the kinds read are"):
        records(section(tmp_path / "a.docx"))
    (tmp_path / "a.txt").write_bytes(b"one\ntwo \xff\n")
    with pytest.raises(UserError, match=r"a\.txt:2: not UTF-8"):
        records(section(tmp_path / "a.txt"))
    with pytest.raises(UserError, match=r"dataset\.format: '.*a\.txt' is plain text, not 'alpaca'"):
        records(section(tmp_path / "a.txt", format="alpaca"))


@pytest.mark.parametrize(
    ("weight", "times"), [(1, [1] * 6), (2, [2] * 6), (0.5, [1, 1, 1]), (1.5, [1, 2] * 3), (1 / 3, [1, 1])]
)
def test_weights_are_exact(section, jsonl, weight, times):
    listed = (SourceConfig(str(jsonl(*[{"text": str(i)} for i in range(6)])), weight=weight), SourceConfig(str(jsonl({"text": "z"}, name="z.jsonl"))))  # fmt: skip
    found = [record for _, record in sources.read(section("-"), listed)]
    assert [record.times for record in found if not isinstance(record, Unreadable)] == [*times, 1]
    assert len(found) == 7
    left_out = [record.reason for record in found if isinstance(record, Unreadable)]
    assert left_out == [f"left out by the weight {weight:g}"] * (6 - len(times))


def test_sources_have_formats_and_limits_of_their_own(section, jsonl):
    first = jsonl(*[{"a": "x", "text": "no"}] * 3, name="a.jsonl")
    second = jsonl({"q": "Hi", "r": "Hello"}, name="b.jsonl")
    listed = (
        SourceConfig(str(first), "text", columns={"text": "a"}, num_samples=2),
        SourceConfig(str(second), columns={"prompt": "q", "response": "r"}),
    )
    found = list(sources.read(section("-"), listed))
    assert [form for form, _ in found] == ["text", "text", "alpaca"]
    assert [record.text for _, record in found[:2]] == ["x", "x"]
    assert sources.expand(listed) == [first, second]


@pytest.fixture
def registry(tmp_path):
    """Writes dataset_info.json, and reads what a name stands for."""

    def write(**entries):
        (tmp_path / "dataset_info.json").write_text(json.dumps(entries))
        return lambda names: sources.registered(names, str(tmp_path))

    return write


def test_a_registry_of_llama_factory(section, registry, tmp_path, jsonl):
    jsonl({"q": "Hi", "a": "Hello"}, name="a.json")
    jsonl({"log": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}, name="b.jsonl")
    jsonl({"body": "Hi"}, name="c.jsonl")
    (tmp_path / "many").mkdir()
    for split in ("train", "test"):
        jsonl({"instruction": split, "output": "x"}, name=f"many/{split}.jsonl")
    named = registry(
        a={"file_name": "a.json", "columns": {"prompt": "q", "response": "a"}},
        b={"file_name": "b.jsonl", "formatting": "sharegpt", "columns": {"messages": "log"},
           "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}},
        c={"file_name": "c.jsonl", "columns": {"prompt": "body"}},
        many={"file_name": "many", "num_samples": 5},
        many_test={"file_name": "many", "split": "test"},
    )  # fmt: skip
    config = section("-", name="a, b,c,many,many_test", dataset_dir=str(tmp_path))
    found = list(sources.read(config, sources.training_path(config)))
    assert [form for form, _ in found] == ["alpaca", "sharegpt", "text", "alpaca", "alpaca"]
    assert (
        [m["content"] for m in found[0][1].messages] == ["Hi", "Hello"] == [m["content"] for m in found[1][1].messages]
    )
    assert [record.messages[0]["content"] for _, record in found[3:]] == ["train", "test"]
    assert named("a")[0].path == str(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"file_name": "x.json", "ranking": True}, "'x' is preference data"),
        ({"hf_hub_url": "a/b"}, "'x' has no 'file_name'; only files of this machine can be read"),
        ({"file_name": "x.json", "formatting": "chatml"}, "'formatting' must be alpaca or sharegpt, found 'chatml'"),
        ({"file_name": "x.json", "columns": ["a"]}, "'columns' and 'tags' must be objects"),
    ],
)
def test_entries_that_cannot_be_read(registry, entry, message):
    with pytest.raises(UserError, match=message):
        registry(x=entry)("x")


def test_registries_that_cannot_be_read(registry, tmp_path):
    with pytest.raises(UserError, match="has no data set 'y'; it has x"):
        registry(x={})("y")
    with pytest.raises(UserError, match="dataset_dir: missing; give the folder whose dataset_info.json lists 'y'"):
        sources.registered("y", None)
    with pytest.raises(UserError, match="dataset_dir: cannot read"):
        sources.registered("y", str(tmp_path / "none"))
    (tmp_path / "dataset_info.json").write_text("{")
    with pytest.raises(UserError, match="dataset_info.json: not valid JSON"):
        sources.registered("y", str(tmp_path))


def test_bad_records_are_left_out_and_counted(section, jsonl, tmp_path):
    file = jsonl({"text": "a"}, "{", {"messages": [USER, ASSISTANT]}, {"text": "a\0b"}, {"text": "b"})
    (tmp_path / "t.txt").write_bytes(b"\xff")
    found = [record for path in (file, tmp_path / "t.txt") for _, record in sources.read(section("-", on_bad_record="skip"), str(path))]  # fmt: skip
    assert [record.text for record in found if not isinstance(record, Unreadable)] == ["a", "b"]
    assert [record.reason for record in found if isinstance(record, Unreadable)] == [
        "not valid JSON", "format 'text' needs the columns 'text'", "'text' contains a NUL character", "not UTF-8 text",
    ]  # fmt: skip
    with pytest.raises(UserError, match=rf"{file}:2: not valid JSON"):
        list(sources.read(section("-"), str(file)))


def test_formats_mixed_in_a_file_are_no_silent_batch(section, jsonl):
    with pytest.raises(UserError, match="rows.jsonl:2: format 'messages' needs the columns 'messages'; found 'text'"):
        records(section(jsonl({"messages": [USER, ASSISTANT]}, {"text": "a"})))


MEMORY = """
import resource, sys
from megatrain_jax.config import DatasetConfig
from megatrain_jax.data import dataset, sources
from megatrain_jax.data.tokenizer import load_tokenizer

path, folder, cache, how = sys.argv[1:]
config = DatasetConfig(path, max_seq_len=2048, packing="wrapped", cache_dir=cache, num_workers=0)
tokenizer = load_tokenizer(folder)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if how == "read":
    count = sum(1 for _ in sources.read(config, path))
else:
    count = len(dataset.prepare(config, tokenizer, seed=0, vocab_size=400).train)
print(count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def memory(folder, tokenizer_folder, kind, how, megabytes):
    """Records, or samples, of a file of that size, and MiB by which the memory grows while they are read, or made."""
    text = "The quick brown fox jumps over the lazy dog, and the answer is forty-two. " * 130
    row = json.dumps({"text": text}) + ", " if kind == ".json" else text + "\n"
    file, count = folder / f"{megabytes}{kind}", megabytes * 10**6 // len(row)
    with open(file, "w", encoding="ascii") as out:
        out.write("[" if kind == ".json" else "")
        for _ in range(count - 1):
            out.write(row)
        out.write(row.rstrip(", ") + "]" if kind == ".json" else row)
    command = [sys.executable, "-c", MEMORY, str(file), str(tokenizer_folder), str(folder / "cache"), how]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    file.unlink()
    found, grown = map(float, done.stdout.split())
    assert found == (count if kind == ".json" else math.ceil(count / (files.PIECE // len(row))))
    return grown


@pytest.mark.parametrize("kind", [".json", ".txt"])
def test_a_file_larger_than_what_is_held(tokenizer_folder, tmp_path, kind):
    """Of 200 MB, on a single line where it is JSON, no more is in memory than a few records or pieces."""
    assert memory(tmp_path, tokenizer_folder, kind, "read", 200) < 30


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [".json", ".txt"])
def test_samples_of_a_large_file_take_no_more_memory_than_of_a_small_one(tokenizer_folder, tmp_path, kind):
    few, many = (memory(tmp_path, tokenizer_folder, kind, "indexed", megabytes) for megabytes in (6, 30))
    assert many - few < 40
