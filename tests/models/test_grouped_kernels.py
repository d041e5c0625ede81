"""The kernels, interpreted, against NumPy in float64; on a GPU tests/gpu runs them compiled."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh
from jaxlib import triton
from jaxlib.mlir import ir

from megatrain_jax.models import experts, grouped_kernels
from megatrain_jax.models.grouped_kernels import ROWS, fits, multiply_rows, sum_outer_products

EXPERT_N = np.array([0, 0, 1, 3, 3, 4], np.int32)  # expert 2 has no rows, and the last tile is of none of the four
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2}
SHAPES = [(128, 256), (192, 320), (128, 64)]  # whole tiles of columns, parts of them, fewer than one


def normal(*shape: int, dtype: str, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def close(got, want, dtype):
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=TOLERANCE[dtype] * np.abs(want).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("in_first", [False, True])
@pytest.mark.parametrize(("depth", "width"), SHAPES)
def test_rows_meet_the_weights_of_their_expert(depth, width, in_first, dtype):
    x = normal(ROWS * len(EXPERT_N), depth, dtype=dtype)
    w = normal(4, *((depth, width) if in_first else (width, depth)), dtype=dtype, seed=1)
    got = multiply_rows(x, w, EXPERT_N, in_first=in_first, interpret=True)
    each = np.asarray(w, np.float64) if in_first else np.asarray(w, np.float64).swapaxes(1, 2)
    each = np.append(each, np.zeros_like(each[:1]), axis=0)
    want = [np.asarray(rows, np.float64) @ each[e] for rows, e in zip(np.split(x, len(EXPERT_N)), EXPERT_N)]
    close(got, np.concatenate(want), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_outer_products_are_added_for_each_expert_and_are_zero_without_rows(height, width, dtype):
    rows = 2 * ROWS * len(EXPERT_N)
    a, b = normal(rows, height, dtype=dtype), normal(rows, width, dtype=dtype, seed=1)
    got = sum_outer_products(a, b, EXPERT_N, experts=4, interpret=True)
    of_row = np.repeat(EXPERT_N, 2 * ROWS)
    want = [np.asarray(a, np.float64)[of_row == e].T @ np.asarray(b, np.float64)[of_row == e] for e in range(4)]
    close(got, np.stack(want), dtype)
    assert not np.asarray(got[2], np.float32).any()


def operations(operation):
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from operations(inner.operation)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("kernel", ["rows", "transposed rows", "outer products"])
@pytest.mark.parametrize("width", [192, 320])
def test_triton_accepts_what_is_lowered_for_a_gpu(kernel, width):
    """Interpreting does not check the types of the loops that Pallas makes; XLA parses them so on a GPU."""
    rows, depth, of = ROWS * len(EXPERT_N), 128, functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    call, operands = {
        "rows": (functools.partial(multiply_rows, in_first=False), (of((rows, depth)), of((4, width, depth)))),
        "transposed rows": (
            functools.partial(multiply_rows, in_first=True),
            (of((rows, depth)), of((4, depth, width))),
        ),
        "outer products": (functools.partial(sum_outer_products, experts=4), (of((rows, depth)), of((rows, width)))),
    }[kernel]
    a_gpu = contextlib.nullcontext()
    if jax.__version_info__ >= (0, 11):  # before, 9.0 is assumed
        device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
        a_gpu = use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Explicit,), abstract_device=device))
    with a_gpu:
        lowered = jax.jit(call).trace(*operands, EXPERT_N).lower(lowering_platforms=("cuda",))
    calls = [op for op in operations(lowered.compiler_ir().operation) if "mhlo.backend_config" in op.attributes]
    (code,) = [op.attributes["mhlo.backend_config"]["ir"].value_bytes for op in calls]
    with ir.Context() as context:
        triton.dialect.register_dialect(context)
        context.load_all_available_dialects()
        assert ir.Module.parse(code).operation.verify()


def test_only_whole_tiles_and_steps_fit():
    assert fits(128, 64, 2880) and fits(512, 2048, 768)
    assert not fits(64, 64, 64) and not fits(128, 64, 100)


def test_off_a_gpu_the_plain_tiles_are_taken_where_the_kernels_would_apply(monkeypatch):
    tiles = experts.TILES_AT_ONCE
    x, w = normal(ROWS * tiles, 128, dtype="bfloat16"), normal(4, 64, 128, dtype="bfloat16", seed=1)
    expert_N = np.sort(np.random.default_rng(0).integers(0, 4, tiles)).astype(np.int32)
    asked = []
    monkeypatch.setattr(grouped_kernels, "fits", lambda *sizes: asked.append(sizes) or fits(*sizes))
    loss = lambda x, w: experts.grouped_matmul(x, w, expert_N, False).astype(jnp.float32).sum()  # noqa: E731
    gradients = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    assert asked and all(fits(*sizes) for sizes in asked)
    ones = np.ones((ROWS * tiles, 64))
    of_row = np.repeat(expert_N, ROWS)
    close(gradients[0], np.stack([np.asarray(w, np.float64)[e].sum(axis=0) for e in of_row]), "bfloat16")
    want = [ones[of_row == e].T @ np.asarray(x, np.float64)[of_row == e] for e in range(4)]
    close(gradients[1], np.stack(want), "bfloat16")
