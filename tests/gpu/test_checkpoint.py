"""Checkpoints of what lies on a CUDA GPU and in locked pages. Elsewhere these skip; see test_gpu.py."""

import functools
import math
import time

import jax
import numpy as np
import pytest

from megatrain_jax.checkpoint import manifest, state
from megatrain_jax.config import OptimizerConfig, TrainingConfig
from megatrain_jax.host.optimizer import HostOptimizer
from megatrain_jax.host.store import HostStore
from megatrain_jax.models.blocks import tensor_shapes
from megatrain_jax.stream.resident import ResidentTensor
from megatrain_jax.stream.transfer import make_mesh
from scripts.bench_checkpoint import with_peak
from tests.conftest import small_spec
from tests.gpu.conftest import needs_gpu

pytestmark = needs_gpu

# Tensors of up to 64 MiB; odd sizes, so that no chunk begins where a tensor does.
SPEC = small_spec(1, hidden_size=2047, intermediate_size=8193, num_heads=1, num_kv_heads=1, head_dim=62)
LARGEST = 4 * 2047 * 8193


def random_store(resident, seed):
    """Every number of it, moments and counts included, is random."""
    mesh, rng = make_mesh("cuda"), np.random.default_rng(seed)
    make = functools.partial(ResidentTensor, mesh=mesh, dtype="bfloat16")
    shapes = [tensor_shapes(block) for block in SPEC.blocks]
    options = dict(wire_dtype="bfloat16", lock_pages=True, layout="split", resident=resident, make_resident=make)
    store = HostStore(SPEC, shapes, **options)
    for tensor in store.tensors.values():
        tensor.assign(rng.standard_normal(tensor.shape, np.float32))
    HostOptimizer(store, OptimizerConfig(), TrainingConfig(), 10)
    for tensor in store.tensors.values():
        for array in tensor.state().values():
            size = math.prod(array.shape)
            bits = rng.standard_normal(size, np.float32).view(np.int32) | 1  # never halfway between two of bfloat16
            array.write(0, bits & 0xFF if array.dtype.kind == "i" else bits.view(np.float32))
    return store


def arrays(store):
    found = {}
    for name, tensor in store.tensors.items():
        for key, array in tensor.state().items():
            found[name, key] = np.empty(array.shape, array.dtype)
            array.read(0, found[name, key].reshape(-1))
    return found


def on_the_device():
    """Bytes of arrays. The allocator's own count moves with what it does not split off: up to 128 MiB a piece."""
    return sum(array.nbytes for array in jax.live_arrays("cuda"))


@pytest.mark.parametrize("there, here", [((0, 1, 2), (0, 1, 2)), ((0, 2), (1,)), ((), (1,)), ((1,), ())])
def test_blocks_on_the_device_are_saved_and_restored_bit_for_bit(tmp_path, there, here):
    """And what is restored is what the templates read, wherever the block is then."""
    store, other = random_store(there, 0), random_store(here, 1)
    before = arrays(store)
    state.save(tmp_path / "checkpoint-1", store, {})
    assert len(manifest.read(tmp_path / "checkpoint-1")["tensors"]) == len(store.tensors)
    state.load(tmp_path / "checkpoint-1", other)
    after = arrays(other)
    assert before.keys() == after.keys() and before
    for key, array in before.items():
        assert array.tobytes() == after[key].tobytes(), key
    for number, block in enumerate(other.blocks):
        for path, weights in make_mesh("cuda").put_weights(block).items():
            expected = before[block[path].name, "master"]
            assert np.asarray(weights).tobytes() == expected.astype(weights.dtype).tobytes(), (number, path)


def test_memory_is_bounded_by_the_largest_tensor(tmp_path):
    """Host memory while saving and restoring, and the device's after both, with all blocks on the device."""
    store = random_store(range(3), 0)
    state.save(tmp_path / "checkpoint-0", store, {})  # what is compiled and pooled once
    state.load(tmp_path / "checkpoint-0", store)
    before = on_the_device()
    _, saving = with_peak(lambda: state.save(tmp_path / "checkpoint-1", store, {}))
    _, restoring = with_peak(lambda: state.load(tmp_path / "checkpoint-1", store))
    print(f"saving adds {saving / LARGEST:.2f} of the largest tensor, restoring {restoring / LARGEST:.2f}")
    assert saving <= 3 * LARGEST and restoring <= 3 * LARGEST
    assert on_the_device() == before


def test_gradients_land_in_locked_pages_at_the_speed_of_the_link():
    """Beside the way that blocks and crawls, to the same array of the host."""
    from cuda.bindings import runtime

    mesh = make_mesh("cuda")
    x = jax.block_until_ready(jax.numpy.ones((64 << 20,), "float32"))

    def seconds(copy):
        found = []
        for i in range(4):
            y = jax.block_until_ready(x + i)  # an array keeps the copy that was made of it
            start = time.perf_counter()
            copy(y)
            found.append(time.perf_counter() - start)
        return min(found[1:])

    landed = jax.block_until_ready(mesh.to_host(x))
    status, _ = runtime.cudaHostGetFlags(np.asarray(landed).ctypes.data)
    assert status == runtime.cudaError_t.cudaSuccess
    ours, pageable = seconds(lambda y: jax.block_until_ready(mesh.to_host(y))), seconds(np.asarray)
    print(f"{x.nbytes / ours / 1e9:.1f} GB/s to locked pages, {x.nbytes / pageable / 1e9:.1f} GB/s to others")
    assert ours < pageable / 3
