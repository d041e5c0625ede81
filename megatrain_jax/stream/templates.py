"""Jitted forward and backward of each kind of block, compiled once per distinct structure and shape.

A template holds no weights: they are an argument. Weights come in as they crossed the link and gradients go out as they
will cross it: on one device in their logical shape, on n devices as rows ``[n, row_length]`` (see `transfer`); XLA turns
the change of sharding into an all-gather and a reduce-scatter.

Gradients of several micro-batches are summed in float32 on the device. `acc` is that sum so far, None before the
first; with `last` the sum is rounded to the wire's dtype and its squared norm is added to `sumsq`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from megatrain_jax.models.attention import AttentionOptions
from megatrain_jax.models.blocks import (
    INTERMEDIATES,
    DecoderLayer,
    Embedding,
    Head,
    Weights,
    bind,
    embedding_multiplier,
    layer_module,
    tensor_shapes,
)
from megatrain_jax.models.losses import head_loss, head_loss_and_grads
from megatrain_jax.models.moe import Routed, RouterStats, Streaming, balance_loss
from megatrain_jax.models.parts import times
from megatrain_jax.models.spec import (
    BlockSpec,
    Context,
    EmbeddingSpec,
    ExpertsSpec,
    HeadSpec,
    LayerSpec,
    ModelSpec,
    TrunkSpec,
)
from megatrain_jax.stream.transfer import AXIS, Mesh
from megatrain_jax.xla import template_options


@dataclasses.dataclass(frozen=True)
class Execution:
    """What every template of a run shares; part of the key under which they are compiled.

    Attributes:
      mesh: where they run.
      dtype: of the matmuls and of what crosses the link.
      attention: how attention is computed.
      loss_tile: tokens whose logits exist at once.
    """

    mesh: Mesh
    dtype: np.dtype
    attention: AttentionOptions
    loss_tile: int

    def jit(self, function: Callable, donate: str | Sequence[str] | None = None) -> Callable:
        """A template: `function` compiled for the mesh, which may overwrite the arguments named in `donate`."""
        options = template_options(self.mesh.platform, self.mesh.size) or None
        return jax.jit(function, donate_argnames=donate, compiler_options=options)

    def unpack(self, weights: Weights, block: BlockSpec) -> dict[str, jax.Array]:
        """Weights as they crossed the link, in their logical shapes on every device."""
        if self.mesh.size == 1:
            return dict(weights)
        shapes, everywhere = tensor_shapes(block), self.mesh.sharding()
        return {
            path: jax.lax.with_sharding_constraint(rows, everywhere)
            .reshape(-1)[: math.prod(shapes[path])]
            .reshape(shapes[path])
            for path, rows in weights.items()
        }

    def pack(self, grad: jax.Array) -> jax.Array:
        """The inverse of `unpack` for one gradient."""
        if self.mesh.size == 1:
            return grad
        flat = jnp.pad(grad.reshape(-1), (0, -grad.size % self.mesh.size))
        return jax.lax.with_sharding_constraint(flat.reshape(self.mesh.size, -1), self.mesh.sharding(AXIS))

    def split_rows(self, x: Any) -> Any:
        """Keeps the rows of a batch, of one array or several, on the devices that they belong to."""
        return x if self.mesh.size == 1 else jax.lax.with_sharding_constraint(x, self.mesh.sharding(AXIS))

    def accumulate(self, acc: Weights | None, grads: Weights, *, last: bool) -> dict[str, jax.Array]:
        """Packed gradients of this micro-batch added to `acc`, in float32 unless this is the only one."""
        acc = acc or {}
        packed = {path: self.pack(grad) for path, grad in grads.items()}
        for path in packed:
            if path in acc:
                packed[path] = acc[path] + packed[path].astype(jnp.float32)
            elif not last:
                packed[path] = packed[path].astype(jnp.float32)
        return packed

    def close(self, sums: Weights, sumsq: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        """Sums rounded to the wire's dtype, and `sumsq` with the squared norm of exactly those values added."""
        wire = {path: value.astype(self.dtype) for path, value in sums.items()}
        return wire, sumsq + sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in wire.values())


def _split(weights: Weights, trainable: frozenset[str]) -> tuple[dict, dict]:
    return (
        {path: w for path, w in weights.items() if path in trainable},
        {path: w for path, w in weights.items() if path not in trainable},
    )


def _marker(x: jax.Array) -> jax.Array:
    """A scalar of a call's result that nobody donates: waiting for it is waiting for the call."""
    return x[(0,) * x.ndim].astype(jnp.float32)


@functools.lru_cache(maxsize=None)
def embedding_forward(block: EmbeddingSpec, run: Execution):
    """``(weights, token_ids [B, S]) -> hidden states [B, S, D]``."""

    def forward(weights, token_ids):
        return run.split_rows(Embedding(block).apply(bind(run.unpack(weights, block)), token_ids))

    return run.jit(forward)


@functools.lru_cache(maxsize=None)
def embedding_of_rows(block: EmbeddingSpec, run: Execution):
    """``(rows of the table [B, S, D]) -> hidden states [B, S, D]``: `embedding_forward` where the host looks up."""
    return run.jit(lambda rows: run.split_rows(times(rows, embedding_multiplier(block, rows.dtype))))


@functools.lru_cache(maxsize=None)
def embedding_backward(block: EmbeddingSpec, run: Execution, last: bool):
    """``(token_ids, dx, acc, sumsq) -> (gradients, sumsq, marker)``; needs no weights.

    A tied head's gradient comes in as `acc`, so that the sum leaves once and enters the norm once.
    """

    def backward(token_ids, dx, acc, sumsq):
        table = jnp.zeros((block.vocab_size, block.hidden_size), jnp.float32)
        rows = times(dx.reshape(-1, block.hidden_size).astype(jnp.float32), embedding_multiplier(block, dx.dtype))
        grad = table.at[token_ids.reshape(-1)].add(rows)
        sums = run.accumulate(acc, {"weight": grad}, last=last)
        if last:
            sums, sumsq = run.close(sums, sumsq)
        return sums, sumsq, _marker(sums["weight"])

    return run.jit(backward, "acc" if not last else None)


InnerSpec = LayerSpec | TrunkSpec | ExpertsSpec


def has_stats(block: InnerSpec) -> bool:
    """Whether a block has a router whose statistics make an auxiliary loss."""
    return not isinstance(block, ExpertsSpec) and block.moe is not None and block.moe.balanced


def needed_in_backward(block: InnerSpec, x: Any) -> Any:
    """The part of a block's input that its backward reads.

    Groups of experts need what goes to the experts and not the sum so far. The last one, which is the first in backward,
    keeps it for all of them.
    """
    if isinstance(block, ExpertsSpec):
        return x.routed if block.last else ()
    return x


class Returning(NamedTuple):
    """What flows back between the blocks of a layer whose experts stream in groups.

    Attributes:
      dh_BxSxD, dweight_BxSxK: float32, gradients of `routed`, summed over the groups that are done.
      dx_BxSxD: gradient of what the layer gives, and so of what each group adds.
      routed: as the last group to be done got it.
    """

    dh_BxSxD: jax.Array
    dweight_BxSxK: jax.Array
    dx_BxSxD: jax.Array
    routed: Routed


def _on_each_device(apply, block: InnerSpec, run: Execution):
    """``apply(weights, x, context) -> (y, stats)`` for a batch that is split over the devices.

    Sorting rows by expert knows no devices: each one sorts its own, and the statistics are added.
    """
    if block.moe is None or run.mesh.size == 1:
        return apply
    mesh, split = run.mesh.sharding(AXIS).mesh, PartitionSpec(AXIS)

    def on_each_device(weights, x, context):
        y, stats = apply(weights, x, context)
        return y, jax.tree.map(lambda value: value[None], stats)

    everywhere = jax.shard_map(
        on_each_device, mesh=mesh, in_specs=(PartitionSpec(), split, split), out_specs=split, check_vma=False
    )

    def apply_everywhere(weights, x, context):
        y, stats = everywhere(weights, x, context)
        return y, jax.tree.map(lambda value: value.sum(0), stats)

    return apply_everywhere


def _layer(block: InnerSpec, run: Execution):
    """``(weights, x, context) -> (y, stats)`` on weights in their logical shapes."""
    module = layer_module(block, run.attention)
    return _on_each_device(lambda weights, x, context: module.apply(bind(weights), x, context), block, run)


@functools.lru_cache(maxsize=None)
def layer_forward(block: InnerSpec, run: Execution):
    """``(weights, x [B, S, D], context) -> (y, stats)``; between parts of a layer `x` or `y` is a `Streaming`."""
    layer = _layer(block, run)

    def forward(weights, x, context):
        y, stats = layer(run.unpack(weights, block), x, context)
        return run.split_rows(y), stats

    return run.jit(forward)


@functools.lru_cache(maxsize=None)
def layer_backward(block: InnerSpec, run: Execution, trainable: frozenset[str], last: bool):
    """``(weights, x, dy, dstats, context, acc, sumsq) -> (dx, gradients, sumsq, marker)``; recomputes the forward.

    Between parts of a layer `dy` or `dx` is a `Returning`, and `x` is what `needed_in_backward` gave.
    """
    if isinstance(block, ExpertsSpec):
        return _experts_backward(block, run, trainable, last)
    layer = _layer(block, run)

    def backward(weights, x, dy, dstats, context, acc, sumsq):
        train, frozen = _split(run.unpack(weights, block), trainable)

        def differentiable(train, x):
            y, stats = layer(train | frozen, x, context)
            if isinstance(y, Streaming):
                y = y.x_BxSxD, y.routed.h_BxSxD, y.routed.weight_BxSxK
            return y, stats

        if isinstance(dy, Returning):
            dy = dy.dx_BxSxD.astype(jnp.float32), dy.dh_BxSxD.astype(x.dtype), dy.dweight_BxSxK
        _, vjp = jax.vjp(differentiable, train, x)
        grads, dx = vjp((dy, dstats))
        return _finish_layer(run, grads, dx, acc, sumsq, last)

    donated = [] if isinstance(block, TrunkSpec) else ["dy"]
    return run.jit(backward, donated if last else [*donated, "acc"])


def _experts_backward(block: ExpertsSpec, run: Execution, trainable: frozenset[str], last: bool):
    """`layer_backward` of a group of experts. Nothing that flows is donated: most of it goes through unchanged."""
    module = layer_module(block)
    added = _on_each_device(lambda w, routed, _: (module.apply(bind(w), routed, method="added"), ()), block, run)

    def backward(weights, x, dy, dstats, context, acc, sumsq):
        if block.last:
            dh, dweight, dy, routed = 0.0, 0.0, dy, x
        else:
            dh, dweight, dy, routed = dy
            routed = routed._replace(expert_BxSxK=routed.expert_BxSxK + block.experts)
        train, frozen = _split(run.unpack(weights, block), trainable)

        def differentiable(train, h, weight):
            return added(train | frozen, Routed(h, routed.expert_BxSxK, weight), ())[0]

        _, vjp = jax.vjp(differentiable, train, routed.h_BxSxD, routed.weight_BxSxK)
        grads, more_dh, more_dweight = vjp(dy)
        dx = Returning(dh + more_dh.astype(jnp.float32), dweight + more_dweight, dy, routed)
        return _finish_layer(run, grads, dx, acc, sumsq, last)

    return run.jit(backward, None if last else "acc")


@functools.lru_cache(maxsize=None)
def layer_forward_keeping(block: LayerSpec, run: Execution, trainable: frozenset[str]):
    """``(weights, x [B, S, D], context) -> (y, stats, pullback)``: what backward needs is kept and not computed again.

    The pullback holds the weights, the input and `INTERMEDIATES`, and goes to `layer_backward_kept`.
    """
    layer = _layer(block, run)

    def forward(weights, x, context):
        train, frozen = _split(run.unpack(weights, block), trainable)
        apply = jax.checkpoint(
            lambda train, x: layer(train | frozen, x, context),
            policy=jax.checkpoint_policies.save_only_these_names(*INTERMEDIATES),
        )
        (y, stats), pullback = jax.vjp(apply, train, x)
        return run.split_rows(y), stats, pullback

    return run.jit(forward)


@functools.lru_cache(maxsize=None)
def layer_backward_kept(run: Execution, last: bool):
    """``(pullback, dy, dstats, acc, sumsq) -> (dx, gradients, sumsq, marker)``, as `layer_backward`."""

    def backward(pullback, dy, dstats, acc, sumsq):
        grads, dx = pullback((dy, dstats))
        return _finish_layer(run, grads, dx, acc, sumsq, last)

    return run.jit(backward, "dy" if last else ("dy", "acc"))


@jax.jit
def add_stats(pooled: RouterStats, stats: RouterStats) -> RouterStats:
    """Statistics of more tokens or layers."""
    return jax.tree.map(jnp.add, pooled, stats)


@jax.jit
def router_loss(pooled: RouterStats, coefficient: jax.Array) -> tuple[jax.Array, RouterStats]:
    """`balance_loss` of a whole step times its coefficient, and its gradient: the ``dstats`` of every layer."""
    return jax.value_and_grad(lambda stats: coefficient * balance_loss(stats))(pooled)


def _finish_layer(run: Execution, grads: Weights, dx: Any, acc: Weights | None, sumsq: jax.Array, last: bool):
    sums = run.accumulate(acc, grads, last=last)
    if last:
        sums, sumsq = run.close(sums, sumsq)
    dx = run.split_rows(dx)
    return dx, sums, sumsq, _marker(jax.tree.leaves(dx)[0])


@functools.lru_cache(maxsize=None)
def head_logits(block: HeadSpec, run: Execution):
    """``(weights, x) -> logits [B, S, V]`` float32."""
    return run.jit(lambda weights, x: run.split_rows(Head(block).apply(bind(run.unpack(weights, block)), x)))


@functools.lru_cache(maxsize=None)
def head_forward(block: HeadSpec, run: Execution):
    """``(weights, x, targets, loss_weights, scale) -> loss``: the weighted sum of next-token losses times `scale`."""

    def forward(weights, x, targets, loss_weights, scale):
        loss_weights = loss_weights * scale
        weights = run.unpack(weights, block)
        return head_loss(Head(block), weights, x, targets, loss_weights, tile=run.loss_tile)

    return run.jit(forward)


@functools.lru_cache(maxsize=None)
def head_backward(block: HeadSpec, run: Execution, trainable: frozenset[str], owned: frozenset[str], last: bool):
    """``(weights, x, targets, loss_weights, scale, acc, sumsq) -> (loss, dx, gradients, kept, sumsq)``.

    Forward and backward in one pass over tiles of tokens. `kept` is the float32 gradient of a tied projection, which
    stays on the device until the embedding's own gradient is added to it.
    """

    def backward(weights, x, targets, loss_weights, scale, acc, sumsq):
        train, frozen = _split(run.unpack(weights, block), trainable)
        loss, dx, grads = head_loss_and_grads(
            Head(block), train, frozen, x, targets, loss_weights * scale, tile=run.loss_tile
        )
        sums = run.accumulate(acc, grads, last=last)
        kept = {}
        if last:
            kept = {path: value for path, value in sums.items() if path not in owned}
            sums, sumsq = run.close({path: value for path, value in sums.items() if path in owned}, sumsq)
        return loss, run.split_rows(dx), sums, kept, sumsq

    return run.jit(backward, "acc" if not last else None)


class LayerStep:
    """The stateless template of one decoder layer, for research code: no donation, no mesh.

    Weights are a flat dict of paths such as ``"self_attn.q_proj.weight"`` in the ``[out, in]`` layout. Both methods are
    pure and jitted and compose with `jax.jit`, `jax.vmap` and `jax.grad`.
    """

    def __init__(self, block: LayerSpec):
        layer = DecoderLayer(block, AttentionOptions())
        self.block = block
        self._forward = jax.jit(lambda weights, x, context: layer.apply(bind(weights), x, context))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Path and shape of every weight."""
        return tensor_shapes(self.block)

    def forward(self, weights: Weights, x: jax.Array, context: Context) -> tuple[jax.Array, tuple]:
        """``(y, stats)`` for hidden states ``[batch, seq, hidden]``; a dense layer has ``stats == ()``, see `RouterStats`."""
        return self._forward(weights, x, context)

    def backward(
        self, weights: Weights, x: jax.Array, cotangent: tuple[jax.Array, tuple], context: Context
    ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """``(dx, dw)`` for the cotangent ``(dy, dstats)`` of `forward`'s result; the forward is computed again."""
        _, vjp = jax.vjp(lambda weights, x: self._forward(weights, x, context), dict(weights), x)
        dw, dx = vjp(cotangent)
        return dx, dw


def layer_step(spec: ModelSpec, layer: int) -> LayerStep:
    """The template of decoder layer number `layer`, counted from 0. Raises IndexError if there is none."""
    return LayerStep(spec.layers[layer])
