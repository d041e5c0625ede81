"""Mixture of experts: router, experts, and the statistics that the auxiliary loss is made of."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from megatrain_jax.config import UserError
from megatrain_jax.models.experts import Rows, add_bias, collect, grouped_matmul, pick, sort_by_expert, spread
from megatrain_jax.models.part_specs import MoESpec
from megatrain_jax.models.parts import ACTIVATIONS, GatedMLP, Linear, times
from megatrain_jax.models.spec import Context, ExpertsSpec, LayerSpec, ModelSpec


class RouterStats(NamedTuple):
    """What one router did with some tokens, padding left out; sums of these over layers and micro-batches pool them.

    Attributes:
      counts_E: float32, how many tokens chose each expert.
      probs_E: float32, the sum over tokens of the softmax over all experts.
      tokens: float32, how many tokens there were.
    """

    counts_E: jax.Array
    probs_E: jax.Array
    tokens: jax.Array


def balance_loss(stats: RouterStats) -> jax.Array:
    """The load balancing loss of the pooled statistics (arXiv 2101.03961, equations 4 to 6), a float32 scalar.

    ``E * sum_e(counts_e / tokens * probs_e / tokens)``, as transformers' ``load_balancing_loss_func`` defines it; the
    counts are constants to the gradient.
    """
    tokens = jnp.maximum(stats.tokens, 1)
    counts_E = jax.lax.stop_gradient(stats.counts_E)
    return len(counts_E) * jnp.sum(counts_E / tokens * stats.probs_E / tokens)


def choose_experts(
    logits_TxE: jax.Array, spec: MoESpec, choice_bias_E: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The experts of each token, int32 ``[T, K]``, and their weights, float32 ``[T, K]``.

    Args:
      logits_TxE: float32.
      choice_bias_E: added to the scores for the choice alone; None if the spec has no `choice_bias`.
    """
    if spec.score == "chosen_softmax":
        best, expert_TxK = jax.lax.top_k(logits_TxE, spec.top_k)
        return expert_TxK, spec.scaling * jax.nn.softmax(best, axis=-1)
    scores = jax.nn.softmax(logits_TxE, axis=-1) if spec.score == "softmax" else jax.nn.sigmoid(logits_TxE)
    ranked = jax.lax.stop_gradient(scores)
    if choice_bias_E is not None:
        ranked += choice_bias_E.astype(jnp.float32)[None, :]
    if spec.groups > 1:
        ranked = _only_best_groups(ranked, spec)
    expert_TxK = jax.lax.top_k(ranked, spec.top_k)[1]
    weight_TxK = jnp.take_along_axis(scores, expert_TxK, axis=-1)
    if spec.normalise:
        weight_TxK /= weight_TxK.sum(axis=-1, keepdims=True) + (1e-20 if spec.score == "sigmoid" else 0.0)
    return expert_TxK, spec.scaling * weight_TxK


def _only_best_groups(ranked_TxE: jax.Array, spec: MoESpec) -> jax.Array:
    """Scores with those of all but the best groups replaced by minus infinity."""
    grouped = ranked_TxE.reshape(len(ranked_TxE), spec.groups, -1)
    best = jax.lax.top_k(grouped, 2 if spec.group_score == "top2" else 1)[0].sum(axis=-1)
    chosen = jax.nn.one_hot(jax.lax.top_k(best, spec.top_groups)[1], spec.groups, dtype=bool).any(axis=1)
    return jnp.where(chosen[..., None], grouped, -jnp.inf).reshape(ranked_TxE.shape)


class Router(nn.Module):
    """Logits over the experts, in float32, and the bias of the choice if there is one."""

    spec: MoESpec

    @nn.compact
    def __call__(self, x_TxD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        s = self.spec
        weight = self.param("weight", nn.initializers.zeros, (s.num_experts, x_TxD.shape[-1]))
        logits = jnp.einsum("td,ed->te", x_TxD.astype(jnp.float32), weight.astype(jnp.float32), precision="highest")
        if s.router_bias:
            bias = self.param("bias", nn.initializers.zeros, (s.num_experts,))
            logits += bias.astype(jnp.float32)[None, :]
        if not s.choice_bias:
            return logits, None
        return logits, self.param("e_score_correction_bias", nn.initializers.zeros, (s.num_experts,))


class GatedExperts(nn.Module):
    """Gated MLPs side by side: ``gate_up_proj [E, 2 I, D]``, gate above up, and ``down_proj [E, D, I]``."""

    spec: LayerSpec
    experts: int

    @nn.compact
    def __call__(self, x_MxD: jax.Array, weight_M: jax.Array, rows: Rows) -> jax.Array:
        """Each row through its expert, times its weight."""
        s, width = self.spec.moe, x_MxD.shape[-1]
        up_weights = self.param("gate_up_proj", nn.initializers.zeros, (self.experts, 2 * s.intermediate_size, width))
        down_weights = self.param("down_proj", nn.initializers.zeros, (self.experts, width, s.intermediate_size))
        gate_up = checkpoint_name(grouped_matmul(x_MxD, up_weights, rows.expert_N, False), "expert")
        gate, up = jnp.split(gate_up, 2, axis=-1)
        h = _weighted(ACTIVATIONS[self.spec.activation](gate) * up, weight_M)
        return grouped_matmul(h, down_weights, rows.expert_N, False)


class ClampedExperts(nn.Module):
    """The experts of GPT-OSS: ``gate_up_proj [E, D, 2 I]``, gate and up interleaved, ``down_proj [E, I, D]``, and biases."""

    spec: LayerSpec
    experts: int

    @nn.compact
    def __call__(self, x_MxD: jax.Array, weight_M: jax.Array, rows: Rows) -> jax.Array:
        """Each row through its expert, times its weight."""
        s, width = self.spec.moe, x_MxD.shape[-1]
        zeros, inner = nn.initializers.zeros, s.intermediate_size
        up_weights = self.param("gate_up_proj", zeros, (self.experts, width, 2 * inner))
        up_bias = self.param("gate_up_proj_bias", zeros, (self.experts, 2 * inner))
        down_weights = self.param("down_proj", zeros, (self.experts, inner, width))
        down_bias = self.param("down_proj_bias", zeros, (self.experts, width))
        gate_up = grouped_matmul(x_MxD, up_weights, rows.expert_N, True)
        gate_up = checkpoint_name(add_bias(gate_up, up_bias, rows.expert_N), "expert")
        gate = jnp.minimum(gate_up[:, ::2], s.limit)
        up = jnp.clip(gate_up[:, 1::2], -s.limit, s.limit)
        h = _weighted((up + 1) * gate * jax.nn.sigmoid(s.alpha * gate), weight_M)
        return add_bias(grouped_matmul(h, down_weights, rows.expert_N, True), down_bias, rows.expert_N, weight_M)


def _weighted(h_MxI: jax.Array, weight_M: jax.Array) -> jax.Array:
    """Rows times their weights. Weighted before the last matmul, a row need not be kept after it for the gradient."""
    return (h_MxI.astype(jnp.float32) * weight_M[:, None]).astype(h_MxI.dtype)


class Routed(NamedTuple):
    """Tokens on their way to experts.

    Attributes:
      h_BxSxD: what the experts read.
      expert_BxSxK: int32, the experts of each token, counted from the first one of those that come next.
      weight_BxSxK: float32.
    """

    h_BxSxD: jax.Array
    expert_BxSxK: jax.Array
    weight_BxSxK: jax.Array


class Streaming(NamedTuple):
    """What flows between the blocks of a layer whose experts stream in groups.

    Attributes:
      x_BxSxD: float32, what the layer gives so far.
      routed: for the groups that follow.
    """

    x_BxSxD: jax.Array
    routed: Routed


def _through(experts: GatedExperts | ClampedExperts, routed: Routed) -> jax.Array:
    """The weighted sum of what some experts make of the tokens that go to them, ``[B, S, D]``."""
    h_TxD, expert_TxK, weight_TxK = (part.reshape(-1, part.shape[-1]) for part in routed)
    rows = sort_by_expert(expert_TxK, experts.experts)
    y_TxD = collect(experts(spread(h_TxD, rows), pick(weight_TxK, rows), rows), rows)
    return y_TxD.reshape(routed.h_BxSxD.shape)


def _experts(spec: LayerSpec, count: int) -> GatedExperts | ClampedExperts:
    return (ClampedExperts if spec.moe.clamped else GatedExperts)(spec, count, name="experts")


class MoE(nn.Module):
    """Every token through the experts that the router chooses for it, and through the shared MLP if there is one."""

    spec: LayerSpec
    experts_apart: bool = False

    @nn.compact
    def __call__(
        self, x_BxSxD: jax.Array, context: Context
    ) -> tuple[jax.Array | None, RouterStats | tuple[()], Routed]:
        """``(y, stats, routed)``; with `experts_apart` the experts are not part of `y`, which is None if nothing is."""
        s = self.spec.moe
        x_TxD = x_BxSxD.reshape(-1, x_BxSxD.shape[-1])
        logits_TxE, choice_bias_E = Router(s, name=s.router)(x_TxD)
        expert_TxK, weight_TxK = choose_experts(logits_TxE, s, choice_bias_E)
        expert_TxK = checkpoint_name(expert_TxK, "routing")
        choices = (*x_BxSxD.shape[:2], s.top_k)
        routed = Routed(x_BxSxD, expert_TxK.reshape(choices), weight_TxK.reshape(choices))
        y_BxSxD = None if self.experts_apart else _through(_experts(self.spec, s.num_experts), routed)
        if s.shared_size:
            shared = GatedMLP(dataclasses.replace(self.spec, intermediate_size=s.shared_size), name=s.shared)(x_BxSxD)
            if s.shared_gate:
                shared *= jax.nn.sigmoid(Linear(1, name=f"{s.shared}_gate")(x_BxSxD))
            y_BxSxD = shared if y_BxSxD is None else y_BxSxD + shared
        stats = self._stats(logits_TxE, expert_TxK, context) if s.balanced else ()
        return y_BxSxD, stats, routed

    def _stats(self, logits_TxE: jax.Array, expert_TxK: jax.Array, context: Context) -> RouterStats:
        real_T = (context.segment_ids.reshape(-1) > 0).astype(jnp.float32)
        counts_E = jnp.zeros(self.spec.moe.num_experts, jnp.float32)
        counts_E = counts_E.at[expert_TxK.reshape(-1)].add(jnp.repeat(real_T, expert_TxK.shape[1]))
        probs_E = (jax.nn.softmax(logits_TxE, axis=-1) * real_T[:, None]).sum(axis=0)
        return RouterStats(counts_E, probs_E, real_T.sum())


class ExpertGroup(nn.Module):
    """Some experts of a layer, as a block: what the layer gives so far in, with what they add out."""

    spec: ExpertsSpec

    @nn.compact
    def added(self, routed: Routed) -> jax.Array:
        """What they add, ``[B, S, D]``, zero for a token that goes to none of them."""
        s = self.spec.layer
        return times(_through(_experts(s, self.spec.experts), routed), s.residual_multiplier)

    def __call__(self, streaming: Streaming, context: Context) -> tuple[Streaming | jax.Array, tuple[()]]:
        x_BxSxD, routed = streaming
        x_BxSxD += self.added(routed).astype(jnp.float32)
        if self.spec.last:
            return x_BxSxD.astype(routed.h_BxSxD.dtype), ()
        return Streaming(x_BxSxD, routed._replace(expert_BxSxK=routed.expert_BxSxK - self.spec.experts)), ()


def most_expert_groups(spec: ModelSpec) -> tuple[int, str]:
    """Blocks that the experts of every layer can be cut in, and why no more."""
    sparse = [layer for layer in spec.layers if layer.moe is not None]
    if not sparse:
        return 1, "it has no experts"
    if any(layer.norms.mlp_out is not None for layer in sparse):
        return 1, "a norm follows its experts"
    experts = min(layer.moe.num_experts for layer in sparse)
    return experts, f"its layers have {experts} experts"


def in_expert_groups(spec: ModelSpec, groups: int) -> ModelSpec:
    """The model with the experts of a layer in so many blocks. Raises UserError if they cannot be cut so."""
    most, why = most_expert_groups(spec)
    if groups > most:
        raise UserError(f"memory.expert_groups: {groups} is more than this model's {most}: {why}; set {most} or auto")
    return dataclasses.replace(spec, expert_groups=groups)
