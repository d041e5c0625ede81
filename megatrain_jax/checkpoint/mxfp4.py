"""MXFP4, the format in which the experts of GPT-OSS were released: 4-bit floats in blocks of 32 that share a power of two.

See the OCP Microscaling Formats (MX) specification, version 1.0, section 5.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

BLOCK = 32  # values that share a scale; two to a byte

_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def dequantise(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Values of one expert's matrix, bfloat16 ``[in, out]``; all but the very largest and smallest are exact.

    Args:
      blocks: uint8 ``[out, in / 32, 16]``; the low half of a byte is the first of its two values.
      scales: uint8 ``[out, in / 32]``: exponents of two, plus 127.
    """
    pairs = _VALUES[np.stack([blocks & 15, blocks >> 4], axis=-1)]
    values = np.ldexp(pairs.reshape(*scales.shape, BLOCK), scales.astype(np.int32)[..., None] - 127)
    return np.ascontiguousarray(values.reshape(len(scales), -1).T.astype(ml_dtypes.bfloat16))
