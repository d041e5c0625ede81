"""Weights in FP8, against a value-by-value reference, against transformers, and within whole folders."""

import json
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import megatrain_jax as mt
from megatrain_jax.checkpoint.fp8 import dequantise, scales_shape
from megatrain_jax.checkpoint.huggingface import load_weights
from megatrain_jax.config import UserError
from megatrain_jax.models.blocks import model_tensors
from megatrain_jax.models.families import spec_from_config
from megatrain_jax.models.names import written_pieces
from tests.families import raw_config

FP8 = ml_dtypes.float8_e4m3fn
# As DeepSeek's says; tests set smaller blocks, so that small matrices have several and smaller ones at the edges.
CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def some_weights(shape, block=(128, 128), seed=0, dtype=np.float32):
    """Any bits that are numbers, and scales."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 255, shape).astype(np.uint8)
    bits[(bits & 0x7F) == 0x7F] = 0x7E  # no number
    scales = np.exp(rng.uniform(-9, 3, scales_shape(tuple(shape), block)))
    return bits, scales.astype(dtype)


def written_out(bits, scales, block):
    """Value by value, in the words of the format."""
    out = np.empty(bits.shape, ml_dtypes.bfloat16)
    for at in np.ndindex(bits.shape):
        sign, exponent, fraction = bits[at] >> 7, (bits[at] >> 3) & 15, bits[at] & 7
        value = (8 + int(fraction)) * 2.0 ** (int(exponent) - 10) if exponent else int(fraction) * 2.0**-9
        scale = np.float32(scales[(*at[:-2], at[-2] // block[0], at[-1] // block[1])])
        out[at] = np.float32((-1) ** int(sign) * value) * scale
    return out


@pytest.mark.parametrize("shape", [(8, 12), (10, 14), (3, 5), (1, 1), (4, 9), (2, 9, 7)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_every_value_is_multiplied_by_the_scale_of_its_block(shape, dtype):
    block = (4, 6)
    bits, scales = some_weights(shape, block, dtype=dtype)
    got = dequantise(bits, scales, block)
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got.view(np.uint16), written_out(bits, scales, block).view(np.uint16))


def test_all_values_of_the_format_are_those_of_ml_dtypes():
    bits = np.arange(256, dtype=np.uint8)[None]
    got = dequantise(bits, np.ones((1, 2), np.float32), (128, 128))
    np.testing.assert_array_equal(got.astype(np.float32), bits.view(FP8).astype(np.float32))


@pytest.mark.parametrize("shape", [(256, 128), (256, 384), (3, 128, 256)])
def test_values_are_what_transformers_makes_of_them(shape):
    """Of sizes that are multiples of a block, the only ones that it takes."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    bits, scales = some_weights(shape)
    theirs = Fp8Dequantize(None)._dequantize_one(
        torch.from_numpy(bits).view(torch.float8_e4m3fn), torch.from_numpy(scales), torch.bfloat16
    )
    got = dequantise(bits, scales, (128, 128))
    np.testing.assert_array_equal(got.view(np.int16), theirs.view(torch.int16).numpy())


def quantised_folder(folder, config, *, block=(128, 128), fused=False):
    """A folder in which every matrix of a layer is in FP8, as DeepSeek's is; and the bfloat16 values by their names on file."""
    spec = spec_from_config(config)
    tensors = model_tensors(spec)
    pieces = dict(tensors) if fused else {k: p.shape for k, p in written_pieces(spec, tensors).items()}
    rng, on_file, values = np.random.default_rng(0), {}, {}
    for key, shape in pieces.items():
        router = key.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
        if len(shape) == 1 or ".layers." not in key or router or "conv1d" in key:
            dtype = np.float32 if key.endswith("e_score_correction_bias") else ml_dtypes.bfloat16
            on_file[key] = values[key] = rng.normal(size=shape, scale=0.1).astype(dtype)
        else:
            on_file[key] = np.clip(rng.normal(size=shape, scale=100), -448, 448).astype(FP8)
            scales = rng.uniform(5e-4, 2e-3, scales_shape(shape, block)).astype(np.float32)
            on_file[key + "_scale_inv"] = scales
            values[key] = dequantise(on_file[key].view(np.uint8), scales, block)
    folder.mkdir()
    save_file(on_file, folder / "model.safetensors", metadata={"format": "pt"})
    quantised = {**CONFIG, "weight_block_size": list(block)}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    return on_file, values


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3", "phi3", "qwen3_moe"])
def test_a_quantised_folder_is_read_and_written_without_its_scales(tmp_path, name, fused):
    _, values = quantised_folder(tmp_path / "fp8", raw_config(name), block=(16, 20), fused=fused)
    model = mt.load(tmp_path / "fp8", dtype="float32", device="cpu")
    assert not model.notes
    mt.save(model, tmp_path / "plain", dtype="float32")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    written = load_file(tmp_path / "plain" / "model.safetensors")
    if fused:
        again = {name: tensor.read() for name, tensor in model.store.tensors.items()}
        for key, value in values.items():
            np.testing.assert_array_equal(again[key], value.astype(np.float32), err_msg=key)
    else:
        assert set(written) == set(values)
        for key, value in values.items():
            np.testing.assert_array_equal(written[key], value.astype(np.float32), err_msg=key)
    mt.load(tmp_path / "plain", dtype="float32", device="cpu")


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_transformers_computes_the_same_from_the_same_files(tmp_path, name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "moe_intermediate_size": 128, "q_lora_rank": 128, "kv_lora_rank": 64}
    if name == "deepseek_v3":
        sizes |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32, "num_key_value_heads": 4}
        sizes.pop("head_dim")
    config = raw_config(name) | sizes
    quantised_folder(tmp_path / "fp8", config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8",
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
    ).float()
    ids = np.random.default_rng(0).integers(3, 96, (2, 20))
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    assert expected.std() > 0.05
    got = mt.load(tmp_path / "fp8", dtype="float32", device="cpu").logits(ids)
    # Ours are rounded to bfloat16 first, theirs are the float32 products.
    assert np.linalg.norm(got - expected) < 0.01 * np.linalg.norm(expected)


QUERY = "model.layers.0.self_attn.q_proj.weight"
INPUT_NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no scale", rf"tensor '{QUERY}' has dtype F8_E4M3 and there is no '{QUERY}_scale_inv' with its scales"),
        ("scale alone", r"tensor 'model.x.weight_scale_inv' holds scales and there is no weight; get the files again"),
        (
            "scale of bfloat16",
            rf"'{QUERY}_scale_inv' holds scales and there is a weight of dtype BF16, which needs none",
        ),
        ("other blocks", rf"'{QUERY}_scale_inv' has shape \[1, 1\] where config.json asks for \[4, 2\]"),
        ("whole scale", rf"'{QUERY}_scale_inv' has dtype I32; supported: BF16, F16, F32"),
        ("norm", rf"tensor '{INPUT_NORM}' has dtype F8_E4M3; supported: BF16"),
        ("no config", r"' has dtype F8_E4M3, yet config.json has no quantization_config with quant_method fp8; get"),
        ("not a number", rf"tensor '{QUERY}' has values that are not finite"),
        ("infinite scale", rf"tensor '{QUERY}_scale_inv' has values that are not finite"),
        ("too large", rf"tensor '{QUERY}' has values that are not finite"),
    ],
)
def test_what_does_not_belong_together_is_refused_by_name(tmp_path, change, message):
    config, folder = raw_config("qwen3"), tmp_path / "fp8"
    tensors, values = quantised_folder(folder, config, block=(16, 20))
    scales = f"{QUERY}_scale_inv"
    if change == "no scale":
        del tensors[scales]
    if change == "scale alone":
        tensors["model.x.weight_scale_inv"] = tensors[scales]
    if change == "scale of bfloat16":
        tensors[QUERY] = values[QUERY]
    if change == "other blocks":
        tensors[scales] = tensors[scales][:1, :1].copy()
    if change == "whole scale":
        tensors[scales] = np.ones(tensors[scales].shape, np.int32)
    if change == "norm":
        tensors[INPUT_NORM] = tensors[INPUT_NORM].astype(FP8)
    if change == "no config":
        (folder / "config.json").write_text(json.dumps(config))
    if change == "not a number":
        tensors[QUERY].view(np.uint8)[-1, -1] = 0x7F
    if change == "infinite scale":
        tensors[scales][-1, -1] = np.inf
    if change == "too large":
        tensors[scales][-1, -1] = 3e38
        tensors[QUERY][-1, -1] = 448
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=message) as caught:
        mt.load(folder, device="cpu")
    assert "\n" not in str(caught.value)


def test_scales_of_parts_that_are_left_out_are_left_out_with_them(tmp_path):
    tensors, _ = quantised_folder(tmp_path / "fp8", raw_config("qwen3"), block=(16, 20))
    more = {key.replace("layers.0", "layers.7"): value for key, value in tensors.items() if "layers.0.mlp" in key}
    save_file(tensors | more, tmp_path / "fp8" / "model.safetensors")
    model = mt.load(tmp_path / "fp8", device="cpu")
    assert len(model.notes) == len(more) == 6 and all(
        note.startswith("not used: model.layers.*.") for note in model.notes
    )


def test_reading_takes_little_more_than_the_values(tmp_path):
    name, shape = "model.layers.0.mlp.up_proj.weight", (2048, 1024)
    bits, scales = some_weights(shape)
    save_file({name: bits.view(FP8), f"{name}_scale_inv": scales / 1e6}, tmp_path / "model.safetensors")
    tracemalloc.start()
    load_weights(tmp_path, {name: shape}, lambda *_: None, tied=False, fp8_block=(128, 128))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3.7 * bits.size  # the bytes of the file, twice as many of bfloat16, and some rows in float32
