"""SIGTERM and SIGINT: the first asks a run to stop, the second ends it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator


class Stop:
    """Name of the first SIGTERM or SIGINT, None before it."""

    signal: str | None = None


@contextlib.contextmanager
def stop_signals(tell: Callable[[str], None]) -> Iterator[Stop]:
    """The first SIGTERM or SIGINT is noted; the second does what it would have done without this.

    Where that is to end the process, it ends it even while the main thread is inside a call that does not return: Python
    runs its handlers between two instructions of the main thread, so another thread listens too.

    Args:
      tell: called with a line, in that thread, at the first signal.
    """
    stop, before = Stop(), {}

    def on_signal(number, _frame):
        stop.signal = signal.Signals(number).name
        for each, handler in before.items():
            signal.signal(each, handler)

    def listen():
        told = False
        while number := ear.recv(1):
            if number[0] not in before:
                continue
            if told and before[number[0]] is signal.SIG_DFL:
                os._exit(128 + number[0])
            if not told:
                tell(f"stopping   after this step ({signal.Signals(number[0]).name}); a second signal ends it at once")
            told = True

    ear, mouth = socket.socketpair()
    mouth.setblocking(False)
    thread, listening_before = threading.Thread(target=listen, name="megatrain-signals", daemon=True), -1
    with contextlib.suppress(ValueError):  # not the main thread: the caller keeps its handlers
        listening_before = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, on_signal)
    thread.start()
    try:
        yield stop
    finally:
        if before:
            signal.set_wakeup_fd(listening_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        mouth.close()
        thread.join()
        ear.close()


@contextlib.contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """Ctrl-C ends the process as SIGTERM does, at once and without a traceback, where it would raise KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # ignored, as under nohup, or somebody else's
        return
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
