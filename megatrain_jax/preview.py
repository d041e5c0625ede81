"""Command line: what the data looks like, and what of it is supervised.

python -m megatrain_jax.preview --config configs/quickstart.yaml [section.key=value ...]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from megatrain_jax.config import Config
from megatrain_jax.train import run

SHOWN = 3  # samples
STREAMED = 10_000  # records that are looked at where there are too many to index
_LONGEST = 1_000  # characters of a stretch that are printed
_TERMINAL, _PLAIN = ("\x1b[32m", "\x1b[0m"), ("{+", "+}")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; its exit code is 0, or 2 for something that the user can mend."""
    parser = argparse.ArgumentParser(
        prog="python -m megatrain_jax.preview", description="Show what would be trained on."
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces a value of the file")
    options = parser.parse_intermixed_args(arguments)
    return run(_preview, options.config, options.overrides)


def _preview(config: Config) -> None:
    from megatrain_jax.data.dataset import prepare
    from megatrain_jax.data.tokenizer import load_tokenizer
    from megatrain_jax.models.families import read_config, spec_from_config
    from megatrain_jax.report.lengths import plot_lengths, text_histogram

    spec = spec_from_config(read_config(config.model.name, config.model.config_overrides))
    section = config.dataset
    if section.streaming:
        few = min(section.max_samples or STREAMED, STREAMED)
        section = dataclasses.replace(section, streaming=False, max_samples=few)
        print(f"streaming  only the first {few:,} records were read")
    data = prepare(
        section,
        load_tokenizer(config.model.tokenizer or config.model.name),
        seed=config.seed,
        vocab_size=spec.vocab_size,
    )
    lengths, limit = np.asarray(data.train.lengths, np.int64), section.max_seq_len
    print("\n".join(describe(data, section.packing)))
    low, median, high, longest = np.quantile(lengths, [0, 0.5, 0.95, 1])
    print(f"lengths    {low:.0f} to {longest:.0f} tokens, half up to {median:.0f}, 95% up to {high:.0f}")
    print("\n".join(f"           {line}" for line in text_histogram(lengths)))
    picture = Path(config.output_dir) / "lengths.png"
    os.makedirs(picture.parent, exist_ok=True)
    if plot_lengths(lengths, limit, picture):
        print(f"picture    {picture}")
    marks = _TERMINAL if sys.stdout.isatty() and "NO_COLOR" not in os.environ else _PLAIN
    print(f"\nSupervised tokens are {'green' if marks is _TERMINAL else f'between {marks[0]} and {marks[1]}'}.")
    count = len(data.train)
    for number in sorted({i * (count - 1) // max(SHOWN - 1, 1) for i in range(SHOWN)}):
        sample = data.train[number]
        asked = int(sample.supervised.sum())
        told = f"\n--- sample {number + 1:,} of {count:,}: {len(sample.token_ids):,} tokens, {asked:,} supervised"
        weights = sample.loss_weights()[sample.supervised]
        low, high = weights.min(), weights.max()
        print(told if low == high == 1 else f"{told}, weights {low:g} to {high:g}")
        print(marked(data.tokenizer.decode, sample.token_ids, sample.supervised, marks))


def describe(data, packing: str) -> list[str]:
    """A data set in lines: what it holds, how well rows are used, what was changed and dropped."""
    lines = []
    sides = (
        ("data", data.train, data.train_rows, data.train_statistics),
        ("eval", data.eval, data.eval_rows, data.eval_statistics),
    )
    for name, samples, rows, counts in sides:
        if not len(samples):
            continue
        places = len(rows) * data.sequence_length
        how = f" (format {data.format})" if name == "data" else ""
        lines += [
            f"{name:<11}{counts.samples:,} samples{how}, {counts.tokens:,} tokens, {counts.supervised_tokens:,} of them "
            f"supervised ({counts.supervised_tokens / counts.tokens:.1%})",
            f"{'rows':<11}{len(rows):,} of {data.sequence_length:,} tokens, {counts.tokens / places:.1%} filled "
            f"(packing {packing})",
        ]
        lines += [f"{what:<11}{line}" for what in ("changed", "dropped") for line in _reasons(getattr(counts, what))]
    return lines


def marked(
    decode: Callable[[list[int], bool], str], token_ids: np.ndarray, supervised: np.ndarray, marks: tuple[str, str]
) -> str:
    """The text of a sample, what is supervised between `marks`; stretches that are very long lose their middle."""
    ids = token_ids.tolist()
    edges = [0, *(np.flatnonzero(np.diff(supervised.astype(int))) + 1).tolist(), len(ids)]
    pieces, before = [], ""
    for start, stop in zip(edges, edges[1:]):
        # What a token is written as may depend on those before it, so stretches are cut from the whole.
        until = decode(ids[:stop], False)
        piece = _printable(until[len(before) :])
        before = until
        if len(piece) > _LONGEST:
            half = _LONGEST // 2
            piece = f"{piece[:half]} [... {len(piece) - 2 * half:,} characters ...] {piece[-half:]}"
        pieces.append(marks[0] + piece + marks[1] if supervised[start] else piece)
    return "".join(pieces)


def _printable(text: str) -> str:
    """`text` without what would steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def _reasons(counts: Mapping[str, int]) -> list[str]:
    return [f"{count:,}: {reason}" for reason, count in sorted(counts.items(), key=lambda item: -item[1])]


if __name__ == "__main__":
    sys.exit(main())
