"""Weights in FP8 with a scale for each block of rows and columns, as DeepSeek V3 and the FP8 releases of Qwen3 are stored.

A matrix of float8_e4m3fn is accompanied by one of scales, a value of which belongs to ``block[0] x block[1]`` values;
blocks at the lower and right edge may be smaller. See the technical report of DeepSeek-V3 (arXiv 2412.19437, section 3.3.2).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

SCALES = "_scale_inv"  # what the name of the scales has behind that of the weight

_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def scales_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of weights ``[..., out, in]``."""
    return (*shape[:-2], *(-(-size // width) for size, width in zip(shape[-2:], block)))


def dequantise(weights: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Values times the scales of their blocks, multiplied in float32 and rounded to bfloat16; a block of rows at a time.

    Args:
      weights: uint8, the bits of float8_e4m3fn ``[..., out, in]``.
      scales: of any floating dtype, in the shape of `scales_shape`.
      block: rows and columns that share a scale.
    """
    out = np.empty(weights.shape, ml_dtypes.bfloat16)
    width = weights.shape[-1]
    for at in np.ndindex(weights.shape[:-2]):
        for number, scales_of_rows in enumerate(scales[at].astype(np.float32)):
            rows = slice(number * block[0], (number + 1) * block[0])
            with np.errstate(over="ignore"):  # whoever reads files refuses what is infinite
                out[at][rows] = _VALUES[weights[at][rows]] * np.repeat(scales_of_rows, block[1])[:width]
    return out
