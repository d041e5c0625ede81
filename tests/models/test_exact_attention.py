"""Attention in tiles against its formula, written out in NumPy, and its gradient against that of the whole scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatrain_jax.models.attention import AttentionOptions, attend, causal_mask
from megatrain_jax.models.exact_attention import attend_in_tiles

SEQ = 13
SEGMENTS = np.array([[1] * 4 + [2] * 7 + [0] * 2, [1] * 13], np.int32)


def operands(seed=0):
    rng = np.random.default_rng(seed)
    q, k = (jnp.asarray(1.5 * rng.standard_normal((2, SEQ, heads, 8)), jnp.float32) for heads in (4, 2))
    v = jnp.asarray(rng.standard_normal((2, SEQ, 2, 6)), jnp.float32)
    return q, k, v, jnp.asarray(rng.standard_normal(4), jnp.float32)


def whole(q, k, v, sinks, *, window, scale, softcap, with_sinks):
    """All scores at once."""
    k, v = jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(causal_mask(jnp.asarray(SEGMENTS), window), scores, -1e30)
    if with_sinks:
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks[None, :, None, None], (2, 4, SEQ, 1))], -1)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1)[..., :SEQ], v)


@pytest.mark.parametrize("tile", [4, 256])
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, False), (2.0, False), (None, True), (5.0, True)])
def test_tiles_are_the_formula_and_so_are_their_gradients(tile, window, softcap, with_sinks):
    args = operands()
    how = dict(window=window, scale=0.7, softcap=softcap)

    def tiled(q, k, v, sinks):
        sinks = sinks if with_sinks else None
        return attend_in_tiles(q, k, v, jnp.asarray(SEGMENTS), sinks_H=sinks, tile=tile, **how)

    expected = lambda *args: whole(*args, with_sinks=with_sinks, **how)  # noqa: E731
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal((2, SEQ, 4, 6)), jnp.float32)
    got, pullback = jax.vjp(jax.jit(tiled), *args)
    want, expected_pullback = jax.vjp(jax.jit(expected), *args)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
    for ours, theirs in zip(pullback(cotangent), expected_pullback(cotangent), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_scores_of_all_queries_never_exist_at_once():
    shapes = [jax.ShapeDtypeStruct((1, 4096, heads, 8), jnp.bfloat16) for heads in (4, 2, 2)]
    segments = jax.ShapeDtypeStruct((1, 4096), jnp.int32)

    def loss(q, k, v, segments):
        y = attend(q, k, v, segments, window=None, options=AttentionOptions(), softcap=50.0)
        return y.astype(jnp.float32).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes, segments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 4096 * 4096 * 4 / 2  # float32 scores, half of them
