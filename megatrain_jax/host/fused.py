"""In-place kernels for the common optimizers on the split layout, compiled by numba; tests hold them equal to optax.

Import this file only where numba is installed. A kernel makes one pass over the bytes that must move: the halves of the
master, the moments and the gradient are read once and, but for the gradient, written once. It multiplies and adds in
the order of optax' own expressions, with ``1 - beta`` formed in double precision, so the moments come out bit-identical
to jitted optax.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
from numba import config, njit, prange, set_num_threads, types
from numba.extending import overload


def _can_cache() -> bool:
    """Whether there is a folder that compiled kernels can be kept in: numba's own, beside this file, or in the home."""
    try:
        njit(cache=True)(_can_cache)
    except RuntimeError:
        return False
    return True


# A division is vectorised only under NumPy's error model.
_OPTIONS = {"error_model": "numpy", "fastmath": {"contract"}, "cache": _can_cache()}


def make_kernel(
    name: str,
    learning_rate: Callable[[int], float],
    *,
    b1: float = 0.0,
    b2: float = 0.0,
    eps: float = 0.0,
    momentum: float = 0.0,
    decoupled_decay: float = 0.0,
    added_decay: float = 0.0,
) -> Callable:
    """An in-place update ``kernel(hi, lo, moments, grad, scale, count)`` of flat NumPy arrays.

    Args:
      name: "adamw", "adam", "lion" or "sgd", as optax defines them.
      learning_rate: by the number of steps applied before, as an optax schedule.
      b1, b2, eps, momentum: of the optimizer.
      decoupled_decay: times the weight, added to the update before the learning rate.
      added_decay: times the weight, added to the gradient.

    Returns:
      The kernel. `hi` uint16 and `lo` int16 are the halves of the master (see `SplitRow`), `moments` float32 arrays in
      the order of optax' state, `grad` bfloat16 or float32, `scale` multiplies it, `count` is the number of steps applied
      before.
    """
    f = np.float32
    constants = (f(b1), f(1 - b1), f(b2), f(1 - b2), f(eps), f(decoupled_decay), f(added_decay))

    def kernel(hi, lo, moments, grad, scale, count):
        grad = grad if grad.dtype == np.float32 else grad.view(np.uint16)
        rate, t = f(learning_rate(count)), count + 1
        # Of the cores that this process may use, two are left to the thread that dispatches and to the ones that watch.
        set_num_threads(max(1, min(config.NUMBA_NUM_THREADS, len(os.sched_getaffinity(0)) - 2)))
        if name == "sgd":
            _sgd(hi, lo, *moments, grad, f(scale), rate, f(momentum), f(added_decay))
        elif name == "lion":
            _lion(hi, lo, *moments, grad, f(scale), rate, *constants[:4], f(decoupled_decay))
        else:
            corrections = f(1) - f(b1) ** f(t), f(1) - f(b2) ** f(t)
            _adam(hi, lo, *moments, grad, f(scale), rate, *corrections, *constants)

    return kernel


@njit(inline="always", **_OPTIONS)
def _join(hi, lo):
    return np.uint32(np.uint32(np.uint32(hi) << np.uint32(16)) + np.uint32(np.int32(lo))).view(np.float32)


@njit(inline="always", **_OPTIONS)
def _put(hi, lo, i, p):
    bits = np.float32(p).view(np.uint32)
    upper = np.uint32(np.uint32(bits + np.uint32(0x8000)) >> np.uint32(16)) if p == p else np.uint32(0x7FC0)
    hi[i] = np.uint16(upper)
    lo[i] = np.int16(np.uint32(bits - np.uint32(upper << np.uint32(16))))


def _value(g):
    """A gradient as float32, from float32 or from the bits of bfloat16."""


@overload(_value, inline="always")
def _value_of(g):
    if g == types.uint16:
        return lambda g: np.uint32(np.uint32(g) << np.uint32(16)).view(np.float32)
    return lambda g: g


@njit(parallel=True, nogil=True, **_OPTIONS)
def _adam(hi, lo, mu, nu, grad, scale, rate, c1, c2, b1, omb1, b2, omb2, eps, decoupled, added):
    for i in prange(hi.size):
        p = _join(hi[i], lo[i])
        g = _value(grad[i]) * scale + added * p
        m = omb1 * g + b1 * mu[i]
        v = omb2 * (g * g) + b2 * nu[i]
        mu[i] = m
        nu[i] = v
        _put(hi, lo, i, p - rate * ((m / c1) / (np.sqrt(v / c2) + eps) + decoupled * p))


@njit(parallel=True, nogil=True, **_OPTIONS)
def _lion(hi, lo, mu, grad, scale, rate, b1, omb1, b2, omb2, decoupled):
    for i in prange(hi.size):
        p = _join(hi[i], lo[i])
        g = _value(grad[i]) * scale
        direction = np.sign(omb1 * g + b1 * mu[i])
        mu[i] = omb2 * g + b2 * mu[i]
        _put(hi, lo, i, p - rate * (direction + decoupled * p))


@njit(parallel=True, nogil=True, **_OPTIONS)
def _sgd(hi, lo, trace, grad, scale, rate, momentum, added):
    for i in prange(hi.size):
        p = _join(hi[i], lo[i])
        t = _value(grad[i]) * scale + added * p + momentum * trace[i]
        trace[i] = t
        _put(hi, lo, i, p - rate * t)
