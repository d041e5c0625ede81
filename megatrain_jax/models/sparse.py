"""Families of decoders with experts: a config.json of each, read as a `ModelSpec`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from megatrain_jax.config import UserError
from megatrain_jax.models.config_keys import count, flag, layer_types, number, only, read_rope
from megatrain_jax.models.decoder import DEFAULTS, Family, decoder, no_bias, one_type, sliding_only_if
from megatrain_jax.models.dense import HYBRID, hybrid_decoder
from megatrain_jax.models.part_specs import LatentSpec, MoESpec
from megatrain_jax.models.spec import ModelSpec

# Keys that only these families read.
SPARSE_KEYS = {
    "decoder_sparse_step",
    "first_k_dense_replace",
    "kv_lora_rank",
    "mlp_only_layers",
    "moe_intermediate_size",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "qkv_bias",
    "rope_interleave",
    "routed_scaling_factor",
    "router_aux_loss_coef",
    "shared_expert_intermediate_size",
    "swiglu_alpha",
    "swiglu_limit",
    "topk_group",
    "topk_method",
    "v_head_dim",
}


def _mixtral(config: Mapping[str, Any]) -> ModelSpec:
    defaults = {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
    defaults |= {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2}
    config = {**DEFAULTS, **defaults, **_one_name(config, "num_experts", "num_local_experts")}
    no_bias(config)
    only(config, "router_jitter_noise", 0.0)
    full = config["sliding_window"] is None
    spec = decoder(config, one_type(config, "full_attention" if full else "sliding_attention"))
    moe = _experts(config, "num_local_experts", "intermediate_size")
    return _balanced(config, _with_experts(spec, moe, lambda layer: True))


_QWEN = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
}


def _qwen2_moe(config: Mapping[str, Any]) -> ModelSpec:
    defaults = {"intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "qkv_bias": True}
    defaults |= {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "max_window_layers": 28}
    config = {**DEFAULTS, **_QWEN, **defaults, "shared_expert_intermediate_size": 5632, **config}
    only(config, "attention_bias", False)
    only(config, "mlp_bias", False)
    sliding = flag(config, "use_sliding_window")
    if config["layer_types"] is None:
        # As transformers fills it in: every other one of the first layers slides.
        first = count(config, "max_window_layers", least=0)
        types = [
            "sliding_attention" if sliding and not layer % 2 and layer < first else "full_attention"
            for layer in range(count(config, "num_hidden_layers"))
        ]
    else:
        types = sliding_only_if(sliding, layer_types(config))
    moe = dataclasses.replace(
        _experts(config, "num_experts"),
        normalise=flag(config, "norm_topk_prob"),
        shared_size=count(config, "shared_expert_intermediate_size"),
        shared="shared_expert",
        shared_gate=True,
    )
    spec = decoder(config, types, qkv_bias=flag(config, "qkv_bias"))
    return _balanced(config, _with_experts(spec, moe, _qwen_sparse(config)))


def _qwen3_moe(config: Mapping[str, Any]) -> ModelSpec:
    defaults = {"intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4}
    defaults |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    config = {**DEFAULTS, **_QWEN, **defaults, **_one_name(config, "num_local_experts", "num_experts")}
    only(config, "mlp_bias", False)
    sliding = flag(config, "use_sliding_window") and config["sliding_window"] is not None
    bias = flag(config, "attention_bias")
    types = one_type(config, "sliding_attention" if sliding else "full_attention")
    moe = dataclasses.replace(_experts(config, "num_experts"), normalise=flag(config, "norm_topk_prob"))
    spec = decoder(config, types, qk_norm=True, qkv_bias=bias, o_bias=bias)
    return _balanced(config, _with_experts(spec, moe, _qwen_sparse(config)))


def _qwen_sparse(config: Mapping[str, Any]) -> Callable[[int], bool]:
    step, dense = count(config, "decoder_sparse_step"), config["mlp_only_layers"] or []
    if not isinstance(dense, (list, tuple)) or not all(isinstance(layer, int) for layer in dense):
        raise UserError(f"config.json: mlp_only_layers is {dense!r}; it must be a list of numbers of layers")
    return lambda layer: layer not in dense and (layer + 1) % step == 0


def _gpt_oss(config: Mapping[str, Any]) -> ModelSpec:
    defaults = {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36}
    defaults |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}
    defaults |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0}
    defaults |= {"num_local_experts": 128, "num_experts_per_tok": 4, "attention_bias": True}
    defaults |= {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    config = {**DEFAULTS, **defaults, **_one_name(config, "num_experts", "num_local_experts")}
    only(config, "mlp_bias", False)
    only(config, "hidden_act", "silu")
    if not config["rope_scaling"] and not config["rope_parameters"]:
        config["rope_parameters"] = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
        config["rope_parameters"] |= {"original_max_position_embeddings": 4096}
    if config["layer_types"] is None:
        layers = range(count(config, "num_hidden_layers"))
        types = ["full_attention" if layer % 2 else "sliding_attention" for layer in layers]
    else:
        types = layer_types(config)
    moe = dataclasses.replace(
        _experts(config, "num_local_experts", "intermediate_size"),
        router="router",
        router_bias=True,
        score="chosen_softmax",
        clamped=True,
        limit=number(config, "swiglu_limit"),
        alpha=number(config, "swiglu_alpha"),
    )
    bias = flag(config, "attention_bias")
    spec = decoder(config, types, norm="rms_float32", qkv_bias=bias, o_bias=bias, sinks=True)
    return _balanced(config, _with_experts(spec, moe, lambda layer: True))


_DEEPSEEK = {
    "intermediate_size": 11008,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def _deepseek_v2(config: Mapping[str, Any]) -> ModelSpec:
    defaults = {"vocab_size": 102400, "first_k_dense_replace": 0, "moe_intermediate_size": 1407}
    defaults |= {"n_routed_experts": 64, "n_shared_experts": 2, "routed_scaling_factor": 1.0, "topk_method": "greedy"}
    config = {**DEFAULTS, **_DEEPSEEK, **defaults, **_one_name(config, "num_experts", "n_routed_experts")}
    only(config, "router_aux_loss_coef", 0)
    # transformers reads the key and does not normalise.
    only(config, "norm_topk_prob", False)
    only(config, "scoring_func", "softmax")
    if config["topk_method"] not in ("greedy", "group_limited_greedy"):
        raise UserError(
            f"config.json: topk_method {config['topk_method']!r} is not supported; supported: greedy, group_limited_greedy"
        )
    groups = _groups(config) if config["topk_method"] == "group_limited_greedy" else {}
    moe = dataclasses.replace(
        _experts(config, "n_routed_experts", groups=groups),
        normalise=False,
        scaling=number(config, "routed_scaling_factor"),
        shared_size=count(config, "n_shared_experts") * count(config, "moe_intermediate_size"),
        balanced=False,
    )
    spec = _latent(config, interleaved=True, mlp_bias=flag(config, "mlp_bias"))
    return _with_experts(spec, moe, _after_dense(config))


def _deepseek_v3(config: Mapping[str, Any]) -> ModelSpec:
    defaults = {"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61}
    defaults |= {"num_attention_heads": 128, "max_position_embeddings": 4096, "moe_intermediate_size": 2048}
    defaults |= {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "routed_scaling_factor": 2.5}
    defaults |= {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "rope_interleave": True}
    config = {**DEFAULTS, **_DEEPSEEK, **defaults, **_one_name(config, "num_local_experts", "n_routed_experts")}
    only(config, "mlp_bias", False)
    spec = _latent(config, interleaved=flag(config, "rope_interleave"))
    return _with_experts(spec, _sigmoid_experts(config), _after_dense(config))


def _glm4_moe(config: Mapping[str, Any]) -> ModelSpec:
    defaults = {"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46}
    defaults |= {"num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 131072}
    defaults |= {"rms_norm_eps": 1e-5, "moe_intermediate_size": 1408, "n_routed_experts": 128, "num_experts_per_tok": 8}
    defaults |= {"n_shared_experts": 1, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
    defaults |= {"first_k_dense_replace": 1, "use_qk_norm": False, "partial_rotary_factor": 0.5}
    config = {**DEFAULTS, **defaults, **_one_name(config, "num_local_experts", "n_routed_experts")}
    only(config, "mlp_bias", False)
    spec = decoder(
        config,
        one_type(config, "full_attention"),
        rope=lambda layer_type, head_dim: read_rope(config, layer_type, head_dim, partial=True),
        qk_norm=flag(config, "use_qk_norm"),
        qkv_bias=flag(config, "attention_bias"),
    )
    return _with_experts(spec, _sigmoid_experts(config), _after_dense(config))


_QWEN_HYBRID = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
}


def _qwen3_next(config: Mapping[str, Any]) -> ModelSpec:
    config = {**DEFAULTS, **HYBRID, **_QWEN_HYBRID, **config}
    return _hybrid_experts(config, fused=True, normalise=flag(config, "norm_topk_prob"))


def _qwen3_5_moe(config: Mapping[str, Any]) -> ModelSpec:
    sizes = {"vocab_size": 248320, "num_hidden_layers": 40, "num_experts_per_tok": 8, "num_experts": 256}
    config = {**DEFAULTS, **HYBRID, **_QWEN_HYBRID, **sizes, **config}
    only(config, "norm_topk_prob", True)
    only(config, "decoder_sparse_step", 1)
    only(config, "mlp_only_layers", [])
    return _hybrid_experts(config, fused=False, normalise=True)


def _hybrid_experts(config: Mapping[str, Any], *, fused: bool, normalise: bool) -> ModelSpec:
    moe = dataclasses.replace(
        _experts(config, "num_experts"),
        normalise=normalise,
        shared_size=count(config, "shared_expert_intermediate_size"),
        shared="shared_expert",
        shared_gate=True,
    )
    return _balanced(config, _with_experts(hybrid_decoder(config, fused=fused), moe, _qwen_sparse(config)))


SPARSE: dict[str, Family] = {
    "mixtral": Family("Mixtral", _mixtral, ("num_experts", "num_local_experts")),
    "qwen2_moe": Family("Qwen2Moe", _qwen2_moe, ("num_experts",)),
    "qwen3_moe": Family("Qwen3Moe", _qwen3_moe, ("num_experts", "num_local_experts")),
    "qwen3_next": Family("Qwen3Next", _qwen3_next, ("num_experts", "partial_rotary_factor")),
    "qwen3_5_moe_text": Family("Qwen3_5Moe", _qwen3_5_moe, ("num_experts", "partial_rotary_factor")),
    "gpt_oss": Family("GptOss", _gpt_oss, ("num_experts", "num_local_experts"), quantised="mxfp4"),
    "deepseek_v2": Family("DeepseekV2", _deepseek_v2, ("num_experts",)),
    "deepseek_v3": Family("DeepseekV3", _deepseek_v3, ("num_local_experts",)),
    "glm4_moe": Family("Glm4Moe", _glm4_moe, ("num_local_experts", "partial_rotary_factor", "use_qk_norm")),
}


def _one_name(config: Mapping[str, Any], alias: str, key: str) -> dict[str, Any]:
    """The config with a value of `alias` under `key`, as transformers takes the one for the other."""
    rest = {name: value for name, value in config.items() if name != alias}
    given = config.get(alias)
    if given is not None and rest.setdefault(key, given) != given:
        raise UserError(f"config.json: {alias} is {given!r} and {key} is {rest[key]!r}; they name the same, remove one")
    return rest


def _experts(
    config: Mapping[str, Any],
    number_key: str,
    width_key: str = "moe_intermediate_size",
    groups: Mapping[str, Any] = {},
) -> MoESpec:
    if config.get("num_experts_per_tok") is None:
        raise UserError("config.json: num_experts_per_tok is absent; it must be a whole number, 1 or more")
    moe = MoESpec(count(config, number_key), count(config, "num_experts_per_tok"), count(config, width_key), **groups)
    if moe.num_experts % moe.groups:
        raise UserError(f"config.json: {number_key} {moe.num_experts} is not a multiple of n_group {moe.groups}")
    in_group = moe.num_experts // moe.groups
    reach = min(moe.top_groups, moe.groups) * in_group
    if moe.top_groups > moe.groups or moe.top_k > reach:
        raise UserError(
            f"config.json: num_experts_per_tok {moe.top_k} must be at most the {reach} experts to choose from"
        )
    if moe.groups > 1 and moe.group_score == "top2" and in_group < 2:
        raise UserError(f"config.json: n_group {moe.groups} leaves fewer than two experts to a group")
    return moe


def _groups(config: Mapping[str, Any], group_score: str = "max") -> dict[str, Any]:
    config = {"n_group": None, "topk_group": None, **config}
    return dict(groups=count(config, "n_group"), top_groups=count(config, "topk_group"), group_score=group_score)


def _sigmoid_experts(config: Mapping[str, Any]) -> MoESpec:
    """The experts of DeepSeek V3, whose balance is kept by a bias of the choice and not by a loss."""
    config = {"norm_topk_prob": True, **config}
    only(config, "router_aux_loss_coef", 0)
    only(config, "scoring_func", "sigmoid")
    only(config, "topk_method", "noaux_tc")
    return dataclasses.replace(
        _experts(config, "n_routed_experts", groups=_groups(config, "top2")),
        score="sigmoid",
        choice_bias=True,
        normalise=flag(config, "norm_topk_prob"),
        scaling=number(config, "routed_scaling_factor"),
        shared_size=count(config, "n_shared_experts") * count(config, "moe_intermediate_size"),
        balanced=False,
    )


def _after_dense(config: Mapping[str, Any]) -> Callable[[int], bool]:
    only(config, "moe_layer_freq", 1)
    dense = count(config, "first_k_dense_replace", least=0)
    return lambda layer: layer >= dense


def _latent(config: Mapping[str, Any], *, interleaved: bool, **switches: Any) -> ModelSpec:
    """A decoder with latent attention."""
    nope, rope_dim = count(config, "qk_nope_head_dim"), count(config, "qk_rope_head_dim")
    heads = count(config, "num_attention_heads")
    only(config, "num_key_value_heads", heads)
    rank = None if config["q_lora_rank"] is None else count(config, "q_lora_rank")
    latent = LatentSpec(rank, count(config, "kv_lora_rank"), nope, rope_dim, count(config, "v_head_dim"))
    only(config, "head_dim", rope_dim)  # what transformers 5 writes
    config = {**config, "head_dim": nope + rope_dim, "num_key_value_heads": None}
    rope = read_rope(config, "full_attention", rope_dim, interleaved=interleaved)
    scale = (nope + rope_dim) ** -0.5
    settings = config["rope_scaling"] or config["rope_parameters"] or {}
    if rope.kind != "default" and settings.get("mscale_all_dim") and rope.factor > 1:
        scale *= (0.1 * number(settings, "mscale_all_dim") * math.log(rope.factor) + 1.0) ** 2
    bias = flag(config, "attention_bias")
    return decoder(
        config,
        one_type(config, "full_attention"),
        rope=lambda layer_type, head_dim: rope,
        latent=latent,
        attention_scale=scale,
        qkv_bias=bias,
        o_bias=bias,
        **switches,
    )


def _with_experts(spec: ModelSpec, moe: MoESpec, is_sparse: Callable[[int], bool]) -> ModelSpec:
    """The model with experts in the layers for which `is_sparse` holds."""
    layers = (dataclasses.replace(layer, moe=moe) if is_sparse(i) else layer for i, layer in enumerate(spec.layers))
    return dataclasses.replace(spec, layers=tuple(layers))


def _balanced(config: Mapping[str, Any], spec: ModelSpec) -> ModelSpec:
    coefficient = config.get("router_aux_loss_coef", 0.001)
    if isinstance(coefficient, bool) or not isinstance(coefficient, (int, float)) or not 0 <= coefficient <= 1e9:
        raise UserError(f"config.json: router_aux_loss_coef is {coefficient!r}; it must be a number, 0 or more")
    some = any(layer.moe for layer in spec.layers)
    return dataclasses.replace(spec, router_aux_loss_coef=float(coefficient) if some else 0.0)
