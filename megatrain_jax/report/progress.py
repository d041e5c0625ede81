"""The progress line: where the run is, how it goes, and when it will be done."""

from __future__ import annotations

import collections
import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TextIO

_WINDOW = 20  # steps that the ETA looks back on


class Progress(Protocol):
    """A context manager between whose ends the run reports.

    A record has "step" (steps done) and, where known, "loss" (nats per supervised token), "learning_rate",
    "grad_norm" (before clipping), "tokens_per_second" (real tokens, no padding), "supervised_share" (of the real
    tokens) and "skipped_steps" (so far).
    """

    def __enter__(self) -> Progress: ...

    def __exit__(self, *exception: object) -> None: ...

    def step(self, record: Mapping[str, Any]) -> None:
        """Shows a step."""

    def message(self, text: str) -> None:
        """Prints a line that stays: an evaluation, a checkpoint, a warning."""


def make_progress(
    mode: Literal["auto", "rich", "plain", "off"],
    total_steps: int,
    start_step: int = 0,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """What shows the progress of a run.

    Args:
      mode: "rich" is one live line, "plain" a line a record, "off" messages alone; "auto" is rich on a terminal and
        plain elsewhere.
      total_steps: steps of the whole run.
      start_step: steps done before this process began.
      stream: where to; None is the standard output.
      clock: seconds, for the ETA.
    """
    stream = stream or sys.stdout
    if mode == "auto":
        mode = "rich" if stream.isatty() else "plain"
    if mode == "rich":
        return _Rich(total_steps, start_step, stream, clock)
    return _Plain(total_steps, stream, clock, quiet=mode == "off")


def format_duration(seconds: float) -> str:
    """Seconds as a person says them, in two units: 45s, 3m12s, 2h05m, 1d03h."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02}h"
    if hours:
        return f"{h}h{m:02}m"
    return f"{m}m{s:02}s" if minutes else f"{s}s"


class _Eta:
    """Time left, from the pace of the last steps that this process did; what it did not do tells nothing."""

    def __init__(self, total_steps: int, clock: Callable[[], float]):
        self._total_steps = total_steps
        self._clock = clock
        self._marks: collections.deque[tuple[int, float]] = collections.deque(maxlen=_WINDOW + 1)

    def after(self, step: int) -> list[str]:
        """To be called as `step` is done. Empty until two steps are known: the first one also compiled."""
        self._marks.append((step, self._clock()))
        (first, began), (last, ended) = self._marks[0], self._marks[-1]
        if last == first:
            return []
        return [f"eta {format_duration((self._total_steps - step) * (ended - began) / (last - first))}"]


def _fields(record: Mapping[str, Any]) -> list[str]:
    shown = {
        "loss": "loss {:.4f}",
        "learning_rate": "lr {:.2e}",
        "grad_norm": "grad norm {:.3f}",
        "tokens_per_second": "{:.0f} tokens/s",
        "supervised_share": "supervised {:.0%}",
    }
    fields = [text.format(float(record[key])) for key, text in shown.items() if record.get(key) is not None]
    return fields + ([f"skipped {record['skipped_steps']}"] if record.get("skipped_steps") else [])


class _Plain:
    """A line a record, to be read by people and by grep."""

    def __init__(self, total_steps: int, stream: TextIO, clock: Callable[[], float], quiet: bool):
        self._total_steps = total_steps
        self._stream = stream
        self._eta = _Eta(total_steps, clock)
        self._quiet = quiet

    def __enter__(self) -> _Plain:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def step(self, record: Mapping[str, Any]) -> None:
        if not self._quiet:
            count = f"{record['step']:>{len(str(self._total_steps))}}/{self._total_steps}"
            self.message("  ".join([f"step {count}", *_fields(record), *self._eta.after(record["step"])]))

    def message(self, text: str) -> None:
        # In one piece, because several threads have something to say.
        with contextlib.suppress(
            OSError
        ):  # nobody reads any more, or the disk that it goes to is full: no reason to end
            self._stream.write(f"{text}\n")
            self._stream.flush()


class _Rich:
    """One line that moves; messages scroll above it."""

    def __init__(self, total_steps: int, start_step: int, stream: TextIO, clock: Callable[[], float]):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(file=stream, force_terminal=True, highlight=False)
        # A narrow terminal needs its width for the numbers.
        bar = [BarColumn(bar_width=console.width - 110)] if console.width >= 120 else []
        self._progress = Progress(*bar, TextColumn("{task.fields[text]}", markup=False), console=console)
        start = f"step {start_step}/{total_steps}"
        self._task = self._progress.add_task("", total=total_steps, completed=start_step, text=start)
        self._total_steps = total_steps
        self._eta = _Eta(total_steps, clock)

    def __enter__(self) -> _Rich:
        self._progress.start()
        self._progress.console.show_cursor(True)  # a process that is killed cannot bring it back
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def step(self, record: Mapping[str, Any]) -> None:
        # What does not fit is cut off at the end, so the time left stands at the front.
        count = f"step {record['step']}/{self._total_steps}"
        text = "  ".join([count, *self._eta.after(record["step"]), *_fields(record)])
        self._progress.update(self._task, completed=record["step"], text=text)

    def message(self, text: str) -> None:
        self._progress.console.print(text, markup=False)
