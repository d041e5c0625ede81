"""One small config for each switch of each family; every test that goes through the families reads this table.

Windows are shorter than the prompts of the tests and the original contexts of stretched rotary embeddings too.
"""

from __future__ import annotations

import json
from typing import Any

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.02,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def longrope(frequencies: int, **more: Any) -> dict[str, Any]:
    """Different factors for each frequency, short and long."""
    short, long = ([1.0 + step * i for i in range(frequencies)] for step in (0.1, 0.7))
    return {"type": "longrope", "short_factor": short, "long_factor": long, **more}


DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}

# name -> what differs from SMALL. The first word is the model type.
CASES: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": LLAMA3, "rope_theta": 5e5},
    "llama bias linear tied": {
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 16,
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "llama yarn": {"rope_scaling": YARN},
    "llama longrope": {"rope_scaling": longrope(4, original_max_position_embeddings=16)},
    "mistral": {"head_dim": 16, "sliding_window": 6},
    "mistral full tied": {"sliding_window": None, "hidden_act": "relu", "tie_word_embeddings": True},
    "qwen2": {},
    "qwen2 mixed tied": {
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": [SLIDING, FULL],
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3 mixed bias": {
        "head_dim": 16,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
    "gemma": {"head_dim": 16, "hidden_act": "gelu"},
    "gemma bias untied": {
        "head_dim": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "gemma2": {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24},
    "gemma2 strong caps": {
        "head_dim": 16,
        "sliding_window": 6,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 4,
        "layer_types": [FULL, SLIDING],
    },
    "gemma2 no caps untied": {
        "tie_word_embeddings": False,
        "head_dim": 16,
        "sliding_window": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "attention_bias": True,
    },
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "rope_theta": 1e6,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma3_text nested bias untied": {
        "attention_bias": True,
        "tie_word_embeddings": False,
        "head_dim": 16,
        "sliding_window": 6,
        "layer_types": [SLIDING, FULL],
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 30,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
        },
    },
    "phi3": {"sliding_window": 6, "head_dim": 16},
    "phi3 longrope": {
        "original_max_position_embeddings": 16,
        "rope_scaling": longrope(4),
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
    },
    "phi3 partial longrope tied": {
        "hidden_size": 64,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 16,
        "rope_scaling": longrope(6),
        "tie_word_embeddings": True,
    },
    "glm": {"head_dim": 16},
    "glm no bias tied": {
        "head_dim": 16,
        "num_key_value_heads": 1,
        "attention_bias": False,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": True,
    },
    "glm4": {"head_dim": 16},
    "glm4 tied": {
        "head_dim": 16,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_scaling": YARN,
        "attention_bias": False,
    },
    "olmo2": {"rope_theta": 5e5},
    "olmo2 bias tied": {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 16},
    "olmo3": {"num_hidden_layers": 4, "sliding_window": 6, "rope_scaling": YARN},
    "olmo3 nested tied": {
        "head_dim": 16,
        "tie_word_embeddings": True,
        "sliding_window": 6,
        "layer_types": [FULL, SLIDING],
        "attention_bias": True,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 1e3},
            FULL: {**YARN, "attention_factor": 1.2, "beta_fast": 16, "beta_slow": 2, "rope_theta": 1e4},
        },
    },
    "smollm3": {"no_rope_layers": [1, 0], "rope_theta": 1e4},
    "smollm3 sliding bias": {
        "head_dim": 16,
        "num_hidden_layers": 3,
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 6,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "granite": {
        "embedding_multiplier": 12.3,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.3,
        "logits_scaling": 7.0,
        "tie_word_embeddings": True,
    },
    "granite bias": {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "cohere": {"logit_scale": 0.25},
    "cohere qk norm bias untied": {
        "head_dim": 16,
        "use_qk_norm": True,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "cohere2": {"num_hidden_layers": 3, "sliding_window": 6, "sliding_window_pattern": 3},
    "qwen3_5_text": {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "full_attention_interval": 3,
        "rope_parameters": {"rope_theta": 1e3, "rope_type": "default", "mrope_section": [1, 1, 0]},
        **DELTA,
    },
    "qwen3_5_text bias tied": {
        "layer_types": [FULL, LINEAR],
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 1e3, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
        **DELTA,
        "linear_conv_kernel_dim": 2,
    },
    "cohere2 bias untied": {
        "logit_scale": 0.5,
        "sliding_window": 6,
        "attention_bias": True,
        "layer_types": [FULL, SLIDING],
        "tie_word_embeddings": False,
    },
}

# Families with experts. 21 + 9 tokens go to 6 or 8 experts, so each expert has some and none has all.
QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "router_aux_loss_coef": 0.1}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
DEEPSEEK = {**LATENT, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
DEEPSEEK |= {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
MSCALE_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7}
MSCALE_YARN |= {"mscale_all_dim": 0.9, "beta_fast": 8, "beta_slow": 1}
CASES |= {
    "mixtral": {"num_local_experts": 6, "router_aux_loss_coef": 0.1},
    "mixtral sliding tied": {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 6, "head_dim": 16}
    | {"tie_word_embeddings": True, "router_aux_loss_coef": 0.0},
    "qwen2_moe": {**QWEN_MOE, "shared_expert_intermediate_size": 40},
    "qwen2_moe sliding mixed": {**QWEN_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "norm_topk_prob": True}
    | {"shared_expert_intermediate_size": 40, "use_sliding_window": True, "sliding_window": 6, "qkv_bias": False}
    | {"head_dim": 16, "mlp_only_layers": [1], "tie_word_embeddings": True},
    "qwen3_moe": {**QWEN_MOE, "head_dim": 16, "norm_topk_prob": True},
    "qwen3_moe mixed": {**QWEN_MOE, "head_dim": 16, "num_hidden_layers": 4, "mlp_only_layers": [1]}
    | {
        "decoder_sparse_step": 2,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 6,
        "norm_topk_prob": False,
    },
    "qwen3_next": {**QWEN_MOE, **DELTA, "head_dim": 16, "full_attention_interval": 2}
    | {"shared_expert_intermediate_size": 40},
    "qwen3_next mixed": {**QWEN_MOE, **DELTA, "head_dim": 16, "num_hidden_layers": 4, "attention_bias": True}
    | {"layer_types": [FULL, LINEAR, LINEAR, FULL], "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    | {"linear_conv_kernel_dim": 3, "num_key_value_heads": 1, "norm_topk_prob": False, "tie_word_embeddings": True},
    "qwen3_5_moe_text": {**QWEN_MOE, **DELTA, "head_dim": 16, "full_attention_interval": 2}
    | {"rope_parameters": {"rope_theta": 1e3, "rope_type": "default", "mrope_section": [1, 1, 0]}},
    "qwen3_5_moe_text bias tied": {**QWEN_MOE, **DELTA, "head_dim": 16, "layer_types": [FULL, LINEAR]}
    | {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1, "linear_conv_kernel_dim": 2}
    | {"shared_expert_intermediate_size": 40},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 6}
    | {"swiglu_limit": 0.5, "router_aux_loss_coef": 0.1}
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False}},
    "gpt_oss no bias tied": {
        "head_dim": 16,
        "swiglu_alpha": 1.2,
        "tie_word_embeddings": True,
        "num_local_experts": 6,
        "layer_types": [FULL, SLIDING],
        "attention_bias": False,
    },
    "deepseek_v2": {**DEEPSEEK, "topk_method": "greedy", "q_lora_rank": 12, "rope_scaling": MSCALE_YARN},
    "deepseek_v2 groups": {**DEEPSEEK, "topk_method": "group_limited_greedy", "q_lora_rank": None}
    | {"attention_bias": True, "mlp_bias": True, "routed_scaling_factor": 3.0, "tie_word_embeddings": True}
    | {"n_shared_experts": 1},
    "deepseek_v3": {**DEEPSEEK, "q_lora_rank": 12, "rope_scaling": MSCALE_YARN},
    "deepseek_v3 halves": {**DEEPSEEK, "q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False}
    | {"attention_bias": True, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
    | {"n_shared_experts": 2, "routed_scaling_factor": 1.5, "tie_word_embeddings": True},
    "glm4_moe": {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}
    | {"attention_bias": True},
    "glm4_moe qk norm groups": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    | {"use_qk_norm": True, "n_group": 4, "topk_group": 2, "partial_rotary_factor": 1.0, "n_shared_experts": 2}
    | {"first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.5, "tie_word_embeddings": True},
}


def raw_config(name: str) -> dict[str, Any]:
    """The config.json of a case."""
    return json.loads(json.dumps({**SMALL, "model_type": name.split()[0], **CASES[name]}))


def first_cases() -> list[str]:
    """One case of each family."""
    return list({name.split()[0]: name for name in reversed(CASES)}.values())[::-1]
