"""Rotary position embedding (Su et al., arXiv 2104.09864) in the variants that stretch a trained context."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax.models.part_specs import RopeSpec
from megatrain_jax.models.spec import Context


def rope_frequencies(rope: RopeSpec, head_dim: int, *, long: bool = False) -> np.ndarray:
    """Angular frequencies, float32 ``[rotated / 2]``, in radians per position.

    ``"llama3"`` is the scaling of Llama 3.1: wavelengths longer than ``original / low_freq_factor`` are stretched by
    `factor`, those shorter than ``original / high_freq_factor`` are kept, and between the two they are mixed.
    ``"yarn"`` mixes likewise, by the index of the frequency between those that turn `beta_fast` and `beta_slow` times
    within the original context (arXiv 2309.00071, section 3.2).

    Args:
      head_dim: values of a head; `rope.rotary_dim` of them are rotated.
      long: the frequencies of ``"longrope"`` for samples beyond the original context.
    """
    dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
    freq = 1.0 / rope.theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    if rope.kind == "linear":
        freq = freq / rope.factor
    elif rope.kind == "llama3":
        turns = rope.original_max_position_embeddings * freq / (2 * math.pi)
        mix = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        mix = np.clip(mix, 0.0, 1.0)
        freq = (1 - mix) * freq / rope.factor + mix * freq
    elif rope.kind == "yarn":
        low, high = (_yarn_index(rope, dim, turns) for turns in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        stretched = np.clip((np.arange(dim // 2) - low) / ((high - low) or 0.001), 0.0, 1.0)
        freq = stretched * freq / rope.factor + (1 - stretched) * freq
    elif rope.kind == "longrope":
        freq = freq / np.asarray(rope.long_factors if long else rope.short_factors, np.float64)
    elif rope.kind != "default":
        raise ValueError(f"unknown rotary embedding {rope.kind!r}")
    return freq.astype(np.float32)


def _yarn_index(rope: RopeSpec, dim: int, turns: float) -> float:
    """Index, not a whole number, of the frequency that turns so many times within the original context."""
    return dim * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def apply_rope(x_BxSxHxd: jax.Array, context: Context, rope: RopeSpec) -> jax.Array:
    """Rotates pairs of values of each head by ``position * frequency``, in float32; same shape and dtype as `x`.

    With ``"longrope"`` each sample takes the long factors if it is itself longer than the original context, whatever it is
    batched or packed with. (transformers looks at the longest row of the batch.)
    """
    dim = x_BxSxHxd.shape[-1] if rope.rotary_dim is None else rope.rotary_dim
    freq_d = rope_frequencies(rope, x_BxSxHxd.shape[-1])[None, None, None, :]
    if rope.kind == "longrope":
        is_long = sample_lengths(context.segment_ids) > rope.original_max_position_embeddings
        long_d = rope_frequencies(rope, x_BxSxHxd.shape[-1], long=True)[None, None, None, :]
        freq_d = jnp.where(is_long[..., None, None], long_d, freq_d)
    angle = context.positions.astype(jnp.float32)[..., None, None] * freq_d
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if rope.attention_factor != 1.0:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    x = x_BxSxHxd[..., :dim].astype(jnp.float32)
    if rope.interleaved:
        x1, x2 = x[..., ::2], x[..., 1::2]
        y = jnp.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).reshape(x.shape)
    else:
        x1, x2 = jnp.split(x, 2, axis=-1)
        y = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    y = y.astype(x_BxSxHxd.dtype)
    return y if dim == x_BxSxHxd.shape[-1] else jnp.concatenate([y, x_BxSxHxd[..., dim:]], axis=-1)


def sample_lengths(segment_ids_BxS: jax.Array) -> jax.Array:
    """int32 ``[batch, seq]``: how many tokens the sample of each token has in its row."""
    segments = segment_ids_BxS.shape[1] + 1
    count = lambda ids: jnp.zeros(segments, jnp.int32).at[ids].add(1)[ids]  # noqa: E731
    return jax.vmap(count)(segment_ids_BxS)
