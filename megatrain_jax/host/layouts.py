"""How one row of a tensor lies in host memory. Only store.py knows which of these it is.

* `PlainRow`: a float32 master in chunks that the CPU backend owns, so that optax updates them in place because they are
  donated, and a wire copy. A float32 wire that needs no locked pages is the master itself.
* `SplitRow`: the float32 master as two halves, of which the upper one *is* the wire (bfloat16); the fused kernels
  update it. With ``u`` the bits of the float32, ``hi = (u + 0x8000) >> 16`` (see `rounding.py`) and
  ``lo = u - (hi << 16)`` as a signed 16-bit number: exact but for the payload of a NaN, and 12 bytes per parameter with
  two moments.
* `FrozenRow`: the wire alone, and a float32 master only where the wire does not hold the exact value.
"""

from __future__ import annotations

import collections
import concurrent.futures
import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax.host import rounding

CHUNK = 1 << 20  # elements; XLA emits one loop per output, so the operands of a chunk must fit in cache
GROUP = 4  # chunks updated by one call
WORKERS = 8  # calls in flight
ALIGN = 64  # elements; keeps every slice aligned enough for the CPU backend to read it in place


class Rule(NamedTuple):
    """What an optimizer does to an element.

    Attributes:
      init: optax' own ``init`` of a list of float32 arrays; it names the state, in every layout.
      step: pure function ``(params, state, grads, scale) -> (params, state)`` of lists of float32 chunks.
      kernel: in-place ``(hi, lo, moments, grad, scale, count)`` on the split layout, None if there is none.
    """

    init: Callable[[list], Any]
    step: Callable[[list, Any, list, jax.Array], tuple[list, Any]]
    kernel: Callable | None = None


class Row(Protocol):
    """What `HostTensor` asks of a row. `wire` is flat, in the wire dtype."""

    wire: np.ndarray

    def write(self, values: np.ndarray, start: int = 0) -> None:
        """Sets the elements from `start` on from any float dtype; those of a frozen tensor all at once."""

    def read(self, out: np.ndarray, start: int = 0) -> None:
        """Fills `out`, float32, with the elements of the master from `start` on."""

    def init_state(self, rule: Rule) -> None:
        """Makes the optimizer's state."""

    def update(self, rule: Rule, grad: np.ndarray, scale: np.float32) -> None:
        """One step in place; `grad` is flat, in any float dtype, and multiplied by `scale` first."""

    def state(self) -> dict[str, list[tuple[np.ndarray, slice | None]]]:
        """By path in optax' state: writable views, and which elements of the row each covers (None: not by element)."""


def cpu_device() -> jax.Device:
    """The CPU device of this process; the optimizer runs on it."""
    return jax.local_devices(backend="cpu")[0]


def view(array: jax.Array) -> np.ndarray:
    """Writable NumPy view of an array that the CPU backend owns, through its raw pointer.

    A view made by `np.asarray` would count as a user of the array and block its donation.
    """
    raw = (ctypes.c_char * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.frombuffer(raw, array.dtype).reshape(array.shape)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _zeros(shape, dtype):
    return jnp.zeros(shape, dtype)


def _allocate(shape: tuple[int, ...], dtype) -> jax.Array:
    with jax.default_device(cpu_device()):
        return jax.block_until_ready(_zeros(shape, dtype))


@functools.partial(
    jax.jit,
    static_argnames=("step", "wire_dtype"),
    donate_argnames=("params", "state", "scratch"),
    keep_unused=True,
)
def _apply(params, state, scratch, grad, scale, *, step, wire_dtype):
    """One optimizer step on a group of chunks. `scratch` is only memory for the copy that goes to the wire."""
    ends = np.cumsum([p.size for p in params])
    grads = [grad[end - p.size : end].reshape(p.shape) for p, end in zip(params, ends, strict=True)]
    params, state = step(params, state, grads, scale)
    return params, state, [rounding.to_dtype(p.reshape(-1), wire_dtype) for p in params] if scratch else []


@dataclasses.dataclass
class _Group:
    """Chunks that are updated by one call, and their optimizer state."""

    start: int  # offset in the row, in elements
    params: list[jax.Array]
    state: Any = None

    @property
    def stop(self) -> int:
        return self.start + sum(p.size for p in self.params)


def _chunk_lengths(size: int) -> list[int]:
    count = max(1, math.ceil(size / CHUNK))
    length = max(ALIGN, math.ceil(math.ceil(size / count) / ALIGN) * ALIGN)
    return [min(length, size - start) for start in range(0, max(size, 1), length)]


def _pointers(tree: Any) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) if leaf.ndim]


class FrozenRow:
    """Has no state and no update."""

    def __init__(self, wire: np.ndarray):
        self.wire = wire
        self._exact: np.ndarray | None = None

    def write(self, values: np.ndarray, start: int = 0) -> None:
        if start:
            raise ValueError("a frozen tensor is written whole")
        rounding.assign(self.wire[: values.size], values)
        exact = np.array_equal(self.wire[: values.size].astype(np.float32), values.astype(np.float32))
        self._exact = None if exact else np.zeros(self.wire.size, np.float32)
        if not exact:
            self._exact[: values.size] = values

    def read(self, out: np.ndarray, start: int = 0) -> None:
        out[...] = (self.wire if self._exact is None else self._exact)[start : start + out.size]

    def state(self) -> dict[str, list[tuple[np.ndarray, slice | None]]]:
        return {}


class PlainRow:
    """Float32 chunks for optax.

    Args:
      shape: of the whole tensor if the optimizer wants it in one piece, else ``(row_length,)``.
      wire: None makes the master serve as the wire.
      whole: keep one chunk.
    """

    def __init__(self, shape: tuple[int, ...], wire: np.ndarray | None, *, whole: bool):
        self._groups: list[_Group] = []
        if whole or wire is None:
            self._groups.append(_Group(0, [_allocate(shape, jnp.float32)]))
        else:
            lengths = _chunk_lengths(shape[0])
            for part in np.array_split(np.asarray(lengths), math.ceil(len(lengths) / GROUP)):
                start = self._groups[-1].stop if self._groups else 0
                self._groups.append(_Group(start, [_allocate((int(n),), jnp.float32) for n in part]))
        self._separate_wire = wire is not None
        self.wire = view(self._groups[0].params[0]).reshape(-1) if wire is None else wire

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[slice, np.ndarray]]:
        """Of each chunk that overlaps ``[start, stop)``: where in that range, and a flat writable view of the overlap."""
        for group in self._groups:
            if group.start >= stop or group.stop <= start:
                continue
            at = group.start
            for chunk in group.params:
                low, high = max(at, start), min(at + chunk.size, stop)
                if low < high:
                    yield slice(low - start, high - start), view(chunk).reshape(-1)[low - at : high - at]
                at += chunk.size

    def write(self, values: np.ndarray, start: int = 0) -> None:
        stop = start + values.size
        if self._separate_wire:
            rounding.assign(self.wire[start:stop], values)
        for where, chunk in self._pieces(start, stop):
            chunk[...] = values[where]

    def read(self, out: np.ndarray, start: int = 0) -> None:
        for where, chunk in self._pieces(start, start + out.size):
            out[where] = chunk

    def init_state(self, rule: Rule) -> None:
        with jax.default_device(cpu_device()):
            for group in self._groups:
                group.state = rule.init(group.params)

    def update(self, rule: Rule, grad: np.ndarray, scale: np.float32) -> None:
        """Raises RuntimeError if the state did not change in place, so that memory would have doubled."""
        list(_workers().map(lambda group: self._update_group(group, rule, grad, scale), self._groups))

    def _update_group(self, group: _Group, rule: Rule, grad: np.ndarray, scale: np.float32) -> None:
        scratch = _scratch.take(group.params, self.wire.dtype) if self._separate_wire else []
        before = _pointers((group.params, group.state, scratch))
        group.params, group.state, scratch = _apply(
            group.params,
            group.state,
            scratch,
            jax.device_put(grad[group.start : group.stop], cpu_device()),
            scale,
            step=rule.step,
            wire_dtype=self.wire.dtype,
        )
        jax.block_until_ready((group.params, group.state, scratch))
        if _pointers((group.params, group.state, scratch)) != before:
            raise RuntimeError("the CPU backend moved the optimizer's state instead of updating it in place")
        start = group.start
        for chunk in scratch:
            np.copyto(self.wire[start : start + chunk.size], view(chunk))
            start += chunk.size
        if scratch:
            _scratch.give(scratch)

    def state(self) -> dict[str, list[tuple[np.ndarray, slice | None]]]:
        found = collections.defaultdict(list)
        for group in self._groups:
            ends = np.cumsum([p.size for p in group.params]) + group.start
            for path, leaf in jax.tree_util.tree_flatten_with_path(group.state)[0]:
                index = getattr(path[-1], "idx", None)
                if leaf.ndim and index is not None and leaf.shape == group.params[index].shape:
                    where = slice(int(ends[index]) - leaf.size, int(ends[index]))
                    found[jax.tree_util.keystr(path[:-1])].append((view(leaf).reshape(-1), where))
                else:
                    found[jax.tree_util.keystr(path)].append((view(leaf), None))
        return dict(found)


class SplitRow:
    """Halves for the fused kernels.

    Args:
      wire: bfloat16, the upper half of the master.
    """

    def __init__(self, wire: np.ndarray):
        self.wire = wire
        self._hi = wire.view(np.uint16)
        self._lo = np.zeros(wire.size, np.int16)
        self._moments: dict[str, np.ndarray] = {}
        self._counts: dict[str, np.ndarray] = {}

    def write(self, values: np.ndarray, start: int = 0) -> None:
        for low in range(0, values.size, CHUNK):
            part = values[low : low + CHUNK]
            here = slice(start + low, start + low + part.size)
            part = part.astype(np.float32)
            rounding.assign(self.wire[here], part)
            self._lo[here] = (part.view(np.uint32) - (self._hi[here].astype(np.uint32) << np.uint32(16))).view(np.int32)

    def read(self, out: np.ndarray, start: int = 0) -> None:
        for low in range(0, out.size, CHUNK):
            part = out[low : low + CHUNK]
            here = slice(start + low, start + low + part.size)
            hi = self._hi[here].astype(np.uint32) << np.uint32(16)
            part[...] = (hi + self._lo[here].astype(np.int32).view(np.uint32)).view(np.float32)

    def init_state(self, rule: Rule) -> None:
        shape = jax.ShapeDtypeStruct(self.wire.shape, jnp.float32)
        for path, leaf in jax.tree_util.tree_flatten_with_path(jax.eval_shape(rule.init, [shape]))[0]:
            if leaf.shape == shape.shape:
                self._moments[jax.tree_util.keystr(path[:-1])] = np.zeros(leaf.shape, leaf.dtype)
            else:
                self._counts[jax.tree_util.keystr(path)] = np.zeros(leaf.shape, leaf.dtype)

    def update(self, rule: Rule, grad: np.ndarray, scale: np.float32) -> None:
        counts = list(self._counts.values())
        count = int(counts[0]) if counts else 0
        rule.kernel(self._hi, self._lo, list(self._moments.values()), grad, scale, count)
        for each in counts:
            each += 1

    def state(self) -> dict[str, list[tuple[np.ndarray, slice | None]]]:
        moments = {key: [(moment, slice(0, moment.size))] for key, moment in self._moments.items()}
        return moments | {key: [(count, None)] for key, count in self._counts.items()}


class _Scratch:
    """Memory that the rounded weights of a group pass through, reused by every group of the same lengths."""

    def __init__(self):
        self._free = collections.defaultdict(list)

    def take(self, params: Sequence[jax.Array], dtype: np.dtype) -> list[jax.Array]:
        try:
            return self._free[tuple(p.size for p in params), np.dtype(dtype)].pop()
        except IndexError:
            return [_allocate((p.size,), dtype) for p in params]

    def give(self, scratch: list[jax.Array]) -> None:
        self._free[tuple(p.size for p in scratch), np.dtype(scratch[0].dtype)].append(scratch)


_scratch = _Scratch()


@functools.lru_cache(maxsize=1)
def _workers() -> concurrent.futures.ThreadPoolExecutor:
    """Threads that each update one group at a time; XLA's own threads share the work inside a group."""
    return concurrent.futures.ThreadPoolExecutor(WORKERS, thread_name_prefix="megatrain-update")
