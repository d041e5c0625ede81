"""The matmuls of `experts.grouped_matmul` as Triton kernels, written in Pallas, for one GPU of compute capability 8 or more.

Rows lie in tiles that belong to a single expert each, so a program reads the weights of its tile's expert where they are: no
weights are gathered, and cost follows the rows. Measured at 128 experts, 2048 x 768, top 8 of 64k tokens on an H200: 500 to 640
TFLOP/s (docs/benchmarks.md), where batches of tiles in plain XLA reach 120 to 240 and `jax.lax.ragged_dot` expands to every expert.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

try:
    from jax.experimental.pallas import triton
except ImportError:  # jax 0.11 calls it deprecated; one without it computes with plain tiles
    triton = None

ROWS, DEPTH = 128, 64  # of a program's tile; rows of one expert come in multiples of ROWS
COLUMNS = 256


def fits(tile: int, *widths: int) -> bool:
    """Whether the kernels take rows in tiles of `tile` and weights of these widths."""
    return triton is not None and tile % ROWS == 0 and all(width % DEPTH == 0 for width in widths)


def _columns(width: int, columns: int, j: jax.Array) -> tuple[pl.Slice, jax.Array | None]:
    """Columns of program `j`, and which of them exist; None where all do."""
    mask = None if width % columns == 0 else j * columns + jnp.arange(columns) < width
    return pl.ds(j * columns, columns), mask


def _load(ref, mask: jax.Array | None, axis: int):
    if mask is None:
        return triton.load(ref)
    mask = jnp.broadcast_to(jnp.expand_dims(mask, 1 - axis), ref.shape)
    return triton.load(ref, mask=mask, other=0.0)


@functools.partial(jax.jit, static_argnames=("in_first", "interpret"))
def multiply_rows(x_MxI: jax.Array, w: jax.Array, expert_N: jax.Array, *, in_first: bool, interpret: bool = False):
    """As `experts.grouped_matmul`, accumulated in float32.

    Args:
      x_MxI: rows; M is a multiple of ROWS.
      w: ``[E, O, I]``, or ``[E, I, O]`` if `in_first`.
      expert_N: int32, expert of each of N equal tiles of rows; a tile of number E is zero and costs no matmul.
      interpret: run without a GPU, slowly.
    """
    rows, depth = x_MxI.shape
    width = w.shape[2] if in_first else w.shape[1]
    columns = min(COLUMNS, 1 << (width - 1).bit_length())
    programs = -(-width // columns)
    expert_of = jnp.repeat(expert_N, rows // len(expert_N) // ROWS, total_repeat_length=rows // ROWS)

    def kernel(expert_ref, x_ref, w_ref, y_ref):
        # Programs of the same rows follow one another and find them in the cache.
        i, j = pl.program_id(0) // programs, pl.program_id(0) % programs
        expert, here = expert_ref[i], pl.ds(i * ROWS, ROWS)
        there, mask = _columns(width, columns, j)

        def step(k, acc):
            along = pl.ds(k * DEPTH, DEPTH)
            a = triton.load(x_ref.at[here, along])
            if in_first:
                return acc + triton.dot(a, _load(w_ref.at[expert, along, there], mask, 1))
            return acc + triton.dot(a, _load(w_ref.at[expert, there, along], mask, 0), trans_b=True)

        steps = (expert < len(w)).astype(jnp.int32) * (depth // DEPTH)
        acc = jax.lax.fori_loop(0, steps, step, jnp.zeros((ROWS, columns), jnp.float32))
        mask = None if mask is None else jnp.broadcast_to(mask[None, :], acc.shape)
        triton.store(y_ref.at[here, there], acc.astype(y_ref.dtype), mask=mask)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((rows, width), x_MxI.dtype),
        grid=(rows // ROWS * programs,),
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
    )(expert_of, x_MxI, w)


@functools.partial(jax.jit, static_argnames=("experts", "interpret"))
def sum_outer_products(
    a_MxA: jax.Array, b_MxB: jax.Array, expert_N: jax.Array, *, experts: int, interpret: bool = False
):
    """``[E, A, B]`` in the dtype of `a`: outer products of the rows of each expert, added in float32.

    Args:
      expert_N: int32 and sorted, expert of each of N equal tiles of rows; those of number E count for none.
    """
    rows, height, width = len(a_MxA), a_MxA.shape[1], b_MxB.shape[1]
    columns, lines = min(COLUMNS, 1 << (width - 1).bit_length()), min(ROWS, 1 << (height - 1).bit_length())
    counts = jnp.zeros(experts, jnp.int32).at[expert_N].add(rows // len(expert_N), mode="drop")
    ends = jnp.cumsum(counts)

    def kernel(starts_ref, ends_ref, a_ref, b_ref, out_ref):
        expert = pl.program_id(2)
        up, up_mask = _columns(height, lines, pl.program_id(0))
        along, mask = _columns(width, columns, pl.program_id(1))
        start = starts_ref[expert]

        def step(k, acc):
            here = pl.ds(start + k * DEPTH, DEPTH)
            a, b = _load(a_ref.at[here, up], up_mask, 1), _load(b_ref.at[here, along], mask, 1)
            return acc + triton.dot(a, b, trans_a=True)

        steps = (ends_ref[expert] - start) // DEPTH
        acc = jax.lax.fori_loop(0, steps, step, jnp.zeros((lines, columns), jnp.float32))
        inside = None
        if up_mask is not None or mask is not None:
            ones = lambda m, n: jnp.ones(n, bool) if m is None else m  # noqa: E731
            inside = ones(up_mask, lines)[:, None] & ones(mask, columns)[None, :]
        triton.store(out_ref.at[expert, up, along], acc.astype(out_ref.dtype), mask=inside)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((experts, height, width), a_MxA.dtype),
        grid=(-(-height // lines), -(-width // columns), experts),
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
    )(ends - counts, ends, a_MxA, b_MxB)
