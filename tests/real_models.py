"""What config.json of the model that each of `configs/` names says of its sizes, where it is not the family's default."""

from __future__ import annotations

from typing import Any


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any):
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    } | more


SMALLEST: dict[str, dict[str, Any]] = {
    "cohere": {"model_type": "cohere", **_sizes(4096, 14336, 32, 32, 8, 256000)},
    "cohere2": {"model_type": "cohere2", **_sizes(4096, 14336, 32, 32, 8, 256000)},
    "deepseek-v2": {
        "model_type": "deepseek_v2",
        **_sizes(2048, 10944, 27, 16, 16, 102400, moe_intermediate_size=1408, n_routed_experts=64),
        "num_experts_per_tok": 6,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
    },
    "deepseek-v3": {"model_type": "deepseek_v3"},
    "gemma": {"model_type": "gemma", **_sizes(2048, 16384, 18, 8, 1, 256000, head_dim=256)},
    "gemma2": {"model_type": "gemma2", **_sizes(2304, 9216, 26, 8, 4, 256000, head_dim=256)},
    "gemma3": {"model_type": "gemma3_text", **_sizes(640, 2048, 18, 4, 1, 262144, head_dim=256)},
    "glm-4.5": {"model_type": "glm4_moe", "head_dim": 128, "attention_bias": True},
    "glm4": {"model_type": "glm4", **_sizes(4096, 13696, 40, 32, 2, 151552, head_dim=128)},
    "gpt-oss": {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
    "granite": {"model_type": "granite", **_sizes(2048, 8192, 40, 32, 8, 49159, tie_word_embeddings=True)},
    "llama3": {"model_type": "llama", **_sizes(4096, 14336, 32, 32, 8, 128256)},
    "mistral": {"model_type": "mistral", **_sizes(4096, 14336, 32, 32, 8, 32768)},
    "mixtral": {"model_type": "mixtral"},
    "olmo2": {"model_type": "olmo2", **_sizes(2048, 8192, 16, 16, 16, 100352)},
    "olmo3": {"model_type": "olmo3", **_sizes(4096, 11008, 32, 32, 32, 100278)},
    "phi3": {"model_type": "phi3", **_sizes(3072, 8192, 32, 32, 32, 32064)},
    "phi4-mini": {"model_type": "phi3", **_sizes(3072, 8192, 32, 24, 8, 200064, tie_word_embeddings=True)},
    "qwen2-moe": {"model_type": "qwen2_moe"},
    "qwen2.5": {"model_type": "qwen2", **_sizes(3584, 18944, 28, 28, 4, 152064)},
    "qwen3": {"model_type": "qwen3", **_sizes(4096, 12288, 36, 32, 8, 151936, head_dim=128)},
    "qwen3-moe": {"model_type": "qwen3_moe", "num_hidden_layers": 48, "head_dim": 128},
    "qwen3-next": {"model_type": "qwen3_next"},
    "qwen3.5": {
        "model_type": "qwen3_5_text",
        **_sizes(1024, 3584, 24, 8, 2, 248320, head_dim=256, linear_num_value_heads=16, tie_word_embeddings=True),
    },
    "smollm2": {"model_type": "llama", **_sizes(2048, 8192, 24, 32, 32, 49152, tie_word_embeddings=True)},
    "smollm3": {"model_type": "smollm3", **_sizes(2048, 11008, 36, 16, 4, 128256)},
}
