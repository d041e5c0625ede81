"""The parts of a layer as plain, hashable data; see `spec.py` for what they make up."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al., arXiv 2104.09864).

    Attributes:
      theta: base of the geometric sequence of wavelengths.
      kind: ``"default"``; ``"linear"`` (positions divided by `factor`); ``"llama3"`` (Llama 3.1: long wavelengths divided by
        `factor`, short ones kept, a smooth mix between); ``"yarn"`` (the same idea with a ramp over the number of
        turns, arXiv 2309.00071); ``"longrope"`` (a factor for each frequency, arXiv 2402.13753).
      factor: the context is stretched by this much.
      low_freq_factor, high_freq_factor: ``"llama3"`` only.
      original_max_position_embeddings: context before it was stretched; "llama3", "yarn" and "longrope".
      beta_fast, beta_slow, truncate: ``"yarn"`` only: turns at the two ends of the ramp, and whether those ends are
        rounded to whole frequencies.
      short_factors, long_factors: ``"longrope"`` only: one number for each frequency, for samples up to the original
        context and for longer ones.
      attention_factor: cosine and sine are multiplied by it.
      rotary_dim: only the first so many values of a head are rotated; None is all of them.
      interleaved: the pairs that are rotated are neighbours, not the two halves.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    rotary_dim: int | None = None
    interleaved: bool = False


class NormNames(NamedTuple):
    """Which norms a layer has, by their names on disk: before and after attention, before and after the MLP."""

    attention_in: str | None = "input_layernorm"
    attention_out: str | None = None
    mlp_in: str | None = "post_attention_layernorm"
    mlp_out: str | None = None


@dataclasses.dataclass(frozen=True)
class MoESpec:
    """A mixture of experts in the place of a layer's MLP: a router sends every token to a few of many small MLPs.

    Attributes:
      num_experts: E.
      top_k: experts that a token goes to.
      intermediate_size: of each expert.
      router: name of the router on disk.
      router_bias: the router carries a bias.
      score: what weights are made of: ``"softmax"`` over all experts, ``"chosen_softmax"`` over the chosen ones (GPT-OSS),
        or ``"sigmoid"`` (DeepSeek V3).
      normalise: the weights of a token are divided by their sum.
      scaling: of the weights.
      choice_bias: a buffer ``e_score_correction_bias`` is added to the scores for the choice alone.
      groups, top_groups: experts are chosen from the `top_groups` best of `groups` groups.
      group_score: what a group is judged by: its best expert (``"max"``, DeepSeek V2) or the sum of its best two
        (``"top2"``, DeepSeek V3).
      clamped: experts are those of GPT-OSS: stored ``[in, out]`` with gate and up interleaved, with biases, and
        ``(up + 1) * gate * sigmoid(alpha * gate)`` of clamped values. Else gated MLPs, stored ``[out, in]``, gate above up.
      limit, alpha: of clamped experts.
      shared_size: width of the MLP that every token passes besides; 0 is none.
      shared: its name on disk.
      shared_gate: its output is multiplied by a sigmoid (Qwen2-MoE).
      balanced: an auxiliary loss keeps the experts equally busy.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    router: str = "gate"
    router_bias: bool = False
    score: str = "softmax"
    normalise: bool = True
    scaling: float = 1.0
    choice_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    clamped: bool = False
    limit: float = 7.0
    alpha: float = 1.702
    shared_size: int = 0
    shared: str = "shared_experts"
    shared_gate: bool = False
    balanced: bool = True

    def num_parameters(self, hidden_size: int, experts: int) -> int:
        """Of a layer with so many experts; `top_k` of them is what a token meets."""
        router = self.num_experts * (hidden_size + self.router_bias + self.choice_bias)
        shared = 3 * hidden_size * self.shared_size + hidden_size * self.shared_gate
        biases = (2 * self.intermediate_size + hidden_size) * self.clamped
        return router + shared + experts * (3 * hidden_size * self.intermediate_size + biases)


@dataclasses.dataclass(frozen=True)
class LatentSpec:
    """Latent attention (DeepSeek V2, arXiv 2405.04434): keys and values come from one narrow vector for each token.

    Attributes:
      query_rank: width of the vector that queries come from; None projects them directly.
      key_rank: width of the vector that keys and values come from.
      nope_dim: values of a head that are not rotated.
      rope_dim: values that are; all heads share those of the key.
      value_dim: of a head.
    """

    query_rank: int | None
    key_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclasses.dataclass(frozen=True)
class DeltaSpec:
    """Gated delta rule in the place of attention (Qwen3-Next, Qwen3.5; arXiv 2412.06464).

    Attributes:
      key_heads: of queries and keys; each serves ``value_heads / key_heads`` consecutive value heads.
      key_dim, value_dim: of a head.
      conv_kernel: tokens that the convolution before it reads.
      fused: stored as ``in_proj_qkvz`` and ``in_proj_ba``, key head by key head (Qwen3-Next).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int = 4
    fused: bool = False

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def num_parameters(self, hidden_size: int) -> int:
        values = self.value_heads * self.value_dim
        projections = hidden_size * (self.channels + 2 * values + 2 * self.value_heads)
        return projections + self.channels * self.conv_kernel + 2 * self.value_heads + self.value_dim
