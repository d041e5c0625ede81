"""What a run will need, and how its micro-batches go through the device: plain arithmetic, before anything is allocated."""

from __future__ import annotations

import dataclasses
import math
import os

from megatrain_jax.config import MemoryConfig, UserError
from megatrain_jax.models.spec import ModelSpec

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes in bytes; those of the device are of each device.

    Attributes:
      group_size: micro-batches that go through a block together.
      offload_activations: block inputs wait in host memory.
      state: master weights, moments and wire in host memory.
      gradients: held in host memory until the clip scale is known, and sums over groups.
      activations: kept block inputs of one group.
      working: the most that the device holds besides those.
    """

    group_size: int
    offload_activations: bool
    state: int
    gradients: int
    activations: int
    working: int

    @property
    def host(self) -> int:
        return self.state + self.gradients + self.activations * self.offload_activations

    @property
    def device(self) -> int:
        return self.working + self.activations * (not self.offload_activations)


def state_bytes_per_parameter(dtype: str, *, own_memory: bool, moments: int) -> int:
    """Host bytes of one trained parameter: float32 master and moments, and the wire where it is not the master itself."""
    wire = 2 if dtype == "bfloat16" else 4 * own_memory
    return 4 * (1 + moments) + wire


def working_bytes(spec: ModelSpec, *, rows: int, seq: int, itemsize: int, loss_tile: int, accumulate: bool) -> int:
    """Device bytes of the widest moment of a step: weights in flight, gradients, and the intermediates of one block."""
    tokens = rows * seq
    layer = max((block.num_parameters for block in spec.layers), default=0)
    table = spec.vocab_size * spec.hidden_size
    inner = max((8 * s.intermediate_size + 12 * s.hidden_size for s in spec.layers), default=0)
    in_layer = layer * (5 * itemsize + 4 * accumulate) + tokens * inner * itemsize
    in_head = table * (2 * itemsize + 4) + min(loss_tile, tokens) * spec.vocab_size * 12 + 4 * tokens * spec.hidden_size
    kept = table * 4 if spec.tie_word_embeddings else 0
    return max(in_layer + kept, in_head + layer * itemsize)


def make_plan(
    spec: ModelSpec,
    memory: MemoryConfig,
    *,
    batch_size: int,
    seq: int,
    micro_batches: int,
    dtype: str,
    devices: int,
    own_memory: bool,
    moments: int,
    hold_gradients: bool,
    device_bytes: int | None,
    host_bytes: int | None,
) -> Plan:
    """Decides where block inputs wait, and how many micro-batches run together.

    Args:
      spec: the model, taken as trained whole.
      memory: budgets and `offload_activations`.
      batch_size, seq: of a micro-batch, over all devices.
      micro_batches: in a step.
      dtype: "bfloat16" or "float32".
      devices: that share a micro-batch.
      own_memory: whether they have memory of their own, so that offloading means something.
      moments: float32 values of optimizer state per parameter.
      hold_gradients: whether updates wait for the end of backward.
      device_bytes, host_bytes: what is free, None if unknown; a budget in `memory` wins.

    Raises:
      UserError: one micro-batch does not fit; the message has the figures.
    """
    itemsize = 2 if dtype == "bfloat16" else 4
    rows = math.ceil(batch_size / devices)
    device = device_bytes if memory.device_budget == "auto" else int(memory.device_budget * GIB)
    host = host_bytes if memory.host_budget == "auto" else int(memory.host_budget * GIB)
    state = spec.num_parameters * state_bytes_per_parameter(dtype, own_memory=own_memory, moments=moments)
    held = spec.num_parameters * itemsize * hold_gradients
    one = (len(spec.layers) + 1) * rows * seq * spec.hidden_size * itemsize
    working = working_bytes(
        spec, rows=rows, seq=seq, itemsize=itemsize, loss_tile=memory.loss_tile, accumulate=micro_batches > 1
    )
    room = math.inf if device is None else device - working
    if own_memory and room < 0:
        raise UserError(
            f"training.batch_size: a micro-batch of {rows} x {seq} tokens needs about {working / GIB:.1f} GiB beside its kept "
            f"inputs and the device has {device / GIB:.1f} GiB; lower training.batch_size or dataset.max_seq_len"
        )
    fits = micro_batches * one <= room
    offload = own_memory and (not fits if memory.offload_activations == "auto" else bool(memory.offload_activations))
    if offload or not own_memory:
        room = math.inf if host is None else host - state - held
    group = micro_batches if micro_batches * one * (devices if offload else 1) <= room else int(max(room, 0) // one)
    if group < 1 and (offload or own_memory or memory.host_budget != "auto"):
        where, budget = ("host", host) if offload or not own_memory else ("device", device)
        raise UserError(
            f"memory.{where}_budget: the kept inputs of one micro-batch need {one / GIB:.2f} GiB and {max(room, 0) / GIB:.2f} of "
            f"{budget / GIB:.1f} GiB are left; lower training.batch_size or dataset.max_seq_len, or raise the budget"
        )
    group = max(group, 1)
    grouped = group < micro_batches
    return Plan(
        group_size=group,
        offload_activations=offload,
        state=state,
        gradients=held + (spec.num_parameters * 4 if grouped else 0),
        activations=group * one,
        working=working,
    )


def host_memory() -> int | None:
    """Bytes of host memory that this process may use: the machine's, or its container's if that is less."""
    limits = []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                limits.append(int(file.read()))
        except (OSError, ValueError):
            continue
    if hasattr(os, "sysconf"):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(limits, default=None)
