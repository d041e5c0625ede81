"""Properties of the templates: what cannot influence what, and the stateless step of one layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import megatrain_jax as mt
from megatrain_jax.models.blocks import Head, bind, model_tensors, tensor_shapes
from megatrain_jax.models.parts import Norm
from megatrain_jax.models.spec import Context
from tests.conftest import small_spec
from tests.reference import hidden_states, random_weights

SEQ = 10


def influence(spec, segments: np.ndarray) -> np.ndarray:
    """``[query, key]``: norm of the gradient of the logits at a query with respect to the embedding at a key."""
    weights = {name: jnp.asarray(w) for name, w in random_weights(spec).items()}
    segments = jnp.asarray(segments[None], jnp.int32)
    context = Context(jnp.arange(SEQ, dtype=jnp.int32)[None], segments)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((1, SEQ, spec.hidden_size)), jnp.float32)
    mix = jnp.asarray(rng.standard_normal((1, 1, spec.vocab_size)), jnp.float32)
    head = {path: weights[spec.tensor_name(len(spec.blocks) - 1, path)] for path in tensor_shapes(spec.blocks[-1])}

    def logits_at(x, at):
        y, _ = hidden_states(spec, weights, x, context)
        return (Head(spec.blocks[-1]).apply(bind(head), y) * mix)[0].sum(-1) @ at

    gradients = jax.jit(jax.vmap(jax.grad(logits_at), in_axes=(None, 0)))(x, jnp.eye(SEQ))
    return np.asarray(jnp.abs(gradients).sum((1, 3)))


def test_logits_do_not_depend_on_later_tokens_and_do_on_all_earlier_ones():
    seen = influence(small_spec(1), np.ones(SEQ))
    np.testing.assert_array_equal(seen > 0, np.tri(SEQ, dtype=bool))


def test_a_window_reaches_as_far_as_the_layers_carry_it():
    seen = influence(small_spec(2, sliding_window=3), np.ones(SEQ))
    query, key = np.indices((SEQ, SEQ))
    np.testing.assert_array_equal(seen > 0, (key <= query) & (query - key <= 2 * (3 - 1)))


def test_samples_of_a_row_and_padding_do_not_see_each_other():
    segments = np.array([1, 1, 1, 2, 2, 2, 2, 3, 0, 0])
    seen = influence(small_spec(1, qk_norm=True), segments)
    np.testing.assert_array_equal(seen > 0, np.tri(SEQ, dtype=bool) & (segments[:, None] == segments[None, :]))


def test_the_step_of_one_layer_is_differentiable_and_its_backward_the_gradient():
    spec = small_spec(2, qkv_bias=True, qk_norm=True, sliding_window=4)
    step = mt.layer_step(spec, layer=1)
    assert step.shapes == tensor_shapes(spec.layers[1])
    rng = np.random.default_rng(0)
    weights = {path: jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32) for path, shape in step.shapes.items()}
    x, dy = (jnp.asarray(rng.standard_normal((2, SEQ, 32)), jnp.float32) for _ in range(2))
    context = Context(*(jnp.ones((2, SEQ), jnp.int32) * row for row in (jnp.arange(SEQ)[None], 1)))
    y, stats = step.forward(weights, x, context)
    assert y.shape == x.shape and stats == ()
    dx, dw = step.backward(weights, x, (dy, ()), context)

    product = lambda weights, x: (step.forward(weights, x, context)[0] * dy).sum()  # noqa: E731
    expected_dw, expected_dx = jax.jit(jax.grad(product, argnums=(0, 1)))(weights, x)
    np.testing.assert_allclose(dx, expected_dx, rtol=0, atol=1e-4)
    assert set(dw) == set(weights)
    for path, grad in expected_dw.items():
        assert np.linalg.norm(dw[path] - grad) <= 1e-5 * np.linalg.norm(grad), path

    one = lambda x, context: step.forward(weights, x[None], Context(*(c[None] for c in context)))[0][0]  # noqa: E731
    np.testing.assert_allclose(jax.vmap(one)(x, context), y, rtol=0, atol=1e-5)
    again, _ = step.forward(weights, x, context)  # nothing was donated
    np.testing.assert_array_equal(again, y)


def test_there_is_no_layer_after_the_last():
    with pytest.raises(IndexError):
        mt.layer_step(small_spec(2), layer=2)


def test_norms_are_float32_inside_and_round_before_the_weight():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 64)) * 100, jnp.bfloat16)
    weight = jnp.asarray(np.random.default_rng(1).standard_normal(64), jnp.bfloat16)
    exact = np.asarray(x, np.float64)
    exact /= np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    expected = jnp.asarray(exact, jnp.bfloat16) * weight[None]
    got = Norm(1e-5).apply({"params": {"weight": weight}}, x)
    assert got.dtype == jnp.bfloat16
    assert (np.asarray(got) == np.asarray(expected)).mean() > 0.99  # the rest are ties in the last bit of float32


@pytest.mark.parametrize("tied", [True, False])
def test_tensors_carry_the_names_of_the_files(tied):
    spec = small_spec(1, tied=tied, qkv_bias=True, qk_norm=True)
    layer = "model.layers.0."
    expected = {
        "model.embed_tokens.weight": (97, 32),
        layer + "input_layernorm.weight": (32,),
        layer + "post_attention_layernorm.weight": (32,),
        layer + "self_attn.q_proj.weight": (32, 32),
        layer + "self_attn.q_proj.bias": (32,),
        layer + "self_attn.k_proj.weight": (16, 32),
        layer + "self_attn.k_proj.bias": (16,),
        layer + "self_attn.v_proj.weight": (16, 32),
        layer + "self_attn.v_proj.bias": (16,),
        layer + "self_attn.o_proj.weight": (32, 32),
        layer + "self_attn.q_norm.weight": (8,),
        layer + "self_attn.k_norm.weight": (8,),
        layer + "mlp.gate_proj.weight": (48, 32),
        layer + "mlp.up_proj.weight": (48, 32),
        layer + "mlp.down_proj.weight": (32, 48),
        "model.norm.weight": (32,),
    }
    assert model_tensors(spec) == expected | ({} if tied else {"lm_head.weight": (97, 32)})
