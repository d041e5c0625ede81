"""The templates: what each kind of block computes, as stateless flax modules without weights.

Submodules carry the names of the tensors on disk and weights keep the ``[out, in]`` layout, so binding weights to a
template is naming them. Inside a block, a tensor's path is its name without the block's prefix, such as
``"self_attn.q_proj.weight"``; a block's weights are one flat dict of such paths.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.ad_checkpoint import checkpoint_name

from megatrain_jax.models.attention import AttentionOptions, attend
from megatrain_jax.models.deltanet import GatedDeltaNet
from megatrain_jax.models.mla import LatentAttention
from megatrain_jax.models.moe import ExpertGroup, MoE, Routed, RouterStats, Streaming
from megatrain_jax.models.parts import GatedMLP, Linear, Norm, full_precision, times
from megatrain_jax.models.rope import apply_rope
from megatrain_jax.models.spec import (
    BlockSpec,
    Context,
    EmbeddingSpec,
    ExpertsSpec,
    HeadSpec,
    LayerSpec,
    ModelSpec,
    TrunkSpec,
)

Weights = Mapping[str, jax.Array]

# What a layer keeps for backward when there is room: with these, only elementwise work and scans are computed again.
INTERMEDIATES = (
    "query",
    "key",
    "value",
    "attention",
    "mixed",
    "residual",
    "gate",
    "up",
    "mlp",
    "routing",
    "expert",
    "output_gate",
    "strength",
    "decay",
)


class Attention(nn.Module):
    spec: LayerSpec
    options: AttentionOptions

    @nn.compact
    def __call__(self, x_BxSxD: jax.Array, context: Context) -> jax.Array:
        s = self.spec
        queries, keys = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        if s.fused_qkv:
            qkv = Linear(queries + 2 * keys, s.qkv_bias, name="qkv_proj")(x_BxSxD)
            q, k, v = jnp.split(qkv, [queries, queries + keys], axis=-1)
        else:
            q = Linear((1 + s.output_gate) * queries, s.qkv_bias, name="q_proj")(x_BxSxD)
            k = Linear(keys, s.qkv_bias, name="k_proj")(x_BxSxD)
            v = Linear(keys, s.qkv_bias, name="v_proj")(x_BxSxD)
        if s.output_gate:
            q, gate = jnp.split(q.reshape(*q.shape[:2], s.num_heads, -1), 2, axis=-1)
            gate = checkpoint_name(gate.reshape(*q.shape[:2], -1), "output_gate")
        norm = functools.partial(Norm, s.norm_eps, s.norm, axes=2 if s.qk_norm_scope == "heads" else 1)
        whole = s.qk_norm_scope == "projection"
        if s.qk_norm and whole:
            q, k = norm(name="q_norm")(q), norm(name="k_norm")(k)
        q, k, v = (y.reshape(*y.shape[:2], -1, s.head_dim) for y in (q, k, v))
        if s.qk_norm and not whole:
            q, k = norm(name="q_norm")(q), norm(name="k_norm")(k)
        if s.rope is not None:
            q, k = apply_rope(q, context, s.rope), apply_rope(k, context, s.rope)
        q, k, v = checkpoint_name(q, "query"), checkpoint_name(k, "key"), checkpoint_name(v, "value")
        sinks_H = self.param("sinks", nn.initializers.zeros, (s.num_heads,)) if s.sinks else None
        with jax.default_matmul_precision(full_precision(x_BxSxD.dtype) or "default"):
            y = attend(
                q,
                k,
                v,
                context.segment_ids,
                window=s.sliding_window,
                options=self.options,
                scale=s.attention_scale,
                softcap=s.attention_softcap,
                sinks_H=sinks_H,
            )
        y = checkpoint_name(y.reshape(*x_BxSxD.shape[:2], -1), "attention")
        if s.output_gate:
            y *= jax.nn.sigmoid(gate)
        return Linear(s.hidden_size, s.o_bias, name="o_proj")(y)


class DecoderLayer(nn.Module):
    """One transformer layer: hidden states in, ``(hidden states, stats)`` out; a dense layer has no stats.

    With `experts_apart` it is all of a layer but its experts, and instead of hidden states it gives what those need.
    """

    spec: LayerSpec
    options: AttentionOptions = AttentionOptions()
    experts_apart: bool = False

    @nn.compact
    def __call__(self, x_BxSxD: jax.Array, context: Context) -> tuple[jax.Array | Streaming, RouterStats | tuple[()]]:
        s = self.spec

        def norm(x: jax.Array, name: str | None) -> jax.Array:
            return x if name is None else Norm(s.norm_eps, s.norm, name=name)(x)

        def norm_out(x: jax.Array, name: str | None, kept_as: str) -> jax.Array:
            return x if name is None else norm(checkpoint_name(x, kept_as), name)

        h = norm(x_BxSxD, s.norms.attention_in)
        if s.delta is not None:
            attention = GatedDeltaNet(s, name="linear_attn")
        else:
            attention = (Attention if s.latent is None else LatentAttention)(s, self.options, name="self_attn")
        mixed = norm_out(attention(h, context), s.norms.attention_out, "mixed")
        x_BxSxD = checkpoint_name(x_BxSxD + times(mixed, s.residual_multiplier), "residual")
        if not s.parallel:
            h = norm(x_BxSxD, s.norms.mlp_in)
        if s.moe:
            y, stats, routed = MoE(s, self.experts_apart, name="mlp")(h, context)
        else:
            y, stats = GatedMLP(s, name="mlp")(h), ()
        if self.experts_apart:
            x_BxSxD = x_BxSxD.astype(jnp.float32)
            if y is not None:
                x_BxSxD += times(y, s.residual_multiplier).astype(jnp.float32)
            return Streaming(x_BxSxD, routed), stats
        return x_BxSxD + times(norm_out(y, s.norms.mlp_out, "mlp"), s.residual_multiplier), stats


class Embedding(nn.Module):
    """Token ids ``[batch, seq]`` to hidden states ``[batch, seq, hidden]``."""

    spec: EmbeddingSpec

    @nn.compact
    def __call__(self, token_ids: jax.Array) -> jax.Array:
        weight = self.param("weight", nn.initializers.zeros, (self.spec.vocab_size, self.spec.hidden_size))
        x = jnp.take(weight, token_ids, axis=0)
        return times(x, embedding_multiplier(self.spec, x.dtype))


def embedding_multiplier(spec: EmbeddingSpec, dtype: jnp.dtype) -> float:
    """What hidden states of `dtype` are multiplied by when they are looked up."""
    return float(np.asarray(spec.multiplier, dtype)) if spec.round_multiplier else spec.multiplier


class Head(nn.Module):
    """Final norm and output projection: hidden states to logits ``[batch, seq, vocab]``, accumulated in float32."""

    spec: HeadSpec

    def setup(self) -> None:
        self.norm = Norm(self.spec.norm_eps, self.spec.norm)
        self.lm_head = Linear(self.spec.vocab_size, out_dtype=jnp.float32)

    def normalise(self, x: jax.Array) -> jax.Array:
        return self.norm(x)

    def project(self, h: jax.Array) -> jax.Array:
        """What `finish_logits` makes logits of."""
        return self.lm_head(h)

    def __call__(self, x: jax.Array) -> jax.Array:
        return finish_logits(self.spec, self.project(self.normalise(x)))


def finish_logits(spec: HeadSpec, raw: jax.Array) -> jax.Array:
    """Logits, scaled and capped as the spec says."""
    scaled = times(raw, spec.logit_multiplier)
    return scaled if spec.logit_softcap is None else spec.logit_softcap * jnp.tanh(scaled / spec.logit_softcap)


def bind(weights: Weights) -> dict:
    """Flat weights as the variables that a flax module is applied to."""
    return {"params": unflatten_dict(dict(weights), sep=".")}


def layer_module(
    block: LayerSpec | TrunkSpec | ExpertsSpec, options: AttentionOptions = AttentionOptions()
) -> DecoderLayer | ExpertGroup:
    """The module of a block between embedding and head."""
    if isinstance(block, ExpertsSpec):
        return ExpertGroup(block)
    return DecoderLayer(block.layer, options, True) if isinstance(block, TrunkSpec) else DecoderLayer(block, options)


def tensor_shapes(block: BlockSpec) -> dict[str, tuple[int, ...]]:
    """Path and shape of every tensor that a block's template reads, found by tracing it, without computing anything."""
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    if isinstance(block, EmbeddingSpec):
        module, args = Embedding(block), (ids,)
    else:
        hidden = jax.ShapeDtypeStruct((1, 1, block.hidden_size), jnp.float32)
        if isinstance(block, HeadSpec):
            module, args = Head(block), (hidden,)
        else:
            module, args = layer_module(block), (hidden, Context(ids, ids))
        if isinstance(block, ExpertsSpec):
            choices = (jax.ShapeDtypeStruct((1, 1, block.moe.top_k), dtype) for dtype in (jnp.int32, jnp.float32))
            args = (Streaming(hidden, Routed(hidden, *choices)), args[1])
    variables = jax.eval_shape(lambda *args: module.init(jax.random.key(0), *args), *args)
    return {path: tuple(leaf.shape) for path, leaf in flatten_dict(variables["params"], sep=".").items()}


def model_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name on disk and shape of every tensor of a model, in block order; a tied projection appears once.

    Experts that stream in groups are whole here.
    """
    spec = dataclasses.replace(spec, expert_groups=1)
    shapes = {block: tensor_shapes(block) for block in set(spec.blocks)}
    return {
        spec.tensor_name(i, path): shape for i, block in enumerate(spec.blocks) for path, shape in shapes[block].items()
    }
