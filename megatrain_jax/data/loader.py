"""A data set prepared once, then a stream of steps that can be entered anywhere."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers

from megatrain_jax.config import UserError
from megatrain_jax.data import cache, packing, sources, workers
from megatrain_jax.data.samples import Made, make_samples
from megatrain_jax.data.tokenizer import Tokenizer, with_chat_template
from megatrain_jax.models.spec import Batch

# Settings that change nothing in the samples of a path. A key that is new here changes the name of every cache.
_NOT_IN_KEY = (
    "path", "eval_path", "val_size", "max_samples", "packing", "pad_to_multiple_of", "shuffle", "num_workers", "cache_dir",
)  # fmt: skip
_IN_THIS_PROCESS = 256  # records; starting workers takes as long as some of these
_CHUNK = 32  # records that go to a worker at a time


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
    """Tokenised samples, on the disk.

    Attributes:
      train, eval: samples, in file order; `eval` may be empty.
      train_rows, eval_rows: which of them share a row.
      sequence_length: tokens in every row of every batch.
      format: name of the format recognised; several are joined by ``+``.
      train_statistics, eval_statistics: see `Statistics`. With `val_size`, changes and drops count under train.
    """

    train: cache.Samples
    eval: cache.Samples
    train_rows: packing.Rows
    eval_rows: packing.Rows
    sequence_length: int
    format: str
    train_statistics: Statistics
    eval_statistics: Statistics


def prepare(config: Any, tokenizer: Tokenizer, *, seed: int, vocab_size: int) -> DataSet:
    """Everything that a `DatasetConfig` names: from its cache, or read, tokenised and cached; then split and laid out.

    Args:
      config: a `DatasetConfig`.
      seed: of the split by `val_size`.
      vocab_size: rows of the model's embedding.

    Raises:
      UserError: nothing to train on, a token without a row in the embedding, malformed data, or data that changed while
        it was read.
    """
    if config.eval_path is not None and config.val_size:
        raise UserError(f"dataset.val_size: {config.val_size} and dataset.eval_path are both set; keep one of them")
    tokenizer = with_chat_template(tokenizer, config.chat_template, config.chat_template_kwargs)
    everything = _tokenised(config, tokenizer, vocab_size, config.path, "dataset.path")
    if config.eval_path is not None:
        train, apart = (
            everything.samples,
            _tokenised(config, tokenizer, vocab_size, config.eval_path, "dataset.eval_path"),
        )
        held_out, eval_notes = apart.samples, apart.notes
    else:
        train, held_out = _split(everything, config.val_size, seed)
        eval_notes = {"changed": {}, "dropped": {}}
    rows = [packing.plan_rows(each.lengths, config.packing, config.max_seq_len) for each in (train, held_out)]
    longest = max(each.longest for each in rows)
    length = packing.row_length(longest, config.pad_to_multiple_of, config.max_seq_len)
    statistics = _count(train, everything.notes), _count(held_out, eval_notes)
    return DataSet(train, held_out, *rows, length, everything.notes["format"], *statistics)


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


def _tokenised(config: Any, tokenizer: Tokenizer, vocab_size: int, path: Any, key: str) -> cache.Cache:
    """The samples of all records at `path`, from the cache if they are there."""
    files = sources.expand(path, key)
    before = [_state(file) for file in files]
    follows_from = (
        _code(),
        {name: value for name, value in dataclasses.asdict(config).items() if name not in _NOT_IN_KEY},
        [file.name for file in files],
        cache.hash_files(files),
        tokenizer_key(tokenizer),
        vocab_size,
        config.max_samples if key == "dataset.path" else None,
        config.packing == "wrapped",
    )
    folder = Path(config.cache_dir) if config.cache_dir else default_folder()

    def build(writer: cache.Writer) -> dict[str, Any]:
        records = sources.read(config, path, key)
        if key == "dataset.path":
            records = itertools.islice(records, config.max_samples)
        forms, changed, dropped, found = {}, collections.Counter(), collections.Counter(), False
        for form, made in _made(records, config, tokenizer, vocab_size):
            forms |= {form: None} if form else {}
            changed += made.changed
            dropped += made.dropped
            found = found or bool(made.units)
            for unit in made.units:
                writer.add(unit)
        for file, state in zip(files, before):
            if _state(file) != state:
                raise UserError(f"{file}: changed while it was read; start again when nothing writes to it")
        if not found:
            raise UserError(_nothing(key, path, dropped, config.train_on))
        return {"format": "+".join(forms), "changed": dict(changed), "dropped": dict(dropped)}

    return cache.open_or_build(folder, cache.make_key(*follows_from), build)


def _made(records: Iterator, config: Any, tokenizer: Tokenizer, vocab_size: int) -> Iterator[tuple[str, Made]]:
    """Every record's format, and what became of it. Few records are not worth starting processes for."""
    if config.packing == "wrapped":  # no sample is too long for rows that it may go on in
        config = dataclasses.replace(config, max_seq_len=sys.maxsize)
    make = functools.partial(_make_all, tokenizer=tokenizer, config=config, vocab_size=vocab_size)
    first = list(itertools.islice(records, _IN_THIS_PROCESS))
    yield from make(first)
    if len(first) == _IN_THIS_PROCESS:
        chunks = workers.chunked(records, _CHUNK)
        for chunk in workers.ordered_map(make, chunks, worker_count(config.num_workers)):
            yield from chunk


def _make_all(records: list, tokenizer: Tokenizer, config: Any, vocab_size: int) -> list[tuple[str, Made]]:
    return [(form, make_samples(record, tokenizer, config, vocab_size)) for form, record in records]


def worker_count(wanted: str | int) -> int:
    """`dataset.num_workers` as a number."""
    return min(len(os.sched_getaffinity(0)), 16) if wanted == "auto" else wanted


def default_folder() -> Path:
    """Where caches go unless `dataset.cache_dir` says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatrain_jax" / "data"


def tokenizer_key(tokenizer: Tokenizer) -> dict[str, str]:
    """Everything of a tokenizer that token ids can depend on."""
    fields = {field.name: getattr(tokenizer, field.name) for field in dataclasses.fields(tokenizer)}
    return {**{name: repr(value) for name, value in fields.items()}, "backend": tokenizer.backend.to_str()}


@functools.cache
def _code() -> dict[str, str]:
    """What samples are made with: another release may make them otherwise."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return {"files": cache.hash_files(files), "tokenizers": tokenizers.__version__, "jinja2": jinja2.__version__}


def _state(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _split(everything: cache.Cache, val_size: float, seed: int) -> tuple[cache.Samples, cache.Samples]:
    """Training and evaluation samples; what belongs together stays together."""
    samples, count = everything.samples, len(everything.units) - 1
    if not val_size:
        return samples, samples[:0]
    wanted = max(1, round(val_size * count)) if 0 < val_size < 1 else int(val_size)
    if not 0 < wanted < count:
        raise UserError(f"dataset.val_size: {val_size} of {count} records leaves one side empty; choose another")
    is_out = np.zeros(count, bool)
    is_out[np.random.default_rng(seed).permutation(count)[:wanted]] = True
    sample_is_out = np.repeat(is_out, np.diff(everything.units))
    return tuple(
        dataclasses.replace(samples, chosen=samples.chosen[which]) for which in (~sample_is_out, sample_is_out)
    )


def _count(samples: cache.Samples, notes: Mapping[str, Any]) -> Statistics:
    tokens = int(samples.lengths.sum(dtype=np.int64))
    return Statistics(len(samples), tokens, samples.supervised_tokens, notes["changed"], notes["dropped"])


def _nothing(key: str, path: Any, dropped: collections.Counter[str], train_on: str) -> str:
    if not dropped:
        return f"{key}: no samples in '{path}'"
    reasons = ", ".join(f"{reason}: {count}" for reason, count in dropped.items())
    found = dropped.total()
    return (
        f"{key}: no supervised tokens in any of the {found} samples found in '{path}' ({reasons}); "
        f"check dataset.train_on '{train_on}', dataset.max_seq_len and the roles"
    )
