"""What a run will need, and how its micro-batches go through the device: plain arithmetic, before anything is allocated."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

from megatrain_jax.config import MemoryConfig, UserError
from megatrain_jax.models.deltanet import CHUNK
from megatrain_jax.models.exact_attention import QUERY_TILE
from megatrain_jax.models.experts import num_rows
from megatrain_jax.models.moe import in_expert_groups, most_expert_groups
from megatrain_jax.models.spec import ExpertsSpec, LayerSpec, ModelSpec, TrunkSpec

GIB = 2**30

# What decides between two uses of the same memory, measured on one H200 and 16 host cores (docs/benchmarks.md). Only
# their ratio matters, and only for speed.
DEVICE_FLOPS = 600e12  # matmuls of a layer, a second
HOST_UPDATES = 3.6e9  # parameters that the host's optimizer updates, a second, while copies run
# And beside the copies of several GPUs: 3.3 to 3.8 on two. What stays is split over them, so more can stay.
HOST_UPDATES_FOR_SEVERAL = 3.2e9
MARGIN = 0.95  # of the budget; the rest is for what the estimates leave out


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes in bytes; those of the device are of each device.

    Attributes:
      group_size: micro-batches that go through a block together.
      offload_activations: block inputs wait in host memory.
      state: master weights, moments and wire, in host memory.
      gradients: held in host memory until the clip scale is known, or summed there over groups.
      activations: kept block inputs of one group.
      working: the most that the device holds besides those.
      pinned: the most that is on its way from the device at once, or waits where it arrived: gradients and block inputs.
      beside: host memory that is taken besides what is counted above.
      host, device: the sums. Where host and device are one memory, `host` is everything.
      resident: blocks that stay on the device with their optimizer state.
      keep_layers: this many of the last layers keep their intermediates and are not recomputed.
      expert_groups: blocks that the experts of a layer stream in; see `ModelSpec`.
      in_one_block: what `working` would be if they did not.
    """

    group_size: int
    offload_activations: bool
    state: int
    gradients: int
    activations: int
    working: int
    host: int
    device: int
    resident: tuple[int, ...] = ()
    keep_layers: int = 0
    expert_groups: int = 1
    in_one_block: int = 0
    pinned: int = 0
    beside: int = 0


def state_bytes_per_parameter(dtype: str, *, own_memory: bool, optimizer_bytes: float, split: bool) -> float:
    """Host bytes of one trained parameter: master, optimizer state, and the wire where it is not part of the master.

    Args:
      dtype: "bfloat16" or "float32", of the wire.
      own_memory: whether the wire crosses a link, for which it is a copy of its own.
      optimizer_bytes: of the optimizer's state.
      split: the wire is half of the master.
    """
    wire = 2 if dtype == "bfloat16" else 4 * own_memory
    return (2 if split else 4) + wire + optimizer_bytes


def head_bytes(spec: ModelSpec, *, tokens: int, itemsize: int, loss_tile: int, devices: int) -> int:
    """Device bytes of the loss with its gradients: the head's weights and gradients, a tile of logits, hidden states.

    On several devices each holds them whole besides its share of them: 2.2 GiB more than on one for a table of 1.45 GiB.
    """
    table = spec.vocab_size * spec.hidden_size
    layer = max((block.num_parameters for block in spec.structures), default=0)
    tile = min(loss_tile, tokens) * spec.vocab_size * 12
    copies = 2 * itemsize + 4 + (devices > 1) * 4
    return table * copies + tile + 4 * tokens * spec.hidden_size + layer * itemsize


def layer_bytes(
    spec: ModelSpec,
    *,
    tokens: int,
    itemsize: int,
    accumulate: bool,
    attention_bytes: int,
    kept: bool,
    devices: int = 1,
) -> int:
    """Device bytes of a layer's backward: weights in flight, gradients, and what is computed with.

    On several devices weights and gradients are whole on each for a while, and XLA holds more of what is computed with in
    order to exchange gradients meanwhile: 3.5 GiB more than on one where 7.4 are computed with, if intermediates are kept,
    and 1.0 more than 13.5 if not (Qwen2.5-14B, 64 x 1024 tokens on each of two H200s).

    Args:
      attention_bytes: of masks or scores that are as large as the square of a row.
      kept: the intermediates are kept and counted elsewhere; else they are computed again, and in these bytes.
    """
    blocks, table = spec.structures, spec.vocab_size * spec.hidden_size
    layer = max((block.num_parameters for block in blocks), default=0)
    inner = max(
        (values_in_backward(s, tokens) - (kept and intermediates(s, tokens) - tokens * s.hidden_size) for s in blocks),
        default=0,
    )
    # The gradient of the largest tensor of experts is added up in float32.
    sums = max((4 * 2 * _experts_in(s) * s.moe.intermediate_size * s.hidden_size for s in blocks if s.moe), default=0)
    # The head's gradient may still be leaving; that of a tied one waits for the embedding's.
    head = table * (4 if spec.tie_word_embeddings else itemsize * kept)
    exchanged = (devices > 1) * (2 * layer + kept * inner // 2)
    scores = 4 * max((scores_in_backward(s, tokens) for s in dict.fromkeys(spec.layers)), default=0)
    return (
        layer * ((3 if kept else 5) * itemsize + 4 * accumulate)
        + sums
        + (inner + exchanged) * itemsize
        + scores
        + attention_bytes
        + head
    )


def working_bytes(
    spec: ModelSpec,
    *,
    tokens: int,
    itemsize: int,
    loss_tile: int,
    accumulate: bool,
    attention_bytes: int,
    devices: int = 1,
) -> int:
    """Device bytes of the widest moment of a step that keeps nothing but block inputs, without those."""
    return max(
        head_bytes(spec, tokens=tokens, itemsize=itemsize, loss_tile=loss_tile, devices=devices),
        layer_bytes(
            spec,
            tokens=tokens,
            itemsize=itemsize,
            accumulate=accumulate,
            attention_bytes=attention_bytes,
            kept=False,
            devices=devices,
        ),
    )


def _experts_in(block: LayerSpec | TrunkSpec | ExpertsSpec) -> int:
    """Experts whose weights a block of a sparse layer holds."""
    if isinstance(block, TrunkSpec):
        return 0
    return block.experts if isinstance(block, ExpertsSpec) else block.moe.num_experts


def values_in_backward(block: LayerSpec | TrunkSpec | ExpertsSpec, tokens: int) -> int:
    """Values that exist at once in the backward of a layer, or of a part of one, besides weights."""
    hidden = block.hidden_size
    if block.moe is None:
        return tokens * (5 * block.intermediate_size + 4 * hidden)
    s = block.moe
    # In a group there is room for every choice, wherever the experts are that are chosen.
    rows = num_rows(tokens * s.top_k, _experts_in(block)) if _experts_in(block) else 0
    rows *= 4 * hidden + 6 * s.intermediate_size
    # What flows between the parts of a layer, in float32 for a part, and its gradients.
    flow = 4 * hidden if isinstance(block, LayerSpec) else 8 * hidden + 8 * s.top_k
    if isinstance(block, ExpertsSpec):
        return rows + tokens * flow
    attention = 2 * _mixer_values(block.layer) if isinstance(block, TrunkSpec) else 0  # else the rows outweigh it
    # Logits and probabilities of the router are float32.
    return rows + tokens * (attention + 5 * s.shared_size + flow + 6 * s.num_experts)


def scores_in_backward(layer: LayerSpec, tokens: int) -> int:
    """Float32 values besides, where no fused kernel computes the attention: `models.exact_attention`, `models.deltanet`."""
    if layer.delta is not None:
        d = layer.delta
        states = 2 * d.value_heads * d.key_dim * d.value_dim // CHUNK  # one at the start of each chunk
        return tokens * (states + 16 * d.channels + 8 * d.value_heads * d.value_dim)
    if layer.attention_softcap is None and not layer.sinks:
        return 0
    return tokens * (4 * layer.num_heads * QUERY_TILE + 4 * layer.num_kv_heads * layer.head_dim)


def make_plan(
    spec: ModelSpec,
    memory: MemoryConfig,
    *,
    trained: int,
    batch_size: int,
    seq: int,
    micro_batches: int,
    dtype: str,
    devices: int,
    own_memory: bool,
    state_bytes: float,
    hold_gradients: bool,
    device_bytes: int | None,
    host_bytes: int | None,
    attention_bytes: int = 0,
    beside: Callable[[int], int] = lambda pinned: 0,
) -> Plan:
    """Decides where block inputs wait, how many micro-batches run together, and in how many blocks experts stream.

    Experts stream in groups only if nothing else makes a layer fit, and then in as few as do.

    Args:
      spec: the model, its experts in one block.
      memory: budgets, `offload_activations` and `expert_groups`.
      trained: parameters that are not frozen.
      batch_size, seq: of a micro-batch, over all devices.
      micro_batches: in a step.
      dtype: "bfloat16" or "float32".
      devices: that share a micro-batch.
      own_memory: whether they have memory of their own, so that offloading means something.
      state_bytes: of one trained parameter; see `state_bytes_per_parameter`.
      hold_gradients: whether updates wait for the end of backward.
      device_bytes, host_bytes: what is free, None if unknown; a budget in `memory` wins.
      attention_bytes: see `layer_bytes`.
      beside: `Plan.beside` by `Plan.pinned`.

    Raises:
      UserError: the weights, or one micro-batch, do not fit; the message has the figures.
    """
    itemsize = 2 if dtype == "bfloat16" else 4
    rows = math.ceil(batch_size / devices)
    host_budget, device_budget = _budget(memory.host_budget, host_bytes), _budget(memory.device_budget, device_bytes)
    state = int(trained * state_bytes) + (spec.num_parameters - trained) * itemsize
    # An auxiliary loss of the whole step is known only when all of it has been forward.
    groups = [micro_batches] if spec.router_aux_loss_coef else range(micro_batches, 0, -1)

    def choices(spec: ModelSpec) -> list[Plan]:
        working, in_one_block = (
            working_bytes(
                some,
                tokens=rows * seq,
                itemsize=itemsize,
                loss_tile=memory.loss_tile,
                accumulate=micro_batches > 1,
                attention_bytes=attention_bytes,
                devices=devices,
            )
            for some in (spec, in_expert_groups(spec, 1))
        )
        input_bytes = spec.kept_bytes(rows * seq, itemsize)

        def sized(group: int, offload: bool) -> Plan:
            kept = group * input_bytes
            # Held as they came, or summed in float32 over the groups.
            gradients = trained * itemsize * hold_gradients if group == micro_batches else trained * 4
            # Rows of the embedding are gathered in memory of their own; see `transfer.TableRows`.
            by_rows = own_memory and devices == 1 and group * rows * seq < spec.vocab_size
            gathered = by_rows * rows * seq * spec.hidden_size * itemsize
            offloaded = kept * devices * offload
            # Sums over groups are made of one block after the other.
            landing = trained if group == micro_batches else 2 * max(block.num_parameters for block in spec.blocks)
            pinned = (landing * itemsize + offloaded) * own_memory
            host = state + gradients + offloaded + gathered + beside(pinned)
            device = working + kept * (not offload)
            # Without a memory of its own, what the device takes is the host's.
            host += device * (not own_memory)
            return Plan(
                group,
                offload,
                state,
                gradients,
                kept,
                working,
                host,
                device,
                expert_groups=spec.expert_groups,
                in_one_block=in_one_block,
                pinned=pinned,
                beside=beside(pinned),
            )

        on_device, in_host = ([sized(group, offload) for group in groups] for offload in (False, True))
        if not own_memory or memory.offload_activations is False:
            return on_device
        return in_host if memory.offload_activations is True else [on_device[0], *in_host, *on_device[1:]]

    least = None
    most = most_expert_groups(spec)[0]
    # Of the numbers that make the largest group equally large the smallest.
    auto = sorted({math.ceil(most / size) for size in range(1, most + 1)})
    for expert_groups in auto if memory.expert_groups == "auto" else [memory.expert_groups]:
        for plan in (tried := choices(in_expert_groups(spec, expert_groups))):
            if plan.host <= host_budget and plan.device <= device_budget:
                return plan
        least = tried[-1] if least is None or tried[-1].device < least.device else least
    raise _refusal(least, host_budget, device_budget, f"{rows} x {seq} tokens", bool(spec.router_aux_loss_coef))


def spend_room(
    plan: Plan,
    spec: ModelSpec,
    memory: MemoryConfig,
    *,
    tokens: int,
    micro_batches: int,
    dtype: str,
    devices: int,
    own_memory: bool,
    optimizer_bytes: float,
    state_bytes: float,
    hold_gradients: bool,
    device_bytes: int | None,
    host_bytes: int | None,
    attention_bytes: int = 0,
    beside: Callable[[int], int] = lambda pinned: 0,
) -> Plan:
    """Spends the device memory that a plan leaves: blocks that stay there, and intermediates that are not recomputed.

    Embedding and head stay first: they are the largest blocks and meet at the border between two steps. Layers stay, from
    the first on, while the host could not update the others within the time that hides it: the next forward if updates
    wait for the clip scale, the whole step otherwise. What is left goes to intermediates.

    Args:
      plan: from `make_plan`.
      tokens: of a micro-batch, on each device.
      optimizer_bytes: of the optimizer's state, for a parameter.
      others: as in `make_plan`.

    Raises:
      UserError: `keep_intermediates` or `resident_blocks` asks for more than fits.
    """
    itemsize = 2 if dtype == "bfloat16" else 4
    spec = in_expert_groups(spec, plan.expert_groups)
    layers, blocks = spec.layers, spec.blocks
    grouped = plan.group_size < micro_batches
    tight = plan.offload_activations or grouped
    order = [0, len(blocks) - 1, *range(1, len(blocks) - 1)]
    staying = [0, *itertools.accumulate(blocks[block].num_parameters for block in order)]  # in so many of them
    # Master and moments, and the gradient from a block's backward on while it is held; the copy that computes is one of
    # those in flight.
    each, held = 4 + optimizer_bytes, itemsize * hold_gradients
    at_head = head_bytes(spec, tokens=tokens, itemsize=itemsize, loss_tile=memory.loss_tile, devices=devices)
    again, kept = (
        layer_bytes(
            spec,
            tokens=tokens,
            itemsize=itemsize,
            accumulate=micro_batches > 1,
            attention_bytes=attention_bytes,
            kept=kept,
            devices=devices,
        )
        for kept in (False, spec.expert_groups == 1)
    )

    def kept_bytes(keep: int) -> int:
        """Of intermediates and weights; the input of a layer is part of the plan already."""
        return sum(
            itemsize
            * (plan.group_size * (intermediates(layer, tokens) - tokens * layer.hidden_size) + layer.num_parameters)
            for layer in layers[len(layers) - keep :]
        )

    def needed(resident: int, keep: int) -> int:
        """The peak: at the loss, when all that is kept is there, or in the first layers' backward, when it is gone."""
        if not own_memory:
            return plan.host + kept_bytes(keep)
        stay = staying[resident] / devices
        early = max(at_head, kept) if keep else at_head
        late = again if keep < len(layers) else kept
        inputs = plan.activations * (not plan.offload_activations)
        return inputs + int(max(early + kept_bytes(keep) + stay * each, late + stay * (each + held)))

    budget = MARGIN * (
        _budget(memory.device_budget, device_bytes) if own_memory else _budget(memory.host_budget, host_bytes)
    )

    def most(key: str, wanted: int, cost: Callable[[int], int]) -> int:
        fits = next((n for n in range(wanted, 0, -1) if cost(n) <= budget), 0)
        if getattr(memory, key) != "auto" and fits < wanted:
            raise _too_much(key, wanted, fits, cost(wanted) - cost(0), budget - cost(0))
        return fits

    wanted = 0
    if memory.resident_blocks != "auto":
        wanted = min(memory.resident_blocks, len(order))
    elif own_memory and not grouped:
        forward = 2 * tokens * micro_batches / DEVICE_FLOPS  # seconds a parameter
        hidden_by = forward * (1 if hold_gradients else 3) * sum(layer.active_parameters for layer in layers)
        streamed = [staying[-1] - some for some in staying]
        rate = HOST_UPDATES if devices == 1 else HOST_UPDATES_FOR_SEVERAL
        wanted = next(n for n, left in enumerate(streamed) if n >= 2 and left / rate <= hidden_by or not left)
    resident = most("resident_blocks", wanted, lambda n: needed(n, 0))
    if spec.expert_groups > 1:
        wanted = 0  # they would hold the weights of a whole layer
        if memory.keep_intermediates not in ("auto", 0):
            raise UserError(
                f"memory.keep_intermediates: {memory.keep_intermediates} layers, but those whose experts stream in "
                f"{spec.expert_groups} groups are computed again; set it to 0 or auto"
            )
    elif memory.keep_intermediates != "auto":
        wanted = min(memory.keep_intermediates, len(layers))
    else:
        wanted = 0 if tight else len(layers)
    keep = most("keep_intermediates", wanted, lambda n: needed(resident, n))
    freed = int(staying[resident] * state_bytes)
    # Nor do their gradients land.
    fewer = 0 if grouped else min(itemsize * staying[resident], plan.pinned)
    unheld = min(fewer * hold_gradients, plan.gradients)
    besides = beside(plan.pinned - fewer)
    return dataclasses.replace(
        plan,
        state=plan.state - freed,
        gradients=plan.gradients - unheld,
        pinned=plan.pinned - fewer,
        beside=besides,
        host=plan.host - freed - unheld + besides - plan.beside if own_memory else needed(0, keep),
        device=needed(resident, keep) if own_memory else plan.device + kept_bytes(keep),
        resident=tuple(sorted(order[:resident])),
        keep_layers=keep,
    )


def intermediates(layer: LayerSpec, tokens: int) -> int:
    """Values that a layer keeps for so many tokens: its input and `models.blocks.INTERMEDIATES`."""
    normed = (layer.norms.attention_out is not None) + (layer.norms.mlp_out is not None)
    rest = _mixer_values(layer) + (2 - layer.parallel + normed) * layer.hidden_size
    if layer.moe is None:
        return tokens * (rest + 2 * layer.intermediate_size)
    s = layer.moe
    rows = num_rows(tokens * s.top_k, s.num_experts)
    return tokens * (rest + 2 * s.shared_size + s.top_k) + rows * 2 * s.intermediate_size


def _mixer_values(layer: LayerSpec) -> int:
    """Of `intermediates`, those of attention or of what takes its place, for a token."""
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    if layer.delta is not None:
        return layer.delta.channels + 2 * layer.delta.value_heads * (layer.delta.value_dim + 1)
    if layer.latent is not None:
        return 2 * queries + 2 * layer.num_heads * layer.latent.value_dim
    return (2 + layer.output_gate) * queries + 2 * keys


def _too_much(key: str, wanted: int, fits: int, needed: float, room: float) -> UserError:
    return UserError(
        f"memory.{key}: {wanted} need {needed / GIB:.3g} GiB and {max(room, 0) / GIB:.3g} GiB are left; "
        f"set it to {fits} or auto"
    )


def _budget(setting: str | float, free: int | None) -> float:
    if setting != "auto":
        return setting * GIB
    return math.inf if free is None else free


def _refusal(least: Plan, host: float, device: float, batch: str, whole_step: bool) -> UserError:
    """Why not even the plan that needs least can be had."""
    gib = lambda size: f"{size / GIB:.3g} GiB"  # noqa: E731
    if least.state + least.gradients > host:
        return UserError(
            f"memory.host_budget: {gib(least.state)} for weights and optimizer and {gib(least.gradients)} for gradients are "
            f"needed, and there are {gib(host)} of host memory; take a smaller model, freeze more of it (model.freeze), or "
            "an optimizer with less state (optimizer.type: lion or sgd)"
        )
    where, needed, there = ("host", least.host, host) if least.host > host else ("device", least.device, device)
    batch, hint = f"a micro-batch of {batch}", ""
    cut = f" with the experts of a layer in {least.expert_groups} groups" * (least.expert_groups > 1)
    if whole_step and least.group_size > 1:
        batch = f"{least.group_size} times {batch}, together because of the auxiliary loss of the whole step,"
        hint = "; with model.config_overrides.router_aux_loss_coef: 0 they need not go together"
    return UserError(
        f"memory.{where}_budget: {batch} a device needs {gib(needed)} of {where} memory, of it "
        f"{gib(least.activations)} for kept block inputs and {gib(least.working)} for work on a block{cut}, and there are "
        f"{gib(there)}; lower training.batch_size or dataset.max_seq_len, or raise the budget{hint}"
    )
