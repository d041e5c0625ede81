"""The thread that sees device work end, and what becomes of a listener that fails in it."""

import threading
import time

import jax.numpy as jnp
import pytest

from megatrain_jax.stream.events import Recorder


class Failing:
    """A listener that cannot take one kind of event."""

    def __init__(self, what):
        self.what, self.seen = what, []

    def __call__(self, event):
        self.seen.append(event.what)
        if event.what == self.what:
            raise LookupError(f"no place for {event.what}")


def test_a_listener_that_fails_in_the_thread_stops_nobody_from_learning_when_something_was_ready():
    recorder = Recorder(Failing("h2d done"))
    recorder.watch("h2d", 0, None, jnp.ones(3))
    assert recorder.time_of(jnp.ones(3)).result(20) <= time.perf_counter()
    with pytest.raises(LookupError, match="no place for h2d done"):
        recorder.watch("h2d", 1, None, jnp.ones(3))
    with pytest.raises(LookupError, match="no place for h2d done"):
        recorder.close()


def test_work_that_fails_is_over_too():
    recorder, failed = Recorder(lambda event: None), threading.Event()

    class Broken:
        def block_until_ready(self):
            failed.set()
            raise RuntimeError("the device is gone")

    assert recorder.time_of(Broken()).result(20) and failed.is_set()
    recorder.close()
