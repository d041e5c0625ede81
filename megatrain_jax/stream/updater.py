"""The optimizer's thread: takes the landed gradients of the block that the next forward needs soonest."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax.host.layouts import cpu_device, view
from megatrain_jax.host.optimizer import HostOptimizer
from megatrain_jax.host.store import HostStore
from megatrain_jax.stream.events import Recorder
from megatrain_jax.stream.resident import update_block
from megatrain_jax.stream.transfer import DeviceGradients, HostGradients
from megatrain_jax.watchdog import waiting

TURN = 1 << 25  # elements of a table after which the thread looks again what is needed first: some 10 ms


class NonFiniteError(ArithmeticError):
    """A gradient is infinite or not a number, and the step was not to be skipped."""


@jax.jit
def _squared_norm(g):
    return jnp.sum(jnp.square(g.astype(jnp.float32)))


_add = jax.jit(lambda total, g: total + g.astype(jnp.float32), donate_argnums=0)


class HostSums:
    """Gradients of a block summed in float32 over groups of micro-batches, on the CPU backend.

    Has the interface of `HostGradients`.
    """

    def __init__(self, first: HostGradients, paths: Iterable[str]):
        with waiting("gradients of a block to arrive in host memory"):
            first.wait()
        put = lambda row: jax.device_put(row, cpu_device())  # noqa: E731
        self._rows = {path: [put(row).astype(jnp.float32) + 0 for row in first.rows(path)] for path in paths}

    def add(self, grads: HostGradients) -> None:
        with waiting("gradients of a block to arrive in host memory"):
            grads.wait()
        for path, rows in self._rows.items():
            self._rows[path] = [
                _add(total, jax.device_put(row, cpu_device()))
                for total, row in zip(rows, grads.rows(path), strict=True)
            ]

    def squared_norm(self) -> float:
        """Over the rows of this process."""
        return math.fsum(float(_squared_norm(row)) for rows in self._rows.values() for row in rows)

    def is_ready(self) -> bool:
        return True

    def wait(self) -> None:
        jax.block_until_ready(self._rows)

    def rows(self, path: str) -> list[np.ndarray]:
        return [view(row) for row in self._rows[path]]


@dataclasses.dataclass
class _Job:
    """An update.

    Attributes:
      left: where the block is a table that is updated in turns, which of its rows still are to be; else None.
      begun: something was written.
      later: the rows that the next forward needs are written, so other blocks come first.
    """

    block: int
    grads: HostGradients | HostSums
    scale: float
    must_be_finite: bool
    left: np.ndarray | None
    begun: bool = False
    later: bool = False


class Updater:
    """Runs updates in a thread of its own.

    A block whose update was submitted is *pending* until its weights are written; `wait` is how the dispatching thread
    learns that. Of an embedding whose rows can be updated in any order the next forward needs a few: `wait_for_rows` brings
    them forward, and the rest is done when no other block waits, so that it does not lie between two steps. An exception
    in the thread ends it, and is raised by the next call. As a context manager it is closed at the end, and does not begin
    what is left if an exception ends it.
    """

    def __init__(self, store: HostStore, optimizer: HostOptimizer, record: Recorder):
        self._store, self._optimizer, self._record = store, optimizer, record
        self._changed = threading.Condition()
        self._jobs: dict[int, _Job] = {}
        self._pending: dict[int, _Job] = {}
        self._wanted: np.ndarray | None = None  # rows of the embedding that the dispatching thread waits for
        owned = [tensor for tensor in store.owned(0).values() if not tensor.resident]
        in_turns = len(owned) == 1 and owned[0].is_table and owned[0].size > TURN
        self._table = owned[0] if in_turns else None
        self._error: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="megatrain-optimizer", daemon=True)
        self._thread.start()

    def submit(self, block: int, grads: HostGradients | HostSums, scale: float, must_be_finite: bool = False) -> None:
        """Asks for the update of a block.

        Args:
          block: its number; it must not be pending, but for what `wait_for_rows` has left of the embedding.
          grads: its gradients, which need not have landed yet.
          scale: they are multiplied by this.
          must_be_finite: check the squared norm that came with the gradients before anything is changed.
        """
        with self._changed:
            if block in self._pending and self._pending[block].later:
                self.wait([block])
            self._raise_error()
            if block in self._pending:
                raise RuntimeError(f"block {block} is still being updated")
            left = np.ones(self._table.shape[0], bool) if block == 0 and self._table is not None else None
            self._jobs[block] = self._pending[block] = _Job(block, grads, scale, must_be_finite, left)
            self._changed.notify_all()

    def update_resident(self, block: int, grads: DeviceGradients, scale: float) -> None:
        """Starts the update of a block that lives on the device, which it skips itself if a gradient is not finite."""
        with waiting(f"block {block} to be written to the checkpoint"):
            self._store.holds.wait(block)
        owned = self._store.owned(block)
        rules = [self._optimizer.rule(tensor) for tensor in owned.values()]
        arrays = [grads.arrays[path] for path in owned]
        done = update_block(list(owned.values()), rules, arrays, grads.sumsq, scale)
        self._record.watch("device update", block, None, done)

    def is_pending(self, blocks: Iterable[int]) -> bool:
        with self._changed:
            self._raise_error()
            return not self._pending.keys().isdisjoint(blocks)

    def wait(self, blocks: Iterable[int]) -> None:
        """Returns when none of the blocks is pending."""
        blocks = set(blocks)
        with self._changed:
            while self._error is None and (left := self._pending.keys() & blocks):
                for block in left:
                    self._pending[block].later = False
                more = f" and {len(left) - 1} more" if len(left) > 1 else ""
                with waiting(f"the update of block {min(left)}{more}"):
                    self._changed.wait()
            self._raise_error()

    def wait_for_rows(self, ids: np.ndarray) -> None:
        """Returns when the rows of the embedding that `ids` name are written; ids of no row are passed over."""
        with self._changed:
            job = self._pending.get(0)
            if job is None or job.left is None:
                self.wait([0])
                return
            wanted = np.unique(ids)
            wanted = wanted[(wanted >= 0) & (wanted < job.left.size)]
            while self._error is None and 0 in self._pending and job.left[wanted].any():
                self._wanted = wanted
                self._changed.notify_all()
                with waiting("the update of rows of the embedding"):
                    self._changed.wait()
            self._wanted, job.later = None, True
            self._raise_error()

    def drain(self) -> None:
        """Returns when no block is pending."""
        self.wait(range(len(self._store.blocks)))

    def close(self, *, finish: bool = True) -> None:
        """Finishes what was submitted, or only the update in progress, and ends the thread."""
        with self._changed:
            self._closing = True
            if not finish:
                self._jobs = {block: job for block, job in self._jobs.items() if job.begun}
            self._changed.notify_all()
        with waiting("the end of the optimizer's thread"):
            self._thread.join()

    def __enter__(self) -> Updater:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self.close(finish=error is None)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                if not job.begun:
                    self._begin(job)
                self._record("update", job.block)
                if job.left is None:
                    for path, tensor in self._store.owned(job.block).items():
                        self._optimizer.update(tensor, job.grads.rows(path), job.scale)
                else:
                    self._update_rows(job)
                self._record("update done", job.block)
                with self._changed:
                    if job.left is not None and job.left.any():
                        self._jobs[job.block] = job
                    else:
                        del self._pending[job.block]
                    del job  # whoever waits finds its gradients gone
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the dispatching thread must not wait for ever
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _begin(self, job: _Job) -> None:
        """Waits for what the update needs."""
        block = job.block
        with waiting(f"the gradients of block {block} to arrive in host memory"):
            job.grads.wait()
        if job.must_be_finite and not np.isfinite(np.asarray(job.grads.sumsq.addressable_data(0))):
            raise NonFiniteError(
                f"the gradient is not finite at or after block {block}; training.skip_nonfinite: true skips such steps"
            )
        with waiting(f"block {block} to be written to the checkpoint"):
            self._store.holds.wait(block)
        job.begun = True

    def _update_rows(self, job: _Job) -> None:
        """Updates the rows of the embedding that are waited for, else as many as make a turn."""
        left, turn = np.flatnonzero(job.left), max(1, TURN // self._table.shape[1])
        with self._changed:
            wanted = [] if self._wanted is None else self._wanted[job.left[self._wanted]]
        numbers = wanted if len(wanted) else left[:turn]
        (path,) = self._store.owned(job.block)
        last = numbers.size == left.size
        self._optimizer.update_table_rows(self._table, job.grads.rows(path), job.scale, numbers, last=last)
        with self._changed:
            job.left[numbers] = False
            job.later = job.later or numbers is wanted

    def _next(self) -> _Job | None:
        """The update to do next: of those that have landed the one needed first, else the one that lands first."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closing)
            if not self._jobs:
                return None
            landed = [job for job in self._jobs.values() if job.begun or job.grads.is_ready()]
            job = min(landed, key=lambda job: (job.later, job.block)) if landed else next(iter(self._jobs.values()))
            return self._jobs.pop(job.block)
