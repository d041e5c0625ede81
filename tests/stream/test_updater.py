"""The optimizer's thread: which block it takes, what it refuses, how it ends."""

import threading

import pytest

from megatrain_jax.stream.events import Recorder
from megatrain_jax.stream.updater import Updater
from tests.conftest import small_spec
from tests.reference import make_model, random_weights


class Landing:
    """Gradients that land when they are told to."""

    def __init__(self, landed: bool = True):
        self._event = threading.Event()
        if landed:
            self.land()

    def land(self):
        self._event.set()

    def wait(self):
        assert self._event.wait(20)

    def is_ready(self):
        return self._event.is_set()

    def rows(self, path):
        return []


class Order:
    """Stands in for the optimizer and notes which blocks it was asked for."""

    def __init__(self):
        self.blocks = []

    def update(self, tensor, grads, scale):
        if tensor.owner not in self.blocks:
            self.blocks.append(tensor.owner)


@pytest.fixture
def updater():
    spec = small_spec(3)
    order, recorder = Order(), Recorder()
    updater = Updater(make_model(spec, random_weights(spec)).store, order, recorder)
    updater.order = order
    yield updater
    updater.close()
    recorder.close()


def test_of_the_landed_blocks_the_one_needed_soonest_is_taken(updater):
    first, late = Landing(landed=False), Landing(landed=False)
    updater.submit(4, first, 1.0)  # the thread waits for this one while the others come
    while updater._jobs:
        pass
    for block, landing in [(3, Landing()), (0, late), (2, Landing()), (1, Landing())]:
        updater.submit(block, landing, 1.0)
    first.land()
    updater.wait([1, 2, 3])
    assert updater.order.blocks == [4, 1, 2, 3] and updater.is_pending([0]) and not updater.is_pending([1, 2, 3, 4])
    late.land()
    updater.drain()
    assert updater.order.blocks == [4, 1, 2, 3, 0]


def test_a_block_is_not_updated_twice_at_once(updater):
    landing = Landing(landed=False)
    updater.submit(1, landing, 1.0)
    with pytest.raises(RuntimeError, match="block 1 is still being updated"):
        updater.submit(1, Landing(), 1.0)
    landing.land()
    updater.wait([1])
    updater.submit(1, Landing(), 1.0)
    updater.drain()


def test_what_was_submitted_is_finished_before_the_end(updater):
    for block in range(5):
        updater.submit(block, Landing(), 1.0)
    updater.close()
    assert sorted(updater.order.blocks) == [0, 1, 2, 3, 4]


def test_after_an_exception_nothing_more_is_begun(updater):
    first = Landing(landed=False)
    with pytest.raises(LookupError), updater:
        updater.submit(4, first, 1.0)
        while updater._jobs:
            pass
        for block in range(3):
            updater.submit(block, Landing(), 1.0)
        threading.Timer(0.2, first.land).start()
        raise LookupError
    assert updater.order.blocks == [4]


def test_an_error_is_raised_by_whatever_comes_next_and_does_not_keep_it_from_closing(updater):
    def broken(tensor, grads, scale):
        raise MemoryError("no memory for the update")

    updater.order.update = broken
    updater.submit(2, Landing(), 1.0)
    for call in (
        lambda: updater.wait([2]),
        updater.drain,
        lambda: updater.is_pending([0]),
        lambda: updater.submit(1, Landing(), 1.0),
    ):
        with pytest.raises(MemoryError, match="no memory for the update"):
            call()
    updater.close()
