"""timeline.json and timeline.png: what the device, the link and the optimizer's thread did during a step.

The input is what the pipeline records: objects with `what`, `block`, `micro_batch` and `when` (seconds). Their ends were
*observed*, by a thread that waits for one thing after another in the order of dispatch: an end can be late by scheduling,
or because something dispatched before it took longer. Begins of device work are *inferred*: a lane works in order, so an
item begins when it was dispatched, when the item before it in its lane ended, or when what it needs was there (weights
for a computation, the computation for a copy of its gradients), whichever is last. Updates and waits are exact.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

LANES = ("copy in", "compute", "copy out", "optimizer", "waits")
_LANE_OF = {
    "h2d": "copy in",
    "forward": "compute",
    "loss": "compute",
    "backward": "compute",
    "device update": "compute",
    "d2h": "copy out",
    "update": "optimizer",
    "wait": "waits",
}
_ENDS = {f"{what} done": what for what in _LANE_OF} | {"waited": "wait"}
_NEEDS = {"compute": "copy in", "copy out": "compute"}  # the last of it, of the same block

_INK, _FAINT, _IDLE = "#1f2933", "#f3f5f7", "#f9d0cd"
_EMBEDDING, _HEAD, _WAIT = "#d9611a", "#1f2933", "#b3261e"
_LAYERS = ("#3fa7a0", "#1f5fa8", "#6b3fa0")  # from the first layer to the last
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "ytick.color": _INK,
    "xtick.color": _INK,
}


class Event(Protocol):
    """What the pipeline records; see the module."""

    what: str
    block: int
    micro_batch: int | None
    when: float


class Span(NamedTuple):
    """Something that took time.

    Attributes:
      lane: one of `LANES`; spans of a lane do not overlap.
      what: "h2d", "forward", "loss", "backward", "device update", "d2h", "update" or "wait".
      block: number of the block.
      micro_batch: number within its group, None where all of them share it.
      start: seconds, on the clock of the events.
      stop: seconds.
    """

    lane: str
    what: str
    block: int
    micro_batch: int | None
    start: float
    stop: float


def spans(events: Iterable[Event], begin: float = -math.inf, end: float = math.inf) -> list[Span]:
    """What the events say took place between `begin` and `end` (seconds), cut to that; in order of dispatch.

    Events whose other half is missing are left out.
    """
    pairs, unfinished = [], defaultdict(deque)
    for event in sorted(events, key=lambda event: event.when):
        if event.what in _LANE_OF:
            pairs.append([event, None])
            unfinished[event.what, event.block, event.micro_batch].append(pairs[-1])
        elif waiting := unfinished[_ENDS.get(event.what), event.block, event.micro_batch]:
            waiting.popleft()[1] = event.when
    found, free, last = [], {}, {}
    for event, done in pairs:
        if done is None:
            continue
        lane = _LANE_OF[event.what]
        before = free.get(lane, -math.inf)
        stop = max(done, before)
        start = min(stop, max(event.when, before, last.get((_NEEDS.get(lane), event.block), -math.inf)))
        free[lane] = last[lane, event.block] = stop
        if start < end and stop > begin:
            found.append(Span(lane, event.what, event.block, event.micro_batch, max(start, begin), min(stop, end)))
    return found


def busy_share(events: Iterable[Event], marks: Sequence[float] = ()) -> float:
    """Share of the time in which the compute lane works, 0 if it never does.

    The time is from the first of `marks` to the last, in seconds; without marks, from the lane's first start to its last
    stop.
    """
    return _busy(spans(events, *_bounds(marks)), marks)


def write_trace(events: Iterable[Event], path: str | os.PathLike, marks: Sequence[float] = ()) -> None:
    """Writes the spans in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

    Args:
      events: of the pipeline.
      path: the JSON file.
      marks: when each step began, and when the last one ended, in seconds; only what lies between is written.
    """
    found = spans(events, *_bounds(marks))
    origin = min([*marks[:1], *(span.start for span in found)], default=0.0)
    # Whole nanoseconds: slices of a thread must not overlap, not even by a rounding error.
    nanoseconds = lambda when: round((when - origin) * 1e9)  # noqa: E731
    trace = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "megatrain_jax"}}]
    for tid, lane in enumerate(LANES, 1):
        trace.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": lane}})
        trace.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    for span in found:
        start, stop = nanoseconds(span.start), nanoseconds(span.stop)
        trace.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": 1 + LANES.index(span.lane),
                "name": f"{span.what} {span.block}",
                "cat": span.what,
                "ts": start / 1000,
                "dur": (stop - start) / 1000,
                "args": {"block": span.block, "micro_batch": span.micro_batch},
            }
        )
    part = Path(path).with_name(f"{Path(path).name}.part")
    part.write_text(json.dumps({"traceEvents": trace, "displayTimeUnit": "ms"}), encoding="ascii")
    os.replace(part, path)


def draw(events: Iterable[Event], path: str | os.PathLike, marks: Sequence[float] = ()) -> bool:
    """Draws the lanes over time, blocks in their colours: forward pale, backward full, an idle device red.

    Args:
      events: of the pipeline.
      path: the PNG file.
      marks: when each step began, and when the last one ended, in seconds; empty is one step from the first span to
        the last.

    Returns:
      Whether there is a picture: False, and nothing is written, without matplotlib or without a computation.
    """
    found = spans(events, *_bounds(marks))
    if importlib.util.find_spec("matplotlib") is None or not any(span.lane == "compute" for span in found):
        return False
    import matplotlib
    from matplotlib.figure import Figure

    marks = marks or (min(span.start for span in found), max(span.stop for span in found))
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_STYLE}):
        figure = Figure(figsize=(14, 4.6), dpi=150, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
        _draw_lanes(figure.subplots(), found, marks)
        part = Path(path).with_name(f"{Path(path).name}.part")
        figure.savefig(part, format="png")
    os.replace(part, path)
    return True


class Profile:
    """A listener that keeps the events of some steps and writes ``timeline.json`` and ``timeline.png``.

    Args:
      folder: where to.
      start_step: the first of the steps, counted from 1.
      num_steps: how many.
    """

    def __init__(self, folder: str | os.PathLike, start_step: int, num_steps: int):
        self._folder = Path(folder)
        self._first, self._last = start_step, start_step + num_steps - 1
        self._events: list[Event] = []
        self._marks: list[float] = []
        self._began: int | None = None
        self._collecting = self._finished = False

    def __call__(self, event: Event) -> None:
        if self._collecting:
            self._events.append(event)

    def step_begins(self, step: int) -> str | None:
        """To be called before each step. Writes when all is known, and returns a line that says so."""
        # What runs across the ends of the profiled steps is whole only with the events of the steps around them.
        self._collecting = self._first - 1 <= step <= self._last + 1
        if self._first <= step <= self._last:
            self._began = self._began or step
            self._marks = [*self._marks[:-1], time.perf_counter(), math.inf]
        return self.finish() if step > self._last + 1 else None

    def step_ends(self, step: int) -> None:
        """To be called after each step."""
        if self._first <= step <= self._last:
            self._marks[-1] = time.perf_counter()

    def finish(self) -> str | None:
        """To be called after the last event of the run. Writes, if that was not done, as `step_begins`."""
        if self._finished:
            return None
        self._finished, self._collecting = True, False
        if not self._marks:
            return f"profile    nothing: no step from {self._first} to {self._last} was trained"
        write_trace(self._events, self._folder / "timeline.json", self._marks)
        drawn = draw(self._events, self._folder / "timeline.png", self._marks)
        self._events.clear()
        names = "timeline.json, timeline.png" if drawn else "timeline.json"
        return f"profile    {names} show {len(self._marks) - 1} step(s) from step {self._began} on"


def _bounds(marks: Sequence[float]) -> tuple[float, float]:
    return (marks[0], marks[-1]) if marks else (-math.inf, math.inf)


def _busy(found: Iterable[Span], marks: Sequence[float]) -> float:
    lane = [span for span in found if span.lane == "compute"]
    if not lane:
        return 0.0
    begin, end = marks and _bounds(marks) or (min(span.start for span in lane), max(span.stop for span in lane))
    return sum(span.stop - span.start for span in lane) / (end - begin) if end > begin else 0.0


def _draw_lanes(axes, found: Sequence[Span], marks: Sequence[float]) -> None:
    from matplotlib.colors import LinearSegmentedColormap, to_rgb
    from matplotlib.patches import Patch

    heads = {span.block for span in found if span.what == "loss"}
    last_layer = max((span.block for span in found if span.block and span.block not in heads), default=1)
    gradient = LinearSegmentedColormap.from_list("layers", _LAYERS)
    begin, end = marks[0], marks[-1]
    ms = lambda when: (when - begin) * 1e3  # noqa: E731
    pale = lambda color: tuple(0.5 + 0.5 * c for c in to_rgb(color))  # noqa: E731

    def color_of(block: int):
        if block in heads:
            return _HEAD
        return gradient((block - 1) / max(last_layer - 1, 1)) if block else _EMBEDDING

    row = {lane: -i for i, lane in enumerate(LANES)}
    for lane, y in row.items():
        axes.barh(y, ms(end), height=0.7, color=_IDLE if lane == "compute" else _FAINT, zorder=1)
    for span in found:
        color = _WAIT if span.lane == "waits" else color_of(span.block)
        color = pale(color) if span.what == "forward" else color
        width, left = ms(span.stop) - ms(span.start), ms(span.start)
        axes.barh(row[span.lane], width, left=left, height=0.7, color=color, edgecolor="white", linewidth=0.4, zorder=2)
        if width > 0.011 * ms(end):
            ink = _INK if span.what == "forward" else "white"
            axes.text(left + width / 2, row[span.lane], span.block, ha="center", va="center", color=ink, fontsize=7)
    lane = [span for span in found if span.lane == "compute"]
    for left, right in zip([begin, *(span.stop for span in lane)], [*(span.start for span in lane), end], strict=True):
        if right - left > 0.025 * (end - begin):
            text = f"{ms(right) - ms(left):,.0f}"
            axes.text(ms((left + right) / 2), row["compute"], text, ha="center", va="center", color=_WAIT, fontsize=9)
    for mark in marks[1:-1]:
        axes.axvline(ms(mark), color=_INK, linewidth=1, zorder=3)
    axes.set_xlim(0, ms(end))
    axes.set_ylim(-len(LANES) + 0.5, 0.5)
    axes.set_yticks(list(row.values()), list(row))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.set_xlabel("ms")
    steps = len(marks) - 1
    each = f"step of {ms(end):,.0f} ms" if steps == 1 else f"{steps} steps of {ms(end) / steps:,.0f} ms"
    axes.set_title(f"{each}, the device computes {_busy(found, marks):.1%} of it", loc="left", fontsize=13)
    legend = {
        "embedding": _EMBEDDING,
        "layer 1": color_of(1),
        f"layer {last_layer}": color_of(last_layer),
        "head and loss": _HEAD,
        "forward": pale(color_of(1)),
        "idle, ms": _IDLE,
        "wait for an update": _WAIT,
    }
    axes.legend(
        [Patch(color=color) for color in legend.values()],
        legend,
        ncols=len(legend),
        loc="upper left",
        bbox_to_anchor=(0, -0.12),
        frameon=False,
    )
