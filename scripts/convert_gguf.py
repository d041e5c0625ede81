"""SmolLM2 as a GGUF file -> a Hugging Face folder in bfloat16.

    python scripts/convert_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf OUT_DIR      (pip install gguf)

Two things that a plain copy would get wrong: llama.cpp stores the rows of q and k in the order of interleaved rotary
embedding, while Hugging Face's is half-split; and the pre-tokenizer "smollm" splits numbers into digits. Quantized
weights are dequantized one at a time, and rounded to the nearest bfloat16, ties to even, as torch rounds: of a product
of a few bits by a few, every twentieth is a tie. A GGUF of another architecture or tokenizer is refused.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from megatrain_jax.checkpoint.huggingface import save_folder
from megatrain_jax.config import UserError

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPECTED = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
}
_CONTROL_TOKEN = 3


def convert(source: str | Path, out_dir: str | Path) -> int:
    """Writes `out_dir` (weights, config.json, tokenizer) from the GGUF file `source`; returns the parameter count.

    Raises:
      UserError: no such file, not a GGUF, one that is not a SmolLM2, or `out_dir` cannot be written.
    """
    try:
        reader = GGUFReader(source)
    except (OSError, ValueError) as error:
        raise UserError(f"{source}: cannot be read as GGUF ({error}); get the file again") from error
    fields = {key: field.contents() for key, field in reader.fields.items()}
    for key, expected in _EXPECTED.items():
        if fields.get(key) != expected:
            raise UserError(f"{source}: {key} is {fields.get(key)!r}; only {expected!r} can be converted")
    tensors = {_hf_name(source, tensor.name): tensor for tensor in reader.tensors}
    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        weight = dequantize(tensor.data, tensor.tensor_type).reshape(_shape(tensor)).astype(ml_dtypes.bfloat16)
        if name.endswith("q_proj.weight"):
            return half_split(weight, heads)
        return half_split(weight, kv_heads) if name.endswith("k_proj.weight") else weight

    shapes = {name: _shape(tensor) for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(fields, Path(folder))
        save_folder(out_dir, shapes, read, config=_config(fields, "lm_head.weight" not in tensors), source=Path(folder))
    return sum(int(tensor.n_elements) for tensor in tensors.values())


def half_split(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * head_dim, in] of q or k from interleaved rotary pairs (0, 1), (2, 3) .. to halves (0, d/2), .."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json of the byte-level BPE tokenizer that the GGUF carries."""
    vocabulary: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(vocabulary, fields["tokenizer.ggml.token_type"], strict=True)
    special = [token for token, kind in kinds if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": vocabulary[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": vocabulary[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": vocabulary[fields["tokenizer.ggml.unknown_token_id"]],
        "add_prefix_space": False,
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _config(fields: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        # A GGUF holds float32; its shortest decimal is the number that was meant (1e-05, not 9.99999974e-06).
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def _hf_name(source: str | Path, name: str) -> str:
    match name.split("."):
        case ["blk", layer, kind, "weight"] if kind in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight"
        case [kind, "weight"] if kind in _GLOBAL_NAMES:
            return f"{_GLOBAL_NAMES[kind]}.weight"
    raise UserError(f"{source}: tensor '{name}' is not one of a SmolLM2; this file cannot be converted")


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="the .gguf file")
    parser.add_argument("out_dir", help="the Hugging Face folder to write")
    arguments = parser.parse_args()
    try:
        count = convert(arguments.source, arguments.out_dir)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.out_dir}: {count:,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
