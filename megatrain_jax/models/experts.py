"""Tokens sorted by the expert that they go to, and matmuls in which every row meets the weights of its own expert.

Each token is computed by K of E experts. Its K *choices* become rows of one array, sorted by expert and padded so that
every *tile* of rows belongs to a single expert; cost and memory follow the choices and not the number of experts. No row is
ever dropped. M is the number of rows, T the number of tokens.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from megatrain_jax.models import grouped_kernels
from megatrain_jax.models.parts import full_precision

TILES_AT_ONCE = 16  # without a kernel: tiles of one batched matmul, whose weights are gathered beside each other
LARGEST_TILE = grouped_kernels.ROWS  # a larger one would only be padded more


class Rows(NamedTuple):
    """Which choice lies in which row.

    Attributes:
      choice_M: int32, number ``token * K + k`` of the choice in each row; -1 for padding.
      row_TxK: int32, row of each choice; the last one, which is padding, of a choice that has none.
      expert_N: int32, expert of each of the N tiles, sorted. Tiles that no expert needs are of none, which is number E.
    """

    choice_M: jax.Array
    row_TxK: jax.Array
    expert_N: jax.Array


def tile_size(choices: int, experts: int) -> int:
    """Rows in a tile: few enough that padding, at most a tile for each expert, stays below a quarter of the rows."""
    fair = max(choices // (4 * experts), 8)
    return min(1 << (fair.bit_length() - 1), LARGEST_TILE)


def num_rows(choices: int, experts: int) -> int:
    """Rows that hold any routing of so many choices."""
    tile = tile_size(choices, experts)
    tiles = choices // tile + min(experts, choices)
    return math.ceil(tiles / TILES_AT_ONCE) * TILES_AT_ONCE * tile


def sort_by_expert(expert_TxK: jax.Array, experts: int) -> Rows:
    """The rows of a routing; choices of one expert keep the order of their tokens.

    Args:
      expert_TxK: int32, the experts that each token goes to. A choice of one that is not among them has no row.
      experts: how many there are, E.
    """
    choices = expert_TxK.size
    tile, rows = tile_size(choices, experts), num_rows(choices, experts)
    flat = expert_TxK.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < experts), flat, experts)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.zeros(experts + 1, jnp.int32).at[flat].add(1)
    tiles = -(-counts[:-1] // tile)
    tiles = jnp.append(tiles, rows // tile - tiles.sum())
    shift = (jnp.cumsum(tiles) - tiles) * tile - (jnp.cumsum(counts) - counts)
    number = jnp.arange(choices, dtype=jnp.int32)
    # Behind the rows, where nothing is written, are the choices that have none.
    row = jnp.where(flat[order] < experts, number + shift[flat[order]], rows + number)
    return Rows(
        jnp.full(rows, -1, jnp.int32).at[row].set(order.astype(jnp.int32), mode="drop", unique_indices=True),
        # The last row is padding: if every tile is taken, each expert wastes a part of its last one.
        jnp.zeros(choices, jnp.int32)
        .at[order]
        .set(jnp.minimum(row, rows - 1), unique_indices=True)
        .reshape(expert_TxK.shape),
        jnp.repeat(jnp.arange(experts + 1, dtype=jnp.int32), tiles, total_repeat_length=rows // tile),
    )


@jax.custom_vjp
def spread(x_TxD: jax.Array, rows: Rows) -> jax.Array:
    """Each token in the rows of its choices, ``[M, D]``; padding is zero. The transpose of `collect`."""
    taken = x_TxD[jnp.maximum(rows.choice_M, 0) // rows.row_TxK.shape[1]]
    return jnp.where(rows.choice_M[:, None] >= 0, taken, jnp.zeros((), x_TxD.dtype))


@jax.custom_vjp
def collect(y_MxD: jax.Array, rows: Rows) -> jax.Array:
    """The sum of the rows of each token, ``[T, D]``, added in float32. The transpose of `spread`."""
    parts = (y_MxD[rows.row_TxK[:, k]].astype(jnp.float32) for k in range(rows.row_TxK.shape[1]))
    return sum(parts).astype(y_MxD.dtype)


@jax.custom_vjp
def pick(value_TxK: jax.Array, rows: Rows) -> jax.Array:
    """The value of each row's choice, ``[M]``; padding is zero."""
    taken = value_TxK.reshape(-1)[jnp.maximum(rows.choice_M, 0)]
    return jnp.where(rows.choice_M >= 0, taken, jnp.zeros((), value_TxK.dtype))


# Written as gathers: what autodiff would make of them are scatters with colliding indices.
spread.defvjp(lambda x, rows: (spread(x, rows), rows), lambda rows, dy: (collect(dy, rows), None))
collect.defvjp(lambda y, rows: (collect(y, rows), rows), lambda rows, dx: (spread(dx, rows), None))
pick.defvjp(lambda value, rows: (pick(value, rows), rows), lambda rows, dy: (dy[rows.row_TxK], None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(x_MxI: jax.Array, w: jax.Array, expert_N: jax.Array, in_first: bool) -> jax.Array:
    """Every row times the weights of its tile's expert, ``[M, O]`` in the dtype of `x`.

    Args:
      x_MxI: rows as `sort_by_expert` lays them out.
      w: ``[E, O, I]``, or ``[E, I, O]`` if `in_first`.
      expert_N: expert of each tile of rows. Tiles of no expert hold zeros and, but for a few, are not computed.
      in_first: the layout of `w`.
    """
    tiled = functools.partial(_multiply_tiles, in_first=in_first)
    kernel = functools.partial(grouped_kernels.multiply_rows, in_first=in_first)
    return _on_platform(kernel, tiled, x_MxI, w, expert_N, widths=w.shape[1:])


def _weight_gradient(a_MxA: jax.Array, b_MxB: jax.Array, expert_N: jax.Array, experts: int) -> jax.Array:
    """``[E, A, B]``: the outer products of the rows of each expert, added in float32; zero for one without rows."""
    tiled = functools.partial(_add_tiles, experts=experts)
    kernel = functools.partial(grouped_kernels.sum_outer_products, experts=experts)
    return _on_platform(kernel, tiled, a_MxA, b_MxB, expert_N, widths=(a_MxA.shape[1], b_MxB.shape[1]))


def _on_platform(kernel, tiled, rows, operand, expert_N, *, widths):
    """`kernel` on an NVIDIA GPU where it applies, `tiled` elsewhere."""
    if rows.dtype == jnp.bfloat16 and grouped_kernels.fits(len(rows) // len(expert_N), *widths):
        return jax.lax.platform_dependent(rows, operand, expert_N, cuda=kernel, default=tiled)
    return tiled(rows, operand, expert_N)


def _multiply_tiles(x_MxI: jax.Array, w: jax.Array, expert_N: jax.Array, in_first: bool) -> jax.Array:
    contraction = "tri,tio->tro" if in_first else "tri,toi->tro"

    def multiply(x, expert):
        return jnp.einsum(contraction, x, w.at[expert].get(mode="clip"), precision=full_precision(x.dtype))

    def step(_, operands):
        x, expert = operands
        nothing = lambda x, expert: jnp.zeros_like(jax.eval_shape(multiply, x, expert))  # noqa: E731
        return None, jax.lax.cond(expert[0] < len(w), multiply, nothing, x, expert)

    y = jax.lax.scan(step, None, _in_tiles(x_MxI, expert_N))[1]
    return y.reshape(len(x_MxI), -1)


def _add_tiles(a_MxA: jax.Array, b_MxB: jax.Array, expert_N: jax.Array, experts: int) -> jax.Array:
    def add(total, a, b, expert):
        part = jnp.einsum("tra,trb->tab", a, b, precision=full_precision(a.dtype), preferred_element_type=jnp.float32)
        return total.at[expert].add(part, mode="drop")

    def step(total, operands):
        (a, expert), (b, _) = operands
        return jax.lax.cond(expert[0] < experts, add, lambda total, *_: total, total, a, b, expert), None

    zero = jnp.zeros((experts, a_MxA.shape[1], b_MxB.shape[1]), jnp.float32)
    total, _ = jax.lax.scan(step, zero, (_in_tiles(a_MxA, expert_N), _in_tiles(b_MxB, expert_N)))
    return total.astype(a_MxA.dtype)


def _grouped_forward(x, w, expert_N, in_first):
    return grouped_matmul(x, w, expert_N, in_first), (x, w, expert_N)


def _grouped_backward(in_first, kept, dy):
    x, w, expert_N = kept
    dx = grouped_matmul(dy, w, expert_N, not in_first)
    outer = (x, dy) if in_first else (dy, x)
    return dx, _weight_gradient(*outer, expert_N, len(w)), None


grouped_matmul.defvjp(_grouped_forward, _grouped_backward)


def _in_tiles(x_MxD: jax.Array, expert_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows ``[steps, TILES_AT_ONCE, tile, D]`` and the experts ``[steps, TILES_AT_ONCE]`` of their tiles."""
    tile = len(x_MxD) // len(expert_N)
    return x_MxD.reshape(-1, TILES_AT_ONCE, tile, x_MxD.shape[1]), expert_N.reshape(-1, TILES_AT_ONCE)


def add_bias(y_MxO: jax.Array, bias_ExO: jax.Array, expert_N: jax.Array, scale_M: jax.Array | None = None) -> jax.Array:
    """Every row plus the bias of its tile's expert, times `scale_M` if given; added in float32."""
    y = y_MxO.astype(jnp.float32).reshape(len(expert_N), -1, y_MxO.shape[1])
    bias = bias_ExO.astype(jnp.float32).at[expert_N].get(mode="fill", fill_value=0)[:, None, :]
    if scale_M is not None:
        bias = bias * scale_M.astype(jnp.float32).reshape(len(expert_N), -1, 1)
    return (y + bias).reshape(y_MxO.shape).astype(y_MxO.dtype)
