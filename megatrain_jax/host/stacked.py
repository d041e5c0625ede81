"""A tensor whose parts live in several blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatrain_jax.host.layouts import Rule

if TYPE_CHECKING:
    from megatrain_jax.host.store import HostTensor, StateArray


class StackedTensor:
    """Parts along the first axis as one tensor, with the interface of `HostTensor` but for updates and the wire.

    Those are the parts' own, which makes it unfit for an optimizer that looks at a whole tensor. The parts carry the name
    of the whole.

    Attributes:
      parts: in order.
    """

    def __init__(self, parts: Sequence[HostTensor]):
        self.parts = tuple(parts)
        self.name, self.trainable = parts[0].name, parts[0].trainable
        self.shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        self.size = math.prod(self.shape)

    def assign(self, array: np.ndarray) -> None:
        """Sets the value from any float array of this shape."""
        if array.shape != self.shape:
            raise ValueError(f"{self.name}: expected shape {self.shape}, got {array.shape}")
        start = 0
        for part in self.parts:
            part.assign(array[start : start + part.shape[0]])
            start += part.shape[0]

    def read(self) -> np.ndarray:
        """A copy of the master, float32."""
        return np.concatenate([part.read() for part in self.parts])

    def init_state(self, rule: Rule) -> None:
        for part in self.parts:
            part.init_state(rule)

    def state(self) -> dict[str, StateArray]:
        """See `HostTensor.state`: what the tensor would have in one piece."""
        states = [part.state() for part in self.parts]
        return {key: self._whole([state[key] for state in states]) for key in states[0]}

    def _whole(self, arrays: Sequence[StateArray]) -> StateArray:
        if arrays[0].shape != self.parts[0].shape:  # the same everywhere, such as a count of steps

            def write_all(start: int, values: np.ndarray) -> None:
                for array in arrays:
                    array.write(start, values)

            return arrays[0]._replace(write=write_all)

        def read(start: int, out: np.ndarray) -> None:
            for array, at, where in self._overlaps(arrays, start, out.size):
                array.read(at, out[where])

        def write(start: int, values: np.ndarray) -> None:
            for array, at, where in self._overlaps(arrays, start, values.size):
                array.write(at, values[where])

        return arrays[0]._replace(shape=self.shape, read=read, write=write)

    def _overlaps(
        self, arrays: Sequence[StateArray], start: int, count: int
    ) -> Iterator[tuple[StateArray, int, slice]]:
        """Arrays of parts that overlap a range of the whole: where in each the overlap starts, and where in the range."""
        first = 0
        for part, array in zip(self.parts, arrays, strict=True):
            low, high = max(start, first), min(start + count, first + part.size)
            if low < high:
                yield array, low - first, slice(low - start, high - start)
            first += part.size
