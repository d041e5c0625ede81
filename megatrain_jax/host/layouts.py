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
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax.host import rounding
from megatrain_jax.host.in_place import make_update

# Before jax 0.11 barriers are dropped on the CPU and XLA copies whole chunks in every turn of a loop: there, one tile is a chunk.
_TILED = jax.__version_info__ >= (0, 11)
# Elements updated by one call, at most, and at least where other threads would be without work. The rounded weights that it
# gives are then still in cache when they are copied to the wire, and no thread is busy for long when the others have nothing
# left. Not fewer: each call takes Python's lock for a while (docs/benchmarks.md).
CHUNK, LEAST = 1 << 20, 1 << 18
# Elements of one turn of the loop in it, so that its operands stay in cache from one of XLA's loops to the next.
TILE = 1 << 15 if _TILED else CHUNK
PUT = 1 << 30  # elements of gradients in one array of the CPU backend; their offsets are int32
PART = 1 << 16  # elements that a thread converts at a time; arrays of that size are reused, larger ones mapped anew
ALIGN = 64  # elements; keeps every slice aligned enough for the CPU backend to read it in place


class Rule(NamedTuple):
    """What an optimizer does to an element.

    Attributes:
      init: optax' own ``init`` of a list of float32 arrays; it names the state, in every layout.
      step: pure function ``(params, state, grads, scale) -> (params, state)`` of lists of float32 chunks.
      kernel: of `fused.make_kernel`, for the split layout; None if there is none.
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


@functools.lru_cache(maxsize=64)
def _on_the_cpu(function: Callable, static: tuple[int, ...] = ()) -> Callable:
    """`function` compiled for the CPU backend, which owns what it gives. (`jnp.zeros` with a device would copy from the default one.)"""
    return jax.jit(function, static_argnums=static, out_shardings=jax.sharding.SingleDeviceSharding(cpu_device()))


def _allocate(shape: tuple[int, ...], dtype) -> jax.Array:
    return jax.block_until_ready(_on_the_cpu(jnp.zeros, (0, 1))(shape, dtype))


@dataclasses.dataclass
class _Chunk:
    """What is updated by one call, and its optimizer state."""

    start: int  # offset in the row, in elements
    at: jax.Array  # offset in its part of the gradients, int32
    leaves: list[jax.Array]  # of params and state
    where: list[int] = dataclasses.field(default_factory=list)  # their addresses

    @property
    def params(self) -> jax.Array:
        return self.leaves[0]

    @property
    def size(self) -> int:
        return self.leaves[0].size

    @property
    def stop(self) -> int:
        return self.start + self.size


def _chunk_lengths(size: int) -> list[int]:
    """Equal numbers of whole tiles, as many chunks for each thread, and what is left over."""
    threads, unit = _threads(), min(TILE, LEAST)
    count = max(1, math.ceil(size / CHUNK), min(threads, math.ceil(size / LEAST)))
    if count > threads:
        count = math.ceil(count / threads) * threads
    whole = size // unit * unit
    length = max(unit, math.ceil(whole / unit / count) * unit)
    lengths = [min(length, whole - start) for start in range(0, whole, length)]
    return [*lengths, size - whole] if size > whole or not whole else lengths


def _by_parts(size: int, work: Callable[[slice], None]) -> None:
    """Does `work` to every part of a range, in several threads, since NumPy keeps to one; with one it is slower than a disk."""
    parts = [slice(start, min(start + PART, size)) for start in range(0, size, PART)]
    if len(parts) > 1:
        list(_workers().map(work, parts))
    elif parts:
        work(parts[0])


def _pointers(arrays: Iterable[jax.Array]) -> list[int]:
    return [array.unsafe_buffer_pointer() for array in arrays if array.ndim]


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
        self._tile = None if whole or wire is None else TILE
        shapes = [shape] if self._tile is None else [(n,) for n in _chunk_lengths(shape[0])]
        longest = max(1, math.prod(shapes[0]))
        self._part = max(1, PUT // longest) * longest
        self._chunks: list[_Chunk] = []
        for each in shapes:
            start = self._chunks[-1].stop if self._chunks else 0
            self._chunks.append(_Chunk(start, _offset(start % self._part), [_allocate(each, jnp.float32)]))
        self._separate_wire = wire is not None
        self.wire = view(self._chunks[0].params).reshape(-1) if wire is None else wire

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[slice, np.ndarray]]:
        """Of each chunk that overlaps ``[start, stop)``: where in that range, and a flat writable view of the overlap."""
        for chunk in self._chunks:
            low, high = max(chunk.start, start), min(chunk.stop, stop)
            if low < high:
                here = slice(low - chunk.start, high - chunk.start)
                yield slice(low - start, high - start), view(chunk.params).reshape(-1)[here]

    def write(self, values: np.ndarray, start: int = 0) -> None:
        stop = start + values.size
        if self._separate_wire:
            wire = self.wire[start:stop]
            _by_parts(values.size, lambda part: rounding.assign(wire[part], values[part]))
        for where, chunk in self._pieces(start, stop):
            chunk[...] = values[where]

    def read(self, out: np.ndarray, start: int = 0) -> None:
        for where, chunk in self._pieces(start, start + out.size):
            out[where] = chunk

    def init_state(self, rule: Rule) -> None:
        for chunk in self._chunks:
            state = jax.block_until_ready(_on_the_cpu(rule.init)([chunk.params]))
            chunk.leaves, self._tree = jax.tree.flatten(([chunk.params], state))
            chunk.where = _pointers(chunk.leaves)

    def update(self, rule: Rule, grad: np.ndarray, scale: np.float32) -> None:
        """Raises RuntimeError if the state did not change in place, so that memory would have doubled."""
        # Not by chunk: a call of device_put takes as long as the update of 30,000 elements, in one thread at a time.
        parts = [grad[start : start + self._part] for start in range(0, max(grad.size, 1), self._part)]
        parts, scale = jax.device_put((parts, scale), cpu_device())
        update = make_update(rule.step, self._tree, self._tile, self.wire.dtype)
        work = functools.partial(self._update_chunks, iter(self._chunks), update, parts, scale)
        threads = min(_threads(), len(self._chunks))
        if threads == 1:
            work()
        else:
            for done in [_workers().submit(work) for _ in range(threads)]:
                done.result()

    def _update_chunks(
        self, chunks: Iterator[_Chunk], update: Callable, parts: list[jax.Array], scale: jax.Array
    ) -> None:
        """Updates chunks that no other thread has taken."""
        for chunk in chunks:
            self._update_chunk(chunk, update, parts[chunk.start // self._part], scale)

    def _update_chunk(self, chunk: _Chunk, update: Callable, grads: jax.Array, scale: jax.Array) -> None:
        scratch = _Scratch.take(chunk.size, self.wire.dtype) if self._separate_wire else None
        chunk.leaves, rounded = update(chunk.leaves, scratch and scratch.array, grads, chunk.at, scale)
        # What one program gives is there at once.
        (chunk.params if scratch is None else rounded).block_until_ready()
        if _pointers(chunk.leaves) != chunk.where or scratch and rounded.unsafe_buffer_pointer() != scratch.address:
            raise RuntimeError("the CPU backend moved the optimizer's state instead of updating it in place")
        if scratch is not None:
            np.copyto(self.wire[chunk.start : chunk.stop].view(scratch.bits.dtype), scratch.bits)
            scratch._replace(array=rounded).give()

    def state(self) -> dict[str, list[tuple[np.ndarray, slice | None]]]:
        found = collections.defaultdict(list)
        for chunk in self._chunks:
            _, state = jax.tree.unflatten(self._tree, chunk.leaves)
            for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
                if leaf.ndim and hasattr(path[-1], "idx") and leaf.shape == chunk.params.shape:
                    where = slice(chunk.start, chunk.stop)
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
        def split(part: slice) -> None:
            here, p = slice(start + part.start, start + part.stop), values[part].astype(np.float32)
            rounding.assign(self.wire[here], p)
            self._lo[here] = (p.view(np.uint32) - (self._hi[here].astype(np.uint32) << np.uint32(16))).view(np.int32)

        _by_parts(values.size, split)

    def read(self, out: np.ndarray, start: int = 0) -> None:
        def join(part: slice) -> None:
            here = slice(start + part.start, start + part.stop)
            hi = self._hi[here].astype(np.uint32) << np.uint32(16)
            out[part] = (hi + self._lo[here].astype(np.int32).view(np.uint32)).view(np.float32)

        _by_parts(out.size, join)

    def init_state(self, rule: Rule) -> None:
        shape = jax.ShapeDtypeStruct(self.wire.shape, jnp.float32)
        for path, leaf in jax.tree_util.tree_flatten_with_path(jax.eval_shape(rule.init, [shape]))[0]:
            if leaf.shape == shape.shape:
                self._moments[jax.tree_util.keystr(path[:-1])] = np.zeros(leaf.shape, leaf.dtype)
            else:
                self._counts[jax.tree_util.keystr(path)] = np.zeros(leaf.shape, leaf.dtype)

    def update(self, rule: Rule, grad: np.ndarray, scale: np.float32) -> None:
        self.update_pieces(rule, grad, scale, last=True)

    def update_pieces(
        self, rule: Rule, grad: np.ndarray, scale: np.float32, *where: np.ndarray | int, last: bool
    ) -> None:
        """A part of a step: `where` is the starts of pieces and their length, nothing is everything; `last` ends the step."""
        counts = list(self._counts.values())
        count = int(counts[0]) if counts else 0
        rule.kernel(self._hi, self._lo, list(self._moments.values()), grad, scale, count, *where)
        for each in counts if last else ():
            each += 1

    def state(self) -> dict[str, list[tuple[np.ndarray, slice | None]]]:
        moments = {key: [(moment, slice(0, moment.size))] for key, moment in self._moments.items()}
        return moments | {key: [(count, None)] for key, count in self._counts.items()}


class _Scratch(NamedTuple):
    """Memory that the rounded weights of a chunk pass through, used again by every chunk of the same size.

    Unsigned numbers, because XLA does not vectorise a copy of bfloat16.
    """

    array: jax.Array
    bits: np.ndarray  # a view of it
    address: int

    @classmethod
    def take(cls, size: int, dtype: np.dtype) -> _Scratch:
        try:
            return _free[size, dtype.itemsize].pop()
        except IndexError:
            array = _allocate((size,), f"uint{8 * dtype.itemsize}")
            return cls(array, view(array), array.unsafe_buffer_pointer())

    def give(self) -> None:
        _free[self.bits.size, self.bits.itemsize].append(self)


_free: dict[tuple[int, int], list[_Scratch]] = collections.defaultdict(list)


@functools.lru_cache(maxsize=PUT // LEAST)
def _offset(elements: int) -> jax.Array:
    return jax.device_put(np.int32(elements), cpu_device())


@functools.lru_cache(maxsize=1)
def _workers() -> concurrent.futures.ThreadPoolExecutor:
    """Threads that each update one chunk at a time; two cores are left to the threads that dispatch and watch."""
    return concurrent.futures.ThreadPoolExecutor(_threads(), thread_name_prefix="megatrain-update")


def _threads() -> int:
    return max(1, len(os.sched_getaffinity(0)) - 2)
