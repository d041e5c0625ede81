"""Where block inputs wait for the backward pass: on the device, or in host memory when they do not fit there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from megatrain_jax.stream.transfer import Mesh


class Activations:
    """Inputs of blocks by (block, micro-batch), trees of arrays; each is put once, optionally prefetched, and taken once.

    Args:
      mesh: moves them.
      offload: keep them in pinned host memory between `put` and `prefetch`.
    """

    def __init__(self, mesh: Mesh, *, offload: bool):
        self._mesh, self._offload = mesh, offload
        self._kept: dict[tuple[int, int], Any] = {}
        self._coming: dict[tuple[int, int], Any] = {}
        self._pullbacks: dict[tuple[int, int], Callable] = {}

    def put(self, block: int, micro_batch: int, x: Any) -> None:
        self._kept[block, micro_batch] = jax.tree.map(self._mesh.to_host, x) if self._offload else x

    def prefetch(self, block: int, micro_batch: int) -> None:
        """Starts the copy back; nothing happens if there is no such input."""
        x = self._kept.pop((block, micro_batch), None)
        if x is not None:
            self._coming[block, micro_batch] = jax.tree.map(self._mesh.to_device, x) if self._offload else x

    def take(self, block: int, micro_batch: int) -> Any:
        """The input, on the device; it is forgotten here."""
        if (block, micro_batch) not in self._coming:
            self.prefetch(block, micro_batch)
        return self._coming.pop((block, micro_batch))

    def put_pullback(self, block: int, micro_batch: int, pullback: Callable) -> None:
        """Keeps, on the device, everything that a block's backward needs."""
        self._pullbacks[block, micro_batch] = pullback

    def take_pullback(self, block: int, micro_batch: int) -> Callable:
        return self._pullbacks.pop((block, micro_batch))
