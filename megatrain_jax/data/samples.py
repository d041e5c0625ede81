"""One record to the samples that it trains on: supervised, fitted into a row, every change counted."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

from megatrain_jax.config import UserError
from megatrain_jax.data import templates
from megatrain_jax.data.chat import Sample, supervise, writes_reasoning
from megatrain_jax.data.records import BadRecord, Conversation, Record, Text, Tokens, Unreadable
from megatrain_jax.data.tokenizer import Tokenizer

TRUNCATED = "truncated to max_seq_len"
SPLIT = "split per assistant turn"
WINDOWED = "split into windows of max_seq_len"
UNWRITTEN = "without the reasoning, which the chat template does not write"
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


def make_samples(record: Record | Unreadable, tokenizer: Tokenizer, config: Any, vocab_size: int) -> Made:
    """Samples of at most ``max_seq_len`` tokens, each with something supervised.

    Args:
      config: a `DatasetConfig`.
      vocab_size: rows of the model's embedding.

    Raises:
      UserError: the record cannot be rendered, is too long and that is to be an error, or has a token without a row in
        the embedding.
    """
    made = Made([], collections.Counter(), collections.Counter())
    if isinstance(record, Unreadable):
        made.dropped[record.reason] += 1
        return made
    try:
        samples = supervise(tokenizer, record, config.train_on, config.system_prompt)
    except BadRecord as error:
        if config.on_bad_record == "error":
            raise
        made.dropped[error.reason] += 1
        return made
    highest = max((int(sample.token_ids.max(initial=-1)) for sample in samples), default=-1)
    if highest >= vocab_size:
        raise UserError(
            f"model.tokenizer: vocabulary larger than the embedding: token id {highest} in {record.where}, but the "
            f"model has {vocab_size} rows; use the model's own tokenizer"
        )
    if len(samples) > 1:
        made.changed[SPLIT] += 1
    if isinstance(record, Conversation) and any(map(templates.has_reasoning, record.messages)):
        if not writes_reasoning(tokenizer, record):
            made.changed[UNWRITTEN] += 1
    is_text = isinstance(record, Text) or (isinstance(record, Tokens) and all(record.supervised))
    overlong = ("split" if is_text else "truncate") if config.overlong == "auto" else config.overlong
    fitted = [
        piece
        for sample in _supervised(samples, UNSUPERVISED, made)
        for piece in _fit(sample, overlong, config.max_seq_len, record.where, made)
    ]
    units = [[piece] for piece in fitted] if is_text else [fitted] if fitted else []
    made.units.extend(unit * record.times for unit in units)
    return made


def truncate(sample: Sample, max_seq_len: int) -> Sample:
    """The first `max_seq_len` tokens."""
    return _part(sample, 0, max_seq_len)


def windows(sample: Sample, max_seq_len: int) -> list[Sample]:
    """Consecutive stretches of at most `max_seq_len` tokens.

    Each begins with the last token of the one before, unsupervised there, so that every token but the first of the
    sample is a target exactly once.
    """
    starts = range(0, max(len(sample.token_ids) - 1, 1), max_seq_len - 1)
    return [_part(sample, start, start + max_seq_len) for start in starts]


def _part(sample: Sample, start: int, stop: int) -> Sample:
    """Tokens `start` to `stop` as a sample of their own, whose first token is not supervised."""
    part = Sample(*(None if field is None else field[start:stop].copy() for field in sample))
    for field in part[1:]:
        if field is not None:
            field[:1] = 0
    return part


def _fit(sample: Sample, overlong: str, limit: int, where: str, made: Made) -> list[Sample]:
    """What is left of a sample in rows of `limit` tokens."""
    length = len(sample.token_ids)
    if length <= limit:
        return [sample]
    if overlong == "error":
        raise UserError(
            f"{where}: {length} tokens, more than dataset.max_seq_len {limit}; raise it or set dataset.overlong"
        )
    if overlong == "drop":
        made.dropped[TOO_LONG] += 1
        return []
    if overlong == "split":
        made.changed[WINDOWED] += 1
        return _supervised(windows(sample, limit), UNSUPERVISED, made)
    kept = _supervised([truncate(sample, limit)], CUT_AWAY, made)
    if kept:
        made.changed[TRUNCATED] += 1
    return kept


def _supervised(samples: list[Sample], reason: str, made: Made) -> list[Sample]:
    kept = [sample for sample in samples if sample.supervised.any()]
    if len(kept) < len(samples):
        made.dropped[reason] += len(samples) - len(kept)
    return kept
