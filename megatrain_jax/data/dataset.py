"""A data set: read, tokenised and kept, split, and laid out in rows."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers

from megatrain_jax.config import UserError
from megatrain_jax.data import cache, packing, sources, workers
from megatrain_jax.data.records import Record, Unreadable, size
from megatrain_jax.data.samples import Made, make_samples
from megatrain_jax.data.tokenizer import Tokenizer, with_chat_template

# Settings that change nothing in the samples of a path. A key that is new here changes the name of every cache.
_NOT_IN_KEY = (
    "path", "eval_path", "val_size", "max_samples", "packing", "pad_to_multiple_of", "shuffle", "num_workers", "cache_dir",
    "streaming", "buffer_size",
)  # fmt: skip
_NOT_OF_STREAM = ("path", "eval_path", "num_workers", "cache_dir")
_HASHED = 1 << 22  # elements read from the disk at once
_IN_THIS_PROCESS = 256  # records; starting workers takes as long as some of these
_SAY_EVERY = 10.0  # seconds
_CHUNK = 32  # records that go to a worker at a time
_AT_ONCE = 1 << 21  # characters of records after which no more go with them


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
      tokenizer: with the chat template that conversations are written with.
      sequence_length: tokens in every row of every batch.
      format: name of the format recognised; several are joined by ``+``.
      train_statistics, eval_statistics: see `Statistics`. With `val_size`, changes and drops count under train.

    With `dataset.streaming` nothing is known of the samples to train on: what is of them is None.
    """

    train: cache.Samples | None
    eval: cache.Samples
    train_rows: packing.Rows | None
    eval_rows: packing.Rows
    tokenizer: Tokenizer
    sequence_length: int
    format: str
    train_statistics: Statistics | None
    eval_statistics: Statistics


def prepare(
    config: Any, tokenizer: Tokenizer, *, seed: int, vocab_size: int, say: Callable[[str], None] | None = None
) -> DataSet:
    """Everything that a `DatasetConfig` names: from its cache, or read, tokenised and cached; then split and laid out.

    Args:
      config: a `DatasetConfig`.
      seed: of the split by `val_size`.
      vocab_size: rows of the model's embedding.
      say: is told now and then how far a long tokenisation is.

    Raises:
      UserError: nothing to train on, a token without a row in the embedding, malformed data, or data that changed while
        it was read.
    """
    if config.eval_path is not None and config.val_size:
        raise UserError(f"dataset.val_size: {config.val_size} and dataset.eval_path are both set; keep one of them")
    tokenizer = with_chat_template(tokenizer, config.chat_template, config.chat_template_kwargs)
    plan = functools.partial(packing.plan_rows, packing=config.packing, capacity=config.max_seq_len)
    if config.eval_path is not None:
        apart = _tokenised(config, tokenizer, vocab_size, config.eval_path, "dataset.eval_path", say)
        held_out, eval_notes = apart.samples, apart.notes
    else:
        held_out, eval_notes = cache.NO_SAMPLES, {"changed": {}, "dropped": {}}
    if config.streaming:
        form = _first_format(config, tokenizer, vocab_size)
        statistics = None, _count(held_out, eval_notes)
        rows = None, plan(held_out.lengths)
        return DataSet(None, held_out, *rows, tokenizer, config.max_seq_len, form, *statistics)
    everything = _tokenised(config, tokenizer, vocab_size, sources.training_path(config), "dataset.path", say)
    train = everything.samples
    if config.val_size:
        train, held_out = _split(everything, config.val_size, seed)
    rows = plan(train.lengths), plan(held_out.lengths)
    longest = max(each.longest for each in rows)
    length = packing.row_length(longest, config.pad_to_multiple_of, config.max_seq_len)
    statistics = _count(train, everything.notes), _count(held_out, eval_notes)
    return DataSet(train, held_out, *rows, tokenizer, length, everything.notes["format"], *statistics)


def fingerprint(config: Any, dataset: DataSet) -> str:
    """SHA-256 of what is trained on: the samples in their order, what their tokens weigh, and how they share rows.

    Of a stream it is that of the settings, and of the names and lengths of the files.
    """
    digest, samples = hashlib.sha256(str(dataset.sequence_length).encode()), dataset.train
    if samples is None:
        files = sources.expand(sources.training_path(config), "dataset.path")
        settings = {k: v for k, v in dataclasses.asdict(config).items() if k not in _NOT_OF_STREAM}
        known = [settings, [(file.name, file.stat().st_size) for file in files]]
        digest.update(json.dumps(known, sort_keys=True, default=str).encode())
        return digest.hexdigest()
    columns = [samples.columns["token_ids"], samples.columns["supervised"], samples.offsets, samples.chosen]
    weights = [samples.columns["weights"]] if len(samples.columns["weights"]) else []
    for array in (*columns, *dataclasses.astuple(dataset.train_rows), *weights):
        digest.update(f"{array.dtype}{array.shape}".encode())
        for start in range(0, len(array), _HASHED):
            digest.update(np.ascontiguousarray(array[start : start + _HASHED]))
    return digest.hexdigest()


def _first_format(config: Any, tokenizer: Tokenizer, vocab_size: int) -> str:
    """The format of the first record; what is wrong with the first records is raised."""
    with contextlib.closing(
        make_all(config, tokenizer, vocab_size, sources.training_path(config), "dataset.path")
    ) as made:
        for form, _ in made:
            if form:
                return form
    raise UserError(_nothing("dataset.path", sources.training_path(config), collections.Counter(), config.train_on))


def _tokenised(
    config: Any, tokenizer: Tokenizer, vocab_size: int, path: Any, key: str, say: Callable[[str], None] | None
) -> cache.Cache:
    """The samples of all records at `path`, from the cache if they are there."""
    files = sources.expand(path, key)
    before = states(files)
    follows_from = (
        _code(),
        {name: value for name, value in dataclasses.asdict(config).items() if name not in _NOT_IN_KEY},
        [file.name for file in files],
        cache.hash_files(files),
        tokenizer_key(tokenizer),
        vocab_size,
        config.max_samples if key == "dataset.path" else None,
        config.packing == "wrapped",
        None if isinstance(path, str) else [dataclasses.asdict(source) | {"path": ""} for source in path],
    )
    folder = Path(config.cache_dir) if config.cache_dir else default_folder()

    def build(writer: cache.Writer) -> dict[str, Any]:
        forms, changed, dropped, samples, tokens = {}, collections.Counter(), collections.Counter(), 0, 0
        said = time.monotonic()
        with contextlib.closing(make_all(config, tokenizer, vocab_size, path, key)) as all_made:
            for form, made in all_made:
                forms |= {form: None} if form else {}
                changed += made.changed
                dropped += made.dropped
                for unit in made.units:
                    writer.add(unit)
                    samples, tokens = samples + len(unit), tokens + sum(len(sample.token_ids) for sample in unit)
                if say is not None and time.monotonic() - said >= _SAY_EVERY:
                    say(f"data       tokenised {samples:,} samples, {tokens:,} tokens so far")
                    said = time.monotonic()
        check_unchanged(files, before)
        if not samples:
            raise UserError(_nothing(key, path, dropped, config.train_on))
        return {"format": "+".join(forms), "changed": dict(changed), "dropped": dict(dropped)}

    return cache.open_or_build(folder, cache.make_key(*follows_from), build)


def make_all(config: Any, tokenizer: Tokenizer, vocab_size: int, path: Any, key: str) -> Iterator[tuple[str, Made]]:
    """The format of every record at `path`, "" if it could not be read, and what became of it, in order.

    Few records are made here; the others by `dataset.num_workers` processes, which end when this does.
    """
    records = sources.read(config, path, key)
    if key == "dataset.path":
        records = itertools.islice(records, config.max_samples)
    if config.packing == "wrapped":  # no sample is too long for rows that it may go on in
        config = dataclasses.replace(config, max_seq_len=sys.maxsize)
    make = functools.partial(_make_some, tokenizer=tokenizer, config=config, vocab_size=vocab_size)
    yield from make(next(_chunks(records, _IN_THIS_PROCESS), []))
    if (more := next(records, None)) is not None:
        chunks = _chunks(itertools.chain([more], records), _CHUNK)
        with contextlib.closing(workers.ordered_map(make, chunks, worker_count(config.num_workers))) as made:
            for some in made:
                yield from some


def _chunks(records: Iterator[tuple[str, Record | Unreadable]], count: int) -> Iterator[list]:
    return workers.chunked(records, count, lambda item: size(item[1]), _AT_ONCE)


def _make_some(records: list, tokenizer: Tokenizer, config: Any, vocab_size: int) -> list[tuple[str, Made]]:
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


def states(files: Sequence[Path]) -> list[tuple[int, int]]:
    """By which a file can be seen to have changed."""
    return [(found.st_size, found.st_mtime_ns) for found in map(os.stat, files)]


def check_unchanged(files: Sequence[Path], before: Sequence[tuple[int, int]]) -> None:
    """Raises a UserError about the first of `files` whose state is no longer what it was."""
    for file, state, now in zip(files, before, states(files), strict=True):
        if now != state:
            raise UserError(f"{file}: changed while it was read; start again when nothing writes to it")


def _split(everything: cache.Cache, val_size: float, seed: int) -> tuple[cache.Samples, cache.Samples]:
    """Training and evaluation samples; what belongs together stays together."""
    samples, count = everything.samples, len(everything.units) - 1
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
        return f"{key}: no samples in '{sources.label(path)}'"
    reasons = ", ".join(f"{reason}: {count}" for reason, count in dropped.items())
    found = dropped.total()
    return (
        f"{key}: no supervised tokens in any of the {found} samples found in '{sources.label(path)}' ({reasons}); "
        f"check dataset.train_on '{train_on}', dataset.max_seq_len and the roles"
    )
