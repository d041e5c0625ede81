"""MXFP4 against transformers, and against the meaning of its bits."""

import ml_dtypes
import numpy as np
import pytest

from megatrain_jax.checkpoint.mxfp4 import BLOCK, dequantise


def test_values_and_scales_mean_what_the_format_says():
    # 0 to 15 in order, low half first, twice; the second block is scaled by 2 ** -3.
    codes = np.arange(16, dtype=np.uint8)
    packed = np.tile(codes[::2] | codes[1::2] << 4, 2)
    blocks, scales = np.stack([packed, packed])[None], np.array([[127, 124]], np.uint8)
    values = dequantise(blocks, scales)
    assert values.shape == (2 * BLOCK, 1) and values.dtype == ml_dtypes.bfloat16
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = np.array([*positive, *(-v for v in positive)] * 2)
    np.testing.assert_array_equal(values[:, 0].astype(float), np.concatenate([expected, expected / 8]))


def test_random_blocks_are_what_transformers_makes_of_them():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 12, 4, BLOCK // 2), np.uint8)
    scales = rng.integers(100, 140, (3, 12, 4), np.uint8)
    theirs = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales)).float().numpy()
    ours = np.stack([dequantise(b, s) for b, s in zip(blocks, scales, strict=True)])
    np.testing.assert_array_equal(ours.astype(np.float32), theirs)
