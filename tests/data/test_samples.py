"""Windows of a text cover everything once."""

from __future__ import annotations

import numpy as np
import pytest

from megatrain_jax.data import samples
from megatrain_jax.data.chat import Sample


@pytest.mark.parametrize("n", [1, 2, 5, 8, 9, 15, 16, 40])
@pytest.mark.parametrize("limit", [2, 3, 8])
def test_windows_make_every_token_a_target_exactly_once(n, limit):
    sample = Sample(np.arange(n, dtype=np.int32), np.arange(n) > 0)
    pieces = samples.windows(sample, limit)
    targets = np.concatenate([piece.token_ids[piece.supervised] for piece in pieces])
    np.testing.assert_array_equal(targets, np.arange(1, n))
    assert all(len(piece.token_ids) <= limit and not piece.supervised[0] for piece in pieces)
    np.testing.assert_array_equal(sample.supervised, np.arange(n) > 0)
