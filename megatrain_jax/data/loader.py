"""A data set as a stream of steps that can be entered anywhere."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import TypeVar

import numpy as np

from megatrain_jax.data import packing
from megatrain_jax.data.dataset import DataSet
from megatrain_jax.models.spec import Batch

T = TypeVar("T")


class TrainLoader:
    """An endless stream of steps over a data set: any step can be asked for, so none needs to be remembered.

    Every row comes once per epoch, and with it every sample. The last step of an epoch may hold fewer rows; its shape is
    that of the others.
    """

    def __init__(self, dataset: DataSet, batch_size: int, gradient_accumulation_steps: int, seed: int, shuffle: bool):
        self._samples, self._rows, self._length = dataset.train, dataset.train_rows, dataset.sequence_length
        self._batch_size, self._micro_batches = batch_size, gradient_accumulation_steps
        self._seed, self._shuffle = seed, shuffle
        self._order = functools.lru_cache(maxsize=2)(self._new_order)

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self._rows) // (self._batch_size * self._micro_batches))

    def step(self, n: int) -> list[Batch]:
        """The micro-batches of step `n` (from 0), each `Batch` of NumPy arrays ``[batch_size, sequence_length]``."""
        epoch, index = divmod(n, self.steps_per_epoch)
        size = self._batch_size
        first = index * size * self._micro_batches
        order = self._order(epoch)
        rows = [order[first + k * size : first + (k + 1) * size] for k in range(self._micro_batches)]
        return [
            packing.make_batch([self._rows.pieces(row, self._samples) for row in part], size, self._length)
            for part in rows
        ]

    def steps(self, start: int, stop: int | None = None) -> Iterator[list[Batch]]:
        """Steps `start`, ... `stop` - 1 (endless if None), made ahead; see `made_ahead`."""
        return made_ahead(map(self.step, itertools.count(start) if stop is None else range(start, stop)))

    def _new_order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self._rows))
        return np.random.default_rng((self._seed, epoch)).permutation(len(self._rows))


def made_ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, of which a thread makes the next two while one is used. The thread ends when this does."""
    end = object()
    with contextlib.ExitStack() as stack:
        if hasattr(items, "close"):
            stack.callback(items.close)
        thread = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="data"))
        ahead = collections.deque(thread.submit(next, items, end) for _ in range(2))
        stack.callback(lambda: [future.cancel() for future in ahead])
        while (item := ahead.popleft().result()) is not end:
            ahead.append(thread.submit(next, items, end))
            yield item


def eval_batches(dataset: DataSet, batch_size: int, max_batches: int | None = None) -> Iterator[Batch]:
    """The held-out samples in order, as batches ``[batch_size, sequence_length]``; the last may hold empty rows."""
    for first in range(0, len(dataset.eval_rows), batch_size)[:max_batches]:
        those = range(first, min(first + batch_size, len(dataset.eval_rows)))
        rows = [dataset.eval_rows.pieces(row, dataset.eval) for row in those]
        yield packing.make_batch(rows, batch_size, dataset.sequence_length)
