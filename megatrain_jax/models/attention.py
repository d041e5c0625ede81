"""Causal attention confined to segments."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from megatrain_jax.models.exact_attention import attend_in_tiles


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
    scale: float | None = None,
    softcap: float | None = None,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Grouped-query attention with softmax in float32; ``[batch, seq, heads, value_dim]``.

    Query head h reads key head ``h // (heads / kv_heads)``. No fused kernel has `softcap` or `sinks_H`: with one of them
    the scores are computed in tiles, whatever `options` say; see `attend_in_tiles`.

    Args:
      scale: of the scores; None is ``head_dim ** -0.5``.
    """
    if softcap is not None or sinks_H is not None:
        scale = q_BxSxHxd.shape[-1] ** -0.5 if scale is None else scale
        return attend_in_tiles(
            q_BxSxHxd,
            k_BxSxKxd,
            v_BxSxKxd,
            segment_ids_BxS,
            window=window,
            scale=scale,
            softcap=softcap,
            sinks_H=sinks_H,
        )
    implementation, seq = options.implementation, q_BxSxHxd.shape[1]
    window_size = None if window is None else (window - 1, 0)
    if not options.segments:
        how = {"is_causal": True, "local_window_size": window_size}
    elif implementation == "cudnn" and seq % 2 == 0:
        # What causality hides the kernel skips; the mask, which it adds to the scores, need only tell samples apart.
        same = segment_ids_BxS[:, None, :, None] == segment_ids_BxS[:, None, None, :]
        how = {"is_causal": True, "mask": same if window is None else causal_mask(segment_ids_BxS, window)}
    else:
        # cuDNN differentiates masked attention over an even number of tokens only.
        implementation, how = "xla", {"mask": causal_mask(segment_ids_BxS, window)}
    return jax.nn.dot_product_attention(
        q_BxSxHxd, k_BxSxKxd, v_BxSxKxd, scale=scale, implementation=implementation, **how
    )
