"""The templates: what each kind of block computes, as stateless flax modules without weights.

Submodules carry the names of the tensors on disk and weights keep the ``[out, in]`` layout, so binding weights to a
template is naming them. Inside a block, a tensor's path is its name without the block's prefix, such as
``"self_attn.q_proj.weight"``; a block's weights are one flat dict of such paths.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.ad_checkpoint import checkpoint_name

from megatrain_jax.models.attention import AttentionOptions, apply_rope, attend
from megatrain_jax.models.spec import BlockSpec, Context, EmbeddingSpec, HeadSpec, LayerSpec, ModelSpec

Weights = Mapping[str, jax.Array]

# What a layer keeps for backward when there is room: with these, only elementwise work is computed again.
INTERMEDIATES = ("query", "key", "value", "attention", "residual", "gate", "up")

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def full_precision(dtype: jnp.dtype) -> str | None:
    """Precision of a matmul on `dtype`: float32 means float32, also on a GPU that would round it to TF32."""
    return "highest" if dtype == jnp.float32 else None


class Linear(nn.Module):
    """``x @ weight.T + bias``; ``weight [out, in]``, ``bias [out]``; accumulated and returned in `out_dtype` if given."""

    out_features: int
    bias: bool = False
    out_dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.param("weight", nn.initializers.zeros, (self.out_features, x.shape[-1]))
        y = jnp.einsum(
            "...i,oi->...o", x, weight, precision=full_precision(x.dtype), preferred_element_type=self.out_dtype
        )
        if self.bias:
            bias = self.param("bias", nn.initializers.zeros, (self.out_features,))
            y += bias.reshape((1,) * (y.ndim - 1) + (-1,))
        return y


class RMSNorm(nn.Module):
    """``x / rms(x)`` in float32, cast to the dtype of `x`, then times ``weight`` (arXiv 1910.07467)."""

    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],))
        y = x.astype(jnp.float32)
        y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        return y.astype(x.dtype) * weight.reshape((1,) * (x.ndim - 1) + (-1,))


class Attention(nn.Module):
    spec: LayerSpec
    options: AttentionOptions

    @nn.compact
    def __call__(self, x_BxSxD: jax.Array, context: Context) -> jax.Array:
        s = self.spec

        def heads(name: str, count: int) -> jax.Array:
            y = Linear(count * s.head_dim, s.qkv_bias, name=name)(x_BxSxD)
            return y.reshape(*x_BxSxD.shape[:2], count, s.head_dim)

        q, k, v = heads("q_proj", s.num_heads), heads("k_proj", s.num_kv_heads), heads("v_proj", s.num_kv_heads)
        if s.qk_norm:
            q, k = RMSNorm(s.norm_eps, name="q_norm")(q), RMSNorm(s.norm_eps, name="k_norm")(k)
        q, k = apply_rope(q, context.positions, s.rope), apply_rope(k, context.positions, s.rope)
        q, k, v = checkpoint_name(q, "query"), checkpoint_name(k, "key"), checkpoint_name(v, "value")
        with jax.default_matmul_precision(full_precision(x_BxSxD.dtype) or "default"):
            y = attend(q, k, v, context.segment_ids, window=s.sliding_window, options=self.options)
        y = checkpoint_name(y.reshape(*x_BxSxD.shape[:2], -1), "attention")
        return Linear(s.hidden_size, s.o_bias, name="o_proj")(y)


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))`` (arXiv 2002.05202)."""

    spec: LayerSpec

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        s = self.spec
        gate = checkpoint_name(Linear(s.intermediate_size, s.mlp_bias, name="gate_proj")(x), "gate")
        up = checkpoint_name(Linear(s.intermediate_size, s.mlp_bias, name="up_proj")(x), "up")
        return Linear(s.hidden_size, s.mlp_bias, name="down_proj")(_ACTIVATIONS[s.activation](gate) * up)


class DecoderLayer(nn.Module):
    """One pre-norm transformer layer: hidden states in, ``(hidden states, stats)`` out; a dense layer has no stats."""

    spec: LayerSpec
    options: AttentionOptions = AttentionOptions()

    @nn.compact
    def __call__(self, x_BxSxD: jax.Array, context: Context) -> tuple[jax.Array, tuple]:
        s = self.spec
        h = RMSNorm(s.norm_eps, name="input_layernorm")(x_BxSxD)
        x_BxSxD = checkpoint_name(x_BxSxD + Attention(s, self.options, name="self_attn")(h, context), "residual")
        h = RMSNorm(s.norm_eps, name="post_attention_layernorm")(x_BxSxD)
        return x_BxSxD + GatedMLP(s, name="mlp")(h), ()


class Embedding(nn.Module):
    """Token ids ``[batch, seq]`` to hidden states ``[batch, seq, hidden]``."""

    spec: EmbeddingSpec

    @nn.compact
    def __call__(self, token_ids: jax.Array) -> jax.Array:
        weight = self.param("weight", nn.initializers.zeros, (self.spec.vocab_size, self.spec.hidden_size))
        return jnp.take(weight, token_ids, axis=0)


class Head(nn.Module):
    """Final norm and output projection: hidden states to logits ``[batch, seq, vocab]``, accumulated in float32."""

    spec: HeadSpec

    def setup(self) -> None:
        self.norm = RMSNorm(self.spec.norm_eps)
        self.lm_head = Linear(self.spec.vocab_size, out_dtype=jnp.float32)

    def normalise(self, x: jax.Array) -> jax.Array:
        return self.norm(x)

    def project(self, h: jax.Array) -> jax.Array:
        return self.lm_head(h)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.project(self.normalise(x))


def bind(weights: Weights) -> dict:
    """Flat weights as the variables that a flax module is applied to."""
    return {"params": unflatten_dict(dict(weights), sep=".")}


def tensor_shapes(block: BlockSpec) -> dict[str, tuple[int, ...]]:
    """Path and shape of every tensor that a block's template reads, found by tracing it, without computing anything."""
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    if isinstance(block, EmbeddingSpec):
        module, args = Embedding(block), (ids,)
    else:
        hidden = jax.ShapeDtypeStruct((1, 1, block.hidden_size), jnp.float32)
        is_layer = isinstance(block, LayerSpec)
        module = DecoderLayer(block) if is_layer else Head(block)
        args = (hidden, Context(ids, ids)) if is_layer else (hidden,)
    variables = jax.eval_shape(lambda *args: module.init(jax.random.key(0), *args), *args)
    return {path: tuple(leaf.shape) for path, leaf in flatten_dict(variables["params"], sep=".").items()}


def model_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name on disk and shape of every tensor of a model, in block order; a tied projection appears once."""
    shapes = {block: tensor_shapes(block) for block in set(spec.blocks)}
    return {
        spec.tensor_name(i, path): shape for i, block in enumerate(spec.blocks) for path, shape in shapes[block].items()
    }
