"""The public surface: transformers' logits, loss and gradients from the folder it wrote, and copies that stay."""

import json
import math
import threading
import time
import types
import warnings

import numpy as np
import pytest

import megatrain_jax as mt
from megatrain_jax import model as model_module
from megatrain_jax.config import UserError
from megatrain_jax.model import attention_kernel, initialise, unpadded_batch
from megatrain_jax.models.blocks import model_tensors
from megatrain_jax.models.part_specs import LatentSpec
from megatrain_jax.stream.transfer import Mesh
from tests.conftest import small_spec
from tests.reference import make_model, random_batch, random_weights

slow = pytest.mark.exhaustive

SMALL = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=False,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=5e3,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
FAMILIES = {
    "llama 2": ("Llama", dict(num_key_value_heads=4)),
    "llama 3.1": ("Llama", dict(rope_parameters=LLAMA3_ROPE)),
    "smollm2": (
        "Llama",
        dict(
            hidden_size=36,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
            rope_parameters=dict(rope_type="default", rope_theta=1e5),
        ),
    ),
    "mistral": ("Mistral", dict(sliding_window=8, head_dim=12)),
    "qwen2": ("Qwen2", dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    "qwen3": ("Qwen3", dict(head_dim=12)),
    "qwen3 tied": ("Qwen3", dict(head_dim=12, tie_word_embeddings=True)),
}
PROMPT = 40  # longer than every window, and than llama 3.1's original positions


def written_by_transformers(folder, family):
    """A random model of which no weight is trivial, saved by transformers; the model itself."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    name, changes = FAMILIES[family]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, not ours
        config = getattr(transformers, f"{name}Config")(**SMALL | changes, attn_implementation="eager")
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.float32).eval()
        for key, tensor in model.named_parameters():
            centre = 1.0 if "norm" in key else 0.0
            torch.nn.init.normal_(tensor, centre, 0.3 if tensor.ndim == 1 else 0.15)
        model.save_pretrained(folder)
    return torch, model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path, family):
    torch, theirs = written_by_transformers(tmp_path, family)
    ids = np.random.default_rng(0).integers(0, 97, (2, PROMPT))
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    logits = mt.load(tmp_path, dtype="float32").logits(ids)
    assert logits.dtype == np.float32 and logits.shape == (2, PROMPT, 97)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    assert np.abs(expected).max() > 1


@pytest.mark.parametrize(
    "family",
    [f if f in ("llama 3.1", "mistral", "qwen2", "qwen3 tied") else pytest.param(f, marks=slow) for f in FAMILIES],
)
def test_loss_and_gradients_are_those_of_torch(tmp_path, family):
    torch, theirs = written_by_transformers(tmp_path, family)
    ids = np.random.default_rng(0).integers(0, 97, (2, PROMPT))
    theirs(torch.tensor(ids), labels=torch.tensor(ids)).loss.backward()
    model = mt.load(tmp_path, dtype="float32")
    loss, grads = model.loss_and_grads(unpadded_batch(ids))
    labels = torch.tensor(ids)
    assert loss == pytest.approx(theirs(torch.tensor(ids), labels=labels).loss.item(), rel=1e-5)
    expected = {name: tensor.grad.numpy() for name, tensor in theirs.named_parameters()}
    assert set(grads) == set(expected)
    for name, grad in expected.items():
        assert np.linalg.norm(grads[name] - grad) <= 1e-4 * np.linalg.norm(grad), name


def write_config(folder, **changes):
    config = dict(SMALL, model_type="llama", architectures=["LlamaForCausalLM"], rms_norm_eps=1e-5) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_random_weights_need_a_config_alone_and_repeat(tmp_path):
    write_config(tmp_path, initializer_range=0.05)
    models = [mt.load(tmp_path, dtype="float32", init="random", seed=seed) for seed in (1, 1, 2)]
    one, again, other = ({n: t.read() for n, t in model.store.tensors.items()} for model in models)
    assert set(one) == set(model_tensors(models[0].spec))
    for name, value in one.items():
        np.testing.assert_array_equal(again[name], value)
        if value.ndim == 1:
            np.testing.assert_array_equal(value, 1)
        else:
            assert not np.array_equal(other[name], value)
            assert value.std() == pytest.approx(0.05, rel=0.1) and abs(value.mean()) < 0.01


def test_random_weights_on_their_way_to_the_store_are_bounded(monkeypatch):
    spec, drawn, most, lock = small_spec(3), 0, 0, threading.Lock()
    model, original = make_model(spec, random_weights(spec)), model_module.initial_value

    def slow(spec, name, shape, rng):
        nonlocal drawn, most
        with lock:
            drawn += 4 * math.prod(shape)
            most = max(most, drawn)
        time.sleep(0.005)
        value = original(spec, name, shape, rng)
        with lock:
            drawn -= value.nbytes
        return value

    monkeypatch.setattr(model_module, "initial_value", slow)
    largest = max(4 * tensor.size for tensor in model.store.tensors.values())
    for limit, bound in ((1, largest), (2 * largest, 2 * largest)):
        monkeypatch.setattr(model_module, "DRAWN_AT_ONCE", limit)
        most = 0
        initialise(model.store, 0)
        assert 0 < most <= bound
    assert most > largest


def test_a_tensor_that_cannot_be_drawn_ends_it(monkeypatch):
    spec = small_spec(1)

    def fail(spec, name, shape, rng):
        raise MemoryError(name)

    monkeypatch.setattr(model_module, "initial_value", fail)
    with pytest.raises(MemoryError):
        initialise(make_model(spec, random_weights(spec)).store, 0)


def test_biases_start_at_zero():
    model = make_model(small_spec(1, qkv_bias=True), random_weights(small_spec(1, qkv_bias=True)))
    initialise(model.store, 0)
    assert not model.store.tensors["model.layers.0.self_attn.q_proj.bias"].read().any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_saved_is_loaded(tmp_path, dtype):
    (tmp_path / "in").mkdir()
    write_config(tmp_path / "in")
    model = mt.load(tmp_path / "in", dtype=dtype, init="random")
    mt.save(model, tmp_path / "out", dtype=dtype, max_shard_size=20_000)
    again = mt.load(tmp_path / "out", dtype=dtype)
    for name, tensor in model.store.tensors.items():
        expected = tensor.read().astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(again.store.tensors[name].read(), expected)


def test_freeze_is_a_search_in_names(tmp_path):
    write_config(tmp_path)
    model = mt.load(tmp_path, dtype="float32", init="random", freeze=["embed", r"layers\.0\..*proj"])
    frozen = {name for name, tensor in model.store.tensors.items() if not tensor.trainable}
    assert "model.embed_tokens.weight" in frozen and len(frozen) == 1 + 7
    assert all("embed" in name or ".0." in name for name in frozen)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dtype": "float16"}, "model.dtype: 'float16' is not supported; use bfloat16 or float32"),
        ({"freeze": ["("]}, r"model.freeze: '\(' is not a regular expression"),
        ({"attention": "cudnn", "device": "cpu"}, "model.attn_implementation: cudnn needs a GPU; use auto or xla"),
        ({"device": "cuda"}, "model.device: 'cuda' was asked for and jax sees no GPU"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_line(tmp_path, options, message):
    write_config(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        mt.load(tmp_path, init="random", **options)
    assert "\n" not in str(error.value)


GPU_4090, GPU_A100, GPU_H200, GPU_B200 = "8.9", "8.0", "9.0", "10.0"


def some_gpus(*capabilities):
    return Mesh(tuple(types.SimpleNamespace(platform="cuda", compute_capability=text) for text in capabilities))


@pytest.mark.parametrize(
    "capabilities, head_dim, fused",
    [
        ([GPU_A100], 128, True),
        ([GPU_A100], 136, False),
        ([GPU_4090], 256, False),
        ([GPU_H200], 192, True),
        ([GPU_H200], 256, True),
        ([GPU_H200], 264, False),
        ([GPU_H200], 100, False),
        ([GPU_B200], 256, True),
        ([GPU_H200, GPU_A100], 256, False),
    ],
)
def test_cudnn_takes_the_heads_that_the_gpu_allows(capabilities, head_dim, fused):
    spec, mesh = small_spec(head_dim=head_dim), some_gpus(*capabilities)
    assert attention_kernel("auto", spec, mesh, "bfloat16") == ("cudnn" if fused else "xla")
    assert attention_kernel("auto", spec, mesh, "float32") == attention_kernel("xla", spec, mesh, "bfloat16") == "xla"
    if not fused:
        with pytest.raises(UserError, match=rf"cudnn takes head sizes up to \d+ .* model's is {head_dim}; use auto or"):
            attention_kernel("cudnn", spec, mesh, "bfloat16")


@pytest.mark.parametrize("value_dim, fused", [(64, True), (256, True), (264, False), (196, False)])
def test_padded_values_of_latent_attention_count_as_heads(value_dim, fused):
    latent = LatentSpec(query_rank=None, key_rank=16, nope_dim=128, rope_dim=64, value_dim=value_dim)
    spec = small_spec(head_dim=192, num_kv_heads=4, latent=latent)
    assert attention_kernel("auto", spec, some_gpus(GPU_H200), "bfloat16") == ("cudnn" if fused else "xla")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"attention_chunk_size": 8}, "attention_chunk_size = 8 is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method is 'gptq'"),
        ({"num_hidden_layers": 3}, "no tensor 'model.layers.2"),
        ({"intermediate_size": 40}, "where config.json asks for"),
    ],
)
def test_nothing_is_allocated_for_what_is_refused(tmp_path, monkeypatch, changes, message):
    write_config(tmp_path)
    mt.save(mt.load(tmp_path, init="random"), tmp_path / "out")
    write_config(tmp_path / "out", **changes)
    monkeypatch.setattr("megatrain_jax.model.HostStore", lambda *args, **options: pytest.fail("memory was allocated"))
    with pytest.raises(UserError, match=message):
        mt.load(tmp_path / "out")


@pytest.fixture(scope="module")
def model():
    spec = small_spec(2, tied=True, sliding_window=4, qk_norm=True)
    return make_model(spec, random_weights(spec))


def test_nothing_that_was_returned_or_taken_is_shared_with_the_store(model):
    batch = random_batch(model.spec)
    ids = batch.token_ids.copy()
    logits = model.logits(ids)
    loss, grads = model.loss_and_grads(batch)
    values = {name: tensor.read() for name, tensor in model.store.tensors.items()}
    arrays = [logits, *grads.values(), *values.values()]
    kept = [array.copy() for array in arrays]
    for tensor in model.store.tensors.values():
        tensor.assign(np.full(tensor.shape, 7, np.float32))
    ids[...] = 0
    for array, expected in zip(arrays, kept, strict=True):
        np.testing.assert_array_equal(array, expected)
    for name, tensor in model.store.tensors.items():
        tensor.assign(values[name])
    np.testing.assert_array_equal(model.logits(batch.token_ids), logits)
    for array in arrays:  # and the other way round
        array[...] = 9
    assert all((tensor.read() != 9).any() for tensor in model.store.tensors.values())
    assert model.loss_and_grads(batch)[0] == loss


def test_assigned_arrays_are_copied(model):
    tensor = model.store.tensors["model.norm.weight"]
    before = tensor.read()
    given = np.full(tensor.shape, 2, np.float32)
    tensor.assign(given)
    given[...] = 5
    np.testing.assert_array_equal(tensor.read(), 2)
    tensor.assign(before)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(token_ids=np.full((3, 12), 97, np.int32)), r"token_ids must be in \[0, 97\), got 97 to 97"),
        (dict(targets=np.full((3, 12), -100, np.int32)), r"targets must be in \[0, 97\), got -100 to -100"),
        (dict(positions=np.zeros((3, 11), np.int32)), r"every field of a batch must be \[batch, seq\]"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(model, change, message):
    with pytest.raises(ValueError, match=message):
        model.loss_and_grads(random_batch(model.spec)._replace(**change))


def test_more_tokens_than_positions_are_refused(model):
    with pytest.raises(ValueError, match="65 tokens are more than the model's 64 positions"):
        model.logits(np.zeros((1, 65), np.int32))


def test_the_batch_of_whole_sequences_predicts_the_next_token():
    batch = unpadded_batch([[5, 6, 7], [8, 9, 4]])
    np.testing.assert_array_equal(batch.targets[:, :-1], [[6, 7], [9, 4]])
    np.testing.assert_array_equal(batch.loss_weights, [[1, 1, 0]] * 2)
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2]] * 2)
    with pytest.raises(ValueError, match=r"token_ids must be \[batch, seq\]"):
        unpadded_batch([1, 2])
