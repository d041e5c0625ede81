"""Rows: every sample in them once, as few as best fit makes, and the shift to targets loses nothing."""

from __future__ import annotations

import time

import numpy as np
import pytest

from megatrain_jax.data import packing
from megatrain_jax.data.chat import Sample

HOW = ("none", "best_fit", "wrapped")


def random_sample(rng, n):
    weights = rng.choice([0, 0, 1, 0.25], n).astype(np.float32)
    weights[:1] = 0
    return Sample(rng.integers(1, 1000, n).astype(np.int32), weights > 0, weights)


def whole(samples):
    return [[packing.Piece(sample, 0, len(sample.token_ids))] for sample in samples]


def planned(samples, how, capacity):
    rows = packing.plan_rows([len(sample.token_ids) for sample in samples], how, capacity)
    return [rows.pieces(i, samples) for i in range(len(rows))]


def test_each_supervised_token_is_the_target_of_the_one_before():
    rng = np.random.default_rng(0)
    samples = [random_sample(rng, n) for n in (1, 2, 7, 16)]
    batch = packing.make_batch(whole(samples), batch_size=6, length=16)
    for field in batch:
        assert field.shape == (6, 16)
        assert field.dtype == (np.float32 if field is batch.loss_weights else np.int32)
    for row, sample in enumerate(samples):
        n = len(sample.token_ids)
        where = np.flatnonzero(batch.loss_weights[row])
        np.testing.assert_array_equal(where + 1, np.flatnonzero(sample.supervised))
        np.testing.assert_array_equal(batch.targets[row, where], sample.token_ids[sample.supervised])
        np.testing.assert_array_equal(batch.loss_weights[row, : n - 1], sample.weights[1:])
        np.testing.assert_array_equal(batch.token_ids[row, :n], sample.token_ids)
        np.testing.assert_array_equal(batch.positions[row, :n], np.arange(n))
        np.testing.assert_array_equal(batch.segment_ids[row], np.arange(16) < n)
    for field in batch:
        assert not field[len(samples) :].any()


def segments(batch):
    """Of every segment: its token ids, positions, and pairs of place and target of what is supervised."""
    found = []
    for ids, targets, weights, positions, segment_ids in zip(*batch, strict=True):
        assert (np.diff(segment_ids[segment_ids > 0]) >= 0).all()
        assert not (weights[segment_ids == 0]).any()
        for segment in np.unique(segment_ids[segment_ids > 0]):
            here = segment_ids == segment
            found.append((ids[here], positions[here], targets[here], weights[here]))
    return found


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("seed", range(8))
def test_rows_hold_every_sample_once_and_ask_for_every_target_once(how, seed):
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(4, 40))
    longest = 3 * capacity if how == "wrapped" else capacity
    samples = [random_sample(rng, n) for n in rng.integers(1, longest + 1, rng.integers(1, 60))]
    rows = planned(samples, how, capacity)
    batch = packing.make_batch(rows, len(rows), capacity)
    found = segments(batch)
    for ids, positions, targets, weights in found:
        np.testing.assert_array_equal(positions, np.arange(len(ids)))
        np.testing.assert_array_equal(targets[:-1], ids[1:])  # within a segment the next token is the target
        assert weights.dtype == np.float32
    if how == "wrapped":
        np.testing.assert_array_equal(
            np.concatenate([ids for ids, *_ in found]), np.concatenate([sample.token_ids for sample in samples])
        )
        assert all((row > 0).all() for row in batch.segment_ids[:-1]), "only the last row may have padding"
    else:
        one, other = [tuple(ids) for ids, *_ in found], [tuple(sample.token_ids) for sample in samples]
        assert sorted(one) == sorted(other)
        assert how != "none" or one == other
    asked = np.sort(np.concatenate([targets[weights > 0] for *_, targets, weights in found]))
    np.testing.assert_array_equal(asked, np.sort(np.concatenate([s.token_ids[s.supervised] for s in samples])))


def plain_best_fit(lengths, capacity):
    """The rule, read aloud."""
    rooms, row_of = [], {}
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [row for row, room in enumerate(rooms) if room >= lengths[i]]
        if not fitting:
            rooms.append(capacity)
            fitting = [len(rooms) - 1]
        row_of[i] = min(fitting, key=lambda row: rooms[row])
        rooms[row_of[i]] -= lengths[i]
    return rooms


@pytest.mark.parametrize("seed", range(20))
def test_best_fit_is_its_rule(seed):
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(1, 100))
    lengths = rng.integers(1, capacity + 1, rng.integers(1, 200))
    row_of = packing.best_fit(lengths, capacity)
    filled = np.bincount(row_of, lengths).astype(int)
    assert sorted(filled) == sorted(capacity - room for room in plain_best_fit(lengths.tolist(), capacity))
    assert filled.max() <= capacity
    rows = packing.plan_rows(lengths, "best_fit", capacity)
    assert len(rows) == len(filled) and rows.longest == filled.max()
    firsts = rows.samples[rows.offsets[:-1]]
    assert (np.diff(firsts) > 0).all(), "rows come in the order of their first samples"
    for row in range(len(rows)):
        assert (np.diff(rows.samples[rows.offsets[row] : rows.offsets[row + 1]]) > 0).all()


def test_no_samples_make_no_rows():
    for how in HOW:
        rows = packing.plan_rows([], how, 8)
        assert (len(rows), rows.longest) == (0, 0)


@pytest.mark.exhaustive
def test_a_million_samples_are_packed_in_seconds_and_leave_little_room():
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(5.8, 0.9, 1_000_000)), 8, 4096).astype(np.int64)
    start = time.perf_counter()
    rows = packing.plan_rows(lengths, "best_fit", 4096)
    assert time.perf_counter() - start < 20
    assert len(rows) <= 1.005 * lengths.sum() / 4096


@pytest.mark.parametrize(("longest", "expected"), [(5, 8), (8, 8), (9, 16), (17, 20), (20, 20)])
def test_rows_are_as_long_as_the_fullest_asks(longest, expected):
    assert packing.row_length(longest, pad_to_multiple_of=8, max_seq_len=20) == expected
