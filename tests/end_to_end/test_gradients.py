"""Loss and every gradient of the stream equal `jax.grad` of one unstreamed function of the whole model."""

import dataclasses

import numpy as np
import pytest

from tests.conftest import small_spec
from tests.reference import (
    assert_same_gradients,
    execution,
    loss_and_grads,
    make_model,
    random_batch,
    random_weights,
    relative_errors,
)

TOLERANCE = 1e-5


def assert_streamed_equals_unstreamed(spec, batches, run=None):
    weights = random_weights(spec)
    loss, grads = make_model(spec, weights, run).loss_and_grads(*batches)
    expected_loss, expected = loss_and_grads(spec, weights, batches)
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    assert_same_gradients(grads, expected, TOLERANCE)


slow = pytest.mark.exhaustive


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("micro_batches", "packed"),
    [(1, False), pytest.param(2, False, marks=slow), (3, False), *(pytest.param(k, True, marks=slow) for k in (1, 2))],
)
def test_loss_and_every_gradient(tied, micro_batches, packed):
    spec = small_spec(2, tied=tied, sliding_window=4, qk_norm=True)
    batches = [random_batch(spec, seed, packed=packed) for seed in range(micro_batches)]
    assert_streamed_equals_unstreamed(spec, batches)


@pytest.mark.parametrize("layers", [pytest.param(1, marks=slow), pytest.param(7, marks=slow)])
def test_any_depth(layers):
    spec = small_spec(layers, tied=True, sliding_window=4, qk_norm=True)
    assert_streamed_equals_unstreamed(spec, [random_batch(spec)])


@slow
@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu"])
def test_biases_and_activations(activation):
    spec = small_spec(1, activation=activation, qkv_bias=True, o_bias=True, mlp_bias=True)
    assert_streamed_equals_unstreamed(spec, [random_batch(spec)])


def test_samples_packed_into_rows_and_layers_of_different_structure():
    spec = small_spec(2, sliding_window=4, qk_norm=True)
    mixed = dataclasses.replace(spec, layers=(spec.layers[0], small_spec(1).layers[0]))
    assert_streamed_equals_unstreamed(mixed, [random_batch(mixed, packed=True)])


def test_micro_batches_with_unequal_supervision_are_one_batch():
    spec = small_spec(2, tied=True, sliding_window=4, qk_norm=True)
    whole, rows = random_batch(spec), np.arange(3)[:, None]
    whole = whole._replace(loss_weights=(np.arange(12)[None] < [[1], [5], [11]]).astype(np.float32))
    parts = [whole._replace(loss_weights=whole.loss_weights * (rows == row)) for row in range(3)]
    model = make_model(spec, random_weights(spec))
    loss, grads = model.loss_and_grads(whole)
    split_loss, split_grads = model.loss_and_grads(*parts)
    assert split_loss == pytest.approx(loss, rel=TOLERANCE)
    assert_same_gradients(split_grads, grads, TOLERANCE)


def test_without_supervision_everything_is_zero():
    spec = small_spec(2, tied=True, sliding_window=4, qk_norm=True)
    batch = random_batch(spec)
    loss, grads = make_model(spec, random_weights(spec)).loss_and_grads(
        batch._replace(loss_weights=np.zeros_like(batch.loss_weights))
    )
    assert loss == 0 and not any(grad.any() for grad in grads.values())


def test_bfloat16_is_as_close_to_float32_as_unstreamed_bfloat16_is():
    spec = small_spec(1, tied=True, sliding_window=4, qk_norm=True)
    # Both start from the same rounded weights, so what differs is the arithmetic.
    weights = {n: w.astype(np.dtype("bfloat16")).astype(np.float32) for n, w in random_weights(spec).items()}
    batch = random_batch(spec)
    exact_loss, exact = loss_and_grads(spec, weights, [batch])
    plain_loss, plain = loss_and_grads(spec, weights, [batch], "bfloat16")
    loss, grads = make_model(spec, weights, execution("bfloat16")).loss_and_grads(batch)
    streamed, unstreamed = relative_errors(grads, exact), relative_errors(plain, exact)
    total = lambda errors: np.sqrt(np.mean(np.square(list(errors.values()))))  # noqa: E731
    assert 0 < total(streamed) <= 1.1 * total(unstreamed)
    assert all(streamed[name] <= 2 * unstreamed[name] + 2**-8 for name in exact)
    assert abs(loss - exact_loss) <= 2 * abs(plain_loss - exact_loss) + 2**-8
