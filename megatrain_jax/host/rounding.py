"""How a float32 weight becomes a bfloat16 one, everywhere: to the nearest, and a tie away from zero.

The layouts must agree, and the split one (see `layouts.py`) leaves no choice: its signed 16-bit lower half holds -0x8000
but not 0x8000, so a weight halfway between two bfloat16 belongs to the one of greater magnitude. `astype`, which takes the
even one, differs in one weight of 131,072: enough that a run would depend on who keeps its weights, and a saved model
would not be the one that was evaluated. Gradients are rounded by `astype`, in one place for all layouts.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_PIECE = 1 << 16  # elements, which stay in a processor's cache
_UPPER = int(sys.byteorder == "little")  # which 16 bits of a 32-bit number


def to_dtype(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """`x`, of any float dtype, in `dtype`. A NaN stays one, and what rounds past the largest bfloat16 is infinite."""
    if dtype != BFLOAT16 or x.dtype == BFLOAT16:
        return x.astype(dtype)
    x = x.astype(jnp.float32)
    upper = (x.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)
    # Half a unit more could carry a NaN into infinity or zero.
    return jnp.where(x == x, upper.astype(jnp.uint16), jnp.uint16(0x7FC0)).view(BFLOAT16)


def assign(out: np.ndarray, values: np.ndarray) -> None:
    """``out[...] = values``, both flat, rounded as by `to_dtype`, with no copy of either."""
    for start in range(0, values.size, _PIECE):
        there, x = out[start : start + _PIECE], values[start : start + _PIECE]
        if there.dtype != BFLOAT16 or x.dtype == BFLOAT16:
            there[...] = x
            continue
        # As in `to_dtype`, in fewer passes: the upper half of a sum is every other 16-bit number of it.
        x, upper = x.astype(np.float32, copy=False), there.view(np.uint16)
        upper[...] = (x.view(np.uint32) + np.uint32(0x8000)).view(np.uint16)[_UPPER::2]
        if (nan := np.isnan(x)).any():
            upper[nan] = 0x7FC0
