"""Rows to records: what each spelling says, and that nothing malformed passes for a record."""

from __future__ import annotations

import copy
import json
import random

import pytest

from megatrain_jax.config import UserError
from megatrain_jax.data.formats import Spelling, normalise, recognised
from megatrain_jax.data.records import BadRecord, Completion, Conversation, Text, Tokens

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {}}}
WRAPPED = {"type": "function", "function": FUNCTION}


def read(row, **spelling):
    spelling = recognised(row, Spelling(**spelling), "x:1")
    return normalise(row, spelling, "x:1")


@pytest.mark.parametrize(
    "call",
    [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
        {"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"name": "add", "arguments": '{"a":1}'},
    ],
)
def test_calls_are_told_alike(call):
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    record = read({"messages": [USER, turn, {"role": "function", "content": "1"}], "tools": [FUNCTION]})
    [found] = record.messages[1]["tool_calls"]
    assert found.get("id") == call.get("id")
    assert {k: v for k, v in found.items() if k != "id"} == {
        "type": "function", "function": {"name": "add", "arguments": {"a": 1}},
    }  # fmt: skip
    assert (record.messages[1]["content"], record.messages[2]["role"]) == ("", "tool")
    assert record.tools == [WRAPPED]
    for tools in (json.dumps([FUNCTION]), [WRAPPED], json.dumps([WRAPPED])):
        assert read({"messages": [USER, turn], "tools": tools}).tools == [WRAPPED]
    for tools in (None, [], "", "[]"):
        assert read({"messages": [USER, turn], "tools": tools}).tools is None


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [([USER], [ASSISTANT]), ("Hi", [ASSISTANT]), ([USER], "Hello")],
)
def test_a_pair_may_be_text_on_one_side(prompt, completion):
    record = read({"prompt": prompt, "completion": completion})
    assert (record.messages, record.completion_start) == ((USER, ASSISTANT), 1)
    assert read({"prompt": "Hi", "completion": "Hello"}) == Completion("x:1", "Hi", "Hello")


def test_turns_in_a_cell_of_text():
    assert read({"messages": json.dumps([USER, ASSISTANT])}).messages == (USER, ASSISTANT)


@pytest.mark.parametrize(("flag", "expected"), [({"weight": 0}, {1: 0.0}), ({"weight": 1}, {1: 1.0}), ({"weight": 0.25}, {1: 0.25}), ({"weight": 3, "train": True}, {1: 3.0}), ({"train": False}, {1: 0.0}), ({"weight": None}, {})])  # fmt: skip
def test_turns_say_whether_they_are_trained(flag, expected):
    record = read({"messages": [{**USER, "train": False}, {**ASSISTANT, **flag}]})
    assert (record.weights, record.messages) == (expected, (USER, ASSISTANT))
    if expected:
        assert read({"messages": [USER, {**ASSISTANT, **flag}], "system": "S"}).weights == {2: expected[1]}


def test_tokens_and_their_labels():
    row = {"input_ids": [5, 6, 7, 0], "labels": [-100, 6, 7, -100], "attention_mask": [1, 1, 1, 0]}
    assert read(row) == Tokens("x:1", (5, 6, 7), (False, True, True))
    assert read({"input_ids": [5, 6]}) == Tokens("x:1", (5, 6), (True, True))
    assert read({"input_ids": [0, 5], "attention_mask": [0, 1]}) == Tokens("x:1", (5,), (True,))


def test_columns_and_tags_of_a_registry():
    row = {"q": "Hi", "ctx": "there", "a": "Hello", "sys": "S", "old": [["x", "y"]], "output": "no", "system": "no"}
    columns = {"prompt": "q", "query": "ctx", "response": "a", "system": "sys", "history": "old"}
    record = read(row, columns=columns)
    assert [m["content"] for m in record.messages] == ["S", "x", "y", "Hi\nthere", "Hello"]
    del columns["system"], row["ctx"]
    assert [m["content"] for m in read(row, columns=columns).messages] == ["x", "y", "Hi", "Hello"]
    turns = [
        {"who": "me", "says": "Hi"},
        {"who": "f", "says": '{"name": "add", "arguments": {}}'},
        {"who": "r", "says": "1"},
    ]
    tags = {"role_tag": "who", "content_tag": "says", "user_tag": "me", "function_tag": "f", "observation_tag": "r"}
    record = read({"log": turns}, columns={"messages": "log"}, tags=tags)
    assert [message["role"] for message in record.messages] == ["user", "assistant", "tool"]
    assert record.messages[1]["tool_calls"][0]["function"]["name"] == "add"
    assert read({"doc": "x"}, columns={"text": "doc"}) == Text("x:1", "x")


CALL = {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {}}]}


@pytest.mark.parametrize(
    ("row", "spelling", "message"),
    [
        ({"chosen": "a", "rejected": "b", "prompt": "c"}, {}, "preference data"),
        ({"q": 1}, {"columns": {"question": "q"}}, "dataset.columns names neither"),
        ({"q": 1}, {"columns": {"prompt": "q", "words": "x"}, "form": "alpaca"}, "format 'alpaca' has no 'words'"),
        ({"q": "x"}, {"columns": {"prompt": "q", "response": "r"}}, "needs the columns .* found 'q'"),
        ({"messages": [USER, {**CALL, "tool_calls": [{"name": "add", "arguments": "x"}]}]}, {}, "arguments of 'add': not valid"),
        ({"messages": [USER, {**CALL, "tool_calls": [{"name": "add", "arguments": "[]"}]}]}, {}, "must be an object"),
        ({"messages": [USER, {**CALL, "tool_calls": "add"}]}, {}, "a function call must be"),
        ({"messages": [{**CALL, "role": "user"}]}, {}, "only the assistant calls functions"),
        ({"messages": [USER, ASSISTANT], "tools": [1]}, {}, "'tools' must be a list of function schemas"),
        ({"messages": [USER, ASSISTANT], "tools": {"a": 1}}, {}, "'tools' must be a list of function schemas"),
        ({"messages": [USER, {**ASSISTANT, "weight": -0.5}]}, {}, r"turn 2: 'weight' must be 0 or a number from 1e-30 to 1e30 \(-0.5\)"),
        ({"messages": [USER, {**ASSISTANT, "weight": float("nan")}]}, {}, r"'weight' must be 0 or a number from 1e-30 to 1e30 \(NaN\)"),
        ({"messages": [USER, {**ASSISTANT, "weight": float("inf")}]}, {}, r"'weight' must be 0 or a number from 1e-30 to 1e30 \(Infinity\)"),
        ({"messages": [USER, {**ASSISTANT, "weight": 10**400}]}, {}, "'weight' must be 0 or a number from 1e-30 to 1e30"),
        ({"messages": [USER, {**ASSISTANT, "weight": 1e-60}]}, {}, "'weight' must be 0 or a number from 1e-30 to 1e30"),
        ({"messages": [USER, {**ASSISTANT, "weight": "0.5"}]}, {}, "'weight' must be 0 or a number from 1e-30 to 1e30"),
        ({"messages": [USER, {**ASSISTANT, "weight": True}]}, {}, "'weight' must be 0 or a number from 1e-30 to 1e30"),
        ({"messages": [USER, {**ASSISTANT, "train": "false"}]}, {}, r"'train' must be true or false \(\"false\"\)"),
        ({"messages": [USER, {**ASSISTANT, "train": 0.5}]}, {}, r"'train' must be true or false"),
        ({"messages": [USER, {**ASSISTANT, "weight": 0, "train": True}]}, {}, "'weight' and 'train' contradict each other"),
        ({"messages": [{**USER, "weight": 1}]}, {}, "only turns of the assistant can be trained"),
        ({"messages": [USER, {**ASSISTANT, "thinking": 3}]}, {}, "'thinking' must be text"),
        ({"messages": [USER, {**ASSISTANT, "name": "\ud800"}]}, {}, "half of a surrogate pair"),
        ({"messages": [USER, ASSISTANT], "tools": [{"name": "\ud800"}]}, {}, "'tools' contains half of a surrogate pair"),
        ({"input_ids": []}, {}, "'input_ids' is empty"),
        ({"input_ids": [1.0]}, {}, "must be a list of whole numbers"),
        ({"input_ids": [-1]}, {}, "no token id"),
        ({"input_ids": [1, 2], "labels": [1]}, {}, "differ in length"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, {}, "must repeat 'input_ids'"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, {}, "hides tokens between others"),
    ],
)  # fmt: skip
def test_faults(row, spelling, message):
    with pytest.raises(BadRecord, match=message) as caught:
        read(row, **spelling)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("x:1")


def as_row(record):
    """A record as a row that says the same."""
    if isinstance(record, Text):
        return {"text": record.text}
    if isinstance(record, Completion):
        return {"prompt": record.prompt, "completion": record.completion}
    if isinstance(record, Tokens):
        labels = [i if kept else -100 for i, kept in zip(record.token_ids, record.supervised, strict=True)]
        return {"input_ids": list(record.token_ids), "labels": labels}
    turns = [
        {**message, "weight": record.weights[i]} if i in record.weights else message
        for i, message in enumerate(record.messages)
    ]
    return {"messages": turns, "tools": record.tools}


VALID = [
    {"messages": [{"role": "system", "content": "S"}, USER, {**ASSISTANT, "weight": 0}, USER, ASSISTANT]},
    {"messages": [USER, CALL, {"role": "tool", "content": "1"}, ASSISTANT], "tools": [FUNCTION]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "system": "S"},
    {"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]], "system": "S"},
    {"prompt": "a", "completion": "b"},
    {"prompt": [USER], "completion": [ASSISTANT]},
    {"query": "a", "response": "b"},
    {"text": "a"},
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 1]},
]
STRANGE = [None, True, 0, -1, 2**70, 1.5, float("nan"), "", "x", "\0", "\ud800", "[]", "{", [], [[]], [None], {}, {"role": "user"},
           {"role": "assistant", "content": "x"}, [{"from": "gpt", "value": "y"}], "system", "tool", {"name": "add"}]  # fmt: skip


def mutated(value, rng):
    """`value` with one thing in it changed, removed, doubled or put elsewhere."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        choice = rng.random()
        if choice < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if choice < 0.3:
            return {(rng.choice(["role", "content", "from", "weight", "messages", "text", "tools"]) if k == key else k): v for k, v in value.items()}  # fmt: skip
        return {**value, key: mutated(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at, choice = rng.randrange(len(value)), rng.random()
        if choice < 0.15:
            return value[:at] + value[at + 1 :]
        if choice < 0.3:
            return value[: at + 1] + value[at:]
        return [*value[:at], mutated(value[at], rng), *value[at + 1 :]]
    return rng.choice(STRANGE)


def test_any_mutation_is_refused_or_says_the_same_when_written_again():
    rng = random.Random(5)
    outcomes = {"record": 0, "refused": 0}
    for _ in range(20_000):
        row = copy.deepcopy(rng.choice(VALID))
        for _ in range(rng.choice([1, 1, 2, 3])):
            row = mutated(row, rng)
        try:
            record = read(row)
        except UserError as error:
            outcomes["refused"] += 1
            assert "\n" not in str(error)
            continue
        outcomes["record"] += 1
        assert isinstance(record, Conversation | Completion | Text | Tokens)
        for message in getattr(record, "messages", ()):
            assert isinstance(message["content"], str) and "\0" not in message["content"]
        json.dumps(vars(record), ensure_ascii=False).encode()
        again = read(as_row(record))
        start = {"completion_start": record.completion_start} if isinstance(record, Conversation) else {}
        assert {**vars(again), **start} == vars(record)
    assert min(outcomes.values()) > 2_000
