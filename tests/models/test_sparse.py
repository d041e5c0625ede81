"""Configs of families with experts: what is refused, spellings, and what the released models say."""

import dataclasses
import json

import pytest

from megatrain_jax.config import UserError
from megatrain_jax.models.families import spec_from_config
from megatrain_jax.models.sparse import SPARSE
from tests.families import CASES, raw_config


def parameters(config: dict) -> tuple[float, float]:
    """All and active, in billions."""
    spec = spec_from_config(config)
    idle = sum(layer.num_parameters - layer.active_parameters for layer in spec.layers)
    return spec.num_parameters / 1e9, (spec.num_parameters - idle) / 1e9


@pytest.mark.parametrize(
    ("config", "published"),
    [
        ({"model_type": "mixtral"}, (46.7, 12.9)),
        ({"model_type": "qwen2_moe"}, (14.3, 2.7)),
        ({"model_type": "qwen3_moe", "num_hidden_layers": 48, "head_dim": 128}, (30.5, 3.3)),
        ({"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32}, (20.9, 4.2)),
        ({"model_type": "gpt_oss"}, (116.8, 5.7)),
        ({"model_type": "deepseek_v3"}, (671.0, 37.6)),
    ],
)
def test_released_models_have_the_parameters_that_they_are_named_for(config, published):
    assert parameters(config) == pytest.approx(published, rel=0.02)


def test_the_two_names_of_one_number_are_one():
    for family, alias, key in (
        ("mixtral", "num_experts", "num_local_experts"),
        ("qwen3_moe", "num_local_experts", "num_experts"),
        ("deepseek_v3", "num_local_experts", "n_routed_experts"),
    ):
        config = raw_config(family)
        other = {name: value for name, value in config.items() if name != key} | {alias: config[key]}
        assert spec_from_config(other) == spec_from_config(config)
        with pytest.raises(UserError, match=f"{alias} is 3 and {key} is .*; they name the same"):
            spec_from_config(config | {alias: 3})


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1 is not supported"),
        ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok 7 must be at most the 6 experts"),
        ("mixtral", {"router_aux_loss_coef": -1}, "router_aux_loss_coef is -1; it must be a number, 0 or more"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0; it must be a whole number, 1 or more"),
        ("qwen2_moe", {"mlp_only_layers": 3}, "mlp_only_layers is 3; it must be a list"),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window is not true"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1; it must be true or false"),
        (
            "qwen3_moe",
            {"quantization_config": {"quant_method": "mxfp4"}},
            "'mxfp4'; weights of a qwen3_moe model must be fp8",
        ),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act = gelu is not supported here"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "fp8"}},
            "'fp8'; weights of a gpt_oss model must be mxfp4",
        ),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True is not supported here"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported; supported: greedy"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok is absent"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported here"),
        ("deepseek_v2", {"router_aux_loss_coef": 0.1}, "router_aux_loss_coef = 0.1 is not supported here"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = softmax is not supported here"),
        ("deepseek_v3", {"n_group": 3}, "n_routed_experts 8 is not a multiple of n_group 3"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 4}, "n_group 8 leaves fewer than two experts to a group"),
        ("deepseek_v3", {"topk_group": 1}, "num_experts_per_tok 3 must be at most the 2 experts to choose from"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads = 2 is not supported here"),
        ("glm4_moe", {"mlp_bias": True}, "mlp_bias = True is not supported here"),
        ("glm4_moe", {"partial_rotary_factor": 0.35}, "must be an even number"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(family, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        spec_from_config(raw_config(family) | changes)
    assert "\n" not in str(caught.value)


def test_a_coefficient_without_experts_is_none():
    config = raw_config("qwen3_moe") | {"mlp_only_layers": [0, 1]}
    assert spec_from_config(config).router_aux_loss_coef == 0
    assert spec_from_config(raw_config("qwen3_moe") | {"router_aux_loss_coef": 0}).router_aux_loss_coef == 0


def test_layers_with_and_without_experts_are_two_templates():
    spec = spec_from_config(raw_config("deepseek_v3") | {"num_hidden_layers": 5, "first_k_dense_replace": 2})
    assert [layer.moe is None for layer in spec.layers] == [True, True, False, False, False]
    assert len(set(spec.layers)) == 2
    assert dataclasses.replace(spec.layers[2], moe=None) == spec.layers[0]


SPARSE_CASES = [name for name in CASES if name.split()[0] in SPARSE]


@pytest.mark.parametrize("name", SPARSE_CASES)
def test_rewritten_by_transformers_means_the_same(name):
    """In the spelling of version 5, with every default written out."""
    transformers = pytest.importorskip("transformers")
    raw = raw_config(name)
    kept = {key: value for key, value in raw.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(raw["model_type"], **json.loads(json.dumps(kept)))
    assert spec_from_config(json.loads(config.to_json_string(use_diff=False))) == spec_from_config(raw)


@pytest.mark.parametrize("family", SPARSE)
def test_absent_keys_take_the_defaults_of_transformers(family):
    transformers = pytest.importorskip("transformers")
    # What every released config has, and no default says.
    needed = {"deepseek_v2": {"num_experts_per_tok": 6}, "glm4_moe": {"head_dim": 128}}.get(family, {})
    theirs = json.loads(transformers.AutoConfig.for_model(family, **needed).to_json_string(use_diff=False))
    assert spec_from_config({"model_type": family, **needed}) == spec_from_config(theirs)
