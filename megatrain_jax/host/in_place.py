"""Optax on a chunk of a tensor, in place and in cache.

XLA makes one loop for each output of an update. A chunk is therefore updated tile by tile, so that the operands of a tile stay in
cache from one of these loops to the next. It also computes a value again wherever it is read, and copies what it would need and
has overwritten. So optax' update is traced, and each of its results is written where it belongs as soon as it is known, and
read from there: adamw is then three loops that write in place, and one for the wire, and takes no memory but a few scalars.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.extend.core import Var

from megatrain_jax.host import rounding
from megatrain_jax.xla import update_options


@functools.lru_cache(maxsize=None)
def make_update(step: Callable, tree: jax.tree_util.PyTreeDef, tile: int | None, wire_dtype: np.dtype) -> Callable:
    """One step of an elementwise optimizer on a chunk, or, with a `tile` of None, of any optimizer on a tensor.

    What never changes is not an argument of what this gives, so that a call takes Python's lock for as short as may be.

    Args:
      step: `layouts.Rule.step`.
      tree: of ``([params], state)``.
      tile: elements that are updated in one turn of a loop. It divides the size of a chunk that is larger.
      wire_dtype: what the copy that goes to the wire is rounded to.

    Returns:
      Jitted ``(leaves, scratch, grads, at, scale) -> (leaves, scratch)``, which gives back the memory of the first two:

      * leaves: of params and state. Params are float32, of any shape if `tile` is None, else flat.
      * scratch: memory for the bits of the rounded copy, unsigned and flat; None if there is none.
      * grads: flat; those of the chunk are from element `at` on, an int32.
      * scale: the gradients are multiplied by it.
    """

    def update(leaves, scratch, grads, at, scale):
        (params,), state = jax.tree.unflatten(tree, leaves)
        round_ = lambda p: None if scratch is None else rounding.to_dtype(p.reshape(-1), wire_dtype).view(scratch.dtype)  # noqa: E731
        grad = lambda start, n: grads if n == grads.size else jax.lax.dynamic_slice(grads, (at + start,), (n,))  # noqa: E731
        if tile is None or params.size <= tile:
            (params,), state = step([params], state, [grad(0, params.size).reshape(params.shape)], scale)
            return jax.tree.leaves(([params], state)), round_(params)
        if params.size % tile:
            raise ValueError(f"a chunk of {params.size} elements is not made of tiles of {tile}")
        elementwise = [i for i, leaf in enumerate(leaves) if leaf.shape == params.shape]

        def turn(number, carry):
            arrays, scratch = dict(zip(elementwise, carry[0], strict=True)), carry[1]
            here = number * tile
            cut = lambda x: jax.lax.dynamic_slice(x, (here,), (tile,))  # noqa: E731
            put = lambda x, y: jax.lax.dynamic_update_slice(x, y, (here,))  # noqa: E731

            def written(i, value):
                arrays[i] = jax.lax.optimization_barrier(put(arrays[i], value))
                return cut(arrays[i])

            before = jax.tree.unflatten(tree, [cut(arrays[i]) if i in arrays else x for i, x in enumerate(leaves)])
            results, late = _written_early(step, (*before, [grad(here, tile)], scale), elementwise, written)
            if scratch is not None:
                scratch = put(scratch, round_(results[0]))
            # What is replaced here was read until now.
            arrays, late = jax.lax.optimization_barrier((arrays, late))
            arrays |= {i: put(arrays[i], value) for i, value in late.items()}
            return tuple(arrays[i] for i in elementwise), scratch

        carry = tuple(leaves[i] for i in elementwise), scratch
        arrays, scratch = jax.lax.fori_loop(0, params.size // tile, turn, carry)
        # Step counts and the like, which are the same for every tile.
        one = jax.tree.unflatten(tree, [x[:1] if i in elementwise else x for i, x in enumerate(leaves)])
        results = jax.tree.leaves(step(*one, [grad(0, 1)], scale))
        for i, array in zip(elementwise, arrays, strict=True):
            results[i] = array
        return results, scratch

    return jax.jit(update, donate_argnums=(0, 1), keep_unused=True, compiler_options=update_options() or None)


def _written_early(
    step: Callable, args: tuple, which: Sequence[int], written: Callable[[int, jax.Array], jax.Array]
) -> tuple[list[jax.Array], dict[int, jax.Array]]:
    """The results of ``step(*args)`` as leaves, of which result i replaces argument i.

    Of those in `which` each is passed through `written` as soon as it is known, and what is computed from it is computed
    from what that returns, so that XLA can compute it in place. Those whose argument is still read then are not, but come
    in a dict, to be written when everything has been computed.
    """
    flat, tree = jax.tree.flatten(args)
    closed = jax.make_jaxpr(lambda *leaves: step(*jax.tree.unflatten(tree, leaves)))(*flat)
    jaxpr, early, late = closed.jaxpr, {}, []
    made = {result: number for number, eqn in enumerate(jaxpr.eqns) for result in eqn.outvars}
    variables = lambda atoms: {v for v in atoms if isinstance(v, Var)}  # noqa: E731
    reads = [variables(eqn.invars) for eqn in jaxpr.eqns]
    end = {i: made.get(v, -1) + 1 if isinstance(v := jaxpr.outvars[i], Var) else 0 for i in which}
    for i in sorted(which, key=end.get):
        result = jaxpr.outvars[i]
        old = {jaxpr.invars[i]}  # and what is computed from it, but for what is in memory by then
        for eqn, operands in zip(jaxpr.eqns[: end[i]], reads, strict=False):
            if old & operands:
                old |= {*eqn.outvars} - early.keys() - {result}
        if not end[i] or result in early or old & variables(jaxpr.outvars).union(*reads[end[i] :]):
            late.append(i)
        else:
            early[result] = i
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True)) | dict(zip(jaxpr.invars, flat, strict=True))
    value = lambda v: values[v] if isinstance(v, Var) else v.val  # noqa: E731
    for eqn in jaxpr.eqns:
        out = eqn.primitive.bind(*map(value, eqn.invars), **eqn.primitive.get_bind_params(eqn.params))
        for v, x in zip(eqn.outvars, out if eqn.primitive.multiple_results else [out], strict=True):
            values[v] = written(early[v], x) if v in early else x
    out = [value(v) for v in jaxpr.outvars]
    return out, {i: out[i] for i in late}
