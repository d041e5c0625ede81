"""Draws pipeline.svg, the picture of the README: python docs/images/pipeline.py (pip install matplotlib)."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

PAPER, INK, FAINT = "#fbfaf7", "#22303c", "#c9d1d8"
EMBED, LAYER, HEAD = "#4c9f8f", "#3d78b8", "#b86a3d"
NAMES = ("embed", "layer 0", "layer 1", "layer 2", "head")
COLORS = (EMBED, LAYER, LAYER, LAYER, HEAD)
SHORT = ("E", "0", "1", "2", "H")

FORWARD = (0.7, 1.2, 1.2, 1.2)  # of the embedding and the layers; lengths are of the picture, not measured
HEAD_BOTH = 2.4
BACKWARD = {3: 2.4, 2: 2.4, 1: 2.4, 0: 0.9}
COPY, UPDATE = 0.95, 0.8


def schedule() -> dict[str, list[tuple[int, float, float, bool]]]:
    """(block, start, length, whether of the next step) by lane, by the rules of the stream."""
    lanes = {"copy in": [], "compute": [], "copy out": [], "optimizer": []}
    arrived = COPY
    lanes["copy in"].append((0, 0.0, COPY, False))
    free = 0.0
    order = [(0, FORWARD[0]), (1, FORWARD[1]), (2, FORWARD[2]), (3, FORWARD[3]), (4, HEAD_BOTH)]
    order += [(block, BACKWARD[block]) for block in (3, 2, 1, 0)]
    for i, (block, length) in enumerate(order):
        start = max(free, arrived)
        lanes["compute"].append((block, start, length, False))
        free = start + length
        if i + 1 < len(order) and order[i + 1][0]:  # the embedding's backward needs no weights
            lanes["copy in"].append((order[i + 1][0], start, COPY, False))
            arrived = start + COPY
        if i >= 4:
            lanes["copy out"].append((block, free, COPY, False))
    ready = free + COPY
    for block in range(5):
        lanes["optimizer"].append((block, ready + block * UPDATE, UPDATE, False))
    updated = [ready + (block + 1) * UPDATE for block in range(5)]
    copied = updated[0]
    free = 0.0
    for block in range(3):
        start = max(updated[block], copied)
        lanes["copy in"].append((block, start, COPY, True))
        copied = start + COPY
        if block < 2:
            free = max(free, copied)
            lanes["compute"].append((block, free, FORWARD[block], True))
            free += FORWARD[block]
    return lanes


def box(axes, x, y, width, height, color, text="", *, alpha=1.0, size=10.0, ink="white", weight="bold"):
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor="none", alpha=alpha)
    )
    axes.text(
        x + width / 2, y + height / 2, text, ha="center", va="center", color=ink, fontsize=size, fontweight=weight
    )


def arrow(axes, start, end, color=INK):
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.6})


def draw_memories(axes) -> None:
    axes.text(0, 7.35, "host memory", fontsize=13, fontweight="bold", color=INK)
    axes.text(3.9, 7.35, "owns the model: float32 master, moments, and what crosses the link", fontsize=11, color=INK)
    box(axes, 0, 5.55, 26, 1.55, "#e9edf0")
    for i, (name, color) in enumerate(zip(NAMES, COLORS, strict=True)):
        box(axes, 0.5 + 3.7 * i, 5.85, 3.3, 0.95, color, name)
    box(axes, 20.2, 5.85, 5.3, 0.95, INK, "optimizer thread")
    arrow(axes, (20.1, 6.32), (18.75, 6.32))

    axes.text(0, 2.05, "accelerator", fontsize=13, fontweight="bold", color=INK)
    axes.text(3.9, 2.05, "borrows one block at a time", fontsize=11, color=INK)
    box(axes, 0, 2.55, 26, 1.55, "#e9edf0")
    box(axes, 4.2, 2.85, 3.3, 0.95, LAYER, "layer 1", alpha=0.45, ink=INK)
    box(axes, 11.4, 2.85, 3.3, 0.95, LAYER, "layer 0")
    axes.text(5.85, 4.22, "on its way", ha="center", fontsize=9.5, color=INK)
    axes.text(13.05, 4.22, "computes", ha="center", fontsize=9.5, color=INK)
    box(axes, 20.2, 2.85, 5.3, 0.95, "#8795a1", "gradients")
    arrow(axes, (9.0, 5.75), (6.6, 4.55))
    arrow(axes, (22.85, 3.9), (22.85, 5.75))
    arrow(axes, (14.8, 3.32), (20.1, 3.32))
    axes.text(8.2, 4.95, "weights", fontsize=10, color=INK)
    axes.text(23.1, 4.7, "gradients", fontsize=10, color=INK)


def draw_lanes(axes, lanes) -> None:
    for row, (lane, pieces) in enumerate(lanes.items()):
        y = -1.0 - row * 1.15
        axes.text(0, y + 0.4, lane, va="center", fontsize=11, color=INK)
        axes.plot([3.3, 26], [y - 0.14, y - 0.14], color=FAINT, linewidth=0.8)
        for block, start, length, later in pieces:
            look = {"alpha": 0.45, "ink": INK} if later else {}
            box(axes, 3.4 + start, y, length - 0.07, 0.8, COLORS[block], SHORT[block], size=9, **look)


def main() -> None:
    settings = {"svg.hashsalt": "pipeline", "font.family": "DejaVu Sans"}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(11, 6.1), facecolor=PAPER)
        axes = figure.add_axes((0.025, 0.02, 0.95, 0.96))
        lanes = schedule()
        draw_memories(axes)
        spans = [(s, s + n) for block, s, n, later in lanes["compute"] if not later]
        split = [s for block, s, n, later in lanes["compute"] if block == 4][0]
        end = spans[-1][1]
        for left, right, name in ((COPY, split, "forward"), (split, end, "loss, then backward"), (end, 22.5, "update")):
            axes.annotate("", (3.4 + right, 0.25), (3.4 + left, 0.25), arrowprops={"arrowstyle": "<->", "color": INK})
            axes.text(3.4 + (left + right) / 2, 0.42, name, ha="center", fontsize=10, color=INK)
        draw_lanes(axes, lanes)
        axes.text(26, -5.05, "time; pale: the next step", ha="right", fontsize=9.5, color=INK)
        axes.set_xlim(-0.2, 26.2)
        axes.set_ylim(-5.3, 8.0)
        axes.axis("off")
        figure.savefig(Path(__file__).with_suffix(".svg"), facecolor=PAPER, metadata={"Date": None})


if __name__ == "__main__":
    main()
