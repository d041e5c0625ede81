"""Keys of a config.json, read one by one and checked: a value that makes no sense is refused by the name of its key."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from megatrain_jax.config import UserError
from megatrain_jax.models.part_specs import ROPE_KINDS, RopeSpec

_LARGEST = 2**31 - 1  # of whole numbers: sizes are int32 where they are computed with
LAYER_TYPES = ("full_attention", "sliding_attention")

# What each kind of rotary embedding reads besides its base.
_ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
    },
    "longrope": {"factor", "short_factor", "long_factor", "attention_factor", "original_max_position_embeddings"},
}
# Keys that a config may carry over from another kind; they have no effect with these.
_WITHOUT_EFFECT = {"default": {"factor", *_ROPE_KEYS["llama3"]}, "linear": _ROPE_KEYS["llama3"]}


def only(config: Mapping[str, Any], key: str, *accepted: Any, where: str = "") -> None:
    """Refuses a value other than null and those accepted."""
    value = config.get(key)
    if value is not None and value not in accepted:
        shown = value if isinstance(value, (bool, int, float, str)) else type(value).__name__
        allowed = " or ".join(["null", *(json.dumps(a) for a in accepted)])
        raise UserError(f"config.json: {where}{key} = {shown} is not supported here; it must be absent, {allowed}")


def count(config: Mapping[str, Any], key: str, least: int = 1) -> int:
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
        raise UserError(f"config.json: {key} is {value!r}; it must be a whole number, {least} or more")
    return value


def number(config: Mapping[str, Any], key: str, where: str = "") -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise UserError(f"config.json: {where}{key} is {value!r}; it must be a number above 0")
    return float(value)


def flag(config: Mapping[str, Any], key: str) -> bool:
    if not isinstance(config[key], bool):
        raise UserError(f"config.json: {key} is {config[key]!r}; it must be true or false")
    return config[key]


def layer_types(config: Mapping[str, Any], supported: tuple[str, ...] = LAYER_TYPES) -> list[str]:
    """``layer_types``, one for each layer."""
    types, layers = config["layer_types"], count(config, "num_hidden_layers")
    if not isinstance(types, (list, tuple)) or len(types) != layers:
        raise UserError(f"config.json: layer_types must list one type for each of the {layers} layers")
    for kind in types:
        if kind not in supported:
            raise UserError(f"config.json: layer type {kind!r} is not supported; supported: {', '.join(supported)}")
    return list(types)


def every_nth_full(config: Mapping[str, Any], every: int) -> list[str]:
    """``layer_types``, or, where it is absent, sliding layers of which each `every`-th is full."""
    if config["layer_types"] is not None:
        return layer_types(config)
    layers = range(1, count(config, "num_hidden_layers") + 1)
    return ["sliding_attention" if layer % every else "full_attention" for layer in layers]


# Of a quantization_config of FP8: what has no effect on the values in files, of which each says what dtype it has.
_FP8_WITHOUT_EFFECT = {
    "quant_method",
    "weight_block_size",
    "activation_scheme",
    "dequantize",
    "ignored_layers",
    "modules_to_convert",
    "modules_to_not_convert",
    "scale_fmt",
}


def check_quantisation(config: Mapping[str, Any], method: str) -> None:
    """Refuses a ``quantization_config`` of another method than `method`, "fp8" or "mxfp4"."""
    stored = config.get("quantization_config")
    if stored is None:
        return
    found = stored.get("quant_method") if isinstance(stored, Mapping) else stored
    if found != method:
        raise UserError(
            f"config.json: quantization_config.quant_method is {found!r}; weights of a {config['model_type']} model must "
            f"be {method} or not quantised"
        )
    if method != "fp8":
        return
    where = "quantization_config."
    for key in stored:
        if key not in _FP8_WITHOUT_EFFECT:
            only(stored, key, *{"fmt": ("e4m3",), "expert_dtype": ("fp8",)}.get(key, ()), where=where)
    block = stored.get("weight_block_size", (128, 128))
    if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise UserError(
            f"config.json: {where}weight_block_size is {block!r}; it must be two whole numbers, such as [128, 128]"
        )


def fp8_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale, of a checked config of a model stored in FP8; None of another."""
    stored = config.get("quantization_config")
    if stored is None or stored["quant_method"] != "fp8":
        return None
    rows, columns = stored.get("weight_block_size", (128, 128))
    return rows, columns


def read_rope(
    config: Mapping[str, Any],
    layer_type: str,
    head_dim: int,
    *,
    kinds: tuple[str, ...] = ROPE_KINDS,
    partial: bool = False,
    interleaved: bool = False,
) -> RopeSpec:
    """Rotary settings of layers of `layer_type`; as in transformers ``rope_scaling`` wins over ``rope_parameters``.

    Args:
      head_dim: values that the rotation may take.
      kinds: which the family has.
      partial: whether the family reads ``partial_rotary_factor``; it must be 1 otherwise.
      interleaved: see `RopeSpec`.
    """
    where = "rope_scaling" if config["rope_scaling"] else "rope_parameters"
    rope = config[where] or {}
    nested = isinstance(rope, Mapping) and any(isinstance(value, Mapping) for value in rope.values())
    if nested:
        where, rope = f"{where}.{layer_type}", rope.get(layer_type)
    if not isinstance(rope, Mapping):
        raise UserError(f"config.json: {where} is {rope!r}; it must be an object of rotary settings")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in kinds:
        raise UserError(f"config.json: {where} type {kind!r} is not supported; supported: {', '.join(kinds)}")
    known = (
        {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
        | _ROPE_KEYS[kind]
        | _WITHOUT_EFFECT.get(kind, set())
    )
    for key, value in rope.items():
        if key not in known and value is not None:
            raise UserError(f"config.json: {where}.{key} is not supported with type '{kind}'; remove it")
    holder = next((c for c in (rope, config) if c.get("partial_rotary_factor") is not None), None)
    share = 1.0 if holder is None else number(holder, "partial_rotary_factor")
    if not partial:
        only(rope, "partial_rotary_factor", 1.0, where=f"{where}.")
        only(config, "partial_rotary_factor", 1.0)
    rotated = int(head_dim * share)
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise UserError(
            f"config.json: partial_rotary_factor {share} of head_dim {head_dim} is {rotated} values; "
            f"it must be an even number of them, {head_dim} at most"
        )
    common = dict(
        theta=number(rope if "rope_theta" in rope else config, "rope_theta"),
        kind=kind,
        rotary_dim=None if rotated == head_dim else rotated,
        interleaved=interleaved,
    )
    if kind == "default":
        return RopeSpec(**common)
    if kind == "linear":
        return RopeSpec(factor=number(rope, "factor", where=f"{where}."), **common)
    # As transformers does, a value beside rotary settings common to all layers wins over the one among them.
    holders = (rope,) if nested else (config, rope)
    holder = next((c for c in holders if c.get("original_max_position_embeddings") is not None), None)
    original = (
        count(config, "max_position_embeddings")
        if holder is None
        else count(holder, "original_max_position_embeddings")
    )
    common["original_max_position_embeddings"] = original
    if kind == "llama3":
        low, high = (number(rope, f"{band}_freq_factor", where=f"{where}.") for band in ("low", "high"))
        if low >= high:
            raise UserError(f"config.json: {where}.low_freq_factor {low} must be below high_freq_factor {high}")
        factor = number(rope, "factor", where=f"{where}.")
        return RopeSpec(factor=factor, low_freq_factor=low, high_freq_factor=high, **common)
    if rope.get("factor") is None:
        common["factor"] = count(config, "max_position_embeddings") / original
    else:
        common["factor"] = number(rope, "factor", where=f"{where}.")
    return _yarn(rope, where, nested, common) if kind == "yarn" else _longrope(rope, where, rotated // 2, common)


def _yarn(rope: Mapping[str, Any], where: str, nested: bool, common: dict[str, Any]) -> RopeSpec:
    fast, slow = (
        default if not rope.get(key) else number(rope, key, where=f"{where}.")
        for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    if fast < slow:
        raise UserError(f"config.json: {where}.beta_fast {fast} must not be below beta_slow {slow}")
    if nested:
        only(rope, "truncate", True, where=f"{where}.")

    def magnitude(scale: float = 1.0) -> float:
        return 1.0 if common["factor"] <= 1 else 0.1 * scale * math.log(common["factor"]) + 1.0

    if rope.get("attention_factor") is not None:
        attention_factor = number(rope, "attention_factor", where=f"{where}.")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        over, under = (number(rope, key, where=f"{where}.") for key in ("mscale", "mscale_all_dim"))
        attention_factor = magnitude(over) / magnitude(under)
    else:
        attention_factor = magnitude()
    truncate = rope.get("truncate") is not False
    return RopeSpec(beta_fast=fast, beta_slow=slow, truncate=truncate, attention_factor=attention_factor, **common)


def _longrope(rope: Mapping[str, Any], where: str, frequencies: int, common: dict[str, Any]) -> RopeSpec:
    def factors(key: str) -> tuple[float, ...]:
        values = rope.get(key)
        if not isinstance(values, (list, tuple)) or len(values) != frequencies:
            raise UserError(f"config.json: {where}.{key} must list a number for each of the {frequencies} frequencies")
        return tuple(number({key: value}, key, where=f"{where}.") for value in values)

    original = common["original_max_position_embeddings"]
    if rope.get("attention_factor") is not None:
        attention_factor = number(rope, "attention_factor", where=f"{where}.")
    elif common["factor"] <= 1:
        attention_factor = 1.0
    elif original == 1:
        raise UserError(f"config.json: {where}: original_max_position_embeddings is 1; longrope needs 2 or more")
    else:
        attention_factor = math.sqrt(1 + math.log(common["factor"]) / math.log(original))
    return RopeSpec(
        short_factors=factors("short_factor"),
        long_factors=factors("long_factor"),
        attention_factor=attention_factor,
        **common,
    )
