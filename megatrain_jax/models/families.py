"""A Hugging Face config.json read as a `ModelSpec`: one short function per family (`dense`, `sparse`).

What a key means, and its value where it is absent, follow the configuration class of that family in transformers, in
the spelling of version 4 (``rope_theta``, ``rope_scaling``) and of version 5 (``rope_parameters``). A setting that
would change what the model computes, and that is not implemented here, is refused by name. Read but without effect:
``attention_dropout``, ``resid_pdrop``, ``embd_pdrop`` (training is without dropout), ``pretraining_tp`` (the same maths
in slices), ``use_cache``.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain_jax.config import UserError
from megatrain_jax.models.config_keys import check_quantisation, only
from megatrain_jax.models.decoder import DEFAULTS, Family
from megatrain_jax.models.dense import DENSE
from megatrain_jax.models.sparse import SPARSE, SPARSE_KEYS
from megatrain_jax.models.spec import ModelSpec

_MOST_LAYERS = 10_000  # an order of magnitude above any model: a number that would fill memory is a mistake
_FAMILIES: dict[str, Family] = {**DENSE, **SPARSE}

# What a config may hold besides; families that compute with one of these name it in `_FAMILIES`. For the others, null or
# one of the values listed passes.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "lm_head_bias": (False,),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "no_rope_layers": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "partial_rotary_factor": (1.0,),
    "per_layer_config": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1.0,),
    "rope_interleaved": (False,),
    "rotary_pct": (1.0,),
    "use_bidirectional_attention": (False,),
    "use_gated_activation": (True,),
    "use_parallel_block": (),
    "use_qk_norm": (False,),
}

# Further keys that only some families read.
_SPECIAL = {
    "full_attention_interval",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "hidden_activation",
    "layer_norm_eps",
    "max_window_layers",
    "no_rope_layer_interval",
    "original_max_position_embeddings",
    "rope_local_base_freq",
    "sliding_window_pattern",
    "use_sliding_window",
}

# Models with a language model in them, and the model type of that one; the rest of such a model is left out.
_LANGUAGE_MODELS = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}

# Asked for often, and why the answer is no.
_REFUSED = {
    "gpt2": "it has learned positions and transposed projections, which no supported family has",
}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The architecture that a parsed config.json describes.

    Raises:
      UserError: the family, or a setting that changes what it computes, is not supported, or a value makes no sense.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in _FAMILIES:
        why = f" ({_REFUSED[str(name)]})" if str(name) in _REFUSED else ""
        raise UserError(f"config.json: model_type {name!r} is not supported{why}; supported: {', '.join(_FAMILIES)}")
    family = _FAMILIES[name]
    known = (f"{family.class_name}ForCausalLM", f"{family.class_name}Model")
    architectures = config.get("architectures") or ()
    if not isinstance(architectures, (list, tuple)):
        raise UserError(f"config.json: architectures is {architectures!r}; it must be a list of names")
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise UserError(f"config.json: num_hidden_layers is {layers}; it must be {_MOST_LAYERS} at most")
    for architecture in architectures:
        if architecture not in known:
            raise UserError(f"config.json: architecture {architecture!r} is not supported; supported: {known[0]}")
    for key in ("rope_scaling", "rope_parameters"):
        if config.get(key) is not None and not isinstance(config[key], Mapping):
            raise UserError(f"config.json: {key} is {config[key]!r}; it must be an object of rotary settings")
    for key, accepted in _NEUTRAL.items():
        if key not in family.reads:
            only(config, key, *accepted)
    check_quantisation(config, family.quantised)
    return family.read(config)


def read_config(folder: str | Path, overrides: Mapping[str, Any] = {}) -> dict[str, Any]:
    """config.json of a Hugging Face folder, with the top-level keys of `overrides` set in it.

    Of a model that sees pictures too, it is the config of the language model in it, as a model of its own.
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
    if config.get("model_type") in _LANGUAGE_MODELS:
        config = _language_model(config)
    known = {*config, *DEFAULTS, *_NEUTRAL, *_SPECIAL, *SPARSE_KEYS, "model_type", "quantization_config"}
    for key in overrides:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"'{path}' has no such key"
            raise UserError(f"model.config_overrides: unknown key '{key}'; {hint}")
    layers, types = overrides.get("num_hidden_layers"), config.get("layer_types")
    if isinstance(layers, int) and isinstance(types, list):
        config["layer_types"] = types[:layers]
    return {**config, **overrides}


def _language_model(config: Mapping[str, Any]) -> dict[str, Any]:
    name, part = config["model_type"], config.get("text_config")
    if not isinstance(part, Mapping):
        raise UserError(f"config.json: text_config of a {name} model is {part!r}; it must be an object")
    family = _FAMILIES[_LANGUAGE_MODELS[name]]
    whole = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
    inherited = {key: config[key] for key in whole if key in config}
    own = {"model_type": _LANGUAGE_MODELS[name], "architectures": [f"{family.class_name}ForCausalLM"]}
    return {**part, **inherited, **own}
