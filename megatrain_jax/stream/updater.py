"""The optimizer's thread: takes the landed gradients of the block that the next forward needs soonest."""

from __future__ import annotations

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


class Updater:
    """Runs updates in a thread of its own.

    A block whose update was submitted is *pending* until its weights are written; `wait` is how the dispatching thread
    learns that. An exception in the thread ends it, and is raised by the next `submit`, `is_pending`, `wait` or `drain`.
    As a context manager it is closed at the end, and does not begin what is left if an exception ends it.
    """

    def __init__(self, store: HostStore, optimizer: HostOptimizer, record: Recorder):
        self._store, self._optimizer, self._record = store, optimizer, record
        self._changed = threading.Condition()
        self._jobs: dict[int, tuple[HostGradients | HostSums, float, bool]] = {}
        self._pending: set[int] = set()
        self._error: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="megatrain-optimizer", daemon=True)
        self._thread.start()

    def submit(self, block: int, grads: HostGradients | HostSums, scale: float, must_be_finite: bool = False) -> None:
        """Asks for the update of a block.

        Args:
          block: its number; it must not be pending.
          grads: its gradients, which need not have landed yet.
          scale: they are multiplied by this.
          must_be_finite: check the squared norm that came with the gradients before anything is changed.
        """
        with self._changed:
            self._raise_error()
            if block in self._pending:
                raise RuntimeError(f"block {block} is still being updated")
            self._pending.add(block)
            self._jobs[block] = (grads, scale, must_be_finite)
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
            return not self._pending.isdisjoint(blocks)

    def wait(self, blocks: Iterable[int]) -> None:
        """Returns when none of the blocks is pending."""
        blocks = set(blocks)
        with self._changed:
            while self._error is None and (left := self._pending & blocks):
                more = f" and {len(left) - 1} more" if len(left) > 1 else ""
                with waiting(f"the update of block {min(left)}{more}"):
                    self._changed.wait()
            self._raise_error()

    def drain(self) -> None:
        """Returns when no block is pending."""
        self.wait(range(len(self._store.blocks)))

    def close(self, *, finish: bool = True) -> None:
        """Finishes what was submitted, or only the update in progress, and ends the thread."""
        with self._changed:
            self._closing = True
            if not finish:
                self._jobs.clear()
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
                block, grads, scale, must_be_finite = job
                del job
                with waiting(f"the gradients of block {block} to arrive in host memory"):
                    grads.wait()
                if must_be_finite and not np.isfinite(np.asarray(grads.sumsq.addressable_data(0))):
                    raise NonFiniteError(
                        f"the gradient is not finite at or after block {block}; training.skip_nonfinite: true skips such steps"
                    )
                with waiting(f"block {block} to be written to the checkpoint"):
                    self._store.holds.wait(block)
                self._record("update", block)
                for path, tensor in self._store.owned(block).items():
                    self._optimizer.update(tensor, grads.rows(path), scale)
                del grads
                self._record("update done", block)
                with self._changed:
                    self._pending.discard(block)
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the dispatching thread must not wait for ever
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> tuple[int, HostGradients | HostSums, float, bool] | None:
        """The update to do next: of those that have landed the one needed first, else the one that lands first."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closing)
            if not self._jobs:
                return None
            landed = [block for block, (grads, *_) in self._jobs.items() if grads.is_ready()]
            block = min(landed) if landed else next(iter(self._jobs))
            return block, *self._jobs.pop(block)
