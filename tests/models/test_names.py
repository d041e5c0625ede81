"""Every spelling of a tensor covers it exactly once; files in any of them are the same model."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import megatrain_jax as mt
from megatrain_jax.config import UserError
from megatrain_jax.models.blocks import model_tensors
from megatrain_jax.models.families import spec_from_config
from megatrain_jax.models.names import spellings, written_pieces
from tests.families import raw_config

SPARSE = ["mixtral", "qwen2_moe", "qwen3_moe mixed", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe"]


@pytest.mark.parametrize("name", SPARSE)
def test_spellings_cover_each_tensor_once(name):
    spec = spec_from_config(raw_config(name))
    tensors = model_tensors(spec)
    for tensor, ways in spellings(spec, tensors).items():
        for way in ways:
            covered = np.zeros(tensors[tensor], int)
            for part in way:
                covered[part.where] += 1
            assert (covered == 1).all(), (tensor, way[0].key)


@pytest.mark.parametrize("name", SPARSE)
def test_what_is_written_is_what_transformers_writes(name, tmp_path):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    raw = raw_config(name)
    spec = spec_from_config(raw)
    config = transformers.AutoConfig.for_model(raw.pop("model_type"), **json.loads(json.dumps(raw)))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    theirs = {key: value.shape for key, value in load_file(tmp_path / "model.safetensors").items()}
    assert {key: piece.shape for key, piece in written_pieces(spec, model_tensors(spec)).items()} == theirs


def folder_with(path, config: dict, tensors: dict[str, np.ndarray]):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture
def mixtral(tmp_path):
    """Its config, its weights as they are stacked, and a folder with each expert by itself."""
    config = raw_config("mixtral")
    spec = spec_from_config(config)
    rng = np.random.default_rng(0)
    stacked = {name: rng.normal(size=shape).astype(np.float32) for name, shape in model_tensors(spec).items()}
    pieces = written_pieces(spec, model_tensors(spec))
    apart = {key: np.ascontiguousarray(stacked[piece.name][piece.where]) for key, piece in pieces.items()}
    return config, stacked, folder_with(tmp_path / "apart", config, apart)


def test_experts_are_read_one_by_one_or_stacked_and_written_one_by_one(mixtral, tmp_path):
    config, stacked, apart = mixtral
    for folder in (apart, folder_with(tmp_path / "stacked", config, stacked)):
        model = mt.load(folder, dtype="float32", device="cpu")
        assert not model.notes
        for name, tensor in model.store.tensors.items():
            np.testing.assert_array_equal(tensor.read(), stacked[name])
    mt.save(model, tmp_path / "again", dtype="float32")
    again, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "again", apart))
    assert again.keys() == before.keys()
    for key, value in before.items():
        np.testing.assert_array_equal(again[key], value)


def test_a_missing_expert_is_named_and_one_of_another_shape_is_refused(mixtral, tmp_path):
    config, _, apart = mixtral
    tensors = load_file(apart / "model.safetensors")
    gone = "model.layers.1.block_sparse_moe.experts.4.w3.weight"
    with pytest.raises(UserError, match=f"no tensor '{gone}' in its files"):
        mt.load(folder_with(tmp_path / "gone", config, {k: v for k, v in tensors.items() if k != gone}), device="cpu")
    cut = tensors | {gone: tensors[gone][:, 1:].copy()}
    with pytest.raises(UserError, match=rf"tensor '{gone}' has shape \[48, 31\] where config.json asks for \[48, 32\]"):
        mt.load(folder_with(tmp_path / "cut", config, cut), device="cpu")
    more = tensors | {"model.layers.2.block_sparse_moe.gate.weight": np.zeros((6, 32), np.float32)}
    model = mt.load(folder_with(tmp_path / "more", config, more), device="cpu")
    assert model.notes == ("not used: model.layers.*.block_sparse_moe.gate.weight",)


def test_quantised_experts_are_read_and_written_as_they_compute(tmp_path):
    from megatrain_jax.checkpoint.mxfp4 import dequantise

    config = raw_config("gpt_oss") | {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1}
    spec = spec_from_config(config)
    rng = np.random.default_rng(0)
    tensors, expected = {}, {}
    for name, shape in model_tensors(spec).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, width, out = shape
            blocks = rng.integers(0, 256, (experts, out, width // 32, 16), np.uint8)
            scales = rng.integers(110, 130, blocks.shape[:-1], np.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            expected[name] = np.stack([dequantise(b, s) for b, s in zip(blocks, scales, strict=True)])
        else:
            tensors[name] = expected[name] = rng.normal(size=shape).astype(np.float32)
    quantised = config | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    model = mt.load(folder_with(tmp_path / "mxfp4", quantised, tensors), dtype="float32", device="cpu")
    assert not model.notes
    for name, tensor in model.store.tensors.items():
        np.testing.assert_array_equal(tensor.read(), expected[name].astype(np.float32))
    mt.save(model, tmp_path / "plain", dtype="float32")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    plain = mt.load(tmp_path / "plain", dtype="float32", device="cpu")
    for name, tensor in plain.store.tensors.items():
        np.testing.assert_array_equal(tensor.read(), expected[name].astype(np.float32))


def test_the_bias_of_the_choice_is_written_in_float32(tmp_path):
    config = raw_config("deepseek_v3")
    spec = spec_from_config(config)
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in model_tensors(spec).items()}
    model = mt.load(folder_with(tmp_path / "in", config, tensors), dtype="bfloat16", device="cpu")
    mt.save(model, tmp_path / "out", dtype="bfloat16")
    written = load_file(tmp_path / "out" / "model.safetensors")
    kinds = {key: value.dtype.name for key, value in written.items()}
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert kinds.pop(bias) == "float32" and set(kinds.values()) == {"bfloat16"}
    np.testing.assert_array_equal(written[bias], tensors[bias])
