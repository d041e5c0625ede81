"""What only a CUDA GPU can show. Elsewhere these skip; on a machine with one, run

JAX_DISABLE_MOST_OPTIMIZATIONS=0 python -m pytest tests/gpu
"""

import shutil

import jax
import numpy as np
import pytest

from megatrain_jax.host.store import HostStore
from megatrain_jax.model import Model, load
from megatrain_jax.models.attention import AttentionOptions
from megatrain_jax.models.blocks import tensor_shapes
from megatrain_jax.models.experts import grouped_matmul
from megatrain_jax.stream.pipeline import Settings
from megatrain_jax.stream.templates import Execution
from megatrain_jax.stream.transfer import make_mesh
from tests.conftest import small_spec
from tests.end_to_end.conftest import Project, records, saved_weights, write_model
from tests.gpu.conftest import needs_gpu
from tests.reference import loss_and_grads, random_batch, random_weights, relative_errors, training

pytestmark = needs_gpu

SPEC = small_spec(3, hidden_size=256, intermediate_size=384, head_dim=64, sliding_window=24, qk_norm=True)


def gradients(dtype: str, kernel: str, settings: Settings, batches):
    mesh = make_mesh("cuda")
    store = HostStore(SPEC, [tensor_shapes(b) for b in SPEC.blocks], wire_dtype=dtype, lock_pages=True)
    for name, tensor in store.tensors.items():
        tensor.assign(random_weights(SPEC)[name])
    run = Execution(mesh, np.dtype(dtype), AttentionOptions(kernel), 64)
    model, grads = Model(SPEC, store, run, {}, None), {}

    def sink(block, landing):
        landing.wait()
        for path, tensor in store.owned(block).items():
            grads[tensor.name] = np.array(landing.rows(path)[0], np.float32).reshape(tensor.shape)

    with training(model, settings) as (pipeline, _):
        loss, _, _ = pipeline.gradients(batches, sink)
    return float(loss), grads


@pytest.mark.parametrize("settings", [Settings(), Settings(offload_activations=True), Settings(keep_layers=2)])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_float32_on_the_gpu_is_float32(settings, micro_batches):
    batches = [random_batch(SPEC, m, rows=4, seq=64) for m in range(micro_batches)]
    loss, expected = loss_and_grads(SPEC, random_weights(SPEC), batches)
    got, grads = gradients("float32", "xla", settings, batches)
    assert got == pytest.approx(loss, rel=1e-5)
    assert max(relative_errors(grads, expected).values()) < 1e-4  # TF32 would be a hundred times further away


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("settings", [Settings(), Settings(offload_activations=True), Settings(keep_layers=2)])
def test_cudnn_attention_is_as_close_as_xla(settings, packed):
    batches = [random_batch(SPEC, rows=4, seq=64, packed=packed)]
    _, expected = loss_and_grads(SPEC, random_weights(SPEC), batches)
    fused, plain = (
        max(relative_errors(gradients("bfloat16", kernel, settings, batches)[1], expected).values())
        for kernel in ("cudnn", "xla")
    )
    assert fused < 1.5 * plain < 0.1


def test_weights_lie_in_locked_pages(tmp_path):
    from cuda.bindings import runtime

    model = load(write_model(tmp_path / "model"), device="cuda")
    for tensor in model.store.tensors.values():
        status, _ = runtime.cudaHostGetFlags(tensor.wire[0].ctypes.data)
        assert status == runtime.cudaError_t.cudaSuccess


STREAMED = {"keep_intermediates": 0, "resident_blocks": 0}


@pytest.mark.parametrize(
    "memory, backend", [({}, "auto"), (STREAMED, "auto"), (STREAMED, "optax")], ids=["auto", "streamed", "optax"]
)
def test_a_resumed_run_equals_one_without_a_break_bit_for_bit(tmp_path, memory, backend):
    model = write_model(tmp_path / "model", hidden_size=256, intermediate_size=512, max_position_embeddings=256)
    project = Project(tmp_path, model)
    sections = {
        "model": {"device": "cuda", "dtype": "bfloat16"},
        "training": {"num_steps": 6, "deterministic": True, "gradient_accumulation_steps": 2},
        "checkpoint": {"save_steps": 3},
        "memory": memory,
        "optimizer": {"backend": backend},
    }
    config = project.write(**sections)
    environment = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    done = project.run(str(config), f"output_dir={whole}", **environment)
    assert done.returncode == 0, done.stderr
    resumed.mkdir()
    shutil.copytree(whole / "checkpoint-3", resumed / "checkpoint-3")
    shutil.copy(whole / "metrics.jsonl", resumed)
    done = project.run(str(config), f"output_dir={resumed}", **environment)
    assert done.returncode == 0 and "resumed" in done.stdout, done.stderr
    assert records(whole) == records(resumed)
    for name, value in saved_weights(whole).items():
        assert value.tobytes() == saved_weights(resumed)[name].tobytes(), name


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
def test_kernels_of_experts_equal_plain_tiles():
    rng = np.random.default_rng(0)
    tiles, depth, width = 16, 192, 320
    expert_N = np.sort(rng.choice([0, 1, 3, 4], tiles)).astype(np.int32)  # 2 has no rows, 4 is none
    some = np.repeat(expert_N < 4, 128)[:, None]
    x, dy = (jax.numpy.asarray(some * rng.normal(size=(128 * tiles, n)), "bfloat16") for n in (depth, width))
    w = jax.numpy.asarray(rng.normal(size=(4, width, depth)), "bfloat16")

    def all_of(x, w, dy):
        y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, expert_N, False), x, w)
        return y, *pull(dy)

    on_gpu = jax.jit(all_of)(*jax.device_put((x, w, dy), jax.devices("cuda")[0]))
    on_cpu = jax.jit(all_of)(*jax.device_put((x, w, dy), jax.devices("cpu")[0]))
    for got, want in zip(on_gpu, on_cpu):
        got, want = (np.asarray(a, np.float64) for a in (got, want))
        assert np.linalg.norm(got - want) < 5e-3 * np.linalg.norm(want)
