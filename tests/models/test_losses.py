"""The loss in tiles against the loss of full logits, written with optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from megatrain_jax.models.blocks import Head, bind
from megatrain_jax.models.losses import cross_entropy, head_loss, head_loss_and_grads, join_tiles, split_tiles
from megatrain_jax.models.spec import HeadSpec


@pytest.mark.parametrize("tile", [1, 2, 5, 6, 7, 13, 100])
@pytest.mark.parametrize("shape", [(2, 7), (3, 5, 4), (1, 1)])
def test_tiles_are_cut_along_the_sequence_and_joined_again(tile, shape):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    tiles = split_tiles(x, tile)
    assert tiles.shape[1] == shape[0] and tiles.shape[1] * tiles.shape[2] <= max(tile, shape[0])
    np.testing.assert_array_equal(join_tiles(tiles, shape[1]), x)
    assert float(jnp.abs(tiles).sum()) == pytest.approx(float(jnp.abs(x).sum()), rel=1e-6)  # filled with zeros


def test_cross_entropy_and_its_gradient_are_the_formula():
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((3, 4, 11)) * 4).astype(np.float32)
    targets, weights = rng.integers(0, 11, (3, 4)), rng.random((3, 4)).astype(np.float32)
    loss, grad = cross_entropy(jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(weights))
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    chosen = np.take_along_axis(p, targets[..., None], -1)[..., 0]
    assert float(loss) == pytest.approx(-(weights * np.log(chosen)).sum(), rel=1e-6)
    expected = (p - np.eye(11)[targets]) * weights[..., None]
    np.testing.assert_allclose(grad, expected, rtol=0, atol=2e-6)


def test_cross_entropy_of_huge_logits_is_finite():
    loss, grad = cross_entropy(jnp.float32([[1e4, -1e4]]), jnp.array([1]), jnp.ones(1))
    assert float(loss) == 2e4
    np.testing.assert_array_equal(grad, [[1, -1]])


SPEC = HeadSpec(vocab_size=23, hidden_size=6, norm_eps=1e-5, tied=False)


def operands(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    weights = {"norm.weight": 1 + 0.3 * rng.standard_normal(6), "lm_head.weight": rng.standard_normal((23, 6))}
    x, targets, loss_weights = rng.standard_normal((2, 7, 6)), rng.integers(0, 23, (2, 7)), rng.random((2, 7))
    weights = {path: jnp.asarray(value, dtype) for path, value in weights.items()}
    return weights, jnp.asarray(x, dtype), jnp.asarray(targets), jnp.asarray(loss_weights, jnp.float32)


@pytest.mark.parametrize(
    "tile", [pytest.param(1, marks=pytest.mark.exhaustive), 6, pytest.param(1000, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("frozen", [(), ("norm.weight",), ("lm_head.weight",), ("norm.weight", "lm_head.weight")])
def test_the_head_in_tiles_is_the_head_at_once(tile, frozen):
    weights, x, targets, loss_weights = operands()

    def at_once(weights, x):
        logits = Head(SPEC).apply(bind(weights), x)
        return (loss_weights * optax.softmax_cross_entropy_with_integer_labels(logits, targets)).sum()

    expected, (dw, dx) = jax.value_and_grad(at_once, argnums=(0, 1))(weights, x)
    train = {path: w for path, w in weights.items() if path not in frozen}
    fixed = {path: w for path, w in weights.items() if path in frozen}
    args = (x, targets, loss_weights)
    loss, got_dx, grads = head_loss_and_grads(Head(SPEC), train, fixed, *args, tile=tile)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert float(head_loss(Head(SPEC), weights, *args, tile=tile)) == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_allclose(got_dx, dx, rtol=0, atol=2e-6)
    assert set(grads) == set(train)
    for path, grad in grads.items():
        np.testing.assert_allclose(grad, dw[path], rtol=0, atol=1e-5)


def test_full_logits_never_exist():
    weights, x, targets, loss_weights = operands()
    call = lambda w, x: head_loss_and_grads(Head(SPEC), w, {}, x, targets, loss_weights, tile=2)  # noqa: E731
    text = str(jax.make_jaxpr(call)(weights, x))
    assert "f32[2,1,23]" in text and "[2,7,23]" not in text and "[14,23]" not in text


def test_loss_and_accumulation_are_float32_in_bfloat16():
    weights, x, targets, loss_weights = operands(jnp.bfloat16)
    loss, dx, grads = head_loss_and_grads(Head(SPEC), weights, {}, x, targets, loss_weights, tile=4)
    assert (loss.dtype, dx.dtype) == (jnp.float32, jnp.bfloat16) and grads["lm_head.weight"].dtype == jnp.float32
    exact_weights = {path: w.astype(jnp.float32) for path, w in weights.items()}
    exact, *_ = head_loss_and_grads(Head(SPEC), exact_weights, {}, x.astype(jnp.float32), targets, loss_weights, tile=4)
    assert float(loss) == pytest.approx(float(exact), rel=1e-2)
