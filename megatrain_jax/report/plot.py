"""loss.png: the course of a run in one picture."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np

from megatrain_jax.report.metrics import read_metrics

INK, FAINT, BLUE, ORANGE = "#1f2933", "#d5dbe1", "#1f5fa8", "#d9611a"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}


def plot_loss(metrics_path: str | os.PathLike, png_path: str | os.PathLike) -> bool:
    """Draws training loss, evaluation loss and learning rate over the steps of a metrics file.

    Reads "step" with "loss" and "learning_rate", and "step" with "eval_loss". A loss that was not finite is a gap.

    Returns:
      Whether there is a picture: False, and nothing is written, without matplotlib or without a single loss.
    """
    records = read_metrics(metrics_path)
    train = _series(records, "loss")
    if importlib.util.find_spec("matplotlib") is None or not train.size:
        return False
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    evals, rate = _series(records, "eval_loss"), _series(records, "learning_rate")
    smooth = smoothed(train[1])
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        figure = Figure(figsize=(8, 5), dpi=160, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
        marker = "o" if train.shape[1] == 1 else None
        top.plot(*train, color=BLUE, alpha=0.3, linewidth=0.9, marker=marker, label="training")
        top.plot(train[0], smooth, color=BLUE, linewidth=2, label="training, smoothed")
        if evals.size:
            top.plot(
                *evals, "o-", color=ORANGE, linewidth=1.2, markersize=5, markeredgecolor="white", label="evaluation"
            )
            where = {"xycoords": top.get_yaxis_transform(), "textcoords": "offset points", "va": "center"}
            top.annotate(f"{evals[1, -1]:.2f}", (1, evals[1, -1]), (4, 0), color=ORANGE, annotation_clip=False, **where)
        top.set_ylim(*_limits(train[1], smooth, evals[1]))
        top.set_ylabel("loss (nats per token)")
        top.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=3, frameon=False, borderaxespad=0.2)
        bottom.plot(*rate, color=INK, linewidth=1.2)
        bottom.set_ylim(0, 1.15 * rate[1].max(initial=0) or 1)
        bottom.set_ylabel("learning\nrate")
        bottom.yaxis.set_major_formatter(lambda x, _: _scientific(x))
        bottom.yaxis.set_major_locator(MaxNLocator(2))
        bottom.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        bottom.set_xlabel("step")
        top.margins(x=0.02)
        figure.align_ylabels()
        part = Path(png_path).with_name(f"{Path(png_path).name}.part")
        figure.savefig(part, format="png")
    os.replace(part, png_path)
    return True


def smoothed(values: np.ndarray) -> np.ndarray:
    """Mean over the neighbours on either side, nearer ones weighing more, float64 ``[n]``; NaN does not count.

    The window is a Hann window that reaches over 1/20 of the series, at least two values, to each side.
    """
    reach = max(len(values) // 20, 2)
    window = np.hanning(2 * reach + 1)
    known = np.isfinite(values)
    total = np.convolve(np.where(known, values, 0.0), window)[reach : reach + len(values)]
    weight = np.convolve(known, window)[reach : reach + len(values)]
    return np.divide(total, weight, out=np.full(len(values), np.nan), where=weight > 1e-9)


def _scientific(x: float) -> str:
    mantissa, exponent = f"{x:.1e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}" if x else "0"


def _series(records: list[dict], key: str) -> np.ndarray:
    """Steps and values, float64 ``[2, n]``; null is NaN. Empty if no value is finite."""
    pairs = [(record["step"], record[key]) for record in records if key in record]
    series = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    return series if np.isfinite(series[1]).any() else np.empty((2, 0))


def _limits(raw: np.ndarray, *drawn: np.ndarray) -> tuple[float, float]:
    """A range that holds every curve in `drawn` and all but the spikes of `raw`."""
    values = np.concatenate([np.nanpercentile(raw, [0.5, 99.5]), *drawn])
    low, high = np.nanmin(values), np.nanmax(values)
    pad = 0.05 * (high - low) or 0.5
    return low - pad, high + pad
