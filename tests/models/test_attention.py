"""Rotary embedding and attention against their formulas, written out in NumPy."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from megatrain_jax.models.attention import AttentionOptions, apply_rope, attend, causal_mask, rope_frequencies
from megatrain_jax.models.spec import RopeSpec


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
    with pytest.raises(ValueError, match="unknown rotary embedding 'yarn'"):
        rope_frequencies(RopeSpec(kind="yarn"), 8)


def test_rotation_is_of_the_complex_numbers_made_of_the_two_halves():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, 8)).astype(np.float32)
    positions = rng.integers(0, 50, (2, 5)).astype(np.int32)
    turned = np.asarray(apply_rope(jnp.asarray(x), jnp.asarray(positions), RopeSpec()))
    angle = positions[..., None, None] * 10000.0 ** -(np.arange(4) / 4)
    expected = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle)
    np.testing.assert_allclose(turned, np.concatenate([expected.real, expected.imag], -1), rtol=0, atol=2e-5)
    assert apply_rope(jnp.asarray(x, jnp.bfloat16), jnp.asarray(positions), RopeSpec()).dtype == jnp.bfloat16


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_the_mask_is_its_definition(window):
    segments = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]], np.int32)
    mask = np.asarray(causal_mask(jnp.asarray(segments), window))
    assert mask.shape == (2, 1, 6, 6)
    for b in range(2):
        for q in range(6):
            for k in range(6):
                near = window is None or q - window < k
                assert mask[b, 0, q, k] == (k <= q and near and segments[b, q] == segments[b, k])


def written_out(q, k, v, mask):
    heads, kv_heads = q.shape[2], k.shape[2]
    out = np.zeros_like(q)
    for h in range(heads):
        kv = h // (heads // kv_heads)
        scores = np.einsum("bqd,bkd->bqk", q[:, :, h], k[:, :, kv]) / math.sqrt(q.shape[-1])
        scores = np.where(mask, scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, :, h] = np.einsum("bqk,bkd->bqd", p / p.sum(-1, keepdims=True), v[:, :, kv])
    return out


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("segmented", [True, False])
def test_attention_is_the_formula(window, segmented):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 7, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    segments = np.array([[1, 1, 1, 2, 2, 2, 0]] * 2 if segmented else [[1] * 7] * 2, np.int32)
    visible = np.asarray(causal_mask(jnp.asarray(segments), window))[:, 0]
    got = attend(
        *map(jnp.asarray, (q, k, v, segments)), window=window, options=AttentionOptions("xla", segments=segmented)
    )
    np.testing.assert_allclose(got, written_out(q, k, v, visible), rtol=0, atol=2e-6)
