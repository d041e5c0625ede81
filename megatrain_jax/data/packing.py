"""Samples into batches of one fixed shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from megatrain_jax.data.chat import Sample
from megatrain_jax.models.spec import Batch


def sequence_length(samples: Iterable[Sample], pad_to_multiple_of: int, max_seq_len: int) -> int:
    """Tokens in a row: the longest sample, rounded up to `pad_to_multiple_of`, at most `max_seq_len`."""
    longest = max(len(sample.token_ids) for sample in samples)
    return min(-(-longest // pad_to_multiple_of) * pad_to_multiple_of, max_seq_len)


def make_batch(samples: Sequence[Sample], batch_size: int, length: int) -> Batch:
    """One sample a row, for next-token prediction; rows and positions without a sample weigh nothing.

    Args:
      samples: at most `batch_size` of them, each of at most `length` tokens.

    Returns:
      `Batch` of NumPy arrays ``[batch_size, length]``, int32 and (loss_weights) float32.
    """
    token_ids, targets, positions, segment_ids = np.zeros((4, batch_size, length), np.int32)
    loss_weights = np.zeros((batch_size, length), np.float32)
    for row, sample in enumerate(samples):
        n = len(sample.token_ids)
        token_ids[row, :n] = sample.token_ids
        targets[row, : n - 1] = sample.token_ids[1:]
        loss_weights[row, : n - 1] = sample.supervised[1:]
        positions[row, :n] = np.arange(n)
        segment_ids[row, :n] = 1
    return Batch(token_ids, targets, loss_weights, positions, segment_ids)
