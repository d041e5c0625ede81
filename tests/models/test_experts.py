"""Rows sorted by expert, and matmuls over them, against `jax.lax.ragged_dot` and NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatrain_jax.models import experts
from megatrain_jax.models.experts import Rows, add_bias, collect, grouped_matmul, num_rows, pick, sort_by_expert, spread

TOKENS, TOP, EXPERTS, IN, OUT = 37, 3, 5, 12, 7


def choices(seed: int = 0) -> np.ndarray:
    """Three different experts for every token; expert 2 gets none."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation([0, 1, 3, 4])[:TOP] for _ in range(TOKENS)]).astype(np.int32)


def normal(*shape: int, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.fixture
def rows() -> Rows:
    return jax.jit(sort_by_expert, static_argnums=1)(choices(), EXPERTS)


def experts_of_rows(rows: Rows) -> np.ndarray:
    return np.repeat(np.asarray(rows.expert_N), len(rows.choice_M) // len(rows.expert_N))


def test_every_choice_has_one_row_in_a_tile_of_its_expert(rows):
    choice, row = np.asarray(rows.choice_M), np.asarray(rows.row_TxK)
    assert sorted(choice[choice >= 0]) == list(range(TOKENS * TOP))
    assert (choice[row] == np.arange(TOKENS * TOP).reshape(TOKENS, TOP)).all()
    assert (experts_of_rows(rows)[row] == choices()).all()


@pytest.mark.parametrize(("tokens", "top", "number"), [(1, 1, 1), (1, 2, 64), (3, 1, 2), (500, 8, 16), (4096, 2, 4)])
def test_any_routing_fits(tokens, top, number):
    rng = np.random.default_rng(0)
    spread_out = rng.integers(0, number, (tokens, top))
    for routing in (spread_out, np.zeros_like(spread_out), np.full_like(spread_out, number - 1)):
        rows = sort_by_expert(jnp.asarray(routing, jnp.int32), number)
        assert len(rows.choice_M) == num_rows(tokens * top, number)
        assert (np.asarray(rows.choice_M)[np.asarray(rows.row_TxK)].reshape(-1) == np.arange(tokens * top)).all()
        assert (experts_of_rows(rows)[np.asarray(rows.row_TxK)] == routing).all()


@pytest.mark.parametrize("first, number", [(0, 2), (1, 3), (2, 1), (3, 2), (5, 4)])
def test_choices_of_experts_that_are_elsewhere_have_no_row_and_add_nothing(first, number):
    """Some of five experts are here, in the last case none of them."""
    rows = jax.jit(sort_by_expert, static_argnums=1)(choices() - first, number)
    choice, row = np.asarray(rows.choice_M), np.asarray(rows.row_TxK)
    here = (choices() >= first) & (choices() < first + number)
    assert sorted(choice[choice >= 0]) == list(np.flatnonzero(here))
    assert (choice[row] == np.where(here, np.arange(TOKENS * TOP).reshape(TOKENS, TOP), -1)).all()
    assert (experts_of_rows(rows)[row][here] == choices()[here] - first).all()
    used = sum(-(-np.sum(choices() == first + e) // 8) for e in range(number))
    assert (np.asarray(rows.expert_N) < number).sum() == used  # tiles of eight rows; the others are of no expert
    x, values = normal(TOKENS, IN), normal(TOKENS, TOP)
    np.testing.assert_allclose(collect(spread(x, rows), rows), here.sum(1)[:, None] * x, rtol=1e-6)
    pulled = jax.grad(lambda values: (pick(values, rows) * (rows.choice_M >= 0)).sum())(values)
    np.testing.assert_array_equal(pulled, here)


@pytest.mark.parametrize("in_first", [False, True])
def test_tiles_of_no_expert_are_zero_whatever_lies_there(in_first):
    tiles, tile = 2 * experts.TILES_AT_ONCE, 8
    expert_N = jnp.asarray(np.where(np.arange(tiles) < 3, np.arange(tiles), EXPERTS), jnp.int32)
    x, w = normal(tiles * tile, IN), normal(EXPERTS, *((IN, OUT) if in_first else (OUT, IN)), seed=2)
    x = jnp.where(
        jnp.arange(len(x))[:, None] < experts.TILES_AT_ONCE * tile, x, jnp.nan
    )  # of batches that are all idle
    y, pull = jax.vjp(lambda w: grouped_matmul(x, w, expert_N, in_first), w)
    assert not np.asarray(y[experts.TILES_AT_ONCE * tile :]).any()
    dw = np.asarray(pull(jnp.ones_like(y))[0])
    assert np.isfinite(dw).all() and dw[:3].any(axis=(1, 2)).all() and not dw[3:].any()


def test_padding_stays_below_a_quarter_of_the_rows_where_there_are_many():
    assert num_rows(65536 * 8, 128) <= 65536 * 8 * 1.04
    assert num_rows(4096 * 8, 128) <= 4096 * 8 * 1.26


def test_spread_and_collect_are_transposes(rows):
    x, y = normal(TOKENS, IN), normal(len(rows.choice_M), IN, seed=2)
    spread_x, pull_spread = jax.vjp(lambda x: spread(x, rows), x)
    collect_y, pull_collect = jax.vjp(lambda y: collect(y, rows), y)
    np.testing.assert_allclose(np.vdot(spread_x, y), np.vdot(x, collect_y), rtol=1e-5)
    np.testing.assert_allclose(pull_spread(y)[0], collect_y, rtol=1e-6)
    np.testing.assert_allclose(pull_collect(x)[0], spread_x, rtol=1e-6)
    np.testing.assert_allclose(collect(spread_x, rows), TOP * x, rtol=1e-6)


def test_values_of_choices_reach_their_rows_and_come_back(rows):
    values, gradient = normal(TOKENS, TOP), normal(len(rows.choice_M), seed=2)
    picked, pull = jax.vjp(lambda v: pick(v, rows), values)
    choice = np.asarray(rows.choice_M)
    np.testing.assert_array_equal(picked, np.where(choice >= 0, np.asarray(values).reshape(-1)[choice], 0))
    np.testing.assert_array_equal(
        np.asarray(pull(gradient)[0]).reshape(-1)[choice[choice >= 0]], np.asarray(gradient)[choice >= 0]
    )


@pytest.mark.parametrize("in_first", [False, True])
def test_grouped_matmul_is_ragged_dot(rows, in_first):
    x = spread(normal(TOKENS, IN), rows)
    w = normal(EXPERTS, *((IN, OUT) if in_first else (OUT, IN)), seed=2)
    sizes = np.bincount(experts_of_rows(rows), minlength=EXPERTS + 1)[:EXPERTS].astype(np.int32)

    def oracle(x, w):
        return jax.lax.ragged_dot(x, w if in_first else w.swapaxes(1, 2), sizes, precision="highest")

    y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, rows.expert_N, in_first), x, w)
    expected, expected_pull = jax.vjp(oracle, x, w)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    dy = normal(*y.shape, seed=3)
    for got, want in zip(pull(dy), expected_pull(dy), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_an_expert_without_rows_has_a_zero_gradient(rows):
    x, w = spread(normal(TOKENS, IN), rows), normal(EXPERTS, OUT, IN, seed=2)
    dw = np.asarray(jax.grad(lambda w: grouped_matmul(x, w, rows.expert_N, False).sum())(w))
    assert (dw[2] == 0).all() and all((dw[e] != 0).any() for e in (0, 1, 3, 4))


def test_gradients_of_weights_are_added_in_float32():
    """2,049 equal products: a sum in bfloat16 would stop growing at 256."""
    routing = jnp.zeros((2049, 1), jnp.int32)
    rows = sort_by_expert(routing, 1)
    x, w = spread(jnp.ones((2049, 8), jnp.bfloat16), rows), jnp.ones((1, 8, 8), jnp.bfloat16)
    dw = jax.grad(lambda w: grouped_matmul(x, w, rows.expert_N, False)[rows.row_TxK[:, 0]].astype(jnp.float32).sum())(w)
    np.testing.assert_allclose(np.asarray(dw, np.float32), 2049, rtol=2**-8)


def test_bias_and_its_gradient(rows):
    y, bias, scale = normal(len(rows.choice_M), OUT), normal(EXPERTS, OUT, seed=2), normal(len(rows.choice_M), seed=3)
    expert = experts_of_rows(rows)
    bias_or_none = np.append(bias, np.zeros((1, OUT), np.float32), axis=0)  # tiles of no expert have none
    np.testing.assert_allclose(add_bias(y, bias, rows.expert_N), y + bias_or_none[expert], rtol=1e-6)
    got, pull = jax.vjp(lambda bias, scale: add_bias(y, bias, rows.expert_N, scale), bias, scale)
    np.testing.assert_allclose(got, y + bias_or_none[expert] * scale[:, None], rtol=1e-5, atol=1e-6)
    dbias, dscale = pull(jnp.asarray(y))
    expected = np.zeros_like(bias_or_none)
    np.add.at(expected, expert, np.asarray(y * scale[:, None]))
    np.testing.assert_allclose(dbias, expected[:EXPERTS], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dscale, (y * bias_or_none[expert]).sum(1), rtol=1e-4, atol=1e-5)


def test_tiles_are_cut_to_the_rows_at_hand():
    assert experts.tile_size(65536 * 8, 128) == experts.tile_size(8192 * 8, 128) == 128
    assert experts.tile_size(4096 * 8, 128) == 64
    assert experts.tile_size(16, 4) == 8
