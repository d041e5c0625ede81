"""Blocks that stay on the device, and layers that keep their intermediates, train exactly as streamed ones do."""

import numpy as np
import pytest

from megatrain_jax.host.store import Rows
from megatrain_jax.stream.events import Recorder
from megatrain_jax.stream.pipeline import Settings
from megatrain_jax.stream.resident import ResidentTensor
from megatrain_jax.stream.updater import NonFiniteError
from tests.conftest import small_spec
from tests.reference import (
    assert_same_gradients,
    execution,
    load_state_arrays,
    loss_and_grads,
    make_model,
    nearest_bfloat16,
    random_batch,
    random_weights,
    state_arrays,
    training,
)

SPEC = small_spec(3, qk_norm=True)
TIED = small_spec(3, tied=True, sliding_window=4)


def read(model):
    return {name: state_arrays(tensor) for name, tensor in model.store.tensors.items()}


def train(spec, settings, resident, steps):
    model = make_model(spec, random_weights(spec), resident=resident)
    with training(model, settings) as (pipeline, updater):
        outcomes = [pipeline.train_step(step) for step in steps]
        updater.drain()
        return outcomes, read(model), pipeline


@pytest.mark.parametrize("spec", [SPEC, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "settings", [Settings(max_grad_norm=0.5), Settings(skip_nonfinite=False)], ids=["held", "at once"]
)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_resident_blocks_and_kept_layers_change_nothing(spec, settings, micro_batches):
    steps = [[random_batch(spec, 10 * s + m) for m in range(micro_batches)] for s in range(4)]
    expected, state, _ = train(spec, settings, (), steps)
    for resident, keep in [((0, 4), 0), ((0, 2), 2), ((0, 1, 2, 3, 4), 3)]:
        outcomes, other, _ = train(spec, settings._replace(keep_layers=keep), resident, steps)
        for got, wanted in zip(outcomes, expected, strict=True):
            assert got.loss == pytest.approx(wanted.loss, rel=1e-6)
            assert got.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-6)
        for name, arrays in state.items():
            assert set(other[name]) == set(arrays)
            for key, value in arrays.items():
                np.testing.assert_allclose(other[name][key], value, rtol=0, atol=1e-6, err_msg=f"{name} {key}")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_of_kept_layers_equal_those_of_one_function(packed, micro_batches):
    weights = random_weights(SPEC)
    batches = [random_batch(SPEC, m, packed=packed) for m in range(micro_batches)]
    loss, expected = loss_and_grads(SPEC, weights, batches)
    for keep in (1, 3):
        model = make_model(SPEC, weights)
        grads = {}

        def sink(block, landing, model=model, grads=grads):
            for path, tensor in model.store.owned(block).items():
                grads[tensor.name] = np.array(landing.arrays[path])

        with training(model, Settings(keep_layers=keep)) as (pipeline, _):
            got, _, _ = pipeline.gradients(batches, sink)
        assert float(got) == pytest.approx(loss, rel=1e-6)
        assert_same_gradients(grads, expected, 1e-5)


def test_a_resident_block_skips_a_step_that_is_not_finite_and_the_run_stops():
    model = make_model(SPEC, random_weights(SPEC), resident=range(5))
    batch = random_batch(SPEC)
    weights = batch.loss_weights.copy()
    weights[0, 0] = np.nan
    before = read_masters(model)
    with training(model, Settings(skip_nonfinite=False)) as (pipeline, _):
        with pytest.raises(NonFiniteError):
            pipeline.train_step([batch._replace(loss_weights=weights)])
    for name, value in read_masters(model).items():
        np.testing.assert_array_equal(value, before[name])


def read_masters(model):
    return {name: tensor.read() for name, tensor in model.store.tensors.items()}


def test_nothing_of_a_resident_block_crosses_the_link():
    events = []
    model = make_model(SPEC, random_weights(SPEC), resident=(0, 4))
    with training(model, Settings(keep_layers=1), record=Recorder(events.append)) as (pipeline, updater):
        pipeline.train_step([random_batch(SPEC)])
        updater.drain()
    assert {e.block for e in events if e.what == "d2h"} == {1, 2, 3}
    assert {e.block for e in events if e.what == "update"} == {1, 2, 3}
    assert {e.block for e in events if e.what == "device update"} == {0, 4}
    assert {e.block for e in events if e.what == "device update done"} == {0, 4}
    fetched = [e.block for e in events if e.what == "h2d"]
    assert fetched.count(3) == 1  # kept for backward
    assert fetched.count(1) == fetched.count(2) == 2 and not {0, 4} & set(fetched)


@pytest.mark.parametrize("shape", [(7, 3), (5,)])
def test_state_moves_between_host_and_device(shape):
    run = execution()
    tensor = ResidentTensor("x", shape, owner=0, trainable=True, rows=Rows(), mesh=run.mesh, dtype="bfloat16")
    value = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    value.reshape(-1)[:2] = 1 + 2**-8, -1 - 2**-8  # ties
    tensor.assign(value)
    np.testing.assert_array_equal(tensor.read(), value)
    np.testing.assert_array_equal(np.asarray(tensor.on_device()), nearest_bfloat16(value))
    value[:] = 0  # a copy was taken
    assert np.abs(tensor.read()).max() > 0
    with pytest.raises(ValueError, match="x: expected shape"):
        tensor.assign(np.zeros((2, 2), np.float32))


@pytest.mark.parametrize("resident", [(0, 1), (4,)])
def test_a_checkpoint_of_resident_blocks_is_that_of_streamed_ones(resident):
    steps = [[random_batch(SPEC, s)] for s in range(4)]
    _, whole, _ = train(SPEC, Settings(), (), steps)
    first, second = make_model(SPEC, random_weights(SPEC), resident=resident), make_model(SPEC, random_weights(SPEC, 1))
    saved = {}
    for model, part in ((first, steps[:2]), (second, steps[2:])):
        with training(model, Settings()) as (pipeline, updater):
            for name, arrays in saved.items():
                load_state_arrays(model.store.tensors[name], arrays)
            for step in part:
                pipeline.train_step(step)
            updater.drain()
            saved = read(model)
    for name, arrays in whole.items():
        for key, value in arrays.items():
            np.testing.assert_allclose(saved[name][key], value, rtol=0, atol=1e-6, err_msg=f"{name} {key}")
