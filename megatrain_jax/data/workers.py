"""A function applied in processes of their own, results in the order of the items.

The processes are fresh interpreters that read tasks from a pipe. So nothing is inherited from a process in which jax has
threads, a script needs no ``if __name__ == "__main__"``, and a worker whose parent is gone reads the end of its pipe and
ends too, however the parent died.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T, R = TypeVar("T"), TypeVar("R")

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from megatrain_jax.data import workers; workers.serve()"
)


def ordered_map(function: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """``map(function, items)`` by so many processes; in this one with 0.

    At most two items a worker are taken from `items` ahead of what has been given out. All processes have ended when this
    has: at its end, when it is closed, and when something is raised.

    Args:
      function: can be pickled, as its argument and its result.

    Raises:
      Exception: what `items` or `function` raised, in the order of the items.
      RuntimeError: a worker ended by itself.
    """
    if workers == 0:
        yield from map(function, items)
        return
    with contextlib.ExitStack() as stack:
        # Undone from the last to the first: workers are killed before the threads that wait for them are.
        those = [stack.enter_context(contextlib.closing(_Worker(function))) for _ in range(workers)]
        idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in those:
            idle.put(worker)
        threads = stack.enter_context(concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="data-worker"))
        stack.callback(lambda: [worker.kill() for worker in those])
        ahead: collections.deque[concurrent.futures.Future[R]] = collections.deque()
        stack.callback(lambda: [future.cancel() for future in ahead])

        def call(item: T) -> R:
            worker = idle.get()
            try:
                return worker.call(item)
            finally:
                idle.put(worker)

        for item in items:
            ahead.append(threads.submit(call, item))
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def chunked(items: Iterable[T], count: int, size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Consecutive items in lists of at most `count`, each closed by the item with which its size reaches `most`."""
    chunk, held = [], 0
    for item in items:
        chunk.append(item)
        held += size(item)
        if len(chunk) == count or held >= most:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


class _Worker:
    """One process that applies a function; one call at a time."""

    def __init__(self, function: Callable):
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps([os.path.abspath(path) for path in sys.path])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._send(function)

    def call(self, item: Any) -> Any:
        self._send(item)
        try:
            done, result = pickle.load(self._process.stdout)
        except (EOFError, pickle.UnpicklingError):
            raise self._ended() from None
        if not done:
            raise result
        return result

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _send(self, thing: Any) -> None:
        try:
            pickle.dump(thing, self._process.stdin, pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _ended(self) -> RuntimeError:
        try:
            code = self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            return RuntimeError("a data worker closed its pipe")
        if code >= 0:
            return RuntimeError(f"a data worker ended with code {code}; its last words are above")
        name = signal.Signals(-code).name
        why = ", most likely for lack of memory: set dataset.num_workers lower" if name == "SIGKILL" else ""
        return RuntimeError(f"a data worker was ended by {name}{why}")


def serve() -> None:
    """The life of a worker: reads the function, then items, until its pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends its workers
    with open(os.dup(0), "rb") as tasks, open(os.dup(1), "wb") as results:
        os.dup2(2, 1)  # what libraries print must not get among the results
        function = pickle.load(tasks)
        while True:
            try:
                item = pickle.load(tasks)
            except EOFError:
                return
            try:
                result = pickle.dumps((True, function(item)), pickle.HIGHEST_PROTOCOL)
            except Exception as error:  # noqa: BLE001 (it is raised in the parent)
                result = _as_bytes(error)
            try:
                results.write(result)
                results.flush()
            except BrokenPipeError:
                return


def _as_bytes(error: Exception) -> bytes:
    trace = "in a data worker:\n" + "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps((False, error), pickle.HIGHEST_PROTOCOL)
        pickle.loads(pickled)[1].add_note(trace)
        error.add_note(trace)
        return pickle.dumps((False, error), pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 (an exception need not survive pickling)
        return pickle.dumps((False, RuntimeError(trace)), pickle.HIGHEST_PROTOCOL)
