"""What the threads of a run wait for, and the thread that ends a run which waits too long.

A device, a driver or a file system that never answers cannot be interrupted: a thread that waits for it is inside a
call that does not return. So whoever waits says for what, and a watchdog that sees one wait go on and on names all of
them and ends the process. What was saved before is whole.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

WARN_AFTER = 0.1  # of the time after which a run is ended


class _Wait:
    def __init__(self, what: str):
        self.what, self.thread = what, threading.current_thread().name


_waits: set[_Wait] = set()  # of every thread of this process
_guard = threading.Lock()
_progress = 0  # counts up


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Says what this thread waits for, such as "the update of block 3". To be entered anew whenever there was progress."""
    wait = _Wait(what)
    with _guard:
        _waits.add(wait)
    try:
        yield
    finally:
        with _guard:
            _waits.discard(wait)


def progressed() -> None:
    """Says that long work, such as writing a checkpoint, went on; whoever waits for it has not waited in vain."""
    global _progress
    with _guard:
        _progress += 1


def end_process(message: str) -> NoReturn:
    """Ends the process, whatever its threads are in, with exit code 1. The message is the last line on stderr."""
    faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
    print(f"error: {message}", file=sys.__stderr__, flush=True)
    os._exit(1)


class Watchdog:
    """A thread that looks at what is waited for, until it is closed.

    Time in which the process itself was stopped (a suspended machine, SIGSTOP) does not count.

    Args:
      seconds: a single wait as long as this ends the run; a tenth of it is warned of. 0 is off.
      warn: called with a line, once for each wait.
      end: called with a line when the time is over.
    """

    def __init__(self, seconds: float, warn: Callable[[str], None], end: Callable[[str], None] = end_process):
        self._seconds, self._warn, self._end = seconds, warn, end
        self._tick = min(1.0, seconds / 20)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megatrain-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._seconds:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        if self._seconds:
            self._thread.join()

    def _run(self) -> None:
        ages: dict[_Wait, float] = {}
        warned: set[_Wait] = set()
        last, seen = time.monotonic(), _progress
        while not self._closed.wait(self._tick):
            now = time.monotonic()
            passed, last = min(now - last, 2 * self._tick), now
            with _guard:
                ages = {wait: ages.get(wait, -passed) + passed if seen == _progress else 0.0 for wait in _waits}
                seen = _progress
            warned.intersection_update(ages)
            if max(ages.values(), default=0.0) >= self._seconds:
                self._end(
                    f"training.watchdog_seconds: no progress for {self._seconds:g} s: {_describe(ages)}; the same "
                    "command continues from the last checkpoint, and a larger value waits longer"
                )
                return
            late = {wait for wait, age in ages.items() if age >= WARN_AFTER * self._seconds} - warned
            if late:
                warned |= late
                self._warn(f"waiting    {_describe({wait: ages[wait] for wait in late})}")


def _describe(ages: dict[_Wait, float]) -> str:
    by_age = sorted(ages.items(), key=lambda item: -item[1])
    return ", ".join(f"{wait.thread} waits for {wait.what} since {age:.0f} s" for wait, age in by_age)
