"""Files to records: every format says the same, every fault is named with its file and line."""

from __future__ import annotations

import json

import pytest

from megatrain_jax.config import UserError
from megatrain_jax.data import sources

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
    assert record.tools == [{"name": "add"}]


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
            "turn 1: function_call must be JSON with 'name'",
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
    [('[\n{"text": 1},\n{"text"}]', 3), ('[{"text": "a"}\n\n{"text": "b"}]', 3), ('[{"text": "a"}]\n]', 1)],
)
def test_faults_of_an_array_are_named_with_the_line(section, tmp_path, text, line):
    file = tmp_path / "rows.json"
    file.write_text(text.replace('"text": 1', '"text": "1"'))
    with pytest.raises(UserError, match=rf"{file}:{line}: not valid JSON"):
        records(section(file))


def test_files_that_cannot_be_read(section, tmp_path):
    with pytest.raises(UserError, match=r"dataset\.path: no such file '.*none\.jsonl'"):
        records(section(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match=r"dataset\.path: no \.jsonl \.json \.txt file in folder"):
        records(section(tmp_path))
    (tmp_path / "a.docx").write_text("a")
    with pytest.raises(UserError, match=r"cannot read '.*a\.docx'; the kinds read are"):
        records(section(tmp_path / "a.docx"))
    (tmp_path / "a.txt").write_bytes(b"one\ntwo \xff\n")
    with pytest.raises(UserError, match=r"a\.txt:2: not UTF-8"):
        records(section(tmp_path / "a.txt"))
    with pytest.raises(UserError, match=r"dataset\.format: '.*a\.txt' is plain text, not 'alpaca'"):
        records(section(tmp_path / "a.txt", format="alpaca"))
