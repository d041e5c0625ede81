"""The gated delta rule against its recurrence, token by token in NumPy, and the borders of samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatrain_jax.models.deltanet import causal_conv, delta_rule, unit

SEGMENTS = np.array([[1] * 3 + [2] * 9 + [3] * 3 + [0] * 2, [1] * 17], np.int32)


def operands(seed: int = 0):
    rng = np.random.default_rng(seed)
    batch, seq = SEGMENTS.shape
    q, k = (unit(jnp.asarray(rng.standard_normal((batch, seq, 2, 5)), jnp.float32)) for _ in range(2))
    v = jnp.asarray(rng.standard_normal((batch, seq, 2, 3, 4)), jnp.float32)
    log_decay = jnp.asarray(-rng.exponential(0.5, (batch, seq, 2, 3)), jnp.float32)
    beta = jnp.asarray(rng.uniform(0.1, 1, (batch, seq, 2, 3)), jnp.float32)
    return q, k, v, log_decay, beta


def token_by_token(q, k, v, log_decay, beta, segments):
    """The recurrence as it is defined."""
    q, k, v, log_decay, beta = (np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta))
    y = np.zeros_like(v)
    for b, h, g in np.ndindex(q.shape[0], *v.shape[2:4]):
        state = np.zeros((q.shape[-1], v.shape[-1]))
        for t in range(q.shape[1]):
            if t and segments[b, t] != segments[b, t - 1]:
                state[:] = 0
            state *= np.exp(log_decay[b, t, h, g])
            state += np.outer(k[b, t, h], beta[b, t, h, g] * (v[b, t, h, g] - state.T @ k[b, t, h]))
            y[b, t, h, g] = state.T @ q[b, t, h]
    return y


@pytest.mark.parametrize("chunk", [1, 4, 17, 64])
def test_chunks_are_the_recurrence(chunk):
    args = operands()
    got = jax.jit(lambda *args: delta_rule(*args, jnp.asarray(SEGMENTS), chunk=chunk))(*args)
    np.testing.assert_allclose(got, token_by_token(*args, SEGMENTS), rtol=0, atol=2e-6)


def test_equal_keys_without_decay_do_not_lose_precision():
    q, k, v, log_decay, beta = operands()
    k, log_decay, beta = jnp.broadcast_to(k[:, :1], k.shape), jnp.zeros_like(log_decay), jnp.ones_like(beta)
    got = delta_rule(q, k, v, log_decay, beta, jnp.asarray(SEGMENTS))
    np.testing.assert_allclose(got, token_by_token(q, k, v, log_decay, beta, SEGMENTS), rtol=0, atol=2e-6)


def test_gradients_do_not_depend_on_the_chunk_and_stop_at_borders():
    args = operands()

    def seen(chunk, row, at):
        """Gradients of the output at one token."""
        y_of = lambda *args: delta_rule(*args, jnp.asarray(SEGMENTS), chunk=chunk)[row, at].sum()  # noqa: E731
        return jax.jit(jax.grad(y_of, argnums=range(5)))(*args)

    whole = seen(64, 0, 8)
    for ours, others in zip(seen(4, 0, 8), whole, strict=True):
        np.testing.assert_allclose(ours, others, rtol=0, atol=2e-6)
    reached = np.abs(np.asarray(whole[2])).sum((2, 3, 4)) > 0
    np.testing.assert_array_equal(reached[0], (np.arange(17) >= 3) & (np.arange(17) <= 8))
    assert not reached[1].any()


@pytest.mark.parametrize("kernel", [1, 4, 20])
def test_the_convolution_reads_earlier_tokens_of_the_sample(kernel):
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((2, 17, 3)).astype(np.float32), rng.standard_normal((3, kernel)).astype(np.float32)
    expected = np.zeros_like(x)
    for b, t, back in np.ndindex(2, 17, kernel):
        if back <= t and SEGMENTS[b, t] == SEGMENTS[b, t - back]:
            expected[b, t] += weight[:, kernel - 1 - back] * x[b, t - back]
    got = causal_conv(jnp.asarray(x), jnp.asarray(weight), jnp.asarray(SEGMENTS))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
