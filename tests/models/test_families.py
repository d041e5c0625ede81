"""The reading of config.json. The oracle is the model that transformers builds from the same file."""

import json

import numpy as np
import pytest

from megatrain_jax.config import UserError
from megatrain_jax.models.families import read_config, spec_from_config
from megatrain_jax.models.part_specs import RopeSpec
from tests.families import CASES, raw_config

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SLIDING, FULL = "sliding_attention", "full_attention"

# Every switch of every family, in the spellings of transformers 4 and 5.
CONFIGS = {
    "llama defaults": {"model_type": "llama"},
    "llama grouped": {"model_type": "llama", "num_key_value_heads": 2, "rope_theta": 5e5, "tie_word_embeddings": True},
    "llama biases": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 16,
        "hidden_act": "gelu",
    },
    "llama linear 4": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 2e4},
    "llama linear 5": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e4},
    },
    "llama llama3 4": {"model_type": "llama", "rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5e5},
    "llama llama3 5": {"model_type": "llama", "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3}},
    "llama llama3 positions": {
        "model_type": "llama",
        "max_position_embeddings": 96,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "llama both spellings": {
        "model_type": "llama",
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "rope_parameters": {"rope_type": "default"},
    },
    "mistral defaults": {"model_type": "mistral", "num_key_value_heads": 4},
    "mistral wide heads": {"model_type": "mistral", "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 8},
    "mistral full": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": None, "hidden_act": "relu"},
    "qwen2 defaults": {"model_type": "qwen2", "num_key_value_heads": 4},
    "qwen2 unused window": {
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen2 window": {
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen2 window null": {
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": None,
        "max_window_layers": 1,
    },
    "qwen2 layer types": {
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 3,
        "layer_types": [SLIDING, FULL, SLIDING],
    },
    "qwen3 defaults": {"model_type": "qwen3", "num_key_value_heads": 4},
    "qwen3 tied": {
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "qwen3 bias window": {
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
        "hidden_act": "gelu_pytorch_tanh",
    },
}


def small(**changes) -> dict:
    return {**SMALL, "model_type": "llama", **changes}


def fp8(**changes) -> dict:
    return small(quantization_config={"quant_method": "fp8", **changes})


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> np.ndarray:
    """float64 [head_dim / 2], from the text of the Llama 3.1 release."""
    plain = rope.theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    turns = rope.original_max_position_embeddings * plain / (2 * np.pi)
    kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return kept * plain + (1 - kept) * plain / rope.factor


@pytest.mark.parametrize("name", CONFIGS)
def test_spec_describes_the_model_that_transformers_builds(name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.activations import ACT2FN

    raw = {**SMALL, **CONFIGS[name]}
    spec = spec_from_config(json.loads(json.dumps(raw)))
    kept = {key: value for key, value in raw.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(raw["model_type"], **json.loads(json.dumps(kept)))
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert spec.family == config.model_type
    assert (spec.vocab_size, spec.hidden_size) == tuple(model.model.embed_tokens.weight.shape)
    assert len(spec.layers) == len(model.model.layers)
    assert spec.max_position_embeddings == config.max_position_embeddings
    assert spec.initializer_range == config.initializer_range
    assert spec.norm_eps == model.model.norm.variance_epsilon
    assert spec.tie_word_embeddings == (model.lm_head.weight is model.model.embed_tokens.weight)
    frequencies = model.model.rotary_emb.inv_freq.double().numpy()
    x = torch.linspace(-3, 3, 41)
    for layer, theirs in zip(spec.layers, model.model.layers, strict=True):
        attention, mlp = theirs.self_attn, theirs.mlp
        assert attention.q_proj.weight.shape == (layer.num_heads * layer.head_dim, layer.hidden_size)
        assert attention.k_proj.weight.shape == (layer.num_kv_heads * layer.head_dim, layer.hidden_size)
        assert mlp.gate_proj.weight.shape == (layer.intermediate_size, layer.hidden_size)
        assert attention.head_dim == layer.head_dim
        assert layer.qkv_bias == (attention.q_proj.bias is not None)
        assert layer.o_bias == (attention.o_proj.bias is not None)
        assert layer.mlp_bias == (mlp.down_proj.bias is not None)
        assert layer.qk_norm == hasattr(attention, "q_norm")
        assert layer.norm_eps == theirs.input_layernorm.variance_epsilon
        window = config.sliding_window if spec.family == "mistral" else getattr(attention, "sliding_window", None)
        assert layer.sliding_window == window
        assert torch.equal(mlp.act_fn(x), ACT2FN[layer.activation](x))
        np.testing.assert_allclose(inverse_frequencies(layer.rope, layer.head_dim), frequencies, rtol=1e-5)


@pytest.mark.parametrize("name", [*CONFIGS, *CASES])
def test_rewritten_by_transformers_means_the_same(name):
    transformers = pytest.importorskip("transformers")
    raw = {**SMALL, **CONFIGS[name]} if name in CONFIGS else raw_config(name)
    kept = {key: value for key, value in raw.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(raw["model_type"], **json.loads(json.dumps(kept)))
    assert spec_from_config(json.loads(config.to_json_string(use_diff=False))) == spec_from_config(raw)


@pytest.mark.parametrize("family", dict.fromkeys(name.split()[0] for name in CASES))
def test_absent_keys_take_the_defaults_of_transformers(family):
    transformers = pytest.importorskip("transformers")
    # Keys that transformers leaves without a value that works.
    needed = {"glm4_moe": {"head_dim": 128}, "deepseek_v2": {"num_experts_per_tok": 2}}.get(family, {})
    theirs = json.loads(transformers.AutoConfig.for_model(family, **needed).to_json_string(use_diff=False))
    assert spec_from_config({"model_type": family, **needed}) == spec_from_config(theirs)


def test_rotary_settings_nested_by_layer_type_go_to_their_layers():
    rope = {SLIDING: {"rope_type": "default", "rope_theta": 1e4}, FULL: {"rope_type": "linear", "factor": 8.0}}
    raw = {**SMALL, **CONFIGS["qwen2 layer types"], "rope_parameters": rope}
    thetas = [(layer.sliding_window, layer.rope) for layer in spec_from_config(raw).layers]
    local, wide = RopeSpec(theta=1e4), RopeSpec(theta=1e4, kind="linear", factor=8.0)
    assert thetas == [(8, local), (None, wide), (8, local)]


def test_original_positions_beside_the_rotary_settings_win():
    raw = small(rope_scaling={"rope_type": "llama3", **LLAMA3}, original_max_position_embeddings=512)
    assert spec_from_config(raw).layers[0].rope.original_max_position_embeddings == 512


def test_equal_layers_share_one_spec():
    assert len(set(spec_from_config(small(num_hidden_layers=5)).layers)) == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"model_type None is not supported; supported: llama, mistral, qwen2, qwen3"),
        (
            {"model_type": "gpt2"},
            r"model_type 'gpt2' is not supported \(it has learned positions .*\); supported: llama",
        ),
        ({"model_type": "bert"}, r"model_type 'bert' is not supported; supported: llama"),
        (small(architectures=["LlamaForSequenceClassification"]), r"'LlamaForSequenceClassification' is not supported"),
        (small(hidden_act="quick_gelu"), r"hidden_act 'quick_gelu' .*supported: silu, gelu, gelu_pytorch_tanh, relu"),
        (small(rope_scaling={"type": "ntk", "factor": 4.0}), r"rope_scaling type 'ntk' .*default, linear, llama3"),
        (
            small(rope_parameters={"rope_type": "longrope"}),
            r"rope_parameters.short_factor must list a number for each of the 4",
        ),
        (small(rope_scaling={"type": "dynamic", "factor": 2.0}), r"'dynamic' is not supported"),
        (small(rope_scaling={"type": "linear"}), r"rope_scaling.factor is None; it must be a number above 0"),
        (small(rope_scaling={"type": "linear", "factor": 2.0, "mscale": 1}), r"rope_scaling.mscale is not supported"),
        (small(rope_scaling={"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}), r"low_freq_factor 4.0 must be"),
        (small(rope_scaling="linear"), r"rope_scaling is 'linear'; it must be an object"),
        (small(rope_parameters={SLIDING: {"rope_theta": 1e4}}), r"rope_parameters.full_attention is None"),
        (small(rope_parameters={"partial_rotary_factor": 0.5}), r"rope_parameters.partial_rotary_factor = 0.5"),
        (small(rope_theta=float("nan")), r"rope_theta is nan; it must be a number above 0"),
        (small(partial_rotary_factor=0.5), r"partial_rotary_factor = 0.5 is not supported here"),
        (
            small(quantization_config={"bits": 4}),
            r"quant_method is None; weights of a llama model must be fp8 or not qu",
        ),
        (small(quantization_config="gptq"), r"quant_method is 'gptq'"),
        *(
            (small(quantization_config={"quant_method": method}), f"quantization_config.quant_method is '{method}'")
            for method in ("gptq", "awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "mxfp4", "torchao")
        ),
        (fp8(weight_block_size=None), r"quantization_config.weight_block_size is None; it must be two whole numbers"),
        (fp8(weight_block_size=[128]), r"weight_block_size is \[128\]; it must be two whole numbers"),
        (fp8(weight_block_size=[128, 0]), r"weight_block_size is \[128, 0\]; it must be two whole numbers"),
        (fp8(fmt="e5m2"), r"quantization_config.fmt = e5m2 is not supported here"),
        (fp8(expert_dtype="fp4"), r"quantization_config.expert_dtype = fp4 is not supported here"),
        (fp8(kv_cache_scheme={"num_bits": 8}), r"quantization_config.kv_cache_scheme = dict is not supported here"),
        (small(is_causal=False), r"is_causal = False is not supported here; it must be absent, null or true"),
        (small(num_local_experts=8), r"num_local_experts = 8 is not supported"),
        (small(final_logit_softcapping=30.0), r"final_logit_softcapping = 30.0 is not supported"),
        (small(sliding_window=8), r"sliding_window = 8 is not supported"),
        (small(layer_types=[SLIDING] * 3), r"layer_types of a llama model must all be 'full_attention'"),
        (small(model_type="mistral", num_key_value_heads=2, layer_types=[FULL] * 3), r"all be 'sliding_attention'"),
        (small(model_type="mistral", num_key_value_heads=2, attention_bias=True), r"attention_bias = True is not supp"),
        (small(model_type="qwen2", num_key_value_heads=2, attention_bias=False), r"attention_bias = False is not supp"),
        (small(model_type="qwen2", num_key_value_heads=2, layer_types=[SLIDING] * 3), r"use_sliding_window is not tru"),
        (small(model_type="qwen2", num_key_value_heads=2, layer_types=[FULL]), r"one type for each of the 3 layers"),
        (small(model_type="qwen2", num_key_value_heads=2, layer_types=["linear"] * 3), r"layer type 'linear' is not"),
        (small(model_type="qwen3", num_key_value_heads=2, head_dim=None), r"head_dim is null"),
        (small(head_dim=7), r"head_dim 7 is odd"),
        (small(hidden_size=30), r"hidden_size 30 is not a multiple of num_attention_heads 4"),
        (small(num_key_value_heads=3), r"num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        (small(vocab_size="64"), r"vocab_size is '64'; it must be a whole number, 1 or more"),
        (small(num_hidden_layers=0), r"num_hidden_layers is 0"),
        (small(tie_word_embeddings="yes"), r"tie_word_embeddings is 'yes'; it must be true or false"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config, message):
    with pytest.raises(UserError, match=message) as caught:
        spec_from_config(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "harmless",
    [
        {
            "attention_dropout": 0.1,
            "pretraining_tp": 2,
            "use_cache": False,
            "torch_dtype": "bfloat16",
            "is_llama_config": True,
        },
        {"rope_interleaved": False, "quantization_config": None, "partial_rotary_factor": 1.0},
        {"architectures": ["LlamaForCausalLM"], "layer_types": [FULL] * 3},
        {"architectures": ["LlamaModel"], "rope_scaling": None, "rope_parameters": {}},
    ],
)
def test_settings_without_effect_change_nothing(harmless):
    assert spec_from_config(small(**harmless)) == spec_from_config(small())


def test_read_config_sets_overrides(tmp_path):
    raw = small(model_type="qwen3", num_key_value_heads=2, layer_types=[FULL] * 3)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_config(tmp_path) == raw
    cut = read_config(tmp_path, {"num_hidden_layers": 2, "rope_theta": 1e6})
    assert cut == {**raw, "num_hidden_layers": 2, "rope_theta": 1e6, "layer_types": [FULL] * 2}
    assert len(spec_from_config(cut).layers) == 2


def test_of_a_model_that_sees_too_the_language_model_is_read(tmp_path):
    text = {**SMALL, "model_type": "gemma3_text", "num_key_value_heads": 2, "tie_word_embeddings": True}
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "text_config": text, "tie_word_embeddings": False}))
    got = read_config(tmp_path, {"num_hidden_layers": 2})
    assert got["architectures"] == ["Gemma3ForCausalLM"]
    assert spec_from_config(got) == spec_from_config({**text, "num_hidden_layers": 2, "tie_word_embeddings": False})
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(UserError, match="text_config of a gemma3 model is None"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"no config.json in '.*'; is it a Hugging Face folder"),
        (b"{", r"config.json: cannot be read as JSON"),
        (b"\xff\xfe", r"config.json: cannot be read as JSON"),
        (b"[1]", r"config.json: holds a list where a JSON object is needed"),
    ],
)
def test_an_unreadable_config_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_config(tmp_path)


def test_a_missing_folder_and_a_misspelt_override_are_refused(tmp_path):
    with pytest.raises(UserError, match="model.name: no such folder '.*nowhere'"):
        read_config(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps(small()))
    with pytest.raises(UserError, match="unknown key 'num_hidden_layer'; did you mean 'num_hidden_layers'"):
        read_config(tmp_path, {"num_hidden_layer": 1})
