"""Tensors of blocks that stay on the device, weights and optimizer state, and are updated there by optax."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax.host.layouts import Rule
from megatrain_jax.host.store import Rows
from megatrain_jax.models.spec import is_buffer
from megatrain_jax.stream.transfer import Mesh


@functools.partial(jax.jit, static_argnames="steps", donate_argnames=("params", "states"))
def _update(params, states, grads, sumsq, scale, *, steps):
    """One step of every tensor, or nothing if the gradient is not finite."""
    finite, results = jnp.isfinite(sumsq), []
    for step, param, state, grad in zip(steps, params, states, grads, strict=True):
        new_params, new_state = step([param], state, [grad], scale)
        keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
        results.append((keep(new_params[0], param), jax.tree.map(keep, new_state, state)))
    return results


def update_block(
    tensors: Sequence[ResidentTensor], rules: Sequence[Rule], grads: Sequence[jax.Array], sumsq: jax.Array, scale: float
) -> None:
    """Starts one step of a block's tensors on the device, in one call: a step has tens of them, and no time between two.

    Args:
      tensors, rules, grads: for each tensor what to do, and its gradient as a template gives it.
      sumsq: a scalar on the device; if it is not finite, nothing changes.
      scale: the gradients are multiplied by it.
    """
    params, states = [t._params for t in tensors], [t._state for t in tensors]
    results = _update(params, states, list(grads), sumsq, np.float32(scale), steps=tuple(r.step for r in rules))
    for tensor, (param, state) in zip(tensors, results, strict=True):
        tensor._params, tensor._state = param, state


_cast = jax.jit(lambda x, dtype: x.astype(dtype), static_argnames="dtype")
_copy = jax.jit(lambda x: x + 0)


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
        self._state = rule.init([self._params])

    def state_arrays(self) -> dict[str, np.ndarray]:
        """See `HostTensor.state_arrays`."""
        out = {"master": self.read()}
        for key, leaf, elementwise in self._leaves():
            out[key] = self._gather(leaf) if elementwise else self._mesh.gather(leaf)
        return out

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """See `HostTensor.load_state_arrays`."""
        leaves = self._leaves()
        if differing := {key for key, *_ in leaves} ^ (set(arrays) - {"master"}):
            raise KeyError(f"{self.name}: the optimizer's state differs in {', '.join(sorted(differing))}")
        self.assign(arrays["master"])
        new = [
            self._put(arrays[key]) if elementwise else _copy(jax.device_put(arrays[key], leaf.sharding))
            for key, leaf, elementwise in leaves
        ]
        self._state = jax.tree.unflatten(jax.tree.structure(self._state), new)

    def _leaves(self) -> list[tuple[str, jax.Array, bool]]:
        """Path in optax' state, array, and whether it has a value for each element."""
        found = []
        for path, leaf in jax.tree_util.tree_flatten_with_path(self._state)[0]:
            elementwise = leaf.shape == self._params.shape and bool(path) and hasattr(path[-1], "idx")
            found.append((jax.tree_util.keystr(path[:-1] if elementwise else path), leaf, elementwise))
        return found
