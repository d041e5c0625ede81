"""Gated delta rule (arXiv 2412.06464): attention whose memory is one matrix for each head, not all keys and values.

With ``S`` the matrix of a head, ``k`` and ``q`` normalised, ``g <= 0`` the log of the decay and ``beta`` the strength:

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T        y_t = S_t^T q_t / sqrt(key_dim)

Samples of a row are independent: the matrix and the convolution before it start anew with each.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from megatrain_jax.models.parts import ACTIVATIONS, Linear, Norm, full_precision
from megatrain_jax.models.spec import Context, LayerSpec

CHUNK = 64


def causal_conv(x_BxSxC: jax.Array, weight_CxK: jax.Array, segment_ids_BxS: jax.Array) -> jax.Array:
    """``y_t = sum_j weight[:, K-1-j] * x_{t-j}`` over the tokens of the same segment, float32 ``[batch, seq, channels]``."""
    seq, kernel = x_BxSxC.shape[1], weight_CxK.shape[1]
    x, weight = x_BxSxC.astype(jnp.float32), weight_CxK.astype(jnp.float32)
    y = jnp.zeros_like(x)
    for back in range(min(kernel, seq)):
        earlier = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, :seq]
        same = jnp.pad(segment_ids_BxS, ((0, 0), (back, 0)), constant_values=-1)[:, :seq] == segment_ids_BxS
        y += jnp.where(same[..., None], earlier, 0.0) * weight[:, kernel - 1 - back][None, None, :]
    return y


def delta_rule(
    q_BxSxKxd: jax.Array,
    k_BxSxKxd: jax.Array,
    v_BxSxKxGxe: jax.Array,
    log_decay_BxSxKxG: jax.Array,
    beta_BxSxKxG: jax.Array,
    segment_ids_BxS: jax.Array,
    *,
    chunk: int = CHUNK,
) -> jax.Array:
    """The gated delta rule of the module's text, in chunks of `chunk` tokens: float32 ``[batch, seq, K, G, e]``.

    Within a chunk the updates are one triangular system (the UT transform, arXiv 2406.06484, section 3.2), so all work is
    matmuls; chunks follow one another in a scan. Each key head serves the G value heads of its group. Backward computes
    a chunk again from the matrices at its start.

    Args:
      q, k: float32, normalised; q scaled.
      v, log_decay, beta: float32.
    """
    batch, seq, heads, key_dim = k_BxSxKxd.shape
    groups, value_dim = v_BxSxKxGxe.shape[3:]
    count = -(-seq // chunk)
    lower = jnp.tril(jnp.ones((chunk, chunk), bool))

    def chunks(x: jax.Array, fill: int = 0) -> jax.Array:
        """``[batch, seq, ...]`` to ``[chunks, batch, chunk, ...]``."""
        x = jnp.pad(x, [(0, 0), (0, count * chunk - seq)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
        return jnp.moveaxis(x.reshape(batch, count, chunk, *x.shape[2:]), 1, 0)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(carry, operands):
        state_BxKxGxdxe, previous_B = carry
        q, k, v, log_decay, beta, segments = operands
        until = jnp.moveaxis(jnp.cumsum(log_decay, axis=1), 1, -1)  # [B, K, G, chunk], from the start of the chunk
        beta = jnp.moveaxis(beta, 1, -1)
        same = (segments[:, :, None] == segments[:, None, :]) & lower[None]
        between = until[..., :, None] - until[..., None, :]
        decay = jnp.exp(jnp.where(same[:, None, None], between, -jnp.inf))  # [B, K, G, query, key]
        # A token sees the matrix from before the chunk only if its sample began before.
        carried = (segments == previous_B[:, None]).astype(jnp.float32)[:, None, None]
        reach = jnp.exp(until) * carried
        last = segments[:, -1:]
        to_end = jnp.exp(until[..., -1:] - until) * (segments == last).astype(jnp.float32)[:, None, None]

        similar = jnp.einsum("bikd,bjkd->bkij", k, k)[:, :, None]
        system = beta[..., None] * similar * decay  # what is above and on the diagonal is not read
        known = reach[..., None] * jnp.einsum("bikd,bkgde->bkgie", k, state_BxKxGxdxe)
        wanted = beta[..., None] * (jnp.moveaxis(v, 1, 3) - known)
        new = jax.lax.linalg.triangular_solve(system, wanted, left_side=True, lower=True, unit_diagonal=True)

        scores = jnp.einsum("bikd,bjkd->bkij", q, k)[:, :, None] * decay
        y = reach[..., None] * jnp.einsum("bikd,bkgde->bkgie", q, state_BxKxGxdxe)
        y += jnp.einsum("bkgij,bkgje->bkgie", scores, new)
        kept = jnp.exp(until[..., -1]) * (last == previous_B[:, None]).astype(jnp.float32)[:, :, None]
        state = kept[..., None, None] * state_BxKxGxdxe
        state += jnp.einsum("bjkd,bkgje->bkgde", k, to_end[..., None] * new)
        return (state, last[:, 0]), jnp.moveaxis(y, 3, 1)

    nothing = jnp.zeros((batch, heads, groups, key_dim, value_dim), jnp.float32)
    operands = [chunks(x) for x in (q_BxSxKxd, k_BxSxKxd, v_BxSxKxGxe, log_decay_BxSxKxG, beta_BxSxKxG)]
    before = jnp.full((batch,), -1, segment_ids_BxS.dtype)
    _, y = jax.lax.scan(step, (nothing, before), (*operands, chunks(segment_ids_BxS, fill=-2)))
    return jnp.moveaxis(y, 0, 1).reshape(batch, count * chunk, heads, groups, value_dim)[:, :seq]


def unit(x: jax.Array) -> jax.Array:
    """``x`` over its norm along the last axis, float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


class GatedDeltaNet(nn.Module):
    """Projections, a short causal convolution, the gated delta rule, a gated norm, and the way back (Qwen3-Next, Qwen3.5)."""

    spec: LayerSpec

    @nn.compact
    def __call__(self, x_BxSxD: jax.Array, context: Context) -> jax.Array:
        s, d = self.spec, self.spec.delta
        rows, groups, dtype = x_BxSxD.shape[:2], d.value_heads // d.key_heads, x_BxSxD.dtype
        keys, values = d.key_heads * d.key_dim, d.value_heads * d.value_dim
        if d.fused:
            # For each key head: its query, its key, and the values and gates of the value heads that it serves.
            qkvz = Linear(2 * keys + 2 * values, name="in_proj_qkvz")(x_BxSxD).reshape(*rows, d.key_heads, -1)
            ba = Linear(2 * d.value_heads, name="in_proj_ba")(x_BxSxD).reshape(*rows, d.key_heads, 2 * groups)
            ends = [d.key_dim, 2 * d.key_dim, 2 * d.key_dim + groups * d.value_dim]
            q, k, v, z = (y.reshape(*rows, -1) for y in jnp.split(qkvz, ends, axis=-1))
            qkv = jnp.concatenate([q, k, v], axis=-1)
            b, a = jnp.split(ba, 2, axis=-1)
        else:
            qkv = Linear(2 * keys + values, name="in_proj_qkv")(x_BxSxD)
            z = Linear(values, name="in_proj_z")(x_BxSxD)
            b, a = (
                Linear(d.value_heads, name=f"in_proj_{n}")(x_BxSxD).reshape(*rows, d.key_heads, groups) for n in "ba"
            )
        qkv, z = checkpoint_name(qkv, "query"), checkpoint_name(z, "output_gate")
        b, a = checkpoint_name(b, "strength"), checkpoint_name(a, "decay")
        weight = _Conv(2 * keys + values, d.conv_kernel, name="conv1d")()
        qkv = ACTIVATIONS[s.activation](causal_conv(qkv, weight, context.segment_ids)).astype(dtype)
        q, k, v = jnp.split(qkv, [keys, 2 * keys], axis=-1)
        q, k = (unit(y.reshape(*rows, d.key_heads, d.key_dim)) for y in (q, k))
        v = v.reshape(*rows, d.key_heads, groups, d.value_dim).astype(jnp.float32)
        rate = self.param("A_log", nn.initializers.zeros, (d.value_heads,)).astype(jnp.float32)
        bias = self.param("dt_bias", nn.initializers.ones, (d.value_heads,)).astype(jnp.float32)
        rate, bias = (y.reshape(1, 1, d.key_heads, groups) for y in (rate, bias))
        log_decay = -jnp.exp(rate) * jax.nn.softplus(a.astype(jnp.float32) + bias)
        beta = jax.nn.sigmoid(b.astype(jnp.float32))
        with jax.default_matmul_precision(full_precision(dtype) or "default"):
            y = delta_rule(q * d.key_dim**-0.5, k, v, log_decay, beta, context.segment_ids)
        y = checkpoint_name(y.reshape(*rows, d.value_heads, d.value_dim).astype(dtype), "attention")
        gate = jax.nn.silu(z.reshape(y.shape).astype(jnp.float32))
        y = (Norm(s.norm_eps, name="norm")(y).astype(jnp.float32) * gate).astype(dtype)
        return Linear(s.hidden_size, name="out_proj")(y.reshape(*rows, values))


class _Conv(nn.Module):
    """The weight of a depthwise convolution, stored ``[channels, 1, kernel]``, as ``[channels, kernel]``."""

    channels: int
    kernel: int

    @nn.compact
    def __call__(self) -> jax.Array:
        return self.param("weight", nn.initializers.zeros, (self.channels, 1, self.kernel))[:, 0]
