"""Figures against what is really allocated, decisions against their properties."""

import dataclasses
import gc
import math
import tracemalloc

import jax
import numpy as np
import pytest

from megatrain_jax.config import MemoryConfig, OptimizerConfig, TrainingConfig, UserError
from megatrain_jax.host.optimizer import HostOptimizer
from megatrain_jax.host.pages import Pages
from megatrain_jax.models.blocks import tensor_shapes
from megatrain_jax.models.families import spec_from_config
from megatrain_jax.models.moe import Routed, RouterStats, in_expert_groups
from megatrain_jax.models.part_specs import MoESpec
from megatrain_jax.models.spec import Context, TrunkSpec
from megatrain_jax.stream import planner
from megatrain_jax.stream.planner import (
    GIB,
    MARGIN,
    head_bytes,
    intermediates,
    make_plan,
    spend_room,
    state_bytes_per_parameter,
    working_bytes,
)
from megatrain_jax.stream.templates import Returning, layer_backward, layer_forward_keeping
from tests.conftest import small_spec
from tests.families import first_cases, raw_config
from tests.reference import execution, make_model, random_weights

SPEC = small_spec(4, hidden_size=256, intermediate_size=512, head_dim=64)
INPUT = 5 * 8 * 64 * 256 * 4  # kept inputs of a micro-batch: blocks x rows x tokens x width x bytes


def plan(memory=MemoryConfig(), spec=SPEC, **changes):
    fields = dict(
        trained=spec.num_parameters,
        batch_size=8,
        seq=64,
        micro_batches=4,
        dtype="float32",
        devices=1,
        own_memory=True,
        state_bytes=16,
        hold_gradients=True,
        device_bytes=None,
        host_bytes=None,
    )
    return make_plan(spec, memory, **fields | changes)


def budget(size):
    return size / GIB


def test_kept_inputs_are_one_array_a_layer_and_one_for_the_head():
    assert plan(micro_batches=1).activations == INPUT
    assert plan().activations == 4 * INPUT
    assert plan(batch_size=9, devices=2, micro_batches=1).activations == INPUT / 8 * 5  # rows of the fuller device


@pytest.mark.parametrize("what", ["batch_size", "seq", "micro_batches", "trained", "state_bytes"])
@pytest.mark.parametrize("own_memory", [True, False])
def test_more_never_needs_less(what, own_memory):
    base = {"batch_size": 8, "seq": 64, "micro_batches": 4, "trained": 1000, "state_bytes": 12}[what]
    plans = [plan(own_memory=own_memory, **{what: base * n}) for n in (1, 2, 5)]
    for less, more in zip(plans, plans[1:]):
        assert more.host >= less.host and more.device >= less.device
        assert more.host + more.device > less.host + less.device


def test_what_is_frozen_costs_its_wire_alone():
    n = SPEC.num_parameters
    whole, half = plan(), plan(trained=n // 2)
    assert whole.state == 16 * n and half.state == 16 * (n // 2) + 4 * (n - n // 2)
    assert half.gradients == 4 * (n // 2)
    assert plan(hold_gradients=False).gradients == 0


def test_what_passes_through_pinned_memory_is_known_and_what_is_taken_besides_counts():
    n, largest = SPEC.num_parameters, max(block.num_parameters for block in SPEC.blocks)
    assert plan().pinned == plan(hold_gradients=False).pinned == 4 * n
    assert plan(own_memory=False).pinned == 0
    assert plan(MemoryConfig(offload_activations=True)).pinned == 4 * n + 4 * INPUT
    alone = plan(MemoryConfig(offload_activations=False, device_budget=budget(plan().working + INPUT)))
    assert alone.group_size == 1 and alone.pinned == 2 * 4 * largest  # summed elsewhere, block by block
    more = plan(beside=lambda pinned: 3 * pinned + 7)
    assert more.beside == 12 * n + 7 and more.host == plan().host + more.beside


def test_where_all_fits_nothing_is_offloaded_or_split():
    roomy = plan(device_bytes=plan().device)
    assert (roomy.group_size, roomy.offload_activations) == (4, False)


def test_inputs_that_do_not_fit_on_the_device_wait_in_host_memory():
    got = plan(device_bytes=plan().device - 1)
    assert (got.group_size, got.offload_activations) == (4, True)
    assert got.device == plan().working
    assert got.host == plan().host + 4 * INPUT


def test_offloaded_inputs_of_all_devices_are_on_the_host():
    memory = MemoryConfig(offload_activations=True)
    one, two = plan(memory, batch_size=8), plan(memory, batch_size=16, devices=2)
    assert two.host - one.host == one.activations == two.activations


@pytest.mark.parametrize("group", [1, 2, 3])
def test_groups_are_as_large_as_the_device_holds_where_nothing_may_be_offloaded(group):
    memory = MemoryConfig(offload_activations=False)
    for spare in (0, INPUT - 1):
        got = plan(dataclasses.replace(memory, device_budget=budget(plan().working + group * INPUT + spare)))
        assert (got.group_size, got.offload_activations) == (group, False)
        assert got.activations == group * INPUT
        assert got.gradients == 4 * SPEC.num_parameters  # summed in float32


def test_groups_are_as_large_as_the_host_holds_where_everything_is_offloaded():
    memory = MemoryConfig(offload_activations=True)
    least = plan(memory, micro_batches=1)
    got = plan(dataclasses.replace(memory, host_budget=budget(least.host + INPUT)))
    assert (got.group_size, got.offload_activations) == (2, True)


def test_when_neither_holds_all_the_device_works_in_groups():
    one = plan(micro_batches=1, device_bytes=None)
    got = plan(device_bytes=plan().working + 2 * INPUT, host_bytes=one.host)
    assert (got.group_size, got.offload_activations) == (2, False)


def test_without_a_memory_of_its_own_everything_is_the_hosts():
    got = plan(own_memory=False)
    assert got.host == got.state + got.gradients + got.activations + got.working
    assert not plan(MemoryConfig(offload_activations=True), own_memory=False).offload_activations
    tight = plan(own_memory=False, host_bytes=got.host - 1)
    assert tight.group_size == 3 and tight.host <= got.host - 1


@pytest.mark.parametrize("own_memory", [True, False])
@pytest.mark.parametrize("offload", ["auto", True, False])
def test_no_plan_is_larger_than_its_budgets(own_memory, offload):
    free, rng, refused = plan(micro_batches=6, own_memory=own_memory), np.random.default_rng(0), 0
    for _ in range(200):
        device, host = (int(free_size * rng.uniform(0.5, 1.3)) for free_size in (free.device, free.host))
        try:
            got = plan(
                MemoryConfig(offload_activations=offload),
                micro_batches=6,
                own_memory=own_memory,
                device_bytes=device,
                host_bytes=host,
            )
        except UserError:
            refused += 1
            continue
        assert got.host <= host and got.device <= device and 1 <= got.group_size <= 6
    assert 0 < refused < 200


def test_refusals_have_the_figures_and_the_remedy():
    n = SPEC.num_parameters
    with pytest.raises(UserError) as error:
        plan(host_bytes=16 * n)
    assert f"{16 * n / GIB:.3g} GiB for weights" in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith("memory.host_budget: ") and "model.freeze" in str(error.value)
    with pytest.raises(
        UserError, match="memory.device_budget: a micro-batch of 8 x 64 tokens .*lower training.batch_size"
    ):
        plan(MemoryConfig(offload_activations=False), device_bytes=plan().working + INPUT - 1)
    with pytest.raises(UserError, match="memory.device_budget"):
        plan(MemoryConfig(offload_activations=True), device_bytes=plan().working - 1)
    with pytest.raises(UserError, match="memory.host_budget: a micro-batch"):
        plan(own_memory=False, host_bytes=plan(own_memory=False, micro_batches=1).host - 1)


def test_a_budget_of_the_user_wins_over_what_is_free():
    enough = budget(plan().host + plan().device)
    memory = MemoryConfig(device_budget=enough, host_budget=enough)
    assert plan(memory, device_bytes=1, host_bytes=1) == plan()


@pytest.mark.parametrize(
    "dtype, split, expected", [("float32", False, 12), ("bfloat16", False, 14), ("bfloat16", True, 12)]
)
def test_bytes_per_parameter_are_what_the_store_allocates(monkeypatch, dtype, split, expected):
    """Counted where memory is taken: arrays of the CPU backend, pages of the wire, NumPy arrays."""
    assert state_bytes_per_parameter(dtype, own_memory=False, optimizer_bytes=8, split=split) == expected
    if split:
        pytest.importorskip("numba")
    gc.collect()
    pages, before = [], sum(array.nbytes for array in jax.live_arrays())
    init = Pages.__init__

    def counted(self, size, **options):
        pages.append(size)
        init(self, size, **options)

    monkeypatch.setattr(Pages, "__init__", counted)
    spec = small_spec(2, hidden_size=512, intermediate_size=1024, head_dim=128)
    weights = random_weights(spec)
    tracemalloc.start()
    try:
        store = make_model(spec, weights, execution(dtype), layout="split" if split else "chunks").store
        HostOptimizer(store, OptimizerConfig(), TrainingConfig(), 10)
        gc.collect()
        in_jax = sum(array.nbytes for array in jax.live_arrays()) - before
        in_numpy = tracemalloc.get_traced_memory()[0] if split else 0
    finally:
        tracemalloc.stop()
    assert (in_jax + sum(pages) + in_numpy) / spec.num_parameters == pytest.approx(expected, rel=0.02)


def test_masks_and_scores_of_whole_rows_leave_less_room_for_everything_else():
    assert plan(attention_bytes=GIB).working - plan(attention_bytes=GIB // 2).working == GIB // 2
    first, everything = spent()
    room = int(everything.device / MARGIN) + 1
    assert spent(device_bytes=room)[1].keep_layers == everything.keep_layers
    _, after = spent(device_bytes=room, attention_bytes=room - first.device)
    assert after.device <= room and after.keep_layers < everything.keep_layers


def test_what_is_not_known_is_no_limit():
    assert math.isinf(planner._budget("auto", None))


def spent(memory=MemoryConfig(), spec=SPEC, tokens=512, own_memory=True, **changes):
    fields = dict(
        micro_batches=1,
        dtype="bfloat16",
        devices=1,
        own_memory=own_memory,
        state_bytes=12,
        hold_gradients=True,
        device_bytes=None,
        host_bytes=None,
    )
    fields |= changes
    first = plan(memory, spec, batch_size=8, seq=tokens // 8, **fields)
    return first, spend_room(first, spec, memory, tokens=tokens, optimizer_bytes=8, **fields)


def test_with_room_for_everything_nothing_is_recomputed_and_the_ends_stay():
    first, after = spent()
    assert after.keep_layers == 4 and {0, 5} <= set(after.resident)
    assert after.state < first.state and after.device > first.device


@pytest.mark.parametrize("hold", [True, False])
def test_nothing_lands_of_blocks_that_stay(hold):
    beside = lambda pinned: pinned // 2  # noqa: E731
    first, after = spent(MemoryConfig(resident_blocks=3), hold_gradients=hold, beside=beside)
    lands = 2 * (SPEC.num_parameters - sum(SPEC.blocks[block].num_parameters for block in after.resident))
    assert (after.pinned, after.gradients, after.beside) == (lands, lands * hold, lands // 2)
    assert after.host - first.host == sum(
        getattr(after, name) - getattr(first, name) for name in ("state", "gradients", "beside")
    )
    assert spent(MemoryConfig(resident_blocks=6), beside=beside)[1].pinned == 0


@pytest.mark.parametrize("hold", [True, False])
def test_what_is_spent_is_there_and_more_room_is_never_spent_worse(hold):
    first, everything = spent(hold_gradients=hold)
    before = (0, 0)
    for share in np.linspace(0, 1.2, 25):
        room = int(first.device + share * (everything.device - first.device))
        _, after = spent(device_bytes=room, hold_gradients=hold)
        assert after.device <= max(room, first.device)
        assert len(after.resident) >= before[0]
        before = (len(after.resident), after.keep_layers)
    assert before == (len(everything.resident), everything.keep_layers)


def test_more_blocks_stay_when_updates_are_held_and_when_a_step_is_short():
    wide = small_spec(12, hidden_size=1024, intermediate_size=4096, head_dim=64)
    held, at_once = (spent(spec=wide, tokens=1 << 15, hold_gradients=hold)[1] for hold in (True, False))
    assert len(held.resident) > len(at_once.resident) >= 2
    assert len(spent(spec=wide, tokens=1 << 11)[1].resident) == 14
    assert len(spent(spec=wide, tokens=1 << 20)[1].resident) == 2


def test_without_a_memory_of_its_own_nothing_stays_and_intermediates_count_for_the_host():
    first, after = spent(own_memory=False)
    assert after.resident == () and after.keep_layers == 4 and after.host > first.host
    _, tight = spent(own_memory=False, host_bytes=int(first.host / MARGIN) + 1)
    assert tight.keep_layers == 0


def test_where_inputs_had_to_leave_the_ends_may_stay_and_where_they_had_to_wait_nothing_does():
    first, _ = spent(micro_batches=4)
    _, offloaded = spent(MemoryConfig(offload_activations=True), micro_batches=4, device_bytes=first.device - 1)
    assert offloaded.offload_activations and {0, 5} <= set(offloaded.resident) and offloaded.keep_layers == 0
    assert offloaded.device <= first.device - 1
    _, grouped = spent(MemoryConfig(offload_activations=False), micro_batches=4, device_bytes=first.device - 1)
    assert grouped.group_size < 4 and (grouped.resident, grouped.keep_layers) == ((), 0)


def test_several_devices_hold_the_head_whole_besides_their_share():
    spec = small_spec(1, hidden_size=64)
    one, two = (head_bytes(spec, tokens=8, itemsize=2, loss_tile=8, devices=devices) for devices in (1, 2))
    assert two - one == 4 * spec.vocab_size * spec.hidden_size


def test_rows_of_the_embedding_are_gathered_in_host_memory_while_they_are_fewer_than_the_table():
    few, many = (plan(batch_size=rows, seq=8, micro_batches=2) for rows in (5, 7))
    assert SPEC.vocab_size == 97  # 2 x 40 ids, 2 x 56
    assert few.host - few.state - few.gradients == 5 * 8 * SPEC.hidden_size * 4
    assert many.host == many.state + many.gradients
    assert plan(batch_size=10, seq=8, micro_batches=2, devices=2).host == many.host


@pytest.mark.parametrize("key, wanted", [("keep_intermediates", 3), ("resident_blocks", 4)])
def test_what_is_asked_for_is_done_or_refused_with_figures(key, wanted):
    _, after = spent(MemoryConfig(**{key: wanted}))
    assert {"keep_intermediates": after.keep_layers, "resident_blocks": len(after.resident)}[key] == wanted
    _, none = spent(MemoryConfig(**{key: 0}))
    assert {"keep_intermediates": none.keep_layers, "resident_blocks": len(none.resident)}[key] == 0
    first, _ = spent()
    with pytest.raises(UserError, match=rf"memory.{key}: {wanted} need .* GiB .* set it to \d or auto"):
        spent(MemoryConfig(**{key: wanted}), device_bytes=int(first.device / MARGIN) + 1)


# Layers whose attention no fused kernel computes.
WITHOUT_KERNEL = ["gemma2 strong caps", "qwen3_5_text"]


def structures(name):
    """The distinct layers of a case, wide enough that what is named outweighs tables and statistics."""
    raw = raw_config(name)
    wide = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 96, "head_dim": 64}
    return set(spec_from_config(raw | {key: size for key, size in wide.items() if key in raw}).layers)


@pytest.mark.parametrize("name", [*first_cases(), *WITHOUT_KERNEL[:1]])
def test_kept_intermediates_are_what_the_template_keeps(name):
    for layer in structures(name):
        weights = {p: jax.ShapeDtypeStruct(s, np.float32) for p, s in tensor_shapes(layer).items()}
        x = jax.ShapeDtypeStruct((2, 16, layer.hidden_size), np.float32)
        ids = jax.ShapeDtypeStruct((2, 16), np.int32)
        template = layer_forward_keeping(layer, execution(), frozenset(weights))
        *_, pullback = jax.eval_shape(template, weights, x, Context(ids, ids))
        held = [leaf.shape for leaf in jax.tree.leaves(pullback)]
        for shape in tensor_shapes(layer).values():
            if shape in held:
                held.remove(shape)
        kept = sum(math.prod(shape) for shape in held)
        # What is not named and yet kept is small: the tables of the rotary embedding, positions and segments.
        assert intermediates(layer, 32) <= kept <= intermediates(layer, 32) * 1.1, layer


def test_experts_count_by_the_rows_that_they_compute():
    layer = small_spec(1, hidden_size=64, moe=MoESpec(64, 4, 32)).layers[0]
    dense = dataclasses.replace(layer, moe=None, intermediate_size=4 * 32)
    for count in (planner.values_in_backward, planner.intermediates):
        # Ten times the tokens take ten times the memory, but for padding, which is at most a quarter of the fewer rows.
        assert 8 * count(layer, 10_000) <= count(layer, 100_000) <= 10 * count(layer, 10_000)
        assert count(dense, 100_000) < count(layer, 100_000) < 4 * count(dense, 100_000)


def test_a_step_with_an_auxiliary_loss_is_not_cut_into_groups():
    sparse = dataclasses.replace(
        SPEC, layers=tuple(dataclasses.replace(layer, moe=MoESpec(4, 2, 64)) for layer in SPEC.layers)
    )
    balanced = dataclasses.replace(sparse, router_aux_loss_coef=0.01)
    fits = plan(MemoryConfig(offload_activations=False), spec=balanced).device
    with pytest.raises(UserError, match="auxiliary loss of the whole step.*router_aux_loss_coef: 0"):
        plan(MemoryConfig(offload_activations=False), spec=balanced, device_bytes=fits - 1)
    assert plan(MemoryConfig(offload_activations=False), spec=sparse, device_bytes=fits - 1).group_size < 4


@pytest.mark.parametrize("name", WITHOUT_KERNEL)
def test_scores_in_float32_are_part_of_what_a_layer_works_with(name):
    """What XLA takes for backward of one layer, of which scores are the most here, is no more than planned."""
    for layer in structures(name):
        if layer.delta is None and layer.attention_softcap is None:
            continue
        rows, seq = 2, 640
        shapes = {p: jax.ShapeDtypeStruct(s, np.float32) for p, s in tensor_shapes(layer).items()}
        x = jax.ShapeDtypeStruct((rows, seq, layer.hidden_size), np.float32)
        ids = jax.ShapeDtypeStruct((rows, seq), np.int32)
        program = layer_backward(layer, execution(), frozenset(shapes), True)
        compiled = program.lower(shapes, x, x, (), Context(ids, ids), None, jax.ShapeDtypeStruct((), np.float32))
        taken = compiled.compile().memory_analysis().temp_size_in_bytes
        spec = dataclasses.replace(SPEC, layers=(layer,), vocab_size=8, hidden_size=layer.hidden_size)
        planned = working_bytes(spec, tokens=rows * seq, itemsize=4, loss_tile=1, accumulate=False, attention_bytes=0)
        assert planner.scores_in_backward(layer, rows * seq) <= taken <= planned


# ---------------------------------------------------------------------- experts in groups

SPARSE = small_spec(3, hidden_size=256, head_dim=64, moe=MoESpec(12, 2, 512, shared_size=64))
ON_DEVICE = MemoryConfig(offload_activations=False)


def in_groups(number, memory=ON_DEVICE, **changes):
    return plan(dataclasses.replace(memory, expert_groups=number), spec=SPARSE, micro_batches=1, **changes)


def test_experts_stream_in_groups_only_if_a_layer_does_not_fit_and_then_in_as_few_as_do():
    whole = in_groups(1)
    assert in_groups("auto") == in_groups("auto", device_bytes=whole.device) == whole
    needed = {number: in_groups(number).device for number in range(1, 13)}
    for before, number in zip(
        (1, 2, 3, 4, 6), (2, 3, 4, 6, 12)
    ):  # groups of 6, 4, 3, 2 and 1; five are as large as four
        assert needed[number] < needed[before]
        got = in_groups("auto", device_bytes=needed[before] - 1)
        assert (got.expert_groups, got.device) == (number, needed[number])
        assert got.in_one_block == whole.working > got.working
    assert needed[5] == needed[4]


def test_all_else_is_tried_before_groups():
    whole = in_groups(1)
    got = in_groups("auto", MemoryConfig(), device_bytes=whole.device - 1)
    assert (got.expert_groups, got.offload_activations) == (1, True)
    got = in_groups("auto", MemoryConfig(), device_bytes=whole.working - 1)
    assert got.expert_groups > 1 and got.device <= whole.working - 1


def test_a_layer_that_fits_in_no_number_of_groups_is_refused_with_the_figures_of_most():
    least = in_groups(12)
    match = rf"{least.working / GIB:.3g} GiB for work on a block with the experts of a layer in 12 groups"
    with pytest.raises(UserError, match=match):
        in_groups("auto", device_bytes=least.device - 1)
    with pytest.raises(UserError, match="for work on a block, and there are"):
        in_groups(1, device_bytes=least.device)


def test_kept_inputs_of_a_layer_in_parts_are_its_own_and_that_of_its_experts():
    whole, cut = in_groups(1), in_groups(4)
    assert whole.activations == 4 * 512 * 256 * 4
    assert cut.activations == 7 * 512 * 256 * 4 + 3 * 512 * 8 * SPARSE.layers[0].moe.top_k == in_groups(2).activations


def test_parts_of_layers_may_stay_and_keep_no_intermediates():
    memory = dataclasses.replace(ON_DEVICE, expert_groups=3)
    first, after = spent(memory, SPARSE)
    assert (after.expert_groups, after.keep_layers) == (3, 0)
    assert (
        after.resident == tuple(range(3 * 4 + 2)) and after.device > first.device
    )  # embedding, 3 trunks, 9 groups, head
    _, after = spent(dataclasses.replace(memory, resident_blocks=4), SPARSE)
    assert after.resident == (0, 1, 2, 13)
    with pytest.raises(UserError, match="memory.keep_intermediates: 2 layers.* 3 groups are computed again"):
        spent(dataclasses.replace(memory, keep_intermediates=2), SPARSE)


@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss"])
def test_what_a_part_of_a_layer_works_with_is_no_more_than_planned(name):
    """What XLA takes for its backward, besides weights and gradients."""
    spec = in_expert_groups(spec_from_config(raw_config(name)), 3)
    rows, seq = 2, 256
    hidden = lambda dtype: jax.ShapeDtypeStruct((rows, seq, spec.hidden_size), dtype)  # noqa: E731
    ids = jax.ShapeDtypeStruct((rows, seq), np.int32)
    for block in spec.structures:
        choices = lambda dtype: jax.ShapeDtypeStruct((rows, seq, block.moe.top_k), dtype)  # noqa: B023, E731
        routed = Routed(hidden(np.float32), choices(np.int32), choices(np.float32))
        returning = Returning(hidden(np.float32), choices(np.float32), hidden(np.float32), routed)
        stats = ()
        if isinstance(block, TrunkSpec):
            x, dy = hidden(np.float32), returning
            number = jax.ShapeDtypeStruct((block.moe.num_experts,), np.float32)
            stats = RouterStats(number, number, jax.ShapeDtypeStruct((), np.float32))
        else:
            x, dy = (routed, hidden(np.float32)) if block.last else ((), returning)
        shapes = {p: jax.ShapeDtypeStruct(s, np.float32) for p, s in tensor_shapes(block).items()}
        program = layer_backward(block, execution(), frozenset(shapes), True)
        scalar = jax.ShapeDtypeStruct((), np.float32)
        lowered = program.lower(shapes, x, dy, stats, Context(ids, ids), None, scalar)
        taken = lowered.compile().memory_analysis().temp_size_in_bytes
        scores = planner.scores_in_backward(block.layer, rows * seq) + 4 * block.layer.num_heads * rows * seq**2
        planned = 4 * planner.values_in_backward(block, rows * seq) + 4 * scores * isinstance(block, TrunkSpec)
        assert 0.25 * planned < taken < planned + 3 * 4 * block.num_parameters, (block, taken, planned)
