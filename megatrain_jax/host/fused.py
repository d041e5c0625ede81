"""In-place kernels for the common optimizers on the split layout, compiled by numba; tests hold them equal to optax.

Import this file only where numba is installed. A kernel makes one pass over the bytes that must move: the halves of the
master, the moments and the gradient are read once and, but for the gradient, written once.

The result is that of jitted optax, bit for bit, on a CPU that multiplies and adds in one instruction:

* XLA makes of ``a * b + c * d`` either ``fma(a, b, c * d)`` or ``fma(c, d, a * b)``, and every `_fma` here is the one that it
  makes. With a float32 gradient the product that the gradient is in is the exact one, with bfloat16 it is the other.
* It multiplies by the reciprocals of the bias corrections, which are scalars. optax computes them, jitted.
* It takes subnormal numbers for zero. Otherwise the moments of a weight without gradients would also decay into numbers
  that slow a loop down tenfold and never vanish, and whose sign lion would follow.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence

import numpy as np
from llvmlite import ir
from numba import config, njit, prange, set_num_threads, types
from numba.core import cgutils
from numba.extending import intrinsic, overload


def _can_cache() -> bool:
    """Whether there is a folder that compiled kernels can be kept in: numba's own, beside this file, or in the home."""
    try:
        njit(cache=True)(_can_cache)
    except RuntimeError:
        return False
    return True


_X86 = platform.machine() in ("x86_64", "AMD64")
_FLUSH = np.uint32(0x9FC0)  # its usual mode, but subnormal numbers are taken for zero and zero is returned for them
_BLOCK = 1 << 16  # elements

# A division is vectorised only under NumPy's error model.
_OPTIONS = {"error_model": "numpy", "cache": _can_cache()}


def make_kernel(
    name: str,
    scalars: Callable[[int], Sequence[float]],
    *,
    b1: float = 0.0,
    b2: float = 0.0,
    eps: float = 0.0,
    momentum: float = 0.0,
    decoupled_decay: float = 0.0,
    added_decay: float = 0.0,
) -> Callable:
    """An in-place update ``kernel(hi, lo, moments, grad, scale, count, starts, length)`` of flat NumPy arrays.

    Args:
      name: "adamw", "adam", "lion" or "sgd", as optax defines them.
      scalars: by the number of steps applied before: the learning rate, and ``1 / (1 - b1**t)`` and ``1 / (1 - b2**t)``
        of the step t that comes.
      b1, b2, eps, momentum: of the optimizer.
      decoupled_decay: times the weight, added to the update before the learning rate.
      added_decay: times the weight, added to the gradient.

    Returns:
      The kernel. `hi` uint16 and `lo` int16 are the halves of the master (see `SplitRow`), `moments` float32 arrays in
      the order of optax' state, `grad` bfloat16 or float32, `scale` multiplies it, `count` is the number of steps applied
      before. Only `length` elements from each of `starts` on are updated, int64; None is all.
    """
    f = np.float32
    betas = (f(b1), f(1 - b1), f(b2), f(1 - b2))
    decoupled, added = (f(decay) if decay else None for decay in (decoupled_decay, added_decay))  # compiled apart

    def kernel(hi, lo, moments, grad, scale, count, starts=None, length=_BLOCK):
        starts = np.arange(0, hi.size, _BLOCK) if starts is None else starts
        grad = grad if grad.dtype == np.float32 else grad.view(np.uint16)
        rate, *corrections = (f(x) for x in scalars(count))
        # Of the cores that this process may use, two are left to the thread that dispatches and to the ones that watch.
        set_num_threads(max(1, min(config.NUMBA_NUM_THREADS, len(os.sched_getaffinity(0)) - 2)))
        operands = starts, length, hi, lo, *moments, grad, f(scale), rate
        if name == "sgd":
            _sgd(*operands, f(momentum), added)
        elif name == "lion":
            _lion(*operands, betas, decoupled)
        else:
            _adam(*operands, tuple(corrections), betas, f(eps), decoupled, added)

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


@intrinsic
def _fma(typing, a, b, c):
    """``a * b + c``, rounded once."""
    return types.float32(a, b, c), lambda context, builder, signature, args: builder.fma(*args)


@intrinsic
def _exchange_mode(typing, mode):
    """Sets the thread's control register of floating point, where it is that of x86, and returns what it was."""

    def emit(context, builder, signature, args):
        if not _X86:
            return args[0]
        place = cgutils.alloca_once(builder, ir.IntType(32))
        pointer = ir.IntType(8).as_pointer()
        signature = ir.FunctionType(ir.VoidType(), [pointer])
        store, load = (builder.module.declare_intrinsic(f"llvm.x86.sse.{n}mxcsr", (), signature) for n in ("st", "ld"))
        builder.call(store, [builder.bitcast(place, pointer)])
        before = builder.load(place)
        builder.store(args[0], place)
        builder.call(load, [builder.bitcast(place, pointer)])
        return before

    return types.uint32(types.uint32), emit


def _value(g):
    """A gradient as float32, from float32 or from the bits of bfloat16."""


@overload(_value, inline="always")
def _value_of(g):
    if g == types.uint16:
        return lambda g: np.uint32(np.uint32(g) << np.uint32(16)).view(np.float32)
    return lambda g: g


def _plus(g, a, x, b, y):
    """``a * x + b * y`` where `x` comes from the gradient `g`."""


@overload(_plus, inline="always")
def _plus_of(g, a, x, b, y):
    if g == types.uint16:
        return lambda g, a, x, b, y: _fma(b, y, a * x)
    return lambda g, a, x, b, y: _fma(a, x, b * y)


@njit(inline="always", **_OPTIONS)
def _sign(x):
    return np.copysign(np.float32(1), x) if (x < 0) | (x > 0) else x


@njit(**_OPTIONS)
def _adam_block(hi, lo, mu, nu, grad, scale, rate, corrections, betas, eps, decoupled, added):
    (r1, r2), (b1, omb1, b2, omb2) = corrections, betas
    for i in range(hi.size):
        p, raw = _join(hi[i], lo[i]), _value(grad[i])
        if added is None:
            g = raw * scale
            m = _plus(grad[i], omb1, g, b1, mu[i])
        else:
            g = _plus(grad[i], scale, raw, added, p)
            m = _fma(b1, mu[i], omb1 * g)
        v = _fma(b2, nu[i], omb2 * (g * g))
        mu[i] = m
        nu[i] = v
        update = (m * r1) / (np.sqrt(v * r2) + eps)
        if decoupled is not None:
            update = _fma(decoupled, p, update)
        _put(hi, lo, i, _fma(-rate, update, p))


@njit(parallel=True, nogil=True, **_OPTIONS)
def _adam(starts, length, hi, lo, mu, nu, grad, scale, rate, corrections, betas, eps, decoupled, added):
    for i in prange(starts.size):
        a, b = starts[i], min(hi.size, starts[i] + length)
        mode = _exchange_mode(_FLUSH)
        part = hi[a:b], lo[a:b], mu[a:b], nu[a:b], grad[a:b]
        _adam_block(*part, scale, rate, corrections, betas, eps, decoupled, added)
        _exchange_mode(mode)


@njit(**_OPTIONS)
def _lion_block(hi, lo, mu, grad, scale, rate, betas, decoupled):
    b1, omb1, b2, omb2 = betas
    for i in range(hi.size):
        p, g = _join(hi[i], lo[i]), _value(grad[i]) * scale
        update = _sign(_plus(grad[i], omb1, g, b1, mu[i]))
        mu[i] = _plus(grad[i], omb2, g, b2, mu[i])
        if decoupled is not None:
            update = _fma(decoupled, p, update)
        _put(hi, lo, i, _fma(-rate, update, p))


@njit(parallel=True, nogil=True, **_OPTIONS)
def _lion(starts, length, hi, lo, mu, grad, scale, rate, betas, decoupled):
    for i in prange(starts.size):
        a, b = starts[i], min(hi.size, starts[i] + length)
        mode = _exchange_mode(_FLUSH)
        _lion_block(hi[a:b], lo[a:b], mu[a:b], grad[a:b], scale, rate, betas, decoupled)
        _exchange_mode(mode)


@njit(**_OPTIONS)
def _sgd_block(hi, lo, trace, grad, scale, rate, momentum, added):
    for i in range(hi.size):
        p, raw = _join(hi[i], lo[i]), _value(grad[i])
        if added is None:
            t = _plus(grad[i], scale, raw, momentum, trace[i])
        else:
            t = _fma(momentum, trace[i], _plus(grad[i], scale, raw, added, p))
        trace[i] = t
        _put(hi, lo, i, _fma(-rate, t, p))


@njit(parallel=True, nogil=True, **_OPTIONS)
def _sgd(starts, length, hi, lo, trace, grad, scale, rate, momentum, added):
    for i in prange(starts.size):
        a, b = starts[i], min(hi.size, starts[i] + length)
        mode = _exchange_mode(_FLUSH)
        _sgd_block(hi[a:b], lo[a:b], trace[a:b], grad[a:b], scale, rate, momentum, added)
        _exchange_mode(mode)
