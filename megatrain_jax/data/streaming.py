"""A data set too large to index: read as it comes, shuffled in a buffer, any step reached by skipping those before it."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from megatrain_jax.config import UserError
from megatrain_jax.data import packing, sources
from megatrain_jax.data.chat import Sample
from megatrain_jax.data.dataset import check_unchanged, make_all, states
from megatrain_jax.data.loader import made_ahead
from megatrain_jax.data.tokenizer import Tokenizer
from megatrain_jax.models.spec import Batch


class StreamLoader:
    """An endless stream of steps over files that are read again for every epoch, and must stay as they are.

    Every sample comes once per epoch. Where an epoch ends is not known before; a step may hold rows of two.

    Attributes:
      steps_per_epoch: None, unknown.
      changed, dropped: records and samples that were altered or left out, by reason, in what was read so far.
    """

    steps_per_epoch: int | None = None

    def __init__(
        self, config: Any, tokenizer: Tokenizer, vocab_size: int, batch_size: int, micro_batches: int, seed: int
    ):
        self._config, self._tokenizer, self._vocab_size = config, tokenizer, vocab_size
        self._batch_size, self._micro_batches, self._seed = batch_size, micro_batches, seed
        self._files = sources.expand(sources.training_path(config))
        self._states = states(self._files)
        self.changed: collections.Counter[str] = collections.Counter()
        self.dropped: collections.Counter[str] = collections.Counter()

    def steps(self, start: int, stop: int | None = None) -> Iterator[list[Batch]]:
        """Steps `start`, ... `stop` - 1 (endless if None), made ahead. Those before `start` are made and thrown away."""
        return made_ahead(self._steps(start, stop))

    def _steps(self, start: int, stop: int | None) -> Iterator[list[Batch]]:
        size = self._batch_size
        each = size * self._micro_batches
        with contextlib.closing(self._rows()) as rows:
            for _ in itertools.islice(rows, start * each):
                pass
            for _ in itertools.count() if stop is None else range(start, stop):
                step = list(itertools.islice(rows, each))
                yield [
                    packing.make_batch(step[i : i + size], size, self._config.max_seq_len) for i in range(0, each, size)
                ]

    def _rows(self) -> Iterator[list[packing.Piece]]:
        """Rows of all epochs. Those that samples share are laid out for a buffer of samples at a time."""
        config = self._config
        for epoch in itertools.count():
            with contextlib.closing(self._shuffled(epoch)) as samples:
                while some := list(itertools.islice(samples, config.buffer_size)):
                    lengths = [len(sample.token_ids) for sample in some]
                    plan = packing.plan_rows(lengths, config.packing, config.max_seq_len)
                    for row in range(len(plan)):
                        yield plan.pieces(row, some)

    def _shuffled(self, epoch: int) -> Iterator[Sample]:
        """Samples of one epoch; each leaves a buffer at random, and the next one takes its place."""
        rng, buffer = np.random.default_rng((self._seed, epoch)), []
        with contextlib.closing(self._samples()) as samples:
            if not self._config.shuffle:
                yield from samples
                return
            for sample in samples:
                if len(buffer) < self._config.buffer_size:
                    buffer.append(sample)
                    continue
                place = rng.integers(len(buffer))
                yield buffer[place]
                buffer[place] = sample
        for place in rng.permutation(len(buffer)):
            yield buffer[place]

    def _samples(self) -> Iterator[Sample]:
        config, found = self._config, False
        check_unchanged(self._files, self._states)
        all_made = make_all(config, self._tokenizer, self._vocab_size, sources.training_path(config), "dataset.path")
        with contextlib.closing(all_made):
            for _, made in all_made:
                self.changed += made.changed
                self.dropped += made.dropped
                for sample in itertools.chain(*made.units):
                    found = True
                    yield sample
        check_unchanged(self._files, self._states)
        if not found:
            raise UserError(f"dataset.path: nothing to train on in '{sources.label(sources.training_path(config))}'")
