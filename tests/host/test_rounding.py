"""Weights are rounded to the nearest bfloat16, a tie away from zero, by NumPy, by XLA and by the kernels alike."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest

from megatrain_jax.host import rounding
from tests.reference import nearest_bfloat16

to_bfloat16 = functools.partial(rounding.to_dtype, dtype=rounding.BFLOAT16)


def assigned(x: np.ndarray) -> np.ndarray:
    out = np.full(x.size, 7, rounding.BFLOAT16)
    rounding.assign(out, x)
    return out


BY = {"numpy": assigned, "xla": lambda x: np.asarray(jax.jit(to_bfloat16)(x))}


def some_values() -> np.ndarray:
    """Any finite float32, and many halfway between two bfloat16: odd and even ones, subnormal and the largest."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    bits[::2] = bits[::2] & np.uint32(0xFFFF0000) | np.uint32(0x8000)
    bits[:6] = [0, 0x80000000, 1, 0x00008000, 0x7F7F7FFF, 0xFF7F7FFF]
    values = bits.view(np.float32)
    return values[np.isfinite(values)]


@pytest.mark.parametrize("by", BY)
def test_a_weight_becomes_the_nearest_bfloat16_and_a_tie_goes_away_from_zero(by):
    values = some_values()
    assert BY[by](values).tobytes() == nearest_bfloat16(values).tobytes()


@pytest.mark.parametrize("by", BY)
def test_what_is_not_finite_stays_so_and_what_is_too_large_becomes_infinite(by):
    """Among the NaN those that half a unit more would turn into infinity or zero."""
    bits = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000], np.uint32)
    assert np.isnan(BY[by](bits.view(np.float32)).astype(np.float32)).all()
    large = np.array([0x7F7F8000, 0x7F7FFFFF, 0x7F800000], np.uint32).view(np.float32)
    for sign in (1, -1):
        assert (BY[by](sign * large) == sign * np.inf).all()


@pytest.mark.parametrize("source", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("target", [ml_dtypes.bfloat16, np.float32])
def test_values_are_assigned_piece_by_piece_from_any_dtype(monkeypatch, source, target):
    monkeypatch.setattr(rounding, "_PIECE", 64)
    values = np.random.default_rng(0).standard_normal(1000).astype(source)
    out = np.full(1001, 7, target)
    rounding.assign(out[:1000], values)
    exact = values.astype(np.float32)
    expected = nearest_bfloat16(exact) if target == ml_dtypes.bfloat16 else exact
    assert out[:1000].tobytes() == expected.tobytes() and out[1000] == 7
