"""HostStore: where the model lives. Named tensors in host memory, grouped by the block that they stream with.

Every tensor has a float32 master that the optimizer updates and, beside it, the bytes that cross the link (the wire).
How the master is laid out (`layouts.py`) is nobody's business outside this file.

On a mesh of n devices a tensor crosses as its flat view ``[n, ceil(size / n)]``, zero-padded, one row to each device;
a process keeps the rows of its own devices. On one device that is the tensor as it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from megatrain_jax.host.holds import Holds
from megatrain_jax.host.layouts import ALIGN, FrozenRow, PlainRow, Row, Rule, SplitRow
from megatrain_jax.host.pages import Pages
from megatrain_jax.host.rounding import BFLOAT16
from megatrain_jax.host.stacked import StackedTensor
from megatrain_jax.models.spec import ModelSpec, is_buffer

# "chunks": optax in cache-sized chunks. "whole": optax, each tensor in one piece. "split": fused kernels.
Layout = Literal["chunks", "whole", "split"]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Which rows of the flat views this process holds: `local` of `count`."""

    count: int = 1
    local: tuple[int, ...] = (0,)


Read = Callable[[int, np.ndarray], None]
Write = Callable[[int, np.ndarray], None]


class StateArray(NamedTuple):
    """One array of a tensor's training state, reached by ranges of its flat view so that no whole copy need exist.

    Attributes:
      shape, dtype: of the array.
      read: ``(start, out)`` fills `out`, of this dtype, with the elements from `start` on.
      write: ``(start, values)`` sets the elements from `start` on. Ranges come in order and cover the array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Read
    write: Write


class HostTensor:
    """One named tensor: master, wire, and after `init_state` the optimizer's state.

    Attributes:
      name: Hugging Face name.
      shape: logical shape.
      owner: number of the block whose gradients and update include this tensor.
      trainable: a frozen tensor has no state, and no gradient of it is ever computed.
      rows: which rows of the flat view are here.
      row_length: elements in a row.
      resident: whether the tensor stays on the device instead; see `stream.resident.ResidentTensor`.
    """

    resident = False

    def __init__(self, name: str, shape: tuple[int, ...], *, owner: int, trainable: bool, rows: Rows):
        self.name, self.shape, self.owner, self.trainable, self.rows = name, shape, owner, trainable, rows
        self.size = math.prod(shape)
        self.row_length = math.ceil(self.size / rows.count)
        self._rows: list[Row] = []

    def allocate(self, wires: Sequence[np.ndarray | None], layout: Layout) -> None:
        """Takes memory for the master of each local row; a wire of None makes the float32 master serve as the wire."""
        for wire in wires:
            if not self.trainable:
                wire = np.zeros(self.row_length, np.float32) if wire is None else wire
                self._rows.append(FrozenRow(wire))
            elif layout == "split":
                self._rows.append(SplitRow(wire))
            else:
                whole = layout == "whole"
                self._rows.append(PlainRow(self.shape if whole else (self.row_length,), wire, whole=whole))

    @property
    def wire(self) -> list[np.ndarray]:
        """One flat array per local row, in the wire dtype; what crosses the link."""
        return [row.wire for row in self._rows]

    def assign(self, array: np.ndarray) -> None:
        """Sets the value from any float array of this shape; master and wire are rounded from it independently."""
        if array.shape != self.shape:
            raise ValueError(f"{self.name}: expected shape {self.shape}, got {array.shape}")
        flat = array.reshape(-1)
        for row, number in zip(self._rows, self.rows.local, strict=True):
            row.write(flat[number * self.row_length : (number + 1) * self.row_length])

    def read_row(self, i: int) -> np.ndarray:
        """A copy of local row number `i` of the master, float32 ``[row_length]``."""
        row = np.empty(self.row_length, np.float32)
        self._rows[i].read(row)
        return row

    def read(self) -> np.ndarray:
        """A copy of the master in its logical shape, float32. Every row must be here."""
        out = np.empty(self.shape, np.float32)
        self._read_master(0, out.reshape(-1))
        return out

    def init_state(self, rule: Rule) -> None:
        """Makes the optimizer's state."""
        for row in self._rows:
            row.init_state(rule)

    def update(self, rule: Rule, grads: Sequence[np.ndarray], scale: np.float32) -> None:
        """Updates master, state and wire in place.

        Args:
          rule: the optimizer; the same object is compiled once.
          grads: one flat array ``[row_length]`` per local row, in any float dtype, on 64-byte boundaries to be read in place.
          scale: float32, what the gradients are multiplied by.
        """
        for row, grad in zip(self._rows, grads, strict=True):
            row.update(rule, grad, scale)

    @property
    def is_table(self) -> bool:
        """Whether `update_table_rows` can be used: two dimensions, whole in one row, on the split layout."""
        return len(self.shape) == 2 and self.rows.count == 1 and isinstance(self._rows[0], SplitRow)

    def update_table_rows(
        self, rule: Rule, grads: Sequence[np.ndarray], scale: np.float32, numbers: np.ndarray, *, last: bool
    ) -> None:
        """A part of what `update` does, with the same result when every row of the table has had its turn.

        Args:
          rule, grads, scale: as in `update`, the same for all parts of a step.
          numbers: int64, the rows of the table; each comes once a step.
          last: these are the last ones of this step.
        """
        width = self.shape[1]
        self._rows[0].update_pieces(rule, grads[0], scale, numbers * width, width, last=last)

    def state(self) -> dict[str, StateArray]:
        """The master and every array of the optimizer's state by path, independent of the layout and the rows.

        Arrays with a value for each element have the logical shape; others (such as step counts, which are equal
        everywhere) are as they are. Every row must be here.
        """
        out = {"master": StateArray(self.shape, np.dtype(np.float32), self._read_master, self._write_master)}
        states = [row.state() for row in self._rows]
        for key, pieces in states[0].items():
            first, where = pieces[0]
            if where is None:
                copies = [piece for state in states for piece, _ in state[key]]
                out[key] = StateArray(first.shape, first.dtype, *_equal_everywhere(copies))
            else:
                placed = [
                    (number * self.row_length + where.start, piece)
                    for number, state in zip(self.rows.local, states, strict=True)
                    for piece, where in state[key]
                ]
                out[key] = StateArray(self.shape, first.dtype, *_by_element(placed))
        return out

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[Row, int, slice]]:
        """Rows that overlap a range of the flat view: the row, where in it the overlap starts, and where in the range."""
        if len(self._rows) != self.rows.count:
            raise ValueError(f"{self.name}: this process holds {len(self._rows)} of {self.rows.count} rows")
        for number, row in enumerate(self._rows):
            first = number * self.row_length
            low, high = max(start, first), min(stop, first + self.row_length)
            if low < high:
                yield row, low - first, slice(low - start, high - start)

    def _read_master(self, start: int, out: np.ndarray) -> None:
        for row, at, where in self._overlaps(start, start + out.size):
            row.read(out[where], at)

    def _write_master(self, start: int, values: np.ndarray) -> None:
        for row, at, where in self._overlaps(start, start + values.size):
            row.write(values[where], at)


def _by_element(pieces: Sequence[tuple[int, np.ndarray]]) -> tuple[Read, Write]:
    """Access to a flat array that lies in pieces, each given by its start; what is behind the last range is padding."""

    def overlaps(start: int, stop: int) -> Iterator[tuple[np.ndarray, slice]]:
        for first, piece in pieces:
            low, high = max(start, first), min(stop, first + piece.size)
            if low < high:
                yield piece[low - first : high - first], slice(low - start, high - start)

    def read(start: int, out: np.ndarray) -> None:
        for part, where in overlaps(start, start + out.size):
            out[where] = part

    def write(start: int, values: np.ndarray) -> None:
        for part, where in overlaps(start, start + values.size):
            part[...] = values[where]

    return read, write


def _equal_everywhere(copies: Sequence[np.ndarray]) -> tuple[Read, Write]:
    """Access to an array of which there are several equal copies."""

    def read(start: int, out: np.ndarray) -> None:
        out[...] = copies[0].reshape(-1)[start : start + out.size]

    def write(start: int, values: np.ndarray) -> None:
        for copy in copies:
            copy.reshape(-1)[start : start + values.size] = values

    return read, write


class HostStore:
    """Every tensor of a model in host memory.

    Args:
      spec: the model.
      shapes: path and shape of the tensors of each block, in block order.
      wire_dtype: "bfloat16" or "float32", what crosses the link.
      rows: the mesh's rows and this process' share of them.
      trainable: whether the tensor of a name is trained.
      lock_pages: register the wire's pages with the driver of the accelerator.
      layout: what the optimizer wants; "split" needs a bfloat16 wire, "whole" a single row.
      resident: numbers of the blocks whose tensors do not live here but are made by `make_resident`.
      make_resident: called as `HostTensor`.

    Attributes:
      tensors: every `HostTensor` by name, or the `StackedTensor` of one that lies in several blocks.
      holds: blocks that may not be updated for now.
      lock_pages: as given.
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
        layout: Layout = "chunks",
        resident: Collection[int] = (),
        make_resident: Callable | None = None,
    ):
        self.spec, self.rows, self.layout, self.resident = spec, rows, layout, frozenset(resident)
        self.wire_dtype = BFLOAT16 if wire_dtype == "bfloat16" else np.dtype(np.float32)
        if layout == "split" and self.wire_dtype != BFLOAT16:
            raise ValueError("the split layout needs a bfloat16 wire")
        self.holds, self.lock_pages = Holds(), lock_pages
        self.tensors: dict[str, HostTensor | StackedTensor] = {}
        self.blocks: list[dict[str, HostTensor]] = []
        self._pages: list[Pages] = []
        # A float32 master in one piece can cross the link itself unless the link wants locked pages.
        master_is_wire = self.wire_dtype == np.float32 and not lock_pages
        for block, paths in enumerate(shapes):
            members, fresh = {}, []
            for path, shape in paths.items():
                name, is_part = spec.tensor_name(block, path), spec.experts_in(block) is not None
                if is_part or name not in self.tensors:
                    make = make_resident if block in self.resident else HostTensor
                    trained = trainable(name) and not is_buffer(name)
                    members[path] = make(name, shape, owner=block, trainable=trained, rows=rows)
                    if block not in self.resident:
                        fresh.append(members[path])
                    before = self.tensors[name].parts if name in self.tensors else ()
                    self.tensors[name] = StackedTensor((*before, members[path])) if is_part else members[path]
                else:
                    members[path] = self.tensors[name]
            self.blocks.append(members)
            wires = [[None] * len(rows.local)] * len(fresh)
            if not master_is_wire:
                wires = self._wire_memory(fresh, lock_pages)
            for tensor, wire in zip(fresh, wires, strict=True):
                # A buffer crosses in float32; it is frozen, so that it is its own wire.
                tensor.allocate([None] * len(wire) if is_buffer(tensor.name) else wire, layout)

    def _wire_memory(self, tensors: Sequence[HostTensor], lock: bool) -> list[list[np.ndarray]]:
        """Page-aligned memory for the wire of one block, each row on a boundary that the CPU backend can read in place."""
        strides = [math.ceil(tensor.row_length / ALIGN) * ALIGN for tensor in tensors]
        total = sum(stride * len(self.rows.local) for stride in strides)
        pages = Pages(total * self.wire_dtype.itemsize, lock=lock)
        self._pages.append(pages)
        memory, wires, start = pages.array.view(self.wire_dtype), [], 0
        for tensor, stride in zip(tensors, strides, strict=True):
            starts = [start + i * stride for i in range(len(self.rows.local))]
            wires.append([memory[at : at + tensor.row_length] for at in starts])
            start += stride * len(starts)
        return wires

    def owners(self, block: int) -> frozenset[int]:
        """Blocks whose updates change what block number `block` reads: itself, and the embedding for a tied head."""
        return frozenset(tensor.owner for tensor in self.blocks[block].values())

    def owned(self, block: int) -> dict[str, HostTensor]:
        """Trainable tensors by path whose gradients leave with block number `block`."""
        return {p: t for p, t in self.blocks[block].items() if t.owner == block and t.trainable}

    def units(self) -> list[tuple[list[int], list[HostTensor | StackedTensor]]]:
        """Blocks in order with the trainable tensors that they own; blocks that own parts of the same ones together."""
        units: list[tuple[list[int], list[HostTensor | StackedTensor]]] = []
        for block in range(len(self.blocks)):
            owned = [self.tensors[tensor.name] for tensor in self.owned(block).values()]
            if units and units[-1][1] == owned:
                units[-1][0].append(block)
            else:
                units.append(([block], owned))
        return units

    @property
    def num_parameters(self) -> int:
        return sum(tensor.size for tensor in self.tensors.values())

    @property
    def num_trainable(self) -> int:
        return sum(tensor.size for tensor in self.tensors.values() if tensor.trainable)
