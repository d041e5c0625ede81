"""A data set prepared once, then a stream of steps that can be entered anywhere."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from megatrain_jax.config import UserError
from megatrain_jax.data import packing, sources
from megatrain_jax.data.chat import Sample, Tokenizer, with_chat_template
from megatrain_jax.data.samples import make_samples
from megatrain_jax.models.spec import Batch


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What became of a set of records.

    Attributes:
      samples, tokens, supervised_tokens: what is left, padding excluded.
      changed: records or samples that were altered, by reason.
      dropped: samples that were left out, by reason.
    """

    samples: int
    tokens: int
    supervised_tokens: int
    changed: Mapping[str, int]
    dropped: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class DataSet:
    """Tokenised samples.

    Attributes:
      train, eval: samples, in file order; `eval` may be empty.
      train_rows, eval_rows: which of them share a row.
      sequence_length: tokens in every row of every batch.
      format: name of the format recognised; several are joined by ``+``.
      train_statistics, eval_statistics: see `Statistics`. With `val_size`, changes and drops count under train.
    """

    train: tuple[Sample, ...]
    eval: tuple[Sample, ...]
    train_rows: packing.Rows
    eval_rows: packing.Rows
    sequence_length: int
    format: str
    train_statistics: Statistics
    eval_statistics: Statistics


def prepare(config: Any, tokenizer: Tokenizer, *, seed: int, vocab_size: int) -> DataSet:
    """Read, render, tokenise, fit and split everything that a `DatasetConfig` names.

    Args:
      config: a `DatasetConfig`.
      seed: of the split by `val_size`.
      vocab_size: rows of the model's embedding.

    Raises:
      UserError: nothing to train on, a token without a row in the embedding, or malformed data.
    """
    if config.eval_path is not None and config.val_size:
        raise UserError(f"dataset.val_size: {config.val_size} and dataset.eval_path are both set; keep one of them")
    tokenizer = with_chat_template(tokenizer, config.chat_template)
    units, form, changed, dropped = _read(config, tokenizer, vocab_size, config.path, "dataset.path")
    if config.eval_path is not None:
        held_out, _, *eval_counts = _read(config, tokenizer, vocab_size, config.eval_path, "dataset.eval_path")
    else:
        units, held_out = _split(units, config.val_size, seed)
        eval_counts = {}, {}
    train, held_out = tuple(itertools.chain(*units)), tuple(itertools.chain(*held_out))
    rows = [_plan_rows(samples, config) for samples in (train, held_out)]
    longest = max(each.longest for each in rows)
    length = packing.row_length(longest, config.pad_to_multiple_of, config.max_seq_len)
    statistics = _count(train, changed, dropped), _count(held_out, *eval_counts)
    return DataSet(train, held_out, *rows, length, form, *statistics)


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
        """Steps `start`, ... `stop` - 1 (endless if None), two of them made ahead by a thread that ends with this."""
        with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="data") as thread:
            ahead: collections.deque = collections.deque()
            for n in itertools.count(start) if stop is None else range(start, stop):
                ahead.append(thread.submit(self.step, n))
                if len(ahead) > 2:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def _new_order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self._rows))
        return np.random.default_rng((self._seed, epoch)).permutation(len(self._rows))


def eval_batches(dataset: DataSet, batch_size: int, max_batches: int | None = None) -> Iterator[Batch]:
    """The held-out samples in order, as batches ``[batch_size, sequence_length]``; the last may hold empty rows."""
    for first in range(0, len(dataset.eval_rows), batch_size)[:max_batches]:
        those = range(first, min(first + batch_size, len(dataset.eval_rows)))
        rows = [dataset.eval_rows.pieces(row, dataset.eval) for row in those]
        yield packing.make_batch(rows, batch_size, dataset.sequence_length)


def _plan_rows(samples: tuple[Sample, ...], config: Any) -> packing.Rows:
    return packing.plan_rows([len(sample.token_ids) for sample in samples], config.packing, config.max_seq_len)


def _read(config: Any, tokenizer: Tokenizer, vocab_size: int, path: Any, key: str):
    """Units (what a split may not divide: a conversation's samples, a window of text), format, changed, dropped."""
    records = sources.read(config, path, key)
    if key == "dataset.path":
        records = itertools.islice(records, config.max_samples)
    if config.packing == "wrapped":  # no sample is too long for rows that it may go on in
        config = dataclasses.replace(config, max_seq_len=sys.maxsize)
    units, forms, changed, dropped = [], {}, collections.Counter(), collections.Counter()
    for form, record in records:
        forms |= {form: None} if form else {}
        made = make_samples(record, tokenizer, config, vocab_size)
        units += made.units
        changed += made.changed
        dropped += made.dropped
    if not units:
        raise UserError(_nothing(key, path, dropped, config.train_on))
    return units, "+".join(forms), dict(changed), dict(dropped)


def _split(units: list[list[Sample]], val_size: float, seed: int):
    if not val_size:
        return units, []
    count = max(1, round(val_size * len(units))) if 0 < val_size < 1 else int(val_size)
    if not 0 < count < len(units):
        raise UserError(f"dataset.val_size: {val_size} of {len(units)} records leaves one side empty; choose another")
    held_out = set(np.random.default_rng(seed).permutation(len(units))[:count].tolist())
    return [u for i, u in enumerate(units) if i not in held_out], [units[i] for i in sorted(held_out)]


def _count(samples: tuple[Sample, ...], changed: Mapping[str, int], dropped: Mapping[str, int]) -> Statistics:
    tokens = sum(len(sample.token_ids) for sample in samples)
    return Statistics(len(samples), tokens, sum(int(s.supervised.sum()) for s in samples), changed, dropped)


def _nothing(key: str, path: Any, dropped: collections.Counter, train_on: str) -> str:
    if not dropped:
        return f"{key}: no samples in '{path}'"
    reasons = ", ".join(f"{reason}: {count}" for reason, count in dropped.items())
    found = dropped.total()
    return (
        f"{key}: no supervised tokens in any of the {found} samples found in '{path}' ({reasons}); "
        f"check dataset.train_on '{train_on}', dataset.max_seq_len and the roles"
    )
