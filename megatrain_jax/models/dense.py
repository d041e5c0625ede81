"""Families of dense decoders: a config.json of each, read as a `ModelSpec`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatrain_jax.config import UserError
from megatrain_jax.models.config_keys import count, every_nth_full, flag, layer_types, number, only, read_rope
from megatrain_jax.models.decoder import (
    DEFAULTS,
    Family,
    decoder,
    no_bias,
    number_or_none,
    one_type,
    qwen_types,
    rope_of_type,
    rope_where,
    sliding_only_if,
)
from megatrain_jax.models.part_specs import DeltaSpec, NormNames
from megatrain_jax.models.spec import ModelSpec


def _llama(config: Mapping[str, Any]) -> ModelSpec:
    config = {**DEFAULTS, **config}
    only(config, "sliding_window")
    bias = flag(config, "attention_bias")
    return decoder(
        config, one_type(config, "full_attention"), qkv_bias=bias, o_bias=bias, mlp_bias=flag(config, "mlp_bias")
    )


def _mistral(config: Mapping[str, Any]) -> ModelSpec:
    defaults = {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
    config = {**DEFAULTS, **defaults, "sliding_window": 4096, **config}
    no_bias(config)
    full = config["sliding_window"] is None
    return decoder(config, one_type(config, "full_attention" if full else "sliding_attention"))


_QWEN = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}


def _qwen2(config: Mapping[str, Any]) -> ModelSpec:
    config = {**DEFAULTS, **_QWEN, "attention_bias": True, **config}
    only(config, "attention_bias", True)
    only(config, "mlp_bias", False)
    return decoder(config, qwen_types(config), qkv_bias=True)


def _qwen3(config: Mapping[str, Any]) -> ModelSpec:
    config = {**DEFAULTS, **_QWEN, "head_dim": 128, **config}
    if config["head_dim"] is None:
        raise UserError("config.json: head_dim is null; a qwen3 model needs its number")
    only(config, "mlp_bias", False)
    bias = flag(config, "attention_bias")
    return decoder(config, qwen_types(config), qk_norm=True, qkv_bias=bias, o_bias=bias)


_GEMMA = {
    "vocab_size": 256000,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
}
_GEMMA_NORMS = NormNames(
    attention_out="post_attention_layernorm",
    mlp_in="pre_feedforward_layernorm",
    mlp_out="post_feedforward_layernorm",
)


def _gemma(config: Mapping[str, Any]) -> ModelSpec:
    sizes = {"hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28, "num_attention_heads": 16}
    act = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": None}
    config = {**DEFAULTS, **_GEMMA, **sizes, "num_key_value_heads": 16, **act, **config}
    only(config, "sliding_window")
    only(config, "mlp_bias", False)
    if config["hidden_act"] == "gelu":  # as the first releases have it, of which transformers says the same
        config["hidden_act"] = "gelu_pytorch_tanh"
    only(config, "hidden_activation", config["hidden_act"])
    return _gemma_decoder(config, one_type(config, "full_attention"), "hidden_act")


_GEMMA2 = {
    **_GEMMA,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}


def _gemma2(config: Mapping[str, Any]) -> ModelSpec:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    config = {**DEFAULTS, **_GEMMA2, **caps, **config}
    only(config, "mlp_bias", False)
    return _gemma_decoder(
        config,
        every_nth_full(config, 2),
        "hidden_activation",
        norms=_GEMMA_NORMS,
        attention_scale=number(config, "query_pre_attn_scalar") ** -0.5,
        attention_softcap=number_or_none(config, "attn_logit_softcapping"),
    )


def _gemma3(config: Mapping[str, Any]) -> ModelSpec:
    sizes = {"vocab_size": 262208, "max_position_embeddings": 131072}
    rope = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}
    config = {**DEFAULTS, **_GEMMA2, **sizes, **rope, **config}
    only(config, "mlp_bias", False)
    thetas = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
    return _gemma_decoder(
        config,
        every_nth_full(config, count(config, "sliding_window_pattern")),
        "hidden_activation",
        rope=lambda layer_type, head_dim: rope_of_type(
            config, layer_type, head_dim, number(config, thetas[layer_type])
        ),
        norms=_GEMMA_NORMS,
        qk_norm=True,
        attention_scale=number(config, "query_pre_attn_scalar") ** -0.5,
    )


def _gemma_decoder(config: Mapping[str, Any], types: list[str], activation_key: str, **switches: Any) -> ModelSpec:
    bias = flag(config, "attention_bias")
    spec = decoder(
        config, types, activation_key=activation_key, norm="rms_offset", qkv_bias=bias, o_bias=bias, **switches
    )
    return dataclasses.replace(
        spec,
        embedding_multiplier=spec.hidden_size**0.5,
        round_embedding_multiplier=True,
        logit_softcap=number_or_none(config, "final_logit_softcapping"),
    )


def _phi3(config: Mapping[str, Any]) -> ModelSpec:
    defaults = {"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096}
    config = {**DEFAULTS, **defaults, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **config}
    no_bias(config)
    where = "rope_scaling" if config["rope_scaling"] else "rope_parameters"
    settings = dict(config[where] or {})
    if settings.get("rope_type", settings.get("type")) in ("su", "yarn"):  # earlier names of the same
        config[where] = {**settings, "rope_type": "longrope"}
    full = config["sliding_window"] is None
    return decoder(
        config,
        one_type(config, "full_attention" if full else "sliding_attention"),
        rope=lambda layer_type, head_dim: read_rope(
            config, layer_type, head_dim, kinds=("default", "longrope"), partial=True
        ),
        fused_qkv=True,
        fused_gate_up=True,
    )


def _glm(config: Mapping[str, Any], **norms: Any) -> ModelSpec:
    defaults = {"vocab_size": 151552, "intermediate_size": 13696, "num_hidden_layers": 40, "num_key_value_heads": 2}
    more = {"head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-07, "attention_bias": True}
    config = {**DEFAULTS, **defaults, **more, "partial_rotary_factor": 0.5, **config}
    only(config, "sliding_window")
    only(config, "mlp_bias", False)
    return decoder(
        config,
        one_type(config, "full_attention"),
        rope=lambda layer_type, head_dim: read_rope(config, layer_type, head_dim, partial=True, interleaved=True),
        qkv_bias=flag(config, "attention_bias"),
        fused_gate_up=True,
        **norms,
    )


def _glm4(config: Mapping[str, Any]) -> ModelSpec:
    return _glm(config, norms=NormNames(attention_out="post_self_attn_layernorm", mlp_out="post_mlp_layernorm"))


_OLMO = {
    "vocab_size": 50304,
    "rms_norm_eps": 1e-5,
}


def _olmo2(config: Mapping[str, Any]) -> ModelSpec:
    config = {**DEFAULTS, **_OLMO, **config}
    only(config, "sliding_window")
    return _olmo_decoder(config, one_type(config, "full_attention"))


def _olmo3(config: Mapping[str, Any]) -> ModelSpec:
    config = {**DEFAULTS, **_OLMO, "sliding_window": 4096, "rope_theta": 5e5, **config}
    if config["rope_theta"] != 5e5:
        # transformers 4 gives it to every layer, version 5 to the full ones alone.
        raise UserError(
            f"config.json: rope_theta = {config['rope_theta']} of an olmo3 model is read differently by versions of "
            "transformers; write it into rope_parameters, for full_attention and for sliding_attention"
        )
    return _olmo_decoder(
        config,
        every_nth_full(config, 4),
        rope=lambda layer_type, head_dim: rope_of_type(config, layer_type, head_dim, 5e5),
    )


def _olmo_decoder(config: Mapping[str, Any], types: list[str], **switches: Any) -> ModelSpec:
    only(config, "mlp_bias", False)
    bias = flag(config, "attention_bias")
    return decoder(
        config,
        types,
        norm="rms_float32",
        norms=NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        qk_norm=True,
        qk_norm_scope="projection",
        qkv_bias=bias,
        o_bias=bias,
        **switches,
    )


def _smollm3(config: Mapping[str, Any]) -> ModelSpec:
    defaults = {"vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16}
    more = {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True}
    own = {"use_sliding_window": False, "no_rope_layers": None, "no_rope_layer_interval": 4}
    config = {**DEFAULTS, **defaults, **more, **own, **config}
    layers, rotary = count(config, "num_hidden_layers"), config["no_rope_layers"]
    if rotary is None:
        interval = count(config, "no_rope_layer_interval")
        rotary = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(rotary, (list, tuple)) or len(rotary) != layers or any(r not in (0, 1) for r in rotary):
        raise UserError(f"config.json: no_rope_layers must list a 0 or a 1 for each of the {layers} layers")
    sliding = flag(config, "use_sliding_window")
    if config["layer_types"] is not None:
        types = sliding_only_if(sliding, layer_types(config))
    else:
        window = sliding and config["sliding_window"] is not None
        types = ["sliding_attention" if window and not r else "full_attention" for r in rotary]
    bias = flag(config, "attention_bias")
    spec = decoder(config, types, qkv_bias=bias, o_bias=bias, mlp_bias=flag(config, "mlp_bias"))
    return rope_where(spec, rotary)


def _granite(config: Mapping[str, Any]) -> ModelSpec:
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    config = {**DEFAULTS, **dict.fromkeys(names, 1.0), **config}
    only(config, "sliding_window")
    embedding, residual, attention, logits = (number(config, name) for name in names)
    bias = flag(config, "attention_bias")
    spec = decoder(
        config,
        one_type(config, "full_attention"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(config, "mlp_bias"),
        attention_scale=attention,
        residual_multiplier=residual,
    )
    return dataclasses.replace(spec, embedding_multiplier=embedding, logit_multiplier=1 / logits)


_COHERE = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "logit_scale": 0.0625,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def _cohere(config: Mapping[str, Any]) -> ModelSpec:
    config = {**DEFAULTS, **_COHERE, "rope_theta": 5e5, "use_qk_norm": False, **config}
    only(config, "sliding_window")
    types = one_type(config, "full_attention")
    return _cohere_decoder(config, types, qk_norm=flag(config, "use_qk_norm"), qk_norm_scope="heads")


def _cohere2(config: Mapping[str, Any]) -> ModelSpec:
    config = {**DEFAULTS, **_COHERE, "sliding_window": 4096, "sliding_window_pattern": 4, **config}
    if config["head_dim"] is not None:
        only(config, "head_dim", count(config, "hidden_size") // count(config, "num_attention_heads"))
    types = every_nth_full(config, count(config, "sliding_window_pattern"))
    return rope_where(_cohere_decoder(config, types), [kind == "sliding_attention" for kind in types])


def _cohere_decoder(config: Mapping[str, Any], types: list[str], **switches: Any) -> ModelSpec:
    only(config, "use_parallel_block", True)
    only(config, "mlp_bias", False)
    bias = flag(config, "attention_bias")
    spec = decoder(
        config,
        types,
        eps_key="layer_norm_eps",
        rope=lambda layer_type, head_dim: read_rope(config, layer_type, head_dim, interleaved=True),
        norm="layer",
        norms=NormNames(mlp_in=None),
        parallel=True,
        qkv_bias=bias,
        o_bias=bias,
        **switches,
    )
    return dataclasses.replace(spec, logit_multiplier=number(config, "logit_scale"))


HYBRID = {
    "num_attention_heads": 16,
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def _qwen3_5(config: Mapping[str, Any]) -> ModelSpec:
    sizes = {"vocab_size": 248320, "intermediate_size": 12288, "num_key_value_heads": 4}
    config = {**DEFAULTS, **HYBRID, **sizes, **config}
    return hybrid_decoder(config, fused=False)


def hybrid_decoder(config: Mapping[str, Any], *, fused: bool) -> ModelSpec:
    """Gated delta layers, and among them layers of attention with an output gate (Qwen3-Next, Qwen3.5)."""
    only(config, "sliding_window")
    only(config, "mlp_bias", False)
    if config["layer_types"] is None:
        every, layers = count(config, "full_attention_interval"), count(config, "num_hidden_layers")
        types = ["full_attention" if layer % every == 0 else "linear_attention" for layer in range(1, layers + 1)]
    else:
        types = layer_types(config, ("full_attention", "linear_attention"))
    names = ("key_heads", "value_heads", "key_dim", "value_dim", "conv_kernel")
    keys = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    delta = DeltaSpec(**{n: count(config, f"linear_{key}") for n, key in zip(names, keys)}, fused=fused)
    if delta.value_heads % delta.key_heads:
        raise UserError(
            f"config.json: linear_num_value_heads {delta.value_heads} is not a multiple of "
            f"linear_num_key_heads {delta.key_heads}"
        )
    bias = flag(config, "attention_bias")
    rotary = {key: _text_rope(config[key]) for key in ("rope_parameters", "rope_scaling")}
    spec = decoder(
        config,
        types,
        rope=lambda layer_type, head_dim: read_rope({**config, **rotary}, layer_type, head_dim, partial=True),
        norm="rms_offset",
        qk_norm=True,
        output_gate=True,
        qkv_bias=bias,
        o_bias=bias,
    )
    layers = (
        dataclasses.replace(layer, delta=delta) if kind == "linear_attention" else layer
        for layer, kind in zip(spec.layers, types)
    )
    return dataclasses.replace(spec, layers=tuple(layers))


def _text_rope(settings: Any) -> Any:
    """Rotary settings without those that divide it between the axes of a picture: all positions of a text are equal."""
    if not isinstance(settings, Mapping):
        return settings
    return {key: value for key, value in settings.items() if key not in ("mrope_section", "mrope_interleaved")}


DENSE: dict[str, Family] = {
    "llama": Family("Llama", _llama),
    "mistral": Family("Mistral", _mistral),
    "qwen2": Family("Qwen2", _qwen2),
    "qwen3": Family("Qwen3", _qwen3),
    "gemma": Family("Gemma", _gemma),
    "gemma2": Family("Gemma2", _gemma2, ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")),
    "gemma3_text": Family("Gemma3", _gemma3, ("final_logit_softcapping", "query_pre_attn_scalar")),
    "phi3": Family("Phi3", _phi3, ("partial_rotary_factor",)),
    "glm": Family("Glm", _glm, ("partial_rotary_factor",)),
    "glm4": Family("Glm4", _glm4, ("partial_rotary_factor",)),
    "olmo2": Family("Olmo2", _olmo2),
    "olmo3": Family("Olmo3", _olmo3),
    "smollm3": Family("SmolLM3", _smollm3, ("no_rope_layers",)),
    "granite": Family(
        "Granite",
        _granite,
        ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"),
    ),
    "cohere": Family("Cohere", _cohere, ("logit_scale", "use_parallel_block", "use_qk_norm")),
    "cohere2": Family("Cohere2", _cohere2, ("logit_scale", "use_parallel_block")),
    "qwen3_5_text": Family("Qwen3_5", _qwen3_5, ("partial_rotary_factor",)),
}
