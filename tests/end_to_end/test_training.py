"""Ten streamed steps equal ten steps of plain optax on the whole model."""

import numpy as np
import optax
import pytest

from megatrain_jax.config import OptimizerConfig, TrainingConfig
from megatrain_jax.host.optimizer import make_schedule
from megatrain_jax.stream.pipeline import Settings
from megatrain_jax.stream.updater import NonFiniteError
from tests.conftest import small_spec
from tests.reference import (
    PlainOptax,
    global_norm,
    loss_and_grads,
    make_model,
    random_batch,
    random_weights,
    state_arrays,
    training,
)

slow = pytest.mark.exhaustive
STEPS, DECAY = 10, 0.1
CONFIG = TrainingConfig(learning_rate=1e-3, warmup_steps=2, weight_decay=DECAY)
CLIP = 0.5
EPS = 1e-4  # adam divides by |g| + eps: a smaller one would compare rounding errors, of elements that are nearly 0

CLIPPED = Settings(max_grad_norm=CLIP)
HELD = Settings()
AT_ONCE = Settings(skip_nonfinite=False)


def spec_of(tied):
    return small_spec(2, tied=tied, sliding_window=4, qk_norm=True)


def steps_of(spec, micro_batches=1):
    return [[random_batch(spec, 10 * step + m) for m in range(micro_batches)] for step in range(STEPS)]


def poisoned(batch):
    weights = batch.loss_weights.copy()
    weights[0, 3] = np.nan
    return batch._replace(loss_weights=weights)


def plain_optax(kind: str, weights, max_norm: float):
    rates = make_schedule(CONFIG, STEPS)
    mask = {name: "norm" not in name and "bias" not in name for name in weights}
    decayed = optax.add_decayed_weights(DECAY, mask=mask)
    update = {
        "adamw": optax.adamw(rates, eps=EPS, weight_decay=DECAY, mask=mask),
        "adam": optax.chain(decayed, optax.adam(rates, eps=EPS)),
        "lion": optax.lion(rates, weight_decay=DECAY, mask=mask),
        "sgd": optax.chain(decayed, optax.sgd(rates, momentum=0.9)),
    }[kind]
    return optax.chain(optax.clip_by_global_norm(max_norm), update) if max_norm else update


def read(model):
    return {name: tensor.read() for name, tensor in model.store.tensors.items()}


def state(model):
    return {(name, key): value for name, t in model.store.tensors.items() for key, value in state_arrays(t).items()}


@pytest.mark.parametrize(
    "kind, settings, micro_batches, tied, poisoned_step",
    [
        ("adamw", CLIPPED, 1, True, None),
        ("adamw", HELD, 1, False, None),
        ("adamw", AT_ONCE, 1, True, None),
        ("adamw", CLIPPED, 1, False, 4),
        ("adamw", HELD, 1, True, 0),
        ("adamw", CLIPPED._replace(group_size=1), 3, True, None),
        ("adamw", CLIPPED._replace(group_size=2), 3, True, 4),
        pytest.param("adamw", AT_ONCE._replace(group_size=2), 3, False, None, marks=slow),
        pytest.param("adamw", CLIPPED, 3, False, None, marks=slow),
        ("adam", CLIPPED, 1, True, None),
        ("lion", CLIPPED, 1, True, None),
        ("sgd", AT_ONCE, 1, False, None),
        pytest.param("adam", AT_ONCE, 1, False, None, marks=slow),
        pytest.param("lion", HELD, 1, False, 4, marks=slow),
        pytest.param("sgd", CLIPPED, 1, True, 4, marks=slow),
    ],
)
def test_ten_steps_equal_plain_optax(kind, settings, micro_batches, tied, poisoned_step):
    spec = spec_of(tied)
    weights, steps = random_weights(spec), steps_of(spec, micro_batches)
    if poisoned_step is not None:
        steps[poisoned_step][-1] = poisoned(steps[poisoned_step][-1])
    model = make_model(spec, weights)
    plain = PlainOptax(spec, weights, plain_optax(kind, weights, settings.max_grad_norm))
    clipped = 0
    with training(model, settings, optimizer=OptimizerConfig(type=kind, eps=EPS), config=CONFIG, total_steps=STEPS) as (
        pipeline,
        updater,
    ):
        for number, step in enumerate(steps):
            outcome = pipeline.train_step(step)
            loss, norm = plain.step(step, skip_nonfinite=True)
            assert outcome.applied == (number != poisoned_step)
            if outcome.applied:
                assert outcome.loss == pytest.approx(loss, rel=1e-6)
                assert outcome.grad_norm == pytest.approx(norm, rel=1e-5)
                clipped += norm > CLIP
            else:
                assert not np.isfinite(norm) and not np.isfinite(outcome.grad_norm)
        updater.drain()
        got = read(model)
    for name, expected in plain.weights.items():
        np.testing.assert_allclose(got[name], expected, rtol=0, atol=1e-6, err_msg=name)
        assert np.abs(got[name] - weights[name]).max() > 1e-5  # ten times what may differ
        np.testing.assert_array_equal(np.concatenate(model.store.tensors[name].wire), got[name].reshape(-1))
    assert clipped == STEPS - (poisoned_step is not None)  # so clipping was there to be seen


@pytest.mark.parametrize("settings", [CLIPPED, HELD], ids=["clipped", "held"])
def test_a_skipped_step_changes_nothing(settings):
    spec = spec_of(True)
    model = make_model(spec, random_weights(spec))
    good, other = random_batch(spec, 1), random_batch(spec, 2)
    with training(model, settings) as (pipeline, updater):
        pipeline.train_step([good])
        updater.drain()
        before = state(model)
        assert not pipeline.train_step([poisoned(other)]).applied
        updater.drain()
        after = state(model)
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value)
    assert any("count" in key for _, key in before)


def test_a_step_that_is_not_skipped_and_not_held_stops_the_run_before_anything_changed():
    spec = spec_of(True)
    weights = random_weights(spec)
    model = make_model(spec, weights)
    with training(model, AT_ONCE) as (pipeline, updater):
        with pytest.raises(NonFiniteError, match="training.skip_nonfinite: true skips such steps"):
            pipeline.train_step([poisoned(random_batch(spec))])
            updater.drain()
        with pytest.raises(NonFiniteError):
            pipeline.train_step([random_batch(spec)])
    for name, value in read(model).items():
        np.testing.assert_array_equal(value, weights[name])


@pytest.mark.parametrize("group_size", [None, 1])
def test_a_step_that_is_not_skipped_but_held_stops_the_run_with_nothing_changed(group_size):
    settings = Settings(group_size=group_size, max_grad_norm=1.0, skip_nonfinite=False)
    spec = spec_of(True)
    weights = random_weights(spec)
    model = make_model(spec, weights)
    with training(model, settings) as (pipeline, updater):
        with pytest.raises(NonFiniteError, match="not finite"):
            pipeline.train_step([random_batch(spec), poisoned(random_batch(spec, 1))])
        updater.drain()
    for name, value in read(model).items():
        np.testing.assert_array_equal(value, weights[name])


def test_the_norm_is_that_of_the_whole_model_with_tied_weights_once():
    spec = spec_of(True)
    weights, batch = random_weights(spec), random_batch(spec)
    _, grads = loss_and_grads(spec, weights, [batch])
    with training(make_model(spec, weights), CLIPPED) as (pipeline, _):
        norm = pipeline.train_step([batch]).grad_norm
    assert norm == pytest.approx(global_norm(grads), rel=1e-6)


def frozen_lower(name):
    return "embed" in name or ".layers.0." in name


def frozen_some(name):
    return "q_proj" in name or "lm_head" in name or "layers.1.mlp" in name or name == "model.norm.weight"


def frozen_all_but_norm(name):
    return name != "model.norm.weight"


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=slow)])
@pytest.mark.parametrize("frozen", [frozen_lower, frozen_some, frozen_all_but_norm])
def test_frozen_tensors_do_not_move_and_do_not_count(frozen, tied):
    spec = spec_of(tied)
    weights, steps = random_weights(spec), steps_of(spec)[:3]
    model = make_model(spec, weights, trainable=lambda name: not frozen(name))
    _, expected = loss_and_grads(spec, weights, steps[0])
    expected = {name: grad for name, grad in expected.items() if not frozen(name)}
    _, grads = model.loss_and_grads(*steps[0])
    assert set(grads) == set(expected)
    for name, grad in expected.items():
        assert np.linalg.norm(grads[name] - grad) <= 1e-5 * np.linalg.norm(grad)
    with training(model, CLIPPED) as (pipeline, updater):
        norms = [pipeline.train_step(step).grad_norm for step in steps]
        updater.drain()
    assert norms[0] == pytest.approx(global_norm(expected), rel=1e-6)
    for name, value in read(model).items():
        if frozen(name):
            assert value.tobytes() == weights[name].tobytes()
            assert set(state_arrays(model.store.tensors[name])) == {"master"}
        else:
            assert np.abs(value - weights[name]).max() > 1e-4


def test_a_model_that_is_frozen_whole_has_a_loss_and_no_gradients():
    spec = spec_of(False)
    weights, batch = random_weights(spec), random_batch(spec)
    loss, grads = make_model(spec, weights, trainable=lambda name: False).loss_and_grads(batch)
    assert grads == {} and loss == pytest.approx(loss_and_grads(spec, weights, [batch])[0], rel=1e-6)
