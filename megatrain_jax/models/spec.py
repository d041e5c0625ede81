"""An architecture as plain, hashable data, and the shapes of what flows through it.

Nothing here imports jax: every room of the package may read this file.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

from megatrain_jax.models.part_specs import DeltaSpec, LatentSpec, MoESpec, NormNames, RopeSpec


class Context(NamedTuple):
    """What a block needs to know about the tokens besides their hidden states.

    Attributes:
      positions: int32 ``[batch, seq]``, position of each token within its sample (rotary embedding).
      segment_ids: int32 ``[batch, seq]``, sample of the row that a token belongs to; 0 is padding.
        Attention never crosses segments.
    """

    positions: Any
    segment_ids: Any


class Batch(NamedTuple):
    """One fixed-shape batch of next-token prediction, every field ``[batch, seq]``.

    Attributes:
      token_ids: int32, the input tokens.
      targets: int32, the token to be predicted at each position (the next one).
      loss_weights: float32, weight of each target; 0 where nothing is supervised.
      positions: int32, see `Context`.
      segment_ids: int32, see `Context`.
    """

    token_ids: Any
    targets: Any
    loss_weights: Any
    positions: Any
    segment_ids: Any

    @property
    def context(self) -> Context:
        return Context(self.positions, self.segment_ids)


@dataclasses.dataclass(frozen=True)
class EmbeddingSpec:
    """The token embedding: ``weight [vocab, hidden]``.

    Attributes:
      multiplier: of what is looked up.
      round_multiplier: the multiplier is first rounded to the dtype that computes (Gemma).
    """

    vocab_size: int
    hidden_size: int
    multiplier: float = 1.0
    round_multiplier: bool = False

    @property
    def num_parameters(self) -> int:
        return self.vocab_size * self.hidden_size


def is_buffer(name: str) -> bool:
    """Whether a tensor is no parameter: it is never trained, and is read and written in float32."""
    return name.endswith("e_score_correction_bias")


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: attention, then a gated MLP. Equal specs share one compiled template.

    Attributes:
      rope: None is attention without positions.
      norm: ``"rms"``: cast to the dtype that computes, then times the weight (Llama); ``"rms_float32"``: the weight
        multiplies in float32 (OLMo 2); ``"rms_offset"``: the same with ``1 + weight`` (Gemma); ``"layer"``: mean
        removed too, no bias, in float32 (Cohere).
      norms: which norms there are, and their names.
      parallel: attention and MLP read the same normed input and are added together (Cohere).
      sliding_window: a query attends to at most this many keys, itself included; None is full attention.
      attention_scale: of the scores; None is ``head_dim ** -0.5``.
      attention_softcap: scores become ``cap * tanh(scores / cap)`` (Gemma 2).
      qk_norm: norm of q and k before the rotary embedding.
      qk_norm_scope: ``"head"``: over each head, one weight for all (Qwen3); ``"heads"``: over each head, a weight for each
        (Cohere); ``"projection"``: over all heads together (OLMo 2).
      qkv_bias, o_bias, mlp_bias: which projections carry a bias.
      fused_qkv, fused_gate_up: stored as one ``qkv_proj`` with rows q, k, v, or one ``gate_up_proj`` with rows gate, up.
      residual_multiplier: of what attention and MLP add.
      sinks: each head has a logit that takes part in the softmax and has no value (GPT-OSS).
      latent: the attention is latent attention; `head_dim` is then that of queries and keys.
      moe: the MLP is a mixture of experts.
      output_gate: ``q_proj`` holds, after the query of each head, a gate; what attention gives is multiplied by its
        sigmoid (Qwen3-Next).
      delta: in the place of attention; the fields about attention are then without meaning.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    norm_eps: float
    activation: str = "silu"
    sliding_window: int | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norm: str = "rms"
    norms: NormNames = NormNames()
    parallel: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    qk_norm_scope: str = "head"
    fused_qkv: bool = False
    fused_gate_up: bool = False
    residual_multiplier: float = 1.0
    sinks: bool = False
    latent: LatentSpec | None = None
    moe: MoESpec | None = None
    output_gate: bool = False
    delta: DeltaSpec | None = None

    @property
    def attention_parameters(self) -> int:
        if self.delta is not None:
            return self.delta.num_parameters(self.hidden_size)
        if self.latent is not None:
            return self._latent_parameters(self.latent)
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        norms = 2 * self.head_dim if self.qk_norm_scope == "head" else queries + keys
        gates = queries * self.output_gate
        biases = (queries + gates + 2 * keys) * self.qkv_bias + self.hidden_size * self.o_bias
        matrices = self.hidden_size * (2 * queries + gates + 2 * keys)
        return matrices + biases + norms * self.qk_norm + self.num_heads * self.sinks

    def _latent_parameters(self, s: LatentSpec) -> int:
        queries, values = self.num_heads * self.head_dim, self.num_heads * s.value_dim
        if s.query_rank is None:
            count = self.hidden_size * queries
        else:
            count = s.query_rank * (self.hidden_size + self.qkv_bias + 1 + queries)
        count += (s.key_rank + s.rope_dim) * (self.hidden_size + self.qkv_bias) + s.key_rank
        count += s.key_rank * (self.num_heads * s.nope_dim + values)
        return count + self.hidden_size * (values + self.o_bias)

    @property
    def mlp_parameters(self) -> int:
        width = self.intermediate_size if self.moe is None else self.moe.shared_size
        biases = (2 * width + self.hidden_size) * self.mlp_bias * (width > 0)
        if self.moe is not None:
            return self.moe.num_parameters(self.hidden_size, self.moe.num_experts) + biases
        return 3 * self.hidden_size * width + biases

    @property
    def num_parameters(self) -> int:
        norms = sum(name is not None for name in self.norms) * self.hidden_size
        return self.attention_parameters + self.mlp_parameters + norms

    def describe(self) -> str:
        """What the layer computes, in words that differ between the layers of a model."""
        attention = "attention" if self.latent is None else "latent attention"
        window = "all keys" if self.sliding_window is None else f"window {self.sliding_window}"
        rope = "no positions" if self.rope is None else f"{self.rope.kind} rotary {self.rope.theta:g}"
        mlp = f"MLP {self.intermediate_size}"
        if self.moe is not None:
            mlp = f"{self.moe.top_k} of {self.moe.num_experts} experts of {self.moe.intermediate_size}"
        if self.delta is not None:
            d = self.delta
            return f"gated delta rule {d.value_heads}/{d.key_heads} x {d.value_dim}; {mlp}"
        return f"{attention} {self.num_heads}/{self.num_kv_heads} x {self.head_dim}, {window}, {rope}; {mlp}"

    @property
    def active_parameters(self) -> int:
        """Parameters that a token meets."""
        idle = 0 if self.moe is None else self.moe.num_experts - self.moe.top_k
        if not idle:
            return self.num_parameters
        experts = (self.moe.num_parameters(self.hidden_size, count) for count in (self.moe.num_experts, self.moe.top_k))
        return self.num_parameters - next(experts) + next(experts)


@dataclasses.dataclass(frozen=True)
class HeadSpec:
    """Final norm and output projection.

    Attributes:
      tied: the projection is the embedding's weight.
      norm: as in `LayerSpec`.
      logit_multiplier: of the logits.
      logit_softcap: logits become ``cap * tanh(logits / cap)``.
    """

    vocab_size: int
    hidden_size: int
    norm_eps: float
    tied: bool
    norm: str = "rms"
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None

    @property
    def num_parameters(self) -> int:
        """A tied projection is counted with the embedding."""
        return self.hidden_size + (0 if self.tied else self.vocab_size * self.hidden_size)


@dataclasses.dataclass(frozen=True)
class _PartSpec:
    """Of a decoder layer with experts."""

    layer: LayerSpec

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    @property
    def moe(self) -> MoESpec:
        return self.layer.moe

    def _count(self, experts: int) -> int:
        """Parameters of so many experts."""
        return self.moe.num_parameters(self.hidden_size, experts) - self.moe.num_parameters(self.hidden_size, 0)


@dataclasses.dataclass(frozen=True)
class TrunkSpec(_PartSpec):
    """A decoder layer without its experts, which follow in blocks of their own."""

    @property
    def num_parameters(self) -> int:
        return self.layer.num_parameters - self._count(self.moe.num_experts)


@dataclasses.dataclass(frozen=True)
class ExpertsSpec(_PartSpec):
    """A group of consecutive experts of a layer.

    Attributes:
      experts: how many they are.
      last: of the layer's groups.
    """

    experts: int
    last: bool

    @property
    def num_parameters(self) -> int:
        return self._count(self.experts)


BlockSpec = EmbeddingSpec | LayerSpec | TrunkSpec | ExpertsSpec | HeadSpec


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A decoder-only language model: embedding, layers, head.

    Attributes:
      family: ``model_type`` of the Hugging Face config it was read from.
      layers: one `LayerSpec` per decoder layer, in order.
      max_position_embeddings: longest sequence that the model supports, in tokens.
      initializer_range: standard deviation of randomly initialised matrices.
      embedding_multiplier, round_embedding_multiplier: see `EmbeddingSpec`.
      norm, logit_multiplier, logit_softcap: see `HeadSpec`.
      router_aux_loss_coef: of the auxiliary loss that keeps experts equally busy.
      expert_groups: blocks that the experts of a layer stream in, after one with the rest of the layer; 1 is all of it in
        one block. It says nothing about what is computed.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    initializer_range: float = 0.02
    embedding_multiplier: float = 1.0
    round_embedding_multiplier: bool = False
    norm: str = "rms"
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None
    router_aux_loss_coef: float = 0.0
    expert_groups: int = 1

    @property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """Every block in forward order: embedding, layers, head. Experts that stream in groups follow their layer."""
        embedding = EmbeddingSpec(
            self.vocab_size, self.hidden_size, self.embedding_multiplier, self.round_embedding_multiplier
        )
        head = HeadSpec(
            self.vocab_size,
            self.hidden_size,
            self.norm_eps,
            self.tie_word_embeddings,
            self.norm,
            self.logit_multiplier,
            self.logit_softcap,
        )
        return (embedding, *(block for layer in self.layers for block in self._blocks_of(layer)), head)

    def _blocks_of(self, layer: LayerSpec) -> tuple[LayerSpec | TrunkSpec | ExpertsSpec, ...]:
        if layer.moe is None or self.expert_groups == 1:
            return (layer,)
        sizes = group_sizes(layer.moe.num_experts, self.expert_groups)
        groups = (ExpertsSpec(layer, size, i == self.expert_groups - 1) for i, size in enumerate(sizes))
        return (TrunkSpec(layer), *groups)

    @property
    def structures(self) -> list[LayerSpec | TrunkSpec | ExpertsSpec]:
        """The distinct blocks between embedding and head."""
        return list(dict.fromkeys(block for layer in dict.fromkeys(self.layers) for block in self._blocks_of(layer)))

    @functools.cached_property
    def _places(self) -> list[tuple[int, slice | None]]:
        """Of each block between embedding and head the number of its layer, and which experts it holds if it is a group."""
        places = []
        for number, layer in enumerate(self.layers):
            _, *groups = self._blocks_of(layer)
            ends = list(itertools.accumulate(group.experts for group in groups))
            places.append((number, None))
            places += [(number, slice(end - group.experts, end)) for group, end in zip(groups, ends, strict=True)]
        return places

    def experts_in(self, block: int) -> slice | None:
        """Which experts of its layer a block holds; None if it is not a group of experts."""
        return self._places[block - 1][1] if 0 < block <= len(self._places) else None

    @property
    def num_parameters(self) -> int:
        return sum(block.num_parameters for block in self.blocks)

    def describe_templates(self) -> list[str]:
        """A line for each distinct structure of layer, that is for each that is compiled, with the layers that have it."""
        lines = []
        for structure in dict.fromkeys(self.layers):
            numbers = [i for i, layer in enumerate(self.layers) if layer == structure]
            starts = [i for i in numbers if i - 1 not in numbers]
            ends = [i for i in numbers if i + 1 not in numbers]
            runs = ", ".join(f"{i}" if i == j else f"{i}-{j}" for i, j in zip(starts, ends, strict=True))
            lines.append(f"layers {runs}: {structure.describe()}")
        return lines

    def tensor_name(self, block: int, path: str) -> str:
        """Hugging Face name of tensor `path` (such as ``"self_attn.q_proj.weight"``) of block number `block`.

        Groups of experts hold parts of one tensor, under its name.

        >>> spec.tensor_name(4, "self_attn.q_proj.weight")
        'model.layers.3.self_attn.q_proj.weight'
        """
        if block == 0:
            return f"model.embed_tokens.{path}"
        if block <= len(self._places):
            layer, experts = self._places[block - 1]
            return f"model.layers.{layer}.{path}" if experts is None else f"model.layers.{layer}.mlp.{path}"
        if path == "lm_head.weight":
            return "model.embed_tokens.weight" if self.tie_word_embeddings else path
        return f"model.{path}"

    def kept_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes of the inputs of all blocks that backward needs; groups of a layer share one.

        Args:
          tokens: of a micro-batch.
          itemsize: of a hidden value.
        """
        inputs = (len(self.layers) + 1) * self.hidden_size * itemsize
        sparse = [layer.moe for layer in self.layers if layer.moe is not None and self.expert_groups > 1]
        # The input of the experts, and number and weight of each token's choices.
        return tokens * (inputs + sum(self.hidden_size * itemsize + 8 * moe.top_k for moe in sparse))


def group_sizes(experts: int, groups: int) -> list[int]:
    """Experts in each group: as equal as can be, the larger ones first."""
    size, larger = divmod(experts, groups)
    return [size + (group < larger) for group in range(groups)]
