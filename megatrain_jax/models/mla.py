"""Latent attention (DeepSeek V2, arXiv 2405.04434), computed with full keys and values as training does."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from megatrain_jax.models.attention import AttentionOptions, attend
from megatrain_jax.models.parts import Linear, Norm, full_precision
from megatrain_jax.models.rope import apply_rope
from megatrain_jax.models.spec import Context, LayerSpec

EPS = 1e-6  # of the norms of the narrow vectors, whatever the config says of the others


class LatentAttention(nn.Module):
    """Keys and values of all heads are made of one narrow vector for each token; part of a key is the same for all heads."""

    spec: LayerSpec
    options: AttentionOptions

    @nn.compact
    def __call__(self, x_BxSxD: jax.Array, context: Context) -> jax.Array:
        s, latent = self.spec, self.spec.latent
        heads = lambda y, size: y.reshape(*y.shape[:2], -1, size)  # noqa: E731
        if latent.query_rank is None:
            q = Linear(s.num_heads * s.head_dim, name="q_proj")(x_BxSxD)
        else:
            narrow = Linear(latent.query_rank, s.qkv_bias, name="q_a_proj")(x_BxSxD)
            q = Linear(s.num_heads * s.head_dim, name="q_b_proj")(Norm(EPS, name="q_a_layernorm")(narrow))
        narrow = Linear(latent.key_rank + latent.rope_dim, s.qkv_bias, name="kv_a_proj_with_mqa")(x_BxSxD)
        narrow, shared_key = jnp.split(narrow, [latent.key_rank], axis=-1)
        kv = Linear(s.num_heads * (latent.nope_dim + latent.value_dim), name="kv_b_proj")(
            Norm(EPS, name="kv_a_layernorm")(narrow)
        )
        q, shared_key = heads(q, s.head_dim), heads(shared_key, latent.rope_dim)
        k, v = jnp.split(heads(kv, latent.nope_dim + latent.value_dim), [latent.nope_dim], axis=-1)
        q, rotated = jnp.split(q, [latent.nope_dim], axis=-1)
        q = jnp.concatenate([q, apply_rope(rotated, context, s.rope)], axis=-1)
        shared_key = jnp.broadcast_to(apply_rope(shared_key, context, s.rope), (*k.shape[:3], latent.rope_dim))
        k = jnp.concatenate([k, shared_key], axis=-1)
        q, k, v = checkpoint_name(q, "query"), checkpoint_name(k, "key"), checkpoint_name(v, "value")
        # The kernels take keys and values of one size.
        width = max(s.head_dim, latent.value_dim)
        q, k, v = (jnp.pad(y, [(0, 0)] * 3 + [(0, width - y.shape[-1])]) for y in (q, k, v))
        with jax.default_matmul_precision(full_precision(x_BxSxD.dtype) or "default"):
            y = attend(q, k, v, context.segment_ids, window=None, options=self.options, scale=s.attention_scale)
        y = checkpoint_name(y[..., : latent.value_dim].reshape(*x_BxSxD.shape[:2], -1), "attention")
        return Linear(s.hidden_size, s.o_bias, name="o_proj")(y)
