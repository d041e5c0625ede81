"""Rotary embedding and causal attention confined to segments."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax.models.spec import RopeSpec


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """How attention is computed, the same for every layer of a run.

    Attributes:
      implementation: ``"xla"`` runs anywhere; ``"cudnn"`` is the fused kernel of NVIDIA GPUs (bfloat16).
      segments: honour ``segment_ids``. False is exact, and faster, when every row holds a single sample with any
        padding behind it: causality alone then keeps padding out of every supervised position.
    """

    implementation: str = "xla"
    segments: bool = True


def rope_frequencies(rope: RopeSpec, head_dim: int) -> np.ndarray:
    """Angular frequencies, float32 ``[head_dim / 2]``, in radians per position.

    ``"llama3"`` is the scaling of Llama 3.1: wavelengths longer than ``original / low_freq_factor`` are stretched by
    `factor`, those shorter than ``original / high_freq_factor`` are kept, and between the two they are mixed.
    """
    freq = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        freq = freq / rope.factor
    elif rope.kind == "llama3":
        turns = rope.original_max_position_embeddings * freq / (2 * math.pi)
        mix = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        mix = np.clip(mix, 0.0, 1.0)
        freq = (1 - mix) * freq / rope.factor + mix * freq
    elif rope.kind != "default":
        raise ValueError(f"unknown rotary embedding {rope.kind!r}")
    return freq.astype(np.float32)


def apply_rope(x_BxSxHxd: jax.Array, positions_BxS: jax.Array, rope: RopeSpec) -> jax.Array:
    """Rotates the halves of each head by ``position * frequency``, in float32; same shape and dtype as `x`."""
    freq_d = rope_frequencies(rope, x_BxSxHxd.shape[-1])
    angle = positions_BxS.astype(jnp.float32)[..., None, None] * freq_d[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x1, x2 = jnp.split(x_BxSxHxd.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x_BxSxHxd.dtype)


def causal_mask(segment_ids_BxS: jax.Array, window: int | None) -> jax.Array:
    """bool ``[batch, 1, query, key]``: key k is visible to query q of the same segment if ``q - window < k <= q``."""
    seq = segment_ids_BxS.shape[1]
    query, key = jnp.arange(seq)[:, None], jnp.arange(seq)[None, :]
    visible = key <= query
    if window is not None:
        visible &= key > query - window
    same = segment_ids_BxS[:, :, None] == segment_ids_BxS[:, None, :]
    return (same & visible[None])[:, None]


def attend(
    q_BxSxHxd: jax.Array,
    k_BxSxKxd: jax.Array,
    v_BxSxKxd: jax.Array,
    segment_ids_BxS: jax.Array,
    *,
    window: int | None,
    options: AttentionOptions,
) -> jax.Array:
    """Grouped-query attention with softmax in float32 and scale ``head_dim ** -0.5``; ``[batch, seq, heads, head_dim]``.

    Query head h reads key head ``h // (heads / kv_heads)``.
    """
    if options.segments:
        how = {"mask": causal_mask(segment_ids_BxS, window)}
    else:
        how = {"is_causal": True, "local_window_size": None if window is None else (window - 1, 0)}
    return jax.nn.dot_product_attention(q_BxSxHxd, k_BxSxKxd, v_BxSxKxd, implementation=options.implementation, **how)
