"""A checkpoint is written while training goes on: it is the state before, and training is as without it."""

import concurrent.futures
import threading
import time

import pytest

from megatrain_jax.checkpoint import saver as saver_module
from megatrain_jax.checkpoint import state
from megatrain_jax.checkpoint.saver import Saver
from megatrain_jax.config import UserError
from megatrain_jax.stream.events import Recorder
from tests.checkpoint.test_state import arrays
from tests.conftest import small_spec
from tests.reference import make_model, random_batch, random_weights, training

SPEC = small_spec(3)
BLOCKS = range(len(SPEC.blocks))
SECONDS = 30  # after which a test gives up


def bits(store):
    return {key: array.tobytes() for key, array in arrays(store).items()}


def until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def gates(monkeypatch):
    """A block counts as written once its gate is open."""
    gates, save = [threading.Event() for _ in BLOCKS], state.save

    def gated(*args, done_with, **options):
        def written(block):
            assert gates[block].wait(SECONDS)
            done_with(block)

        save(*args, done_with=written, **options)

    monkeypatch.setattr(saver_module.state, "save", gated)
    return gates


@pytest.mark.parametrize("resident", [(), (0, 2)])
def test_a_block_is_updated_once_it_is_written_and_no_sooner(tmp_path, gates, resident):
    events, steps = [], [[random_batch(SPEC, seed)] for seed in range(2)]
    undisturbed = make_model(SPEC, random_weights(SPEC), resident=resident)
    with training(undisturbed) as (pipeline, updater):
        for step in steps:
            pipeline.train_step(step)
        updater.drain()
    model = make_model(SPEC, random_weights(SPEC), resident=resident)
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        training(model, record=Recorder(events.append)) as (pipeline, updater),
        Saver(tmp_path, model.store, None) as saver,
    ):
        pipeline.train_step(steps[0])
        updater.drain()
        before = bits(model.store)
        saver.start(1, {})
        del events[:]
        going_on = pool.submit(pipeline.train_step, steps[1])
        happened = lambda what: [event.block for event in events if event.what == what]  # noqa: E731
        until(lambda: 0 in happened("backward"))  # forward and backward need nothing of the checkpoint
        assert saver.is_running and happened("update") == []
        streamed = [block for block in BLOCKS if block not in resident]
        for block in BLOCKS:
            expected = [number for number in streamed if number <= block]
            gates[block].set()
            until(lambda: happened("update done") == expected)  # noqa: B023
            assert happened("update") == expected
        assert going_on.result(SECONDS).applied
        updater.drain()
        assert saver.result().startswith("saved      checkpoint-1 in ")
        assert saver.result() is None
    assert bits(model.store) == bits(undisturbed.store) != before
    found = make_model(SPEC, random_weights(SPEC, 1), resident=resident)
    with training(found):
        state.load(tmp_path / "checkpoint-1", found.store)
        assert bits(found.store) == before


def test_a_save_that_fails_holds_nothing_back(tmp_path, monkeypatch):
    def full(*args, **options):
        raise UserError("no room")

    monkeypatch.setattr(saver_module.state, "save", full)
    model = make_model(SPEC, random_weights(SPEC))
    with training(model) as (pipeline, updater):
        with pytest.raises(UserError, match="no room"), Saver(tmp_path, model.store, None) as saver:
            pipeline.train_step([random_batch(SPEC)])
            updater.drain()
            saver.start(1, {})
            pipeline.train_step([random_batch(SPEC)])
            updater.drain()
            saver.result()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error, left", [(KeyboardInterrupt, []), (ArithmeticError, ["checkpoint-1"])])
def test_after_an_error_it_is_finished_and_after_an_interruption_given_up(tmp_path, gates, error, left):
    model = make_model(SPEC, random_weights(SPEC))
    with training(model), pytest.raises(error), Saver(tmp_path, model.store, None) as saver:
        saver.start(1, {})
        threading.Timer(0.1, lambda: [gate.set() for gate in gates]).start()
        raise error
    assert [path.name for path in tmp_path.iterdir()] == left
