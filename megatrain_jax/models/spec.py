"""An architecture as plain, hashable data, and the shapes of what flows through it.

Nothing here imports jax: every room of the package may read this file.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple


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
class RopeSpec:
    """Rotary position embedding (Su et al., arXiv 2104.09864), half-split as in transformers.

    Attributes:
      theta: base of the geometric sequence of wavelengths.
      kind: ``"default"``, ``"linear"`` (positions divided by `factor`) or ``"llama3"`` (Llama 3.1: long
        wavelengths divided by `factor`, short ones kept, a smooth mix between).
      factor: the context is stretched by this much.
      low_freq_factor, high_freq_factor, original_max_position_embeddings: ``"llama3"`` only.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclasses.dataclass(frozen=True)
class EmbeddingSpec:
    """The token embedding: ``weight [vocab, hidden]``."""

    vocab_size: int
    hidden_size: int

    @property
    def num_parameters(self) -> int:
        return self.vocab_size * self.hidden_size


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One pre-norm decoder layer: attention, then a gated MLP. Equal specs share one compiled template.

    Attributes:
      sliding_window: a query attends to at most this many keys, itself included; None is full attention.
      qk_norm: RMSNorm over each head of q and k before the rotary embedding (Qwen3).
      qkv_bias, o_bias, mlp_bias: which projections carry a bias.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    norm_eps: float
    activation: str = "silu"
    sliding_window: int | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False

    @property
    def num_parameters(self) -> int:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + 2 * keys)
        mlp = 3 * self.hidden_size * self.intermediate_size
        norms = 2 * self.hidden_size + 2 * self.head_dim * self.qk_norm
        biases = (queries + 2 * keys) * self.qkv_bias + self.hidden_size * self.o_bias
        biases += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        return attention + mlp + norms + biases


@dataclasses.dataclass(frozen=True)
class HeadSpec:
    """Final norm and output projection. `tied`: the projection is the embedding's weight."""

    vocab_size: int
    hidden_size: int
    norm_eps: float
    tied: bool

    @property
    def num_parameters(self) -> int:
        """A tied projection is counted with the embedding."""
        return self.hidden_size + (0 if self.tied else self.vocab_size * self.hidden_size)


BlockSpec = EmbeddingSpec | LayerSpec | HeadSpec


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A decoder-only language model: embedding, layers, head.

    Attributes:
      family: ``model_type`` of the Hugging Face config it was read from.
      layers: one `LayerSpec` per decoder layer, in order.
      max_position_embeddings: longest sequence that the model supports, in tokens.
      initializer_range: standard deviation of randomly initialised matrices.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    initializer_range: float = 0.02

    @property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """Every block in forward order: embedding, layers, head."""
        embedding = EmbeddingSpec(self.vocab_size, self.hidden_size)
        head = HeadSpec(self.vocab_size, self.hidden_size, self.norm_eps, self.tie_word_embeddings)
        return (embedding, *self.layers, head)

    @property
    def num_parameters(self) -> int:
        return sum(block.num_parameters for block in self.blocks)

    def tensor_name(self, block: int, path: str) -> str:
        """Hugging Face name of tensor `path` (such as ``"self_attn.q_proj.weight"``) of block number `block`.

        >>> spec.tensor_name(4, "self_attn.q_proj.weight")
        'model.layers.3.self_attn.q_proj.weight'
        """
        if block == 0:
            return f"model.embed_tokens.{path}"
        if block <= len(self.layers):
            return f"model.layers.{block - 1}.{path}"
        if path == "lm_head.weight":
            return "model.embed_tokens.weight" if self.tie_word_embeddings else path
        return f"model.{path}"
