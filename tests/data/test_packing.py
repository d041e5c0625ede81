"""Rows: the shift loses nothing."""

from __future__ import annotations

import numpy as np
import pytest

from megatrain_jax.data import packing
from megatrain_jax.data.chat import Sample


def random_sample(rng, n):
    supervised = rng.random(n) < 0.5
    supervised[:1] = False
    return Sample(rng.integers(1, 1000, n).astype(np.int32), supervised)


def test_each_supervised_token_is_the_target_of_the_one_before():
    rng = np.random.default_rng(0)
    samples = [random_sample(rng, n) for n in (1, 2, 7, 16)]
    batch = packing.make_batch(samples, batch_size=6, length=16)
    for field in batch:
        assert field.shape == (6, 16)
        assert field.dtype == (np.float32 if field is batch.loss_weights else np.int32)
    for row, sample in enumerate(samples):
        n = len(sample.token_ids)
        where = np.flatnonzero(batch.loss_weights[row])
        np.testing.assert_array_equal(where + 1, np.flatnonzero(sample.supervised))
        np.testing.assert_array_equal(batch.targets[row, where], sample.token_ids[sample.supervised])
        np.testing.assert_array_equal(batch.token_ids[row, :n], sample.token_ids)
        np.testing.assert_array_equal(batch.positions[row, :n], np.arange(n))
        np.testing.assert_array_equal(batch.segment_ids[row], np.arange(16) < n)
    assert set(np.unique(batch.loss_weights)) <= {0.0, 1.0}
    for field in batch:
        assert not field[len(samples) :].any()


@pytest.mark.parametrize(("lengths", "expected"), [((3, 5), 8), ((8,), 8), ((9,), 16), ((17,), 20), ((20,), 20)])
def test_rows_are_as_long_as_the_longest_sample_asks(lengths, expected):
    samples = [random_sample(np.random.default_rng(n), n) for n in lengths]
    assert packing.sequence_length(samples, pad_to_multiple_of=8, max_seq_len=20) == expected
