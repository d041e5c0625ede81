"""One record to the samples that it trains on: supervised, in windows or fitted into a row, counted."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

from megatrain_jax.config import UserError
from megatrain_jax.data import sources
from megatrain_jax.data.chat import Sample, Tokenizer, supervise

TRUNCATED = "truncated to max_seq_len"
SPLIT = "split per assistant turn"
WINDOWED = "split into windows of max_seq_len"
TOO_LONG = "longer than max_seq_len"
UNSUPERVISED = "no supervised tokens"
CUT_AWAY = "no supervised tokens left by truncation"


class Made(NamedTuple):
    """What became of one record.

    Attributes:
      units: samples in groups that no split between training and evaluation may divide: all of a conversation, or one
        window of a text.
      changed: records or samples that were altered, by reason.
      dropped: samples that were left out, by reason.
    """

    units: list[list[Sample]]
    changed: collections.Counter[str]
    dropped: collections.Counter[str]


def make_samples(record: sources.Record, tokenizer: Tokenizer, config: Any, vocab_size: int) -> Made:
    """Samples of at most ``max_seq_len`` tokens, each with something supervised.

    Args:
      config: a `DatasetConfig`.
      vocab_size: rows of the model's embedding.

    Raises:
      UserError: the record cannot be rendered, is too long and that is to be an error, or has a token without a row in
        the embedding.
    """
    changed: collections.Counter[str] = collections.Counter()
    dropped: collections.Counter[str] = collections.Counter()
    samples = supervise(tokenizer, record, config.train_on, config.system_prompt)
    highest = max((int(sample.token_ids.max(initial=-1)) for sample in samples), default=-1)
    if highest >= vocab_size:
        raise UserError(
            f"model.tokenizer: vocabulary larger than the embedding: token id {highest} in {record.where}, but the "
            f"model has {vocab_size} rows; use the model's own tokenizer"
        )
    changed[SPLIT] += len(samples) > 1
    if isinstance(record, sources.Text):
        pieces = windows(samples[0], config.max_seq_len)
        changed[WINDOWED] += len(pieces) > 1
        return Made([[piece] for piece in _supervised(pieces, UNSUPERVISED, dropped)], changed, dropped)
    samples = _fit(_supervised(samples, UNSUPERVISED, dropped), config, record.where, changed, dropped)
    return Made([samples] if samples else [], changed, dropped)


def truncate(sample: Sample, max_seq_len: int) -> Sample:
    """The first `max_seq_len` tokens."""
    return Sample(*(field[:max_seq_len] for field in sample))


def windows(sample: Sample, max_seq_len: int) -> list[Sample]:
    """Consecutive stretches of at most `max_seq_len` tokens.

    Each begins with the last token of the one before, unsupervised there, so that every token but the first of the
    sample is a target exactly once.
    """
    starts = range(0, max(len(sample.token_ids) - 1, 1), max_seq_len - 1)
    pieces = [
        Sample(sample.token_ids[s : s + max_seq_len], sample.supervised[s : s + max_seq_len].copy()) for s in starts
    ]
    for piece in pieces:
        piece.supervised[:1] = False
    return pieces


def _fit(samples: list[Sample], config: Any, where: str, changed, dropped) -> list[Sample]:
    limit = config.max_seq_len
    lengths = [len(sample.token_ids) for sample in samples]
    too_long = sum(n > limit for n in lengths)
    if not too_long:
        return samples
    if config.overlong == "error":
        raise UserError(
            f"{where}: {max(lengths)} tokens, more than dataset.max_seq_len {limit}; raise it or set dataset.overlong"
        )
    if config.overlong == "drop":
        dropped[TOO_LONG] += too_long
        return [sample for sample, n in zip(samples, lengths) if n <= limit]
    kept = _supervised([truncate(sample, limit) for sample in samples], CUT_AWAY, dropped)
    changed[TRUNCATED] += too_long - (len(samples) - len(kept))
    return kept


def _supervised(samples: list[Sample], reason: str, dropped: collections.Counter[str]) -> list[Sample]:
    kept = [sample for sample in samples if sample.supervised.any()]
    dropped[reason] += len(samples) - len(kept)
    return kept
