"""The optimizer's thread: which block it takes, what it refuses, how it ends."""

import threading
import time

import numpy as np
import pytest

from megatrain_jax.stream import updater as updater_module
from megatrain_jax.stream.events import Recorder
from megatrain_jax.stream.pipeline import Settings
from megatrain_jax.stream.updater import Updater
from tests.conftest import small_spec
from tests.reference import execution, make_model, random_batch, random_weights, training


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


# ---------------------------------------------------------------------- an embedding that is updated in turns


class InTurns(Order):
    """Notes rows of the table beside blocks, and goes on with them when it may."""

    def __init__(self):
        super().__init__()
        self.taken, self.gate, self.asked = [], threading.Semaphore(0), threading.Event()

    def update_table_rows(self, tensor, grads, scale, numbers, *, last):
        self.asked.set()
        assert self.gate.acquire(timeout=20)
        self.taken.append((numbers.tolist(), last))
        self.blocks.append(0)


@pytest.fixture
def in_turns(monkeypatch):
    pytest.importorskip("numba")
    spec = small_spec(2)
    monkeypatch.setattr(updater_module, "TURN", 10 * spec.hidden_size)
    order = InTurns()
    model = make_model(spec, random_weights(spec), execution("bfloat16"), layout="split")
    with Updater(model.store, order, Recorder()) as updater:
        updater.order, updater.height = order, spec.vocab_size
        yield updater
        order.gate.release(100)


def test_rows_that_are_waited_for_come_first_and_the_rest_after_all_other_blocks(in_turns):
    in_turns.submit(0, Landing(), 1.0)
    assert in_turns.order.asked.wait(20)  # the first turn is on its way before anybody waits for rows
    waiting = threading.Thread(target=in_turns.wait_for_rows, args=([[70, 3, 71], [70, -1, in_turns.height]],))
    waiting.start()
    while in_turns._wanted is None:
        pass
    for block in (2, 1):
        in_turns.submit(block, Landing(), 1.0)
    in_turns.order.gate.release(2)
    waiting.join(20)
    assert not waiting.is_alive() and in_turns.is_pending([0])
    in_turns.wait([1, 2])
    first, then = in_turns.order.taken
    assert first == ([*range(10)], False) and then == ([70, 71], False)
    assert in_turns.order.blocks == [0, 0, 1, 2]
    in_turns.wait_for_rows([3, 70])  # they are written
    in_turns.order.gate.release(100)
    in_turns.drain()
    numbers = [number for some, _ in in_turns.order.taken for number in some]
    assert sorted(numbers) == [*range(in_turns.height)] and all(len(some) <= 10 for some, _ in in_turns.order.taken)
    assert [last for _, last in in_turns.order.taken].index(True) == len(in_turns.order.taken) - 1


def test_the_next_update_of_the_table_waits_for_the_rest_of_the_last_one(in_turns):
    in_turns.submit(0, Landing(), 1.0)
    in_turns.order.gate.release(1)
    in_turns.wait_for_rows([5])
    threading.Timer(0.2, in_turns.order.gate.release, [100]).start()
    in_turns.submit(0, Landing(), 1.0)
    in_turns.drain()
    numbers = [number for some, _ in in_turns.order.taken for number in some]
    assert sorted(numbers) == sorted([*range(in_turns.height)] * 2)
    assert sorted(numbers[: in_turns.height]) == [*range(in_turns.height)]


def test_an_error_in_a_turn_reaches_who_waits_for_rows(in_turns):
    def broken(*args, **kwargs):
        raise MemoryError("no memory for the rows")

    in_turns.order.update_table_rows = broken
    in_turns.submit(0, Landing(), 1.0)
    with pytest.raises(MemoryError, match="no memory for the rows"):
        in_turns.wait_for_rows([5])


@pytest.mark.parametrize("settings", [Settings(max_grad_norm=0.5), Settings(skip_nonfinite=False)])
def test_training_is_the_same_bit_for_bit_and_the_rest_overlaps_the_next_step(monkeypatch, settings):
    pytest.importorskip("numba")
    spec, events, found, still_there = small_spec(2), [], [], []

    def listener(event):
        events.append(event)
        if event.what == "d2h" and event.block == 0:
            still_there.append(updater.is_pending([0]))
        if event.what == "update done" and event.block == 0:
            time.sleep(0.01)

    batches = [random_batch(spec, step) for step in range(4)]
    for turn in (updater_module.TURN, 3 * spec.hidden_size):
        monkeypatch.setattr(updater_module, "TURN", turn)
        model = make_model(spec, random_weights(spec), execution("bfloat16"), layout="split")
        del events[:]
        with training(model, settings, record=Recorder(listener)) as (pipeline, updater):
            losses = [pipeline.train_step([batch]).loss for batch in batches]
            updater.drain()
        arrays = {
            (name, key): np.empty(array.shape, array.dtype)
            for name, tensor in model.store.tensors.items()
            for key, array in tensor.state().items()
        }
        for (name, key), out in arrays.items():
            model.store.tensors[name].state()[key].read(0, out.reshape(-1))
        found.append((losses, {key: out.tobytes() for key, out in arrays.items()}))
    assert len(still_there) == 2 * len(batches) and not any(still_there)  # there is room for one gradient of the table
    assert found[0] == found[1] and len(set(found[0][0])) == len(batches)
    forwards = [i for i, e in enumerate(events) if e.what == "forward" and e.block == 0]
    updates = [i for i, e in enumerate(events) if e.what == "update" and e.block == 0]
    assert sum(1 for i in updates if i > forwards[1]) > 3  # begun when the second step's forward was under way
