"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain_jax.checkpoint import state
from megatrain_jax.host.store import HostStore
from megatrain_jax.watchdog import waiting


class _Abandoned(Exception):
    """The save is not wanted any more."""


class Saver:
    """Writes one checkpoint at a time in a thread of its own.

    When a save starts, every block is held (`Holds`): a block is written between two of its updates, in the order in which
    a step updates them, so that training waits only if it comes round to a block before the disk does.

    Args:
      output_dir: where the folders ``checkpoint-N`` are.
      store: what is written.
      limit: newest checkpoints that are kept, None for all.
      files: small files that go into every checkpoint.
    """

    def __init__(self, output_dir: Path, store: HostStore, limit: int | None, files: Mapping[str, bytes] = {}):
        self._output, self._store, self._limit, self._files = output_dir, store, limit, files
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="megatrain-checkpoint")
        self._abandoned = threading.Event()
        self._running: concurrent.futures.Future[str] | None = None

    def start(self, step: int, run: Mapping[str, Any]) -> None:
        """Starts writing ``checkpoint-STEP``. No save may be running and no update be pending.

        Args:
          run: see `state.save`.
        """
        blocks = range(len(self._store.blocks))
        self._store.holds.take(blocks)
        self._running = self._thread.submit(self._save, self._output / f"checkpoint-{step}", run, blocks)

    @property
    def is_running(self) -> bool:
        return self._running is not None and not self._running.done()

    def result(self) -> str | None:
        """Waits for the save that was started; a line about it the first time, then None. Raises what ended it."""
        running, self._running = self._running, None
        if running is None:
            return None
        with waiting("the end of the checkpoint that is being written"):
            return running.result()

    def close(self, *, abandon: bool = False) -> None:
        """Ends the thread, after the save that is running, or at once if it is abandoned; that leaves nothing behind."""
        if abandon:
            self._abandoned.set()
        try:
            with waiting("the end of the checkpoint that is being written"):
                self._thread.shutdown()
        except BaseException:  # such as Ctrl-C: Python itself would wait for the thread otherwise
            self._abandoned.set()
            raise

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error the checkpoint that is being written is still good; who interrupts twice does not want to wait.
        self.close(abandon=kind is not None and not issubclass(kind, Exception))

    def _save(self, folder: Path, run: Mapping[str, Any], blocks: range) -> str:
        started = time.perf_counter()
        try:
            state.save(
                folder,
                self._store,
                run,
                files=self._files,
                done_with=lambda block: self._store.holds.release([block]),
                check=self._check,
            )
            state.prune(self._output, self._limit)
        finally:
            self._store.holds.release(blocks)
        return f"saved      {folder.name} in {time.perf_counter() - started:.1f} s"

    def _check(self) -> None:
        if self._abandoned.is_set():
            raise _Abandoned
