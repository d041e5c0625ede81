"""What the families share: the defaults of absent keys, and the spec of a decoder made of a checked config."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatrain_jax.config import UserError
from megatrain_jax.models.config_keys import count, flag, layer_types, number, only, read_rope
from megatrain_jax.models.part_specs import RopeSpec
from megatrain_jax.models.spec import LayerSpec, ModelSpec

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")

# Values of keys that are absent, where a family does not say otherwise.
DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "layer_types": None,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "attention_bias": False,
    "mlp_bias": False,
    "vocab_size": 32000,
}


class Family(NamedTuple):
    """How the configs of one ``model_type`` are read.

    Attributes:
      class_name: of its classes in transformers, such as ``"Llama"`` of ``LlamaForCausalLM``.
      read: the spec of a config.
      reads: keys of `_NEUTRAL` that it computes with.
      quantised: the one way of quantising in which its files may be.
    """

    class_name: str
    read: Callable[[Mapping[str, Any]], ModelSpec]
    reads: tuple[str, ...] = ()
    quantised: str = "fp8"


def decoder(
    config: Mapping[str, Any],
    types: list[str],
    *,
    rope: Callable[[str, int], RopeSpec] | None = None,
    activation_key: str = "hidden_act",
    eps_key: str = "rms_norm_eps",
    norm: str = "rms",
    **switches: Any,
) -> ModelSpec:
    """The part that the families share.

    Args:
      types: the attention of each layer, such as "full_attention".
      rope: ``(layer type, head_dim) -> RopeSpec``; None is `read_rope`.
      norm: of layers and head.
      switches: further fields of `LayerSpec`, the same for all layers.
    """
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    kv_heads = heads if config["num_key_value_heads"] is None else count(config, "num_key_value_heads")
    if heads % kv_heads:
        raise UserError(f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if config["head_dim"] is None and hidden % heads:
        raise UserError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = hidden // heads if config["head_dim"] is None else count(config, "head_dim")
    if head_dim % 2:
        raise UserError(f"config.json: head_dim {head_dim} is odd; rotary embedding needs an even one")
    activation = config[activation_key]
    if activation not in ACTIVATIONS:
        supported = ", ".join(ACTIVATIONS)
        raise UserError(f"config.json: {activation_key} {activation!r} is not supported; supported: {supported}")
    eps = number(config, eps_key)
    rope = rope or (lambda layer_type, head_dim: read_rope(config, layer_type, head_dim))

    def layer(layer_type: str) -> LayerSpec:
        return LayerSpec(
            hidden_size=hidden,
            intermediate_size=count(config, "intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope(layer_type, head_dim),
            norm_eps=eps,
            norm=norm,
            activation=activation,
            sliding_window=count(config, "sliding_window") if layer_type == "sliding_attention" else None,
            **switches,
        )

    return ModelSpec(
        family=config["model_type"],
        vocab_size=count(config, "vocab_size"),
        hidden_size=hidden,
        layers=tuple(layer(layer_type) for layer_type in types),
        norm_eps=eps,
        norm=norm,
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        max_position_embeddings=count(config, "max_position_embeddings"),
        initializer_range=number(config, "initializer_range"),
    )


def rope_of_type(config: Mapping[str, Any], layer_type: str, head_dim: int, theta: float) -> RopeSpec:
    """Rotary settings of families that have them for each layer type; ``rope_scaling`` is that of the full layers."""
    nested = config["rope_parameters"] or {}
    if not isinstance(nested, Mapping) or not all(v is None or isinstance(v, Mapping) for v in nested.values()):
        raise UserError("config.json: rope_parameters of this family must hold an object for each layer type")
    settings = {"rope_theta": theta, **(nested.get(layer_type) or {})}
    if layer_type == "full_attention":
        settings |= config["rope_scaling"] or {}
    return read_rope({**config, "rope_scaling": None, "rope_parameters": {layer_type: settings}}, layer_type, head_dim)


def rope_where(spec: ModelSpec, rotary: list[Any]) -> ModelSpec:
    """The model with positions in the layers where `rotary` is true, and none in the others."""
    layers = (layer if keep else dataclasses.replace(layer, rope=None) for layer, keep in zip(spec.layers, rotary))
    return dataclasses.replace(spec, layers=tuple(layers))


def number_or_none(config: Mapping[str, Any], key: str) -> float | None:
    return None if config.get(key) is None else number(config, key)


def no_bias(config: Mapping[str, Any]) -> None:
    only(config, "attention_bias", False)
    only(config, "mlp_bias", False)


def sliding_only_if(sliding: bool, types: list[str]) -> list[str]:
    if not sliding and "sliding_attention" in types:
        raise UserError("config.json: layer_types has 'sliding_attention' but use_sliding_window is not true; set it")
    return types


def qwen_types(config: Mapping[str, Any]) -> list[str]:
    """Attention of each layer. ``layer_types`` wins over ``max_window_layers``, which leaves the first layers full."""
    sliding = flag(config, "use_sliding_window")
    if config["layer_types"] is None:
        full = count(config, "max_window_layers", least=0)
        windowed = sliding and config["sliding_window"] is not None
        return [
            "sliding_attention" if windowed and index >= full else "full_attention"
            for index in range(count(config, "num_hidden_layers"))
        ]
    return sliding_only_if(sliding, layer_types(config))


def one_type(config: Mapping[str, Any], layer_type: str) -> list[str]:
    """The same attention in every layer; transformers ignores ``layer_types`` here, so another one is refused."""
    types = [layer_type] * count(config, "num_hidden_layers")
    if config["layer_types"] is not None and layer_types(config) != types:
        raise UserError(
            f"config.json: layer_types of a {config['model_type']} model must all be '{layer_type}' or be absent"
        )
    return types
