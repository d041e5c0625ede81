"""The double-buffered schedule of one step.

    embed -> layer 0 .. L-1 -> head and loss -> layer L-1 .. 0 -> embed

Weights of the next block are on their way before the compute of this one is dispatched, gradients leave while the block
before computes, and a block's update runs in the optimizer's thread while others stream. The order of dispatch is the
whole design: see "rules of the stream" in docs/architecture.md.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from megatrain_jax.host.optimizer import clip_scale
from megatrain_jax.host.store import HostStore
from megatrain_jax.models.moe import RouterStats
from megatrain_jax.models.spec import Batch
from megatrain_jax.stream import templates
from megatrain_jax.stream.activations import Activations
from megatrain_jax.stream.events import Recorder
from megatrain_jax.stream.templates import Execution
from megatrain_jax.stream.transfer import DeviceGradients, HostGradients, TableRows
from megatrain_jax.stream.updater import HostSums, NonFiniteError, Updater
from megatrain_jax.watchdog import waiting

RUN_AHEAD = 2  # calls in flight; more would only take device memory, which is claimed at dispatch


class Settings(NamedTuple):
    """How steps are run.

    Attributes:
      group_size: micro-batches that go through a block together; None is all of them.
      offload_activations: block inputs wait in host memory.
      keep_layers: this many of the last layers keep their intermediates on the device and are not recomputed.
      max_grad_norm: global norm that gradients are scaled down to; 0 is off.
      skip_nonfinite: a step whose gradient or loss is not finite changes nothing.
    """

    group_size: int | None = None
    offload_activations: bool = False
    keep_layers: int = 0
    max_grad_norm: float = 0.0
    skip_nonfinite: bool = True


class StepOutcome(NamedTuple):
    """What a step computed.

    Attributes:
      loss: mean over the weighted targets of all micro-batches, and the auxiliary loss of routers if there are any.
      grad_norm: global norm of the gradients before clipping.
      applied: False if the step was skipped.
      seconds: wall time of "forward", "backward", and of "optimizer_wait", the part of the two in which the dispatching
        thread waited for an update.
      router_loss: the part of `loss` that is the auxiliary loss; None without routers to balance.
    """

    loss: float
    grad_norm: float
    applied: bool
    seconds: dict[str, float]
    router_loss: float | None = None


# Called with a block and its gradients, once for each group of micro-batches.
Sink = Callable[[int, HostGradients | DeviceGradients], None]


class _RunAhead:
    """Keeps the dispatching thread at most `limit` calls ahead of the device; with 0 it waits for each."""

    def __init__(self, limit: int):
        self._limit = limit
        self._markers: collections.deque = collections.deque()

    def admit(self) -> None:
        """Call before a dispatch."""
        while len(self._markers) >= max(self._limit, 1):
            self._wait()

    def dispatched(self, marker: jax.Array, what: str, block: int) -> None:
        self._markers.append((marker, what, block))
        if not self._limit:
            self._wait()

    def _wait(self) -> None:
        marker, what, block = self._markers.popleft()
        with waiting(f"the device to finish the {what} of block {block}"):
            jax.block_until_ready(marker)


def _beginning(what: str, block: int) -> contextlib.AbstractContextManager[None]:
    """Around a dispatch, which on several devices returns when each of them has begun.

    One that runs out of memory alone never does, and the others wait for it in a collective.
    """
    return waiting(f"the device to begin the {what} of block {block}")


class _WeightStream:
    """Weights of blocks in a given order, each on its way one block before it is taken."""

    def __init__(self, order: Iterable[int], put: Callable[[int], dict]):
        self._order, self._put = iter(order), put
        self._coming: dict | None = None

    def start(self) -> None:
        """Starts the copy of the next block to be taken, unless it is on its way."""
        if self._coming is None:
            block = next(self._order, None)
            self._coming = None if block is None else self._put(block)

    def take(self) -> dict:
        """Weights of this block; starts the copy of the next one's, so call it before dispatching any compute."""
        self.start()
        weights, self._coming = self._coming, None
        self.start()
        return weights


def has_plain_rows(batch: Batch) -> bool:
    """Whether every row is one sample with any padding behind it, so that causality alone confines attention."""
    ids = np.asarray(batch.segment_ids)
    return bool(((ids == 0) | (ids == 1)).all() and (np.diff(ids, axis=1) <= 0).all())


class Pipeline:
    """Streams a store's blocks through a mesh.

    Args:
      store: the weights.
      run: what all templates share. Whether attention looks at segments is decided for each call from the batch.
      settings: see `Settings`.
      record: receives the events.
      updater: applies the gradients; None if only losses, logits and gradients are wanted.
    """

    def __init__(
        self,
        store: HostStore,
        run: Execution,
        settings: Settings = Settings(),
        record: Recorder | None = None,
        updater: Updater | None = None,
    ):
        self.store, self.run, self.settings = store, run, settings
        self._record = record or Recorder()
        self._updater = updater
        self._blocks = store.spec.blocks
        if settings.keep_layers and store.spec.expert_groups > 1:
            raise ValueError("layers whose experts stream in groups are recomputed: keep_layers must be 0")
        self._head = len(self._blocks) - 1
        self._rows = TableRows(run.mesh, store.blocks[0]["weight"], lock=store.lock_pages)
        trainable = [i for i in range(len(self._blocks)) if store.owned(i)]
        self._lowest = min(trainable, default=self._head)
        self._waited = 0.0
        self._forward_end: concurrent.futures.Future[float] | None = None
        self._seen: set = set()  # what was called before, and so is compiled

    # ------------------------------------------------------------------ forward only

    def logits(self, batch: Batch) -> jax.Array:
        """Logits of a batch of NumPy arrays, float32 ``[batch, seq, vocab]`` on the devices (rows may be padded)."""
        run, ahead = self._start("logits", [batch])
        weights = self._stream(range(1, self._head + 1))
        (x,), _ = self._forward(run, ahead, weights, [batch], [run.mesh.put_batch(batch)], None)
        w = weights.take()
        with _beginning("loss", self._head):
            return templates.head_logits(self._blocks[self._head], run)(w, x)

    def losses(self, batches: Sequence[Batch]) -> float:
        """Weighted sum of the next-token losses of some batches of equal shape, which go through a block together."""
        run, ahead = self._start("losses", batches)
        weights = self._stream(range(1, self._head + 1))
        placed = [run.mesh.put_batch(batch) for batch in batches]
        xs, _ = self._forward(run, ahead, weights, batches, placed, None)
        head, w = templates.head_forward(self._blocks[self._head], run), weights.take()
        with _beginning("loss", self._head):
            sums = [head(w, x, b.targets, b.loss_weights, np.float32(1)) for x, b in zip(xs, placed, strict=True)]
        with waiting("the losses of the evaluation"):
            return math.fsum(run.mesh.scalar(s) for s in sums)

    # ------------------------------------------------------------------ gradients

    def gradients(self, micro_batches: Sequence[Batch], sink: Sink) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """The loss of all micro-batches, the squared norm of its gradients, and the part that is the auxiliary loss.

        They are device scalars; the last is None if no layer has a router that is to be balanced. The gradients themselves go to `sink`, block by block from the head down, on their way
        to host memory. The squared norm is that of the whole gradient if there is one group of micro-batches.

        Raises:
          ValueError: there are several groups of micro-batches, and an auxiliary loss of the whole step.
        """
        total = math.fsum(float(np.sum(b.loss_weights, dtype=np.float64)) for b in micro_batches)
        scale = np.float32(1 / total if total else 0.0)
        size = self.settings.group_size or len(micro_batches)
        groups = [micro_batches[i : i + size] for i in range(0, len(micro_batches), size)]
        there = range(1, self._head + 1)
        back = range(self._head - 1, max(self._lowest, 1) - 1, -1)
        again = [block for block in back if not self._keeps(block)]
        weights = self._stream([i for _ in groups for i in (*there, *again)])
        run, ahead = self._start("gradients", micro_batches)
        losses, sumsq, balance = [], np.float32(0), None
        if self.store.spec.router_aux_loss_coef and len(groups) > 1:
            raise ValueError(
                "the auxiliary loss of routers is one of the whole step, so micro-batches cannot go in groups"
            )
        for group in groups:
            placed = [run.mesh.put_batch(batch) for batch in group]
            kept = Activations(run.mesh, offload=self.settings.offload_activations)
            xs, stats = self._forward(run, ahead, weights, group, placed, kept)
            if stats is not None:
                coefficient = self.store.spec.router_aux_loss_coef
                balance, stats = templates.router_loss(stats, np.float32(coefficient))
                balance = balance if coefficient else None
            loss, dxs, tied, sumsq = self._backward_head(run, ahead, weights, placed, xs, sumsq, scale, sink)
            losses += loss
            del xs
            for block in back:
                sumsq = self._backward_layer(run, ahead, weights, placed, kept, block, dxs, stats, sumsq, sink)
            if self._lowest == 0:
                sumsq = self._backward_embedding(run, ahead, placed, dxs, tied, sumsq, sink)
        loss = sum(losses[1:], losses[0])
        return loss if balance is None else loss + balance, sumsq, balance

    def train_step(self, micro_batches: Sequence[Batch]) -> StepOutcome:
        """One optimizer step on some micro-batches of equal shape, each a `Batch` of NumPy arrays.

        Returns when loss and norm are known; updates may still be running, and the next step waits for each block's own.

        Raises:
          NonFiniteError: loss or gradient is not finite and such steps are not to be skipped. No weight of a block that is
            not finite has changed.
        """
        settings, mesh = self.settings, self.run.mesh
        grouped = settings.group_size is not None and len(micro_batches) > settings.group_size
        hold = bool(settings.max_grad_norm) or settings.skip_nonfinite or grouped
        held: dict[int, HostGradients | DeviceGradients | HostSums] = {}

        def update(block: int, scale: float) -> None:
            grads = held.pop(block)
            if block in self.store.resident:
                self._updater.update_resident(block, grads, scale)
            else:
                self._updater.submit(block, grads, scale, must_be_finite=not hold)

        def sink(block: int, grads: HostGradients | DeviceGradients) -> None:
            if not hold:
                held[block] = grads
                update(block, 1.0)
            elif not grouped:
                held[block] = grads
            elif block in held:
                held[block].add(grads)
            else:
                held[block] = HostSums(grads, self.store.owned(block))

        start, self._waited = time.perf_counter(), 0.0
        loss, sumsq, balance = self.gradients(micro_batches, sink)
        with waiting("the loss and the gradient norm of the step"):
            loss, sumsq = mesh.scalar(loss), mesh.scalar(sumsq)
            router_loss = None if balance is None else mesh.scalar(balance)
        if grouped:
            sumsq = mesh.sum_over_processes(math.fsum(sums.squared_norm() for sums in held.values()))
        norm = math.sqrt(sumsq) if sumsq >= 0 else math.nan
        finite = math.isfinite(norm) and math.isfinite(loss)
        if not finite and not settings.skip_nonfinite:
            raise NonFiniteError(
                f"the gradient is not finite: its norm is {norm}; training.skip_nonfinite: true skips such steps"
            )
        for block in sorted(held) if finite else ():
            update(block, clip_scale(norm, settings.max_grad_norm))
        end = time.perf_counter()
        with waiting("the time at which forward ended"):
            forward_end = self._forward_end.result()
        seconds = {"forward": forward_end - start, "backward": end - forward_end, "optimizer_wait": self._waited}
        return StepOutcome(loss, norm, finite, seconds, router_loss)

    # ------------------------------------------------------------------ one block

    def _stream(self, order: Iterable[int]) -> _WeightStream:
        return _WeightStream(order, self._put)

    def _wait_for_update(self, block: int, ids: np.ndarray | None = None) -> None:
        """Returns when what a block reads is written; of the embedding only the rows of `ids` if there are some."""
        owners = self.store.owners(block)
        if self._updater is not None and self._updater.is_pending(owners):
            self._record("wait", block)
            start = time.perf_counter()
            if ids is None:
                self._updater.wait(owners)
            else:
                self._updater.wait_for_rows(ids)
            self._waited += time.perf_counter() - start
            self._record("waited", block)

    def _put(self, block: int) -> dict[str, jax.Array]:
        """Starts the copy of a block's weights, once its update is done."""
        self._wait_for_update(block)
        mesh, tensors = self.run.mesh, self.store.blocks[block]
        with waiting(f"the copy of block {block} to the device to start"):
            weights = mesh.put_weights(tensors)
        if nbytes := mesh.weight_bytes(tensors):
            self._record.watch("h2d", block, None, weights, nbytes)
        return weights

    def _start(self, what: str, batches: Sequence[Batch]) -> tuple[Execution, _RunAhead]:
        """What the templates of a pass share, and how far it may run ahead of the devices."""
        plain = all(has_plain_rows(batch) for batch in batches)
        run = dataclasses.replace(self.run, attention=dataclasses.replace(self.run.attention, segments=not plain))
        # On several GPUs of one process nothing may be compiled, nor pinned memory be allocated, while they exchange
        # data: the driver can then wait for one that waits for another. The first pass of a kind does both.
        key = what, run.attention, tuple(np.shape(batch.token_ids) for batch in batches)
        new = self.run.mesh.size > 1 and key not in self._seen
        self._seen.add(key)
        return run, _RunAhead(0 if new else RUN_AHEAD)

    def _keeps(self, block: int) -> bool:
        """Whether a layer keeps its intermediates; the last ones do, because their backward comes first."""
        return self._head - self.settings.keep_layers <= block < self._head

    def _trainable(self, block: int) -> frozenset[str]:
        return frozenset(path for path, tensor in self.store.blocks[block].items() if tensor.trainable)

    def _embed(self, run, ahead, weights, batches: Sequence[Batch], placed: Sequence[Batch]) -> list[jax.Array]:
        """Hidden states of some batches. Of a table that is not on the device only the rows that they need are sent.

        The first layer's weights follow at once.
        """
        block, ids = self._blocks[0], np.concatenate([batch.token_ids for batch in batches], axis=None)
        by_rows = self._rows.usable and ids.size < block.vocab_size
        if by_rows:
            self._wait_for_update(0, ids)
        else:
            table = self._put(0)
        xs = []
        for m, (batch, there) in enumerate(zip(batches, placed, strict=True)):
            if by_rows:
                with waiting("the copy of the embedding's rows to the device"):
                    rows = self._rows.put(batch.token_ids)
                self._record.watch("h2d", 0, m, rows, rows.nbytes)
                template, operands = templates.embedding_of_rows(block, run), (rows,)
            else:
                template, operands = templates.embedding_forward(block, run), (table, there.token_ids)
            weights.start()
            ahead.admit()
            with _beginning("forward", 0):
                xs.append(template(*operands))
            ahead.dispatched(xs[m], "forward", 0)
            self._record.watch("forward", 0, m, xs[m])
        return xs

    def _forward(
        self, run, ahead, weights, batches: Sequence[Batch], placed: Sequence[Batch], kept: Activations | None
    ) -> tuple[list[jax.Array], RouterStats | None]:
        """Embedding and layers: the head's inputs, one per micro-batch, and the pooled statistics of routers.

        Inputs that backward needs go to `kept`.
        """
        xs, pooled = self._embed(run, ahead, weights, batches, placed), None
        for block in range(1, self._head):
            keep = kept is not None and block >= self._lowest and self._keeps(block)
            if keep:
                layer = templates.layer_forward_keeping(self._blocks[block], run, self._trainable(block))
            else:
                layer = templates.layer_forward(self._blocks[block], run)
            w = weights.take()
            for m, batch in enumerate(placed):
                ahead.admit()
                if not keep and kept is not None and block >= self._lowest:
                    kept.put(block, m, templates.needed_in_backward(self._blocks[block], xs[m]))
                with _beginning("forward", block):
                    xs[m], stats, *pullback = layer(w, xs[m], batch.context)
                if keep:
                    kept.put_pullback(block, m, pullback.pop())
                if stats:
                    pooled = stats if pooled is None else templates.add_stats(pooled, stats)
                ahead.dispatched(xs[m], "forward", block)
                self._record.watch("forward", block, m, xs[m])
        return xs, pooled

    def _backward_head(self, run, ahead, weights, placed, xs, sumsq, scale, sink: Sink):
        """Losses, gradients of the head's inputs, a tied projection's gradient, and the running squared norm."""
        block, owned = self._head, frozenset(self.store.owned(self._head))
        w, acc, losses, dxs = weights.take(), None, [], []
        for m, batch in enumerate(placed):
            last = m == len(placed) - 1
            template = templates.head_backward(self._blocks[block], run, self._trainable(block), owned, last)
            ahead.admit()
            with _beginning("loss", block):
                loss, dx, acc, tied, sumsq = template(w, xs[m], batch.targets, batch.loss_weights, scale, acc, sumsq)
            ahead.dispatched(loss, "loss", block)
            self._record.watch("loss", block, m, loss)
            if self._updater is not None:
                self._forward_end = self._record.time_of(loss)
            losses.append(loss)
            dxs.append(dx)
        self._emit(block, acc, sumsq, sink)
        return losses, dxs, tied, sumsq

    def _backward_layer(self, run, ahead, weights, placed, kept: Activations, block, dxs, stats, sumsq, sink: Sink):
        """Replaces `dxs` by the gradients of the layer's inputs; the running squared norm.

        `stats` is the gradient of the statistics of any layer that has some.
        """
        dstats = stats if templates.has_stats(self._blocks[block]) else ()
        keeps, acc = self._keeps(block), None
        w = None if keeps else weights.take()
        for m, batch in enumerate(placed):
            last = m == len(placed) - 1
            ahead.admit()
            if keeps:
                template = templates.layer_backward_kept(run, last)
                operands = (kept.take_pullback(block, m), dxs[m], dstats)
            else:
                template = templates.layer_backward(self._blocks[block], run, self._trainable(block), last)
                operands = (w, kept.take(block, m), dxs[m], dstats, batch.context)
            kept.prefetch(*((block - 1, 0) if last else (block, m + 1)))
            with _beginning("backward", block):
                dxs[m], acc, sumsq, marker = template(*operands, acc, sumsq)
            del operands
            ahead.dispatched(marker, "backward", block)
            self._record.watch("backward", block, m, marker)
        self._emit(block, acc, sumsq, sink)
        return sumsq

    def _backward_embedding(self, run, ahead, placed, dxs, tied: dict[str, jax.Array], sumsq, sink: Sink):
        acc = {"weight": tied["lm_head.weight"]} if tied else None
        for m, batch in enumerate(placed):
            template = templates.embedding_backward(self._blocks[0], run, m == len(placed) - 1)
            ahead.admit()
            with _beginning("backward", 0):
                acc, sumsq, marker = template(batch.token_ids, dxs[m], acc, sumsq)
            ahead.dispatched(marker, "backward", 0)
            self._record.watch("backward", 0, m, marker)
        self._wait_for_update(0)  # the last step's gradients of it may still be there, and there is no room for both
        self._emit(0, acc, sumsq, sink)
        return sumsq

    def _emit(self, block: int, grads: dict[str, jax.Array], sumsq: jax.Array, sink: Sink) -> None:
        """Sends a block's gradients on their way; a block without trainable tensors has none."""
        if grads:
            if block in self.store.resident:
                sink(block, DeviceGradients(grads, sumsq))
                return
            with waiting(f"the copy of the gradients of block {block} to the host to start"):
                landing = self.run.mesh.gradients_to_host(grads, sumsq)
            self._record.watch("d2h", block, None, landing.arrays, landing.nbytes)
            sink(block, landing)
