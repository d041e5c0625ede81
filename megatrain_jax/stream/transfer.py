"""The only file that moves bytes between host and device; every placement goes through one `Mesh`.

* Host to device: `jax.device_put` of a NumPy view whose pages are registered. No staging copy is made.
* Device to host: `jax.device_put` to pinned host memory, then `np.asarray`, which copies nothing. `np.asarray` of a
  device array would block and reach a thirtieth of the link's speed.
* On the CPU backend host and device are one: weights are read in place, gradients are where they should be.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from megatrain_jax.config import UserError
from megatrain_jax.host.pages import Pages
from megatrain_jax.host.store import HostTensor, Rows
from megatrain_jax.models.spec import Batch

AXIS = "data"
_INDEX = 32  # of 256 bytes that an allocator of jax manages it keeps a number of 8
_RUNTIME = 5 << 28  # Python, CUDA's libraries, jax and what it compiled took 0.8 to 1.5 GiB on one H200,
_RUNTIME_MORE = 1 << 31  # and on two of them 1.9 GiB more


@dataclasses.dataclass(frozen=True)
class Mesh:
    """One or more devices that share every step; batches are split over them, weights cross as one row to each.

    Attributes:
      devices: all devices, of every process, in mesh order.
    """

    devices: tuple[jax.Device, ...]

    @property
    def size(self) -> int:
        return len(self.devices)

    @property
    def local(self) -> tuple[int, ...]:
        """Positions of this process' devices."""
        return tuple(i for i, d in enumerate(self.devices) if d.process_index == jax.process_index())

    @property
    def rows(self) -> Rows:
        return Rows(self.size, self.local)

    @property
    def platform(self) -> str:
        return self.devices[0].platform

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Generation of the oldest GPU, such as (9, 0) for Hopper; None where the devices are no NVIDIA GPUs."""
        found = [getattr(device, "compute_capability", None) for device in self.devices]
        return None if None in found else min(tuple(int(n) for n in text.split(".")) for text in found)

    @property
    def has_own_memory(self) -> bool:
        """Whether bytes must cross a link to reach the devices."""
        return self.platform != "cpu"

    def sharding(self, *spec: str | None, memory_kind: str | None = None) -> jax.sharding.Sharding:
        """Placement of an array whose dimensions are split as `spec`; without any, it is replicated."""
        if self.size == 1:
            return SingleDeviceSharding(self.devices[0], memory_kind=memory_kind)
        mesh = jax.sharding.Mesh(np.asarray(self.devices), (AXIS,))
        return NamedSharding(mesh, PartitionSpec(*spec), memory_kind=memory_kind)

    def put_weights(self, tensors: Mapping[str, HostTensor]) -> dict[str, jax.Array]:
        """Starts the copy of a block's weights; on n > 1 devices each arrives as its rows ``[n, row_length]``.

        The host buffers may be rewritten once every computation that reads the result has finished, not before.
        """
        there = {path: tensor.on_device() for path, tensor in tensors.items() if tensor.resident}
        coming = {path: tensor for path, tensor in tensors.items() if not tensor.resident}
        if self.size == 1:
            return there | jax.device_put({p: t.wire[0].reshape(t.shape) for p, t in coming.items()}, self.sharding())
        return there | {
            path: self._assemble((self.size, tensor.row_length), [row[None] for row in tensor.wire])
            for path, tensor in coming.items()
        }

    def weight_bytes(self, tensors: Mapping[str, HostTensor]) -> int:
        """What `put_weights` moves from this process' host memory."""
        return sum(row.nbytes for tensor in tensors.values() if not tensor.resident for row in tensor.wire)

    def put_batch(self, batch: Batch) -> Batch:
        """Copies a batch of NumPy arrays to the devices, its rows split evenly; padded with rows of zero weight."""
        missing = -len(batch.token_ids) % self.size
        return Batch(*(self.put_rows(np.pad(field, [(0, missing), (0, 0)])) for field in batch))

    def put_rows(self, array: np.ndarray) -> jax.Array:
        """Copies an array to the devices, its leading axis, which they divide, split evenly."""
        # A copy, because the caller may reuse its arrays and the CPU backend would read them in place.
        if self.size == 1:
            return jax.device_put(array.copy(), self.sharding())
        parts = np.split(array, self.size)
        return self._assemble(array.shape, [parts[i].copy() for i in self.local])

    def _assemble(self, shape: tuple[int, ...], parts: Sequence[np.ndarray]) -> jax.Array:
        arrays = [jax.device_put(part, self.devices[i]) for i, part in zip(self.local, parts, strict=True)]
        return jax.make_array_from_single_device_arrays(shape, self.sharding(AXIS), arrays)

    def gradients_to_host(self, grads: Mapping[str, jax.Array], sumsq: jax.Array) -> HostGradients:
        """Starts the copy of a block's gradients, and of the running squared norm, to host memory."""
        return HostGradients({path: self.to_host(grad) for path, grad in grads.items()}, self.to_host(sumsq))

    def to_host(self, x: jax.Array) -> jax.Array:
        """Starts the copy of a device array to pinned host memory, split over devices as it was.

        Raises:
          UserError: the pool of pinned memory has no room for it.
        """
        return _to_pinned(x, x.sharding.with_memory_kind("pinned_host")) if self.has_own_memory else x

    def to_device(self, x: jax.Array) -> jax.Array:
        """Starts the copy back of what `to_host` gave."""
        return jax.device_put(x, x.sharding.with_memory_kind("device")) if self.has_own_memory else x

    def memory_bytes(self) -> int | None:
        """Memory of each device that arrays may take, None where the devices have none of their own."""
        stats = self.devices[0].memory_stats() if self.has_own_memory else None
        return stats["bytes_limit"] if stats else None

    def reserve_pinned(self, nbytes: int) -> None:
        """Makes jax take the pinned memory that so many bytes need, before a step needs it, and each device's in one piece.

        Its pools would otherwise grow in steps that double, in the middle of a step: the pieces are too many or too large
        by then, and on several devices the driver may wait for a collective to end that waits for another device.

        Raises:
          UserError: a pool may not be as large.
        """
        if not self.has_own_memory or not nbytes:
            return
        each = np.zeros(-(-nbytes // self.size), np.uint8)  # pages that nobody has written take no memory
        places = [SingleDeviceSharding(self.devices[i], memory_kind="pinned_host") for i in self.local]
        jax.block_until_ready([_to_pinned(each, place) for place in places])

    def runtime_bytes(self, pinned: int) -> int:
        """Host memory that jax, the driver and Python take besides `pinned` bytes that pass through pinned memory.

        A pool takes a power of two, or its limit if that is less, and an index of what it and the device's hold.
        """
        if not self.has_own_memory:
            return 0
        limit = int(os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64)) << 30
        pools = len(self.local) * min(1 << max(-(-pinned // self.size) - 1, 0).bit_length(), limit)
        indexed = pools + len(self.local) * (self.memory_bytes() or 0)
        return max(pools - pinned, 0) + indexed // _INDEX + _RUNTIME + (len(self.local) - 1) * _RUNTIME_MORE

    def peak_bytes(self) -> int | None:
        """The most memory that arrays took so far on any device of this process."""
        stats = [self.devices[i].memory_stats() for i in self.local] if self.has_own_memory else []
        return max((s["peak_bytes_in_use"] for s in stats if s), default=None)

    def scalar(self, x: jax.Array) -> float:
        """Waits for a scalar that is the same on every device."""
        return float(x.addressable_data(0))

    def sum_over_processes(self, x: float) -> float:
        """The sum of one number of each process, the same in all of them."""
        if jax.process_count() == 1:
            return x
        from jax.experimental import multihost_utils

        return float(np.sum(multihost_utils.process_allgather(np.float64(x))))

    def gather(self, x: jax.Array) -> np.ndarray:
        """A copy of a whole device array; across processes when there are several. Not for the hot path."""
        if jax.process_count() > 1 and not x.is_fully_replicated:
            from jax.experimental import multihost_utils

            return np.array(multihost_utils.process_allgather(x, tiled=True))
        return np.array(x)


def _to_pinned(x: jax.Array | np.ndarray, place: jax.sharding.Sharding) -> jax.Array:
    try:
        return jax.device_put(x, place)
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        # What jax says would pass for a lack of device memory.
        raise UserError(
            f"host memory: jax's pool of pinned memory has no room for another {x.nbytes / 2**30:.2f} GiB; lower "
            "training.batch_size, or set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB (its limit in GiB) higher"
        ) from error


class TableRows:
    """Copies the rows of a table that some ids name, in place of the whole table.

    Args:
      mesh: where to.
      table: a tensor of two dimensions.
      lock: gather them in page-locked memory.

    Attributes:
      usable: whether the rows can be had here: the table is in host memory, in one piece.
    """

    def __init__(self, mesh: Mesh, table: HostTensor, *, lock: bool):
        self._mesh, self._table, self._lock = mesh, table, lock
        self.usable = mesh.size == 1 and not table.resident
        self._pages: Pages | None = None

    def put(self, ids: np.ndarray) -> jax.Array:
        """Rows ``[*ids.shape, width]``; they are on the device, and the gathering memory is free again, on return.

        Raises:
          ValueError: an id names no row.
        """
        height, width = self._table.shape
        if ids.size and not 0 <= ids.min() <= ids.max() < height:
            raise ValueError(f"token ids must be in [0, {height}), got {ids.min()} to {ids.max()}")
        wire = self._table.wire[0]
        raw = np.dtype(f"u{wire.itemsize}")  # NumPy lets other threads run while it moves numbers that it knows
        table, flat = wire.view(raw).reshape(height, width), ids.reshape(-1)
        out = self._memory(flat.size * width * wire.itemsize).view(raw).reshape(flat.size, width)

        def gather(part: slice) -> None:
            np.take(table, flat[part], axis=0, out=out[part], mode="clip")

        step = max(1, -(-flat.size // _GATHERERS))
        list(_gatherers().map(gather, (slice(i, i + step) for i in range(0, flat.size, step))))
        rows = jax.device_put(out.view(wire.dtype).reshape(*ids.shape, width), self._mesh.sharding())
        return rows.block_until_ready()

    def _memory(self, nbytes: int) -> np.ndarray:
        if not self._mesh.has_own_memory:
            return np.empty(
                nbytes, np.uint8
            )  # not reused: the CPU backend may read it in place for as long as it likes
        if self._pages is None or self._pages.array.size < nbytes:
            self._pages = Pages(nbytes, lock=self._lock)
        return self._pages.array[:nbytes]


_GATHERERS = min(16, os.cpu_count() or 1)


@functools.lru_cache(maxsize=1)
def _gatherers() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(_GATHERERS, thread_name_prefix="megatrain-gather")


class DeviceGradients(NamedTuple):
    """Gradients of a block that stays on the device. Attributes as those of `HostGradients`."""

    arrays: Mapping[str, jax.Array]
    sumsq: jax.Array


class HostGradients:
    """Gradients of a block on their way to host memory.

    Attributes:
      arrays: by path, in host memory.
      sumsq: squared norm of the gradients of this block and those before it in the step, a scalar in host memory.
    """

    def __init__(self, arrays: dict[str, jax.Array], sumsq: jax.Array):
        self.arrays, self.sumsq = arrays, sumsq

    @property
    def nbytes(self) -> int:
        """What moves to this process' host memory."""
        return sum(shard.data.nbytes for array in self.arrays.values() for shard in array.addressable_shards)

    def wait(self) -> None:
        jax.block_until_ready((self.arrays, self.sumsq))

    def rows(self, path: str) -> list[np.ndarray]:
        """One flat array per local row, read in place: valid while this object is alive."""
        shards = sorted(self.arrays[path].addressable_shards, key=lambda s: s.index[0].start or 0 if s.index else 0)
        return [np.asarray(shard.data).reshape(-1) for shard in shards]

    def is_ready(self) -> bool:
        return all(array.is_ready() for array in self.arrays.values())


def make_mesh(device: str) -> Mesh:
    """The mesh of a `model.device` setting: "auto", "cpu", "cuda", "cuda:N" or "all".

    "auto" and "cuda" are the first accelerator of each process; "auto" falls back to the CPU where there is none.

    Raises:
      UserError: an accelerator was asked for and jax sees none, or jax is too old to copy from registered pages.
    """
    if device == "cpu":
        return Mesh(_per_process("cpu", 0))
    if device != "auto" or os.path.exists("/proc/driver/nvidia/version"):
        # The CPU backend has only the optimizer then, whose threads are to compute instead of waiting for threads of XLA's. It
        # has to be known before there is a backend.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    name, _, index = device.partition(":")
    try:
        found = jax.devices("cuda")
    except RuntimeError as error:
        if device == "auto":
            return Mesh(_per_process("cpu", 0))
        raise UserError(
            f"model.device: {device!r} was asked for and jax sees no GPU ({str(error).strip()}); install the cuda extra "
            "(pip install 'megatrain_jax[cuda]'), or set model.device: cpu"
        ) from None
    if tuple(int(part) for part in jax.__version__.split(".")[:3]) < (0, 11, 1):
        raise UserError(f"jax {jax.__version__} copies weights at a sixth of the link's speed: install jax>=0.11.1")
    if name == "all":
        return Mesh(tuple(found))
    number = int(index or 0)
    if number >= len(jax.local_devices(backend="cuda")):
        raise UserError(f"model.device: {device!r}: there are {len(jax.local_devices(backend='cuda'))} GPUs")
    return Mesh(_per_process("cuda", number))


def _per_process(backend: str, number: int) -> tuple[Any, ...]:
    every = jax.devices(backend)
    return tuple([d for d in every if d.process_index == p][number] for p in sorted({d.process_index for d in every}))
