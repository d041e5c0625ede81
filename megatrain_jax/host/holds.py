"""Blocks whose training state must stay as it is for a while, because it is being written to disk."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class Holds:
    """Who writes a checkpoint takes hold of every block at once and releases each when it is on disk.

    Between a block's update and the next one nothing writes its state, so it is read without a copy in that time. The
    next update of a block that is still held waits.
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._held: set[int] = set()

    def take(self, blocks: Iterable[int]) -> None:
        """Holds blocks. Their updates of this step must be done, and none may have been asked for since."""
        with self._changed:
            self._held |= set(blocks)

    def release(self, blocks: Iterable[int]) -> None:
        with self._changed:
            self._held -= set(blocks)
            self._changed.notify_all()

    def wait(self, block: int) -> None:
        """Returns when the block is not held."""
        with self._changed:
            self._changed.wait_for(lambda: block not in self._held)
