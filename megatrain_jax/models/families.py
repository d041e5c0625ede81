"""A Hugging Face config.json read as a `ModelSpec`: one short function per family.

What a key means, and its value where it is absent, follow the configuration class of that family in transformers, in
the spelling of version 4 (``rope_theta``, ``rope_scaling``) and of version 5 (``rope_parameters``). A setting that
would change what the model computes, and that is not implemented here, is refused by name. Read but without effect:
``attention_dropout`` (training is without dropout), ``pretraining_tp`` (the same maths in slices), ``use_cache``.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatrain_jax.config import UserError
from megatrain_jax.models.spec import LayerSpec, ModelSpec, RopeSpec

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
ROPE_KINDS = ("default", "linear", "llama3")

_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
    "layer_types": None,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "vocab_size": 151936,
}

# What other families compute with these is not implemented here: null or one of the values listed passes.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "no_rope_layers": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "partial_rotary_factor": (1.0,),
    "per_layer_config": (),
    "quantization_config": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1.0,),
    "rope_interleaved": (False,),
    "use_bidirectional_attention": (False,),
}

_ROPE_KEYS = {"rope_theta", "rope_type", "type", "factor", "partial_rotary_factor"}
_LLAMA3_KEYS = {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The architecture that a parsed config.json describes.

    Raises:
      UserError: the family, or a setting that changes what it computes, is not supported, or a value makes no sense.
    """
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise UserError(f"config.json: model_type {family!r} is not supported; supported: {', '.join(_FAMILIES)}")
    class_name, read = _FAMILIES[family]
    known = (f"{class_name}ForCausalLM", f"{class_name}Model")
    for architecture in config.get("architectures") or ():
        if architecture not in known:
            raise UserError(f"config.json: architecture {architecture!r} is not supported; supported: {known[0]}")
    for key, accepted in _NEUTRAL.items():
        _only(config, key, *accepted)
    return read(config)


def read_config(folder: str | Path, overrides: Mapping[str, Any] = {}) -> dict[str, Any]:
    """config.json of a Hugging Face folder, with the top-level keys of `overrides` set in it.

    ``num_hidden_layers`` set lower than the file's also shortens the file's ``layer_types``.

    Raises:
      UserError: no folder, no config.json, JSON that does not parse, or an override of a key that no config has.
    """
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise UserError(f"model.name: no such folder '{folder}'; give a local Hugging Face folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"model.name: no config.json in '{folder}'; is it a Hugging Face folder?") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); get the file again") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: holds a {type(config).__name__} where a JSON object is needed; get the file again")
    known = {*config, *_DEFAULTS, *_NEUTRAL, "model_type", "original_max_position_embeddings"}
    for key in overrides:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"'{path}' has no such key"
            raise UserError(f"model.config_overrides: unknown key '{key}'; {hint}")
    layers, types = overrides.get("num_hidden_layers"), config.get("layer_types")
    if isinstance(layers, int) and isinstance(types, list):
        config["layer_types"] = types[:layers]
    return {**config, **overrides}


def _llama(config: Mapping[str, Any]) -> ModelSpec:
    defaults = {"vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": None}
    config = {**_DEFAULTS, **defaults, "max_position_embeddings": 2048, "sliding_window": None, **config}
    _only(config, "sliding_window")
    bias = _flag(config, "attention_bias")
    return _decoder(
        config, _one_type(config, "full_attention"), qkv_bias=bias, o_bias=bias, mlp_bias=_flag(config, "mlp_bias")
    )


def _mistral(config: Mapping[str, Any]) -> ModelSpec:
    defaults = {"vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8}
    config = {**_DEFAULTS, **defaults, "max_position_embeddings": 131072, **config}
    _only(config, "attention_bias", False)
    _only(config, "mlp_bias", False)
    full = config["sliding_window"] is None
    return _decoder(config, _one_type(config, "full_attention" if full else "sliding_attention"))


def _qwen2(config: Mapping[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, "attention_bias": True, **config}
    _only(config, "attention_bias", True)
    _only(config, "mlp_bias", False)
    return _decoder(config, _qwen_types(config), qkv_bias=True)


def _qwen3(config: Mapping[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, "head_dim": 128, **config}
    if config["head_dim"] is None:
        raise UserError("config.json: head_dim is null; a qwen3 model needs its number")
    _only(config, "mlp_bias", False)
    bias = _flag(config, "attention_bias")
    return _decoder(config, _qwen_types(config), qk_norm=True, qkv_bias=bias, o_bias=bias)


_FAMILIES: dict[str, tuple[str, Callable[[Mapping[str, Any]], ModelSpec]]] = {
    "llama": ("Llama", _llama),
    "mistral": ("Mistral", _mistral),
    "qwen2": ("Qwen2", _qwen2),
    "qwen3": ("Qwen3", _qwen3),
}


def _decoder(config: Mapping[str, Any], layer_types: list[str], **switches: bool) -> ModelSpec:
    """The part that the families share. `switches` are the flags of `LayerSpec`."""
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    kv_heads = heads if config["num_key_value_heads"] is None else _count(config, "num_key_value_heads")
    if heads % kv_heads:
        raise UserError(f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if config["head_dim"] is None and hidden % heads:
        raise UserError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = hidden // heads if config["head_dim"] is None else _count(config, "head_dim")
    if head_dim % 2:
        raise UserError(f"config.json: head_dim {head_dim} is odd; rotary embedding needs an even one")
    if config["hidden_act"] not in ACTIVATIONS:
        supported = ", ".join(ACTIVATIONS)
        raise UserError(f"config.json: hidden_act {config['hidden_act']!r} is not supported; supported: {supported}")
    eps = _number(config, "rms_norm_eps")

    def layer(layer_type: str) -> LayerSpec:
        return LayerSpec(
            hidden_size=hidden,
            intermediate_size=_count(config, "intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope=_rope(config, layer_type),
            norm_eps=eps,
            activation=config["hidden_act"],
            sliding_window=_count(config, "sliding_window") if layer_type == "sliding_attention" else None,
            **switches,
        )

    return ModelSpec(
        family=config["model_type"],
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden,
        layers=tuple(layer(layer_type) for layer_type in layer_types),
        norm_eps=eps,
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        max_position_embeddings=_count(config, "max_position_embeddings"),
        initializer_range=_number(config, "initializer_range"),
    )


def _qwen_types(config: Mapping[str, Any]) -> list[str]:
    """Attention of each layer. ``layer_types`` wins over ``max_window_layers``, which leaves the first layers full."""
    sliding = _flag(config, "use_sliding_window")
    if config["layer_types"] is None:
        full = _count(config, "max_window_layers", least=0)
        windowed = sliding and config["sliding_window"] is not None
        return [
            "sliding_attention" if windowed and index >= full else "full_attention"
            for index in range(_count(config, "num_hidden_layers"))
        ]
    types = _layer_types(config)
    if not sliding and "sliding_attention" in types:
        raise UserError("config.json: layer_types has 'sliding_attention' but use_sliding_window is not true; set it")
    return types


def _one_type(config: Mapping[str, Any], layer_type: str) -> list[str]:
    """The same attention in every layer; transformers ignores ``layer_types`` here, so another one is refused."""
    types = [layer_type] * _count(config, "num_hidden_layers")
    if config["layer_types"] is not None and _layer_types(config) != types:
        raise UserError(
            f"config.json: layer_types of a {config['model_type']} model must all be '{layer_type}' or be absent"
        )
    return types


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    types, layers = config["layer_types"], _count(config, "num_hidden_layers")
    if not isinstance(types, (list, tuple)) or len(types) != layers:
        raise UserError(f"config.json: layer_types must list one type for each of the {layers} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise UserError(
                f"config.json: layer type {kind!r} is not supported; supported: full_attention, sliding_attention"
            )
    return list(types)


def _rope(config: Mapping[str, Any], layer_type: str) -> RopeSpec:
    """Rotary settings of layers of `layer_type`; as in transformers ``rope_scaling`` wins over ``rope_parameters``."""
    where = "rope_scaling" if config["rope_scaling"] else "rope_parameters"
    rope = config[where] or {}
    if isinstance(rope, Mapping) and any(isinstance(value, Mapping) for value in rope.values()):
        where, rope = f"{where}.{layer_type}", rope.get(layer_type)
    if not isinstance(rope, Mapping):
        raise UserError(f"config.json: {where} is {rope!r}; it must be an object of rotary settings")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise UserError(f"config.json: {where} type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    for key, value in rope.items():
        if key not in _ROPE_KEYS | _LLAMA3_KEYS and value is not None:
            raise UserError(f"config.json: {where}.{key} is not supported with type '{kind}'; remove it")
    _only(rope, "partial_rotary_factor", 1.0, where=f"{where}.")
    theta = _number(rope if "rope_theta" in rope else config, "rope_theta")
    if kind == "default":
        return RopeSpec(theta=theta)
    factor = _number(rope, "factor", where=f"{where}.")
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=factor)
    # As transformers does, a value beside the rotary settings wins over the one among them.
    holder = next((c for c in (config, rope) if "original_max_position_embeddings" in c), None)
    low, high = (_number(rope, f"{band}_freq_factor", where=f"{where}.") for band in ("low", "high"))
    if low >= high:
        raise UserError(f"config.json: {where}.low_freq_factor {low} must be below high_freq_factor {high}")
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_count(holder, "original_max_position_embeddings")
        if holder is not None
        else _count(config, "max_position_embeddings"),
    )


def _only(config: Mapping[str, Any], key: str, *accepted: Any, where: str = "") -> None:
    value = config.get(key)
    if value is not None and value not in accepted:
        shown = value if isinstance(value, (bool, int, float, str)) else type(value).__name__
        allowed = " or ".join(["null", *(json.dumps(a) for a in accepted)])
        raise UserError(f"config.json: {where}{key} = {shown} is not supported here; it must be absent, {allowed}")


def _count(config: Mapping[str, Any], key: str, least: int = 1) -> int:
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"config.json: {key} is {value!r}; it must be a whole number, {least} or more")
    return value


def _number(config: Mapping[str, Any], key: str, where: str = "") -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value < math.inf):
        raise UserError(f"config.json: {where}{key} is {value!r}; it must be a number above 0")
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    if not isinstance(config[key], bool):
        raise UserError(f"config.json: {key} is {config[key]!r}; it must be true or false")
    return config[key]
