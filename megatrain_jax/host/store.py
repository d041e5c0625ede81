"""HostStore: where the model lives. Named tensors in host memory, grouped by the block that they stream with.

Every tensor has a float32 master that the optimizer updates and, beside it, the bytes that cross the link (the wire).
How the master is laid out is known to this file alone. Here it is *plain*: float32 chunks owned by the CPU backend,
which optax updates in place because they are donated, and a wire copy in page-locked memory. A float32 wire that needs
no locked pages is the master itself.

On a mesh of n devices a tensor crosses as its flat view ``[n, ceil(size / n)]``, zero-padded, one row to each device;
a process keeps the rows of its own devices. On one device that is the tensor as it is.
"""

from __future__ import annotations

import collections
import concurrent.futures
import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from megatrain_jax.host.pages import Pages
from megatrain_jax.models.spec import ModelSpec

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CHUNK = 1 << 20  # elements; XLA emits one loop per output, so the operands of a chunk must fit in cache
GROUP = 64  # chunks updated by one call: enough to occupy every core, few enough to compile quickly
_ALIGN = 64  # elements; keeps every slice aligned enough for the CPU backend to read it in place

# (params, state, gradients, scale) -> (params, state); lists of chunks. See optimizer.py.
Step = Callable[[list, Any, list, jax.Array], tuple[list, Any]]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Which rows of the flat views this process holds: `local` of `count`."""

    count: int = 1
    local: tuple[int, ...] = (0,)


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
def _apply(params, state, scratch, grad, scale, *, step: Step, wire_dtype):
    """One optimizer step on a group of chunks. `scratch` is only memory for the copy that goes to the wire."""
    ends = np.cumsum([p.size for p in params])
    grads = [grad[end - p.size : end].reshape(p.shape) for p, end in zip(params, ends, strict=True)]
    params, state = step(params, state, grads, scale)
    return params, state, [p.reshape(-1).astype(wire_dtype) for p in params] if scratch else []


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
    length = math.ceil(math.ceil(size / count) / _ALIGN) * _ALIGN
    return [min(length, size - start) for start in range(0, size, length)]


def _pointers(tree: Any) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) if leaf.ndim]


class HostTensor:
    """One named tensor: master, wire, and after `init_state` the optimizer's state.

    Attributes:
      name: Hugging Face name.
      shape: logical shape.
      owner: number of the block whose gradients and update include this tensor.
      trainable: a frozen tensor has no state, and no gradient of it is ever computed.
      rows: which rows of the flat view are here.
      row_length: elements in a row.
      wire: one flat array per local row, in the wire dtype; what crosses the link.
    """

    def __init__(self, name, shape, *, owner: int, trainable: bool, rows: Rows, whole: bool):
        self.name, self.shape, self.owner, self.trainable, self.rows = name, shape, owner, trainable, rows
        self.size = math.prod(shape)
        self.row_length = math.ceil(self.size / rows.count)
        self.wire: list[np.ndarray] = []
        self._whole = whole  # the optimizer needs the tensor in one piece
        self._separate_wire = True
        self._master: list[list[_Group]] = []  # per local row; empty for a frozen tensor
        self._frozen_master: list[np.ndarray] = []  # only where the wire does not hold the exact value

    def allocate(self, wire: Sequence[np.ndarray] | None) -> None:
        """Takes memory for the master, and `wire` for the wire; None makes the float32 master serve as the wire."""
        self._separate_wire = wire is not None
        if self.trainable or wire is None:
            self._master = [self._allocate_row(contiguous=wire is None) for _ in self.rows.local]
        self.wire = list(wire) if wire is not None else [view(g[0].params[0]).reshape(-1) for g in self._master]

    def _allocate_row(self, *, contiguous: bool) -> list[_Group]:
        if self._whole or contiguous:
            shape = self.shape if self._whole else (self.row_length,)
            return [_Group(0, [_allocate(shape, jnp.float32)])]
        lengths, groups = _chunk_lengths(self.row_length), []
        count = math.ceil(len(lengths) / GROUP)
        for part in np.array_split(np.asarray(lengths), count):
            start = groups[-1].stop if groups else 0
            groups.append(_Group(start, [_allocate((int(n),), jnp.float32) for n in part]))
        return groups

    def _pieces(self, row: int) -> Iterator[tuple[slice, np.ndarray]]:
        """Where each chunk of a local row's master lies in the row, and a flat writable view of it."""
        for group in self._master[row]:
            start = group.start
            for chunk in group.params:
                yield slice(start, start + chunk.size), view(chunk).reshape(-1)
                start += chunk.size

    def assign(self, array: np.ndarray) -> None:
        """Sets the value from any float array of this shape; master and wire are rounded from it independently."""
        if array.shape != self.shape:
            raise ValueError(f"{self.name}: expected shape {self.shape}, got {array.shape}")
        flat = array.reshape(-1)
        parts = [flat[row * self.row_length : (row + 1) * self.row_length] for row in self.rows.local]
        exact = True
        for i, part in enumerate(parts):
            if self._separate_wire:
                self.wire[i][: part.size] = part
            if self._master:
                for where, chunk in self._pieces(i):
                    source = part[where]
                    chunk[: source.size] = source
            else:
                exact &= np.array_equal(self.wire[i][: part.size].astype(np.float32), part.astype(np.float32))
        self._frozen_master = [] if exact else [np.zeros(self.row_length, np.float32) for _ in parts]
        for row, part in zip(self._frozen_master, parts, strict=False):
            row[: part.size] = part

    def read_row(self, i: int) -> np.ndarray:
        """A copy of local row number `i` of the master, float32 ``[row_length]``."""
        if self._master:
            row = np.empty(self.row_length, np.float32)
            for where, chunk in self._pieces(i):
                row[where] = chunk
            return row
        return np.array(self._frozen_master[i] if self._frozen_master else self.wire[i], dtype=np.float32)

    def read(self) -> np.ndarray:
        """A copy of the master in its logical shape, float32. Every row must be here."""
        return self._join([self.read_row(i) for i in range(len(self.rows.local))])

    def _join(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        if len(rows) != self.rows.count:
            raise ValueError(f"{self.name}: this process holds {len(rows)} of {self.rows.count} rows")
        return (rows[0] if len(rows) == 1 else np.concatenate(rows))[: self.size].reshape(self.shape)

    def init_state(self, init: Callable[[list], Any]) -> None:
        """Makes the optimizer's state: `init` maps a list of float32 chunks to it."""
        for group in self._groups():
            group.state = init(group.params)

    def _groups(self) -> Iterator[_Group]:
        return (group for groups in self._master for group in groups)

    def apply(self, step: Step, grads: Sequence[np.ndarray], scale: np.float32) -> None:
        """Updates master, state and wire in place.

        Args:
          step: pure function of a list of chunks; the same object is compiled once.
          grads: one flat array ``[row_length]`` per local row, in any float dtype, on 64-byte boundaries to be read in place.
          scale: float32, what the gradients are multiplied by.

        Raises:
          RuntimeError: the state did not change in place, so memory would have doubled.
        """
        pending = []
        for i, groups in enumerate(self._master):
            for group in groups:
                scratch = _scratch.take(group.params, self.wire[i].dtype) if self._separate_wire else []
                before = _pointers((group.params, group.state, scratch))
                grad = jax.device_put(grads[i][group.start : group.stop], cpu_device())
                group.params, group.state, scratch = _apply(
                    group.params, group.state, scratch, grad, scale, step=step, wire_dtype=self.wire[i].dtype
                )
                if _pointers((group.params, group.state, scratch)) != before:
                    raise RuntimeError(
                        f"{self.name}: the CPU backend moved the optimizer's state instead of updating it"
                    )
                pending.append((self.wire[i][group.start : group.stop], group, scratch))
                if len(pending) > 1:
                    self._finish(*pending.pop(0))
        for each in pending:
            self._finish(*each)

    def _finish(self, wire: np.ndarray, group: _Group, scratch: list[jax.Array]) -> None:
        """Waits for a group's update and copies its rounded weights to the wire."""
        jax.block_until_ready((group.params, group.state, scratch))
        if not scratch:
            return
        ends = np.cumsum([chunk.size for chunk in scratch])
        targets = [wire[end - chunk.size : end] for chunk, end in zip(scratch, ends, strict=True)]
        list(_copiers().map(np.copyto, targets, [view(chunk) for chunk in scratch]))
        _scratch.give(scratch)

    def state_arrays(self) -> dict[str, np.ndarray]:
        """The master and every array of the optimizer's state by path, as copies independent of the chunking.

        Arrays shaped like the chunks are joined to the logical shape; others (such as step counts, which are equal in
        every group) are taken as they are.
        """
        out = {"master": self.read()}
        for key, leaves in self._state_leaves().items():
            if leaves[0][1] is None:
                out[key] = np.array(view(leaves[0][0]))
                continue
            rows = [np.zeros(self.row_length, leaves[0][0].dtype) for _ in self.rows.local]
            for leaf, (i, where) in leaves:
                rows[i][where] = view(leaf).reshape(-1)
            out[key] = self._join(rows)
        return out

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """The inverse of `state_arrays`. Raises KeyError or ValueError if the arrays are of another optimizer or shape."""
        leaves_of = self._state_leaves()
        if missing := set(leaves_of) ^ (set(arrays) - {"master"}):
            raise KeyError(f"{self.name}: the optimizer's state differs in {', '.join(sorted(missing))}")
        self.assign(arrays["master"])
        for key, leaves in leaves_of.items():
            flat = arrays[key].reshape(-1)
            for leaf, place in leaves:
                if place is None:
                    view(leaf)[...] = arrays[key]
                    continue
                i, where = place
                part = flat[self.rows.local[i] * self.row_length :][where]
                view(leaf).reshape(-1)[: part.size] = part

    def _state_leaves(self) -> dict[str, list[tuple[jax.Array, tuple[int, slice] | None]]]:
        """By path: every leaf of the state with the row and the slice it covers, None if it is not shaped like a chunk."""
        found = collections.defaultdict(list)
        for i, groups in enumerate(self._master):
            for group in groups:
                ends = np.cumsum([p.size for p in group.params]) + group.start
                for path, leaf in jax.tree_util.tree_flatten_with_path(group.state)[0]:
                    index = getattr(path[-1], "idx", None)
                    if leaf.ndim and index is not None and leaf.shape == group.params[index].shape:
                        where = slice(int(ends[index]) - leaf.size, int(ends[index]))
                        found[jax.tree_util.keystr(path[:-1])].append((leaf, (i, where)))
                    else:
                        found[jax.tree_util.keystr(path)].append((leaf, None))
        return dict(found)


class _Scratch:
    """Memory that the rounded weights of a group pass through, reused by every group of the same lengths."""

    def __init__(self):
        self._free = collections.defaultdict(list)

    def take(self, params: Sequence[jax.Array], dtype: np.dtype) -> list[jax.Array]:
        key = (tuple(p.size for p in params), np.dtype(dtype))
        return self._free[key].pop() if self._free[key] else [_allocate((p.size,), dtype) for p in params]

    def give(self, scratch: list[jax.Array]) -> None:
        self._free[tuple(p.size for p in scratch), np.dtype(scratch[0].dtype)].append(scratch)


_scratch = _Scratch()


@functools.lru_cache(maxsize=1)
def _copiers() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(4, thread_name_prefix="megatrain-wire")


class HostStore:
    """Every tensor of a model in host memory.

    Args:
      spec: the model.
      shapes: path and shape of the tensors of each block, in block order.
      wire_dtype: "bfloat16" or "float32", what crosses the link.
      rows: the mesh's rows and this process' share of them.
      trainable: whether the tensor of a name is trained.
      lock_pages: register the wire's pages with the driver of the accelerator.
      whole_tensors: keep each tensor in one piece for optimizers that are not elementwise.

    Attributes:
      tensors: every `HostTensor` by name.
      blocks: for each block, its tensors by path. A tied projection is the embedding's own tensor.
    """

    def __init__(
        self,
        spec: ModelSpec,
        shapes: Sequence[dict[str, tuple[int, ...]]],
        *,
        wire_dtype: str,
        rows: Rows = Rows(),
        trainable: Callable[[str], bool] = lambda name: True,
        lock_pages: bool = False,
        whole_tensors: bool = False,
    ):
        self.spec, self.rows = spec, rows
        self.wire_dtype = BFLOAT16 if wire_dtype == "bfloat16" else np.dtype(np.float32)
        self.tensors: dict[str, HostTensor] = {}
        self.blocks: list[dict[str, HostTensor]] = []
        self._pages: list[Pages] = []
        # A float32 master in one piece can cross the link itself unless the link wants locked pages.
        master_is_wire = self.wire_dtype == np.float32 and not lock_pages
        for block, paths in enumerate(shapes):
            members, fresh = {}, []
            for path, shape in paths.items():
                name = spec.tensor_name(block, path)
                if name not in self.tensors:
                    options = dict(owner=block, trainable=trainable(name), rows=rows, whole=whole_tensors)
                    self.tensors[name] = HostTensor(name, shape, **options)
                    fresh.append(self.tensors[name])
                members[path] = self.tensors[name]
            self.blocks.append(members)
            wires = [None] * len(fresh) if master_is_wire else self._wire_memory(fresh, lock_pages)
            for tensor, wire in zip(fresh, wires, strict=True):
                tensor.allocate(wire)

    def _wire_memory(self, tensors: Sequence[HostTensor], lock: bool) -> list[list[np.ndarray]]:
        """Page-aligned memory for the wire of one block, each row on a boundary that the CPU backend can read in place."""
        stride = lambda t: math.ceil(t.row_length / _ALIGN) * _ALIGN  # noqa: E731
        total = sum(stride(t) * len(t.rows.local) for t in tensors)
        pages = Pages(total * self.wire_dtype.itemsize, lock=lock)
        self._pages.append(pages)
        memory, wires, start = pages.array.view(self.wire_dtype), [], 0
        for tensor in tensors:
            rows = []
            for _ in tensor.rows.local:
                rows.append(memory[start : start + tensor.row_length])
                start += stride(tensor)
            wires.append(rows)
        return wires

    def owners(self, block: int) -> frozenset[int]:
        """Blocks whose updates change what block number `block` reads: itself, and the embedding for a tied head."""
        return frozenset(tensor.owner for tensor in self.blocks[block].values())

    def owned(self, block: int) -> dict[str, HostTensor]:
        """Trainable tensors by path whose gradients leave with block number `block`."""
        return {p: t for p, t in self.blocks[block].items() if t.owner == block and t.trainable}

    @property
    def num_parameters(self) -> int:
        return sum(tensor.size for tensor in self.tensors.values())

    @property
    def num_trainable(self) -> int:
        return sum(tensor.size for tensor in self.tensors.values() if tensor.trainable)
