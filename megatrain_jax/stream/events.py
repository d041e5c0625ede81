"""What happened in the pipeline, and when: plain records, and the thread that sees device work end."""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Event(NamedTuple):
    """One thing that happened.

    Attributes:
      what: "h2d", "forward", "loss", "backward", "d2h" when the dispatching thread issued it, with " done" appended when
        the device had finished it; "wait" and "waited" around the dispatching thread's waits for an update; "update"
        and "update done" in the optimizer's thread.
      block: number of the block, the embedding being 0.
      micro_batch: number within the step, None where all of them share it.
      when: seconds of `time.perf_counter`.
      nbytes: what crosses the link, for "h2d" and "d2h".
    """

    what: str
    block: int
    micro_batch: int | None
    when: float
    nbytes: int = 0


Listener = Callable[[Event], None]


class Recorder:
    """Passes events to a listener; a thread of its own waits for device work, so the step never synchronises for it.

    Args:
      listener: called from several threads; None drops the events.
    """

    def __init__(self, listener: Listener | None = None):
        self._listener = listener
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None  # made when it is first needed

    def __call__(self, what: str, block: int, micro_batch: int | None = None, nbytes: int = 0) -> None:
        if self._listener is not None:
            self._listener(Event(what, block, micro_batch, time.perf_counter(), nbytes))

    def watch(self, what: str, block: int, micro_batch: int | None, arrays: Any, nbytes: int = 0) -> None:
        """Records that `what` was dispatched now, and "`what` done" when `arrays` are ready.

        The arrays must not be donated to a later computation.
        """
        if self._listener is not None:
            self(what, block, micro_batch, nbytes)
            self._when_ready(arrays, lambda: self(f"{what} done", block, micro_batch))

    def time_of(self, arrays: Any) -> concurrent.futures.Future[float]:
        """When `arrays` became ready, in seconds of `time.perf_counter`."""
        future: concurrent.futures.Future[float] = concurrent.futures.Future()
        self._when_ready(arrays, lambda: future.set_result(time.perf_counter()))
        return future

    def close(self) -> None:
        """Returns when everything watched has been recorded."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _when_ready(self, arrays: Any, done: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="megatrain-watcher", daemon=True)
            self._thread.start()
        self._queue.put((arrays, done))

    def _watch(self) -> None:
        while (item := self._queue.get()) is not None:
            arrays, done = item
            del item
            with contextlib.suppress(Exception):  # the dispatching thread meets the same failure, and reports it
                jax.block_until_ready(arrays)
            del arrays
            done()
