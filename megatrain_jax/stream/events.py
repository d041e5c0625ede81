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

from megatrain_jax.watchdog import waiting


class Event(NamedTuple):
    """One thing that happened.

    Attributes:
      what: "h2d", "forward", "loss", "backward", "d2h", and "device update" of a block that stays on the device, when the
        dispatching thread issued it, with " done" appended when the device had finished it; "wait" and "waited" around the dispatching thread's waits for an update; "update"
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

    What the listener raises in that thread is raised again by the next `watch`, or by `close`.

    Args:
      listener: called from several threads; None drops the events.
    """

    def __init__(self, listener: Listener | None = None):
        self._listener = listener
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None  # made when it is first needed
        self._error: BaseException | None = None

    def __call__(self, what: str, block: int, micro_batch: int | None = None, nbytes: int = 0) -> None:
        if self._listener is not None:
            self._listener(Event(what, block, micro_batch, time.perf_counter(), nbytes))

    def watch(self, what: str, block: int, micro_batch: int | None, arrays: Any, nbytes: int = 0) -> None:
        """Records that `what` was dispatched now, and "`what` done" when `arrays` are ready.

        The arrays must not be donated to a later computation.
        """
        if self._listener is not None:
            self._raise_error()
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
            with waiting("the end of what the device was last asked to do"):
                self._thread.join()
            self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

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
            try:
                done()
            except BaseException as error:  # noqa: BLE001 - whoever waits for what comes after it must not wait for ever
                self._error = self._error or error
