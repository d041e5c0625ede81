"""What becomes of one record: cut, divided, left out or refused, and always counted."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from megatrain_jax.config import UserError
from megatrain_jax.data import samples
from megatrain_jax.data.chat import Sample
from megatrain_jax.data.records import BadRecord, Conversation, Text, Tokens, Unreadable
from megatrain_jax.data.tokenizer import with_chat_template

LONG = Conversation(
    "rows.jsonl:3",
    tuple({"role": role, "content": f"{role} {i} " * 9} for i in range(6) for role in ("user", "assistant")),
    11,
)


@pytest.fixture
def prepare(section, tokenizer):
    return lambda record, **changes: samples.make_samples(record, tokenizer, section("-", **changes), 400)


def test_splitting_keeps_every_supervised_target_once(prepare):
    [[whole]] = prepare(LONG, max_seq_len=10**4).units
    out = prepare(LONG, overlong="split")
    [unit] = out.units
    assert len(unit) > 2 and all(len(piece.token_ids) <= 64 for piece in unit)
    expected = whole.token_ids[whole.supervised]
    np.testing.assert_array_equal(np.concatenate([piece.token_ids[piece.supervised] for piece in unit]), expected)
    assert out.changed == {samples.WINDOWED: 1}


def test_overlong_applies_to_text_too_if_said(prepare):
    text = Text("a.txt:1", "The end. " * 100)
    assert len(prepare(text).units) > 1
    assert len(prepare(text, overlong="truncate").units) == 1
    assert prepare(text, overlong="drop").dropped == {samples.TOO_LONG: 1}
    with pytest.raises(UserError, match=r"a\.txt:1: \d+ tokens, more than dataset\.max_seq_len 64"):
        prepare(text, overlong="error")


def test_a_bad_record_is_refused_or_counted(section, tokenizer):
    strict = with_chat_template(tokenizer, "{{ raise_exception('no users') }}")
    with pytest.raises(BadRecord, match=r"rows\.jsonl:3: the chat template refuses the conversation: no users"):
        samples.make_samples(LONG, strict, section("-"), 400)
    skipping = section("-", on_bad_record="skip")
    out = samples.make_samples(LONG, strict, skipping, 400)
    assert not out.units and out.dropped == {"the chat template refuses the conversation: no users": 1}
    out = samples.make_samples(Unreadable("x:1", "not valid JSON"), tokenizer, skipping, 400)
    assert not out.units and out.dropped == {"not valid JSON": 1}


def test_what_workers_hand_over_survives_pickling():
    error = BadRecord("a:1", "turn 2: unknown role 'x'; known are y")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.reason, again.where) == (str(error), "unknown role 'x'", "a:1")


@pytest.mark.parametrize("n", [1, 2, 5, 8, 9, 15, 16, 40])
@pytest.mark.parametrize("limit", [2, 3, 8])
def test_windows_make_every_token_a_target_exactly_once(n, limit):
    sample = Sample(np.arange(n, dtype=np.int32), np.arange(n) > 0, np.arange(n).astype(np.float32))
    pieces = samples.windows(sample, limit)
    targets = np.concatenate([piece.token_ids[piece.supervised] for piece in pieces])
    np.testing.assert_array_equal(targets, np.arange(1, n))
    weights = np.concatenate([piece.loss_weights()[piece.supervised] for piece in pieces])
    np.testing.assert_array_equal(weights, np.arange(1, n))
    assert all(len(piece.token_ids) <= limit and not piece.supervised[0] for piece in pieces)
    np.testing.assert_array_equal(sample.weights, np.arange(n))


def test_tokens_made_before_are_taken_as_they_are(prepare):
    made = prepare(Tokens("x:1", (5, 6, 7), (False, True, False)))
    [[sample]] = made.units
    assert (sample.token_ids.tolist(), sample.supervised.tolist()) == ([5, 6, 7], [False, True, False])
    [[sample]] = prepare(Tokens("x:1", (5, 6, 7), (False, True, False)), train_on="all").units
    assert sample.supervised.tolist() == [False, True, True]
    assert len(prepare(Tokens("x:1", tuple(range(100)), (True,) * 100)).units) == 2  # as a text
    with pytest.raises(UserError, match="token id 400 in x:1"):
        prepare(Tokens("x:1", (5, 400), (True, True)))


def test_a_weighted_record_stays_on_one_side_of_a_split(prepare):
    [unit] = prepare(Conversation(LONG.where, LONG.messages, 11, times=3)).units
    assert len(unit) == 3 and len({sample.token_ids.tobytes() for sample in unit}) == 1
    assert [len(unit) for unit in prepare(Text("a:1", "The end. " * 100, times=2)).units][:2] == [2, 2]


def test_reasoning_that_is_lost_is_counted(prepare, section, tokenizer, templates):
    turns = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho", "thinking": "Hm."})
    record = Conversation("x:1", turns, 1)
    assert prepare(record).changed == {samples.UNWRITTEN: 1}
    reasoning = with_chat_template(tokenizer, templates.reasoning)
    made = samples.make_samples(record, reasoning, section("-"), 400)
    assert not made.changed and "Hm." in tokenizer.decode(made.units[0][0].token_ids)
    # A template that has the word, and writes no reasoning.
    speaks_of_it = with_chat_template(
        tokenizer, "{# thinking #}" + templates.reasoning.replace("reasoning_content", "x")
    )
    assert samples.make_samples(record, speaks_of_it, section("-"), 400).changed == {samples.UNWRITTEN: 1}
    refuses = with_chat_template(tokenizer, "{% if messages[0].content == '?' %}{{ raise_exception('no') }}{% endif %}" + tokenizer.chat_template)  # fmt: skip
    assert not samples.make_samples(record, refuses, section("-"), 400).changed
