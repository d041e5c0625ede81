"""Samples into rows, and rows into batches of one fixed shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatrain_jax.data.chat import Sample
from megatrain_jax.models.spec import Batch


class Piece(NamedTuple):
    """Tokens `start` to `stop` of a sample."""

    sample: Sample
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Rows:
    """What every row of a data set holds: row r has the pieces `offsets[r]` to `offsets[r + 1]`.

    Attributes:
      offsets: int64 ``[rows + 1]``.
      samples: int64 ``[pieces]``, the number of the sample that a piece is of.
      starts, stops: int64 ``[pieces]``, its tokens in that sample.
    """

    offsets: np.ndarray
    samples: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def longest(self) -> int:
        """Tokens in the fullest row."""
        return int(np.add.reduceat(self.stops - self.starts, self.offsets[:-1]).max()) if len(self) else 0

    def pieces(self, row: int, samples: Sequence[Sample]) -> list[Piece]:
        """What row number `row` holds, in order."""
        here = range(self.offsets[row], self.offsets[row + 1])
        return [Piece(samples[self.samples[i]], int(self.starts[i]), int(self.stops[i])) for i in here]


def plan_rows(lengths: np.ndarray, packing: str, capacity: int) -> Rows:
    """Which samples share a row of `capacity` tokens; a function of the lengths alone.

    Args:
      lengths: integers ``[samples]``, the tokens of each; at most `capacity`, except for ``"wrapped"``.
      packing: ``"none"`` gives each sample a row of its own; ``"best_fit"`` puts whole samples together; ``"wrapped"``
        lays them end to end and cuts where a row is full, so that no row but the last has padding.

    Returns:
      Rows in the order of their first samples, samples of a row in theirs.
    """
    lengths = np.asarray(lengths, np.int64)
    if packing == "wrapped":
        return _wrap(lengths, capacity)
    numbers = np.arange(len(lengths))
    row_of = best_fit(lengths, capacity) if packing == "best_fit" else numbers
    first = np.full(len(lengths), len(lengths))
    np.minimum.at(first, row_of, numbers)
    order = np.lexsort((numbers, first[row_of]))
    begins = np.flatnonzero(np.diff(first[row_of][order], prepend=-1))
    return Rows(np.append(begins, len(order)), order, np.zeros_like(order), lengths[order])


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Best-fit decreasing: from the longest sample to the shortest, each goes into the fullest row that has room for it.

    At most 11/9 of the fewest rows possible, and 4 more (Johnson et al., SIAM J. Comput. 3(4), 1974). Rows are looked up
    by their room in a set of bits, so that a million samples take seconds.

    Returns:
      int64 ``[samples]``, the row of each, numbered in the order in which rows were opened.
    """
    order = np.argsort(-lengths, kind="stable")
    rows_with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r: some row has room for exactly r more tokens
    found, opened = [], 0
    for length in lengths[order].tolist():
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, opened
            opened += 1
        if left := room - length:
            rows_with_room[left].append(row)
            rooms |= 1 << left
        found.append(row)
    row_of = np.empty(len(lengths), np.int64)
    row_of[order] = found
    return row_of


def _wrap(lengths: np.ndarray, capacity: int) -> Rows:
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.union1d(ends - lengths, np.arange(0, total, capacity))
    cuts = cuts[cuts < total]
    samples = np.searchsorted(ends, cuts, side="right")
    origin = (ends - lengths)[samples]
    offsets = np.searchsorted(cuts, np.arange(0, total + capacity, capacity)[: -(-total // capacity) + 1])
    return Rows(offsets, samples, cuts - origin, np.append(cuts[1:], total)[: len(cuts)] - origin)


def row_length(longest: int, pad_to_multiple_of: int, max_seq_len: int) -> int:
    """Tokens in a row of which the fullest holds `longest`: the next multiple, at most `max_seq_len`."""
    return min(-(-longest // pad_to_multiple_of) * pad_to_multiple_of, max_seq_len)


def make_batch(rows: Sequence[Sequence[Piece]], batch_size: int, length: int) -> Batch:
    """A batch for next-token prediction; places without a sample weigh nothing.

    Pieces of a row are segments 1, 2, ... with positions from 0 in each. The last token of a piece is asked for the token
    that follows it in its sample, in whatever row that is: every token but a sample's first is a target exactly once.

    Args:
      rows: at most `batch_size` of them, each of at most `length` tokens.

    Returns:
      `Batch` of NumPy arrays ``[batch_size, length]``, int32 and (loss_weights) float32.
    """
    token_ids, targets, positions, segment_ids = np.zeros((4, batch_size, length), np.int32)
    loss_weights = np.zeros((batch_size, length), np.float32)
    for row, pieces in enumerate(rows):
        begin = 0
        for segment, (sample, start, stop) in enumerate(pieces, 1):
            end = begin + stop - start
            token_ids[row, begin:end] = sample.token_ids[start:stop]
            following = sample.token_ids[start + 1 : stop + 1]
            targets[row, begin : begin + len(following)] = following
            loss_weights[row, begin : begin + len(following)] = sample.loss_weights(start + 1, stop + 1)
            positions[row, begin:end] = np.arange(stop - start)
            segment_ids[row, begin:end] = segment
            begin = end
    return Batch(token_ids, targets, loss_weights, positions, segment_ids)
