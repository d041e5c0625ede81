"""Whether all values of an array are finite, without a copy of it."""

from __future__ import annotations

import ml_dtypes
import numpy as np

# Where all bits of the exponent are set, a value is infinite or not a number.
_EXPONENT = {
    np.dtype(ml_dtypes.bfloat16): np.uint16(0x7F80),
    np.dtype(np.float16): np.uint16(0x7C00),
    np.dtype(np.float32): np.uint32(0x7F800000),
}
_PIECE = 1 << 16  # elements, which stay in a processor's cache


def all_finite(array: np.ndarray) -> bool:
    """Whether no value of a contiguous bfloat16, float16 or float32 array is infinite or not a number."""
    mask = _EXPONENT[array.dtype]
    bits = array.reshape(-1).view(mask.dtype)
    pieces = (bits[start : start + _PIECE] & mask for start in range(0, bits.size, _PIECE))
    return not any((piece == mask).any() for piece in pieces)
