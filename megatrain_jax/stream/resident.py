"""Tensors of blocks that stay on the device, weights and optimizer state, and are updated there by optax."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax.host import rounding
from megatrain_jax.host.layouts import Rule
from megatrain_jax.host.store import Rows, StateArray
from megatrain_jax.models.spec import is_buffer
from megatrain_jax.stream.transfer import Mesh


@functools.partial(jax.jit, static_argnames="steps", donate_argnames=("params", "states"))
def _update(params, states, grads, sumsq, scale, *, steps):
    """One step of every tensor, or nothing if the gradient is not finite; and a scalar that comes with the results."""
    finite, results = jnp.isfinite(sumsq), []
    for step, param, state, grad in zip(steps, params, states, grads, strict=True):
        new_params, new_state = step([param], state, [grad], scale)
        keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
        results.append((keep(new_params[0], param), jax.tree.map(keep, new_state, state)))
    return results, finite


def update_block(
    tensors: Sequence[ResidentTensor], rules: Sequence[Rule], grads: Sequence[jax.Array], sumsq: jax.Array, scale: float
) -> jax.Array:
    """Starts one step of a block's tensors on the device, in one call: a step has tens of them, and no time between two.

    Args:
      tensors, rules, grads: for each tensor what to do, and its gradient as a template gives it.
      sumsq: a scalar on the device; if it is not finite, nothing changes.
      scale: the gradients are multiplied by it.

    Returns:
      A scalar that is ready when the step is done; the tensors themselves are given to the next step.
    """
    params, states = [t._params for t in tensors], [t._state for t in tensors]
    results, done = _update(params, states, list(grads), sumsq, np.float32(scale), steps=tuple(r.step for r in rules))
    for tensor, (param, state) in zip(tensors, results, strict=True):
        tensor._params, tensor._state = param, state
    return done


_cast = jax.jit(rounding.to_dtype, static_argnames="dtype")
_copy = jax.jit(lambda x: x + 0)
_slice = jax.jit(
    lambda x, start, length: jax.lax.dynamic_slice(x.reshape(-1), (start,), (length,)), static_argnames="length"
)


class ResidentTensor:
    """Has the interface of `HostTensor`, but for the wire: `on_device` gives what a template reads.

    On n devices it is split as rows ``[n, row_length]``, as a streamed tensor is when it arrives.
    """

    resident = True

    def __init__(
        self, name: str, shape: tuple[int, ...], *, owner: int, trainable: bool, rows: Rows, mesh: Mesh, dtype
    ):
        self.name, self.shape, self.owner, self.trainable, self.rows = name, shape, owner, trainable, rows
        self.size = math.prod(shape)
        self.row_length = math.ceil(self.size / rows.count)
        self._mesh, self._dtype = mesh, np.dtype("float32" if is_buffer(name) else dtype)
        self._params: jax.Array | None = None
        self._state: Any = None

    def on_device(self) -> jax.Array:
        """The weights in the wire dtype."""
        return _cast(self._params, self._dtype)

    def assign(self, array: np.ndarray) -> None:
        """Sets the value from any float array of this shape."""
        if array.shape != self.shape:
            raise ValueError(f"{self.name}: expected shape {self.shape}, got {array.shape}")
        self._params = self._put(array.astype(np.float32))

    def _put(self, array: np.ndarray) -> jax.Array:
        """An array with a value for each element, split as the weights are. A copy that nobody else can write to."""
        if self._mesh.size == 1:
            return _copy(jax.device_put(array.reshape(self.shape), self._mesh.sharding()))
        flat = np.pad(array.reshape(-1), (0, self.row_length * self.rows.count - self.size))
        return _copy(self._mesh.put_rows(flat.reshape(self.rows.count, -1)))

    def _gather(self, x: jax.Array) -> np.ndarray:
        return self._mesh.gather(x).reshape(-1)[: self.size].reshape(self.shape)

    def read(self) -> np.ndarray:
        """A copy of the master, float32."""
        return self._gather(self._params)

    def init_state(self, rule: Rule) -> None:
        # Zeros depend on nothing, so they would be whole on every device.
        split = lambda leaf: self._params.sharding if leaf.shape == self._params.shape else self._mesh.sharding()  # noqa: E731
        shardings = jax.tree.map(split, jax.eval_shape(rule.init, [self._params]))
        self._state = jax.jit(rule.init, out_shardings=shardings)([self._params])

    def state(self) -> dict[str, StateArray]:
        """See `HostTensor.state`."""
        leaves = [("master", self._params, True), *self._leaves()]
        arrays: dict[str, jax.Array] = {}  # what was written so far; it becomes the state when everything has come

        def array(key: str, leaf: jax.Array, elementwise: bool) -> StateArray:
            shape = self.shape if elementwise else leaf.shape
            coming = np.empty(0, leaf.dtype)

            def write(start: int, values: np.ndarray) -> None:
                nonlocal coming
                if not start:
                    coming = np.empty(math.prod(shape), leaf.dtype)
                coming[start : start + values.size] = values
                if start + values.size == coming.size:
                    placed = self._put(coming) if elementwise else jax.device_put(coming.reshape(shape), leaf.sharding)
                    coming = np.empty(0, leaf.dtype)
                    # Until it has arrived, what it comes from takes host memory, beside what is read next.
                    arrays[key] = jax.block_until_ready(placed if elementwise else _copy(placed))
                    if len(arrays) == len(leaves):
                        self._params, *state = (arrays[key] for key, *_ in leaves)
                        self._state = jax.tree.unflatten(jax.tree.structure(self._state), state)

            return StateArray(shape, np.dtype(leaf.dtype), functools.partial(self._read, leaf), write)

        return {key: array(key, leaf, elementwise) for key, leaf, elementwise in leaves}

    def _read(self, leaf: jax.Array, start: int, out: np.ndarray) -> None:
        """Fills `out` with elements of the flat view, shard by shard, so that each is sliced where it is."""
        starts = lambda shard: shard.index[0].start or 0 if shard.index else 0  # noqa: E731
        shards = {starts(shard): shard.data for shard in leaf.addressable_shards}  # equal copies count once
        first = 0
        for _, data in sorted(shards.items()):
            low, high = max(start, first), min(start + out.size, first + data.size)
            if low < high:
                part = self._mesh.to_host(_slice(data, low - first, length=high - low))
                out[low - start : high - start] = np.asarray(part)
            first += data.size

    def _leaves(self) -> list[tuple[str, jax.Array, bool]]:
        """Path in optax' state, array, and whether it has a value for each element."""
        found = []
        for path, leaf in jax.tree_util.tree_flatten_with_path(self._state)[0]:
            elementwise = leaf.shape == self._params.shape and bool(path) and hasattr(path[-1], "idx")
            found.append((jax.tree_util.keystr(path[:-1] if elementwise else path), leaf, elementwise))
        return found
