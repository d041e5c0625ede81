"""Attention that fused kernels do not compute (capped scores, sinks), exact, in tiles of queries."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

# Queries whose scores exist at once.
QUERY_TILE = 256


def attend_in_tiles(
    q_BxSxHxd: jax.Array,
    k_BxSxKxd: jax.Array,
    v_BxSxKxd: jax.Array,
    segment_ids_BxS: jax.Array,
    *,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks_H: jax.Array | None = None,
    tile: int = QUERY_TILE,
) -> jax.Array:
    """Causal grouped-query attention within segments, ``[batch, seq, heads, value_dim]``; scores and softmax in float32.

    Scores of `tile` queries exist at a time, in backward too, where they are computed again: memory grows with the sequence
    and not with its square. With a window shorter than the row only the keys that a tile can see are read.

    Args:
      window: a query sees this many keys, itself included; None is all.
      scale: of the scores.
      softcap: scores become ``cap * tanh(scores / cap)`` before the mask.
      sinks_H: a logit for each head that takes part in the softmax and has no value.
      tile: queries.
    """
    batch, seq, heads, _ = q_BxSxHxd.shape
    kv_heads, dtype = k_BxSxKxd.shape[2], q_BxSxHxd.dtype
    tile = min(tile, seq)
    count = -(-seq // tile)
    reach = seq if window is None else min(seq, tile + window - 1)
    q = jnp.pad(q_BxSxHxd, ((0, 0), (0, count * tile - seq), (0, 0), (0, 0)))
    q = q.reshape(batch, count, tile, kv_heads, heads // kv_heads, -1)
    query_segments = jnp.pad(segment_ids_BxS, ((0, 0), (0, count * tile - seq))).reshape(batch, count, tile)
    # Every tile adds to the gradient of every key that it reads: the sum is float32.
    k, v = k_BxSxKxd.astype(jnp.float32), v_BxSxKxd.astype(jnp.float32)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one(number, q_t, segments_t, k, v):
        first = jnp.clip((number + 1) * tile - reach, 0, seq - reach)
        near = lambda x: jax.lax.dynamic_slice_in_dim(x, first, reach, axis=1)  # noqa: E731
        query, key = number * tile + jnp.arange(tile)[:, None], first + jnp.arange(reach)[None, :]
        visible = (key <= query) if window is None else (key <= query) & (key > query - window)
        visible = visible[None] & (segments_t[:, :, None] == near(segment_ids_BxS)[:, None, :])
        # A query that is only there to fill the tile sees the first key of its reach, so that its softmax exists.
        visible |= (query >= seq)[None] & (key == first)[None]
        scores = jnp.einsum("bqkgd,bskd->bkgqs", q_t, near(k).astype(dtype), preferred_element_type=jnp.float32)
        scores *= scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
        top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
        if sinks_H is not None:
            sinks = sinks_H.astype(jnp.float32).reshape(1, kv_heads, heads // kv_heads, 1, 1)
            top = jnp.maximum(top, jax.lax.stop_gradient(sinks))
        p = jnp.exp(scores - top)
        total = p.sum(-1, keepdims=True)
        if sinks_H is not None:
            total += jnp.exp(sinks - top)
        return jnp.einsum("bkgqs,bskd->bqkgd", (p / total).astype(dtype), near(v).astype(dtype))

    def body(_, operands):
        return None, one(*operands, k, v)

    operands = (jnp.arange(count), jnp.moveaxis(q, 1, 0), jnp.moveaxis(query_segments, 1, 0))
    y = jax.lax.scan(body, None, operands)[1]
    return jnp.moveaxis(y, 0, 1).reshape(batch, count * tile, heads, -1)[:, :seq]
