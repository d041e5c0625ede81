"""Rotary embedding against its formulas, written out in NumPy."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from megatrain_jax.models.part_specs import RopeSpec
from megatrain_jax.models.rope import apply_rope, rope_frequencies
from megatrain_jax.models.spec import Context


def test_default_frequencies_are_a_geometric_sequence():
    np.testing.assert_allclose(rope_frequencies(RopeSpec(theta=100.0), 8), [1, 100**-0.25, 0.1, 100**-0.75], rtol=1e-6)
    linear = rope_frequencies(RopeSpec(theta=100.0, kind="linear", factor=4.0), 8)
    np.testing.assert_allclose(linear * 4, rope_frequencies(RopeSpec(theta=100.0), 8), rtol=1e-6)


def test_llama3_keeps_short_waves_stretches_long_ones_and_mixes_between():
    rope = RopeSpec(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    plain, scaled = rope_frequencies(RopeSpec(5e5), 128), rope_frequencies(rope, 128)
    seen = set()
    for before, after in zip(plain.astype(float), scaled.astype(float), strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4:
            expected, kind = before, "short"
        elif wavelength > 8192:
            expected, kind = before / 8, "long"
        else:
            smooth, kind = (8192 / wavelength - 1) / (4 - 1), "between"
            expected = (1 - smooth) * before / 8 + smooth * before
        assert after == pytest.approx(expected, rel=1e-6)
        seen.add(kind)
    assert seen == {"short", "long", "between"}


def test_an_unknown_rotary_embedding_is_an_error():
    with pytest.raises(ValueError, match="unknown rotary embedding 'ntk'"):
        rope_frequencies(RopeSpec(kind="ntk"), 8)


def test_rotation_is_of_the_complex_numbers_made_of_the_two_halves():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, 8)).astype(np.float32)
    positions = rng.integers(0, 50, (2, 5)).astype(np.int32)
    context = Context(jnp.asarray(positions), jnp.ones((2, 5), jnp.int32))
    turned = np.asarray(apply_rope(jnp.asarray(x), context, RopeSpec()))
    angle = positions[..., None, None] * 10000.0 ** -(np.arange(4) / 4)
    expected = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle)
    np.testing.assert_allclose(turned, np.concatenate([expected.real, expected.imag], -1), rtol=0, atol=2e-5)
    assert apply_rope(jnp.asarray(x, jnp.bfloat16), context, RopeSpec()).dtype == jnp.bfloat16
