"""How long samples are, in text and in a picture."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np

from megatrain_jax.report.plot import BLUE, INK, ORANGE, STYLE

_BAR = 40  # characters


def bins(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Edges ``[n + 1]`` of at most 16 equal ranges that hold every length, and how many fall in each ``[n]``.

    A range holds its left edge and not its right one; all are a round number of tokens wide.
    """
    longest = max(int(lengths.max(initial=1)), 1)
    step = next(width for width in _round_numbers() if width * 16 > longest)
    edges = np.arange(0, longest + step + 1, step)
    counts = np.bincount(lengths // step, minlength=len(edges) - 1)
    return edges, counts


def text_histogram(lengths: np.ndarray) -> list[str]:
    """A line for each range of lengths: from, to, a bar, how many."""
    edges, counts = bins(lengths)
    most, width = max(int(counts.max(initial=0)), 1), len(f"{edges[-1]:,}")
    return [
        f"{low:>{width},} to {high - 1:>{width},}  {'#' * -(-int(count) * _BAR // most):<{_BAR}}  {count:,}"
        for low, high, count in zip(edges, edges[1:], counts)
    ]


def plot_lengths(lengths: np.ndarray, limit: int, png_path: str | os.PathLike) -> bool:
    """Draws the histogram, with the median and `limit` (max_seq_len) where it is within reach.

    Returns:
      Whether there is a picture: False, and nothing is written, without matplotlib or without samples.
    """
    if importlib.util.find_spec("matplotlib") is None or not len(lengths):
        return False
    import matplotlib
    from matplotlib.figure import Figure

    edges, counts = bins(lengths)
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        figure = Figure(figsize=(8, 4), dpi=160, layout="constrained")
        axes = figure.subplots()
        axes.bar(edges[:-1], counts, width=np.diff(edges), align="edge", color=BLUE, edgecolor="white", linewidth=0.8)
        marks = {"median": (float(np.median(lengths)), ORANGE)}
        if limit <= edges[-1]:
            marks["max_seq_len"] = (limit, INK)
        for name, (at, color) in marks.items():
            axes.axvline(at, color=color, linewidth=1.2, linestyle="--", label=f"{name} {at:,.0f}")
        axes.set_xlabel("tokens in a sample")
        axes.set_ylabel("samples")
        axes.set_xlim(0, edges[-1])
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
        axes.legend(loc="lower right", bbox_to_anchor=(1.01, 1.0), ncols=2, frameon=False, borderaxespad=0.2)
        part = Path(png_path).with_name(f"{Path(png_path).name}.part")
        figure.savefig(part, format="png")
    os.replace(part, png_path)
    return True


def _round_numbers():
    scale = 1
    while True:
        yield from (scale, 2 * scale, 5 * scale)
        scale *= 10
