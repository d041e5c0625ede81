"""Experts that stream in groups: everything as with all experts of a layer in one block.

The oracle is the model with whole layers, which other tests hold to transformers and to `jax.grad`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import megatrain_jax as mt
from megatrain_jax.checkpoint import state
from megatrain_jax.config import MemoryConfig, OptimizerConfig, TrainingConfig, UserError
from megatrain_jax.host.optimizer import HostOptimizer
from megatrain_jax.model import trainable
from megatrain_jax.models.blocks import model_tensors
from megatrain_jax.models.families import spec_from_config
from megatrain_jax.models.moe import in_expert_groups
from megatrain_jax.models.part_specs import NormNames
from megatrain_jax.stream import templates
from megatrain_jax.stream.activations import Activations
from megatrain_jax.stream.pipeline import Pipeline, Settings
from tests.conftest import small_spec
from tests.end_to_end.conftest import records, saved_weights, write_model
from tests.end_to_end.test_devices import finish, start
from tests.end_to_end.test_experts import MOE, sparse_spec
from tests.families import raw_config
from tests.models.test_names import folder_with
from tests.reference import (
    assert_same_gradients,
    execution,
    loss_and_grads,
    make_model,
    random_batch,
    random_weights,
    relative_errors,
    state_arrays,
    training,
)

slow = pytest.mark.exhaustive
# Of the norm of a gradient, in float32: what the order of a sum can change. Where terms cancel, as in the gradient of a
# key's bias, it is ten times the precision of a value.
SAME = 2e-6
SGD = OptimizerConfig(type="sgd", momentum=0.9)


def grouped_and_whole(spec, groups, run=None, **options):
    weights = random_weights(spec)
    return (make_model(s, weights, run, **options) for s in (in_expert_groups(spec, groups), spec))


@pytest.mark.parametrize(
    "family, groups",
    [
        ("qwen2_moe", 3),
        pytest.param("deepseek_v3", 3, marks=slow),  # 8 experts: groups of 3, 3 and 2
        ("gpt_oss", 2),
        pytest.param("qwen3_next", 2, marks=slow),
        *(pytest.param(*case, marks=slow) for case in (("qwen2_moe", 2), ("deepseek_v3", 2), ("gpt_oss", 3))),
        pytest.param("qwen3_next", 3, marks=slow),
        pytest.param("qwen2_moe", 6, marks=slow),  # an expert in each
    ],
)
def test_logits_loss_and_gradients_are_those_of_whole_layers(family, groups):
    spec = spec_from_config(raw_config(family))
    batches = [random_batch(spec, seed, packed=seed == 1) for seed in range(2)]
    ours, whole = grouped_and_whole(spec, groups)
    assert len(ours.store.blocks) == len(whole.store.blocks) + groups * sum(
        layer.moe is not None for layer in spec.layers
    )
    logits, expected = (model.logits(batches[0].token_ids) for model in (ours, whole))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    (loss, grads), (expected_loss, expected) = (model.loss_and_grads(*batches) for model in (ours, whole))
    assert loss == pytest.approx(expected_loss, rel=1e-6)  # with the auxiliary loss, where the family has one
    unmet = {name for name, grad in expected.items() if not grad.any()}
    assert all(not grads[name].any() for name in unmet)
    met = expected.keys() - unmet
    assert_same_gradients({name: grads[name] for name in met}, {name: expected[name] for name in met}, SAME)


@pytest.fixture(scope="module")
def three_steps():
    """Weights after three steps of whole layers, and what each step reported."""
    spec = sparse_spec()
    return spec, *steps(make_model(spec, random_weights(spec)), Settings(max_grad_norm=0.5))


def steps(model, settings):
    outcomes = []
    config = TrainingConfig(learning_rate=0.1, lr_scheduler_type="constant", weight_decay=0.1)
    with training(model, settings, optimizer=SGD, config=config) as (pipeline, updater):
        for step in range(3):
            batches = [random_batch(model.spec, 2 * step + m) for m in range(2)]
            outcomes.append(pipeline.train_step(batches))
        updater.drain()
    return {name: tensor.read() for name, tensor in model.store.tensors.items()}, outcomes


@pytest.mark.parametrize(
    "resident, offload",
    [((), False), pytest.param((), True, marks=slow), ((0, 1, 2, 10), False)],  # embedding, trunk, a group, head
    ids=["streamed", "offloaded", "resident"],
)
def test_training_steps_are_those_of_whole_layers(three_steps, resident, offload):
    """With clipping, weight decay and the auxiliary loss; six experts in groups of 2, between them a dense layer."""
    spec, expected, expected_outcomes = three_steps
    model = make_model(in_expert_groups(spec, 3), random_weights(spec), resident=resident)
    assert len(model.store.blocks) == 11
    weights, outcomes = steps(model, Settings(offload_activations=offload, max_grad_norm=0.5))
    for got, want in zip(outcomes, expected_outcomes, strict=True):
        assert (got.loss, got.grad_norm) == pytest.approx((want.loss, want.grad_norm), rel=2e-6)
        assert got.router_loss == pytest.approx(want.router_loss, rel=2e-6) and got.grad_norm > 0.5
    assert max(relative_errors(weights, expected).values()) < SAME


@slow
def test_micro_batches_may_go_in_groups_too():
    spec = sparse_spec(0.0)
    batches = [random_batch(spec, seed) for seed in range(3)]
    outcomes = []
    for model, group_size in zip(grouped_and_whole(spec, 2), (2, None)):
        with training(model, Settings(group_size=group_size)) as (pipeline, updater):
            outcomes.append(pipeline.train_step(batches))
            updater.drain()
    assert outcomes[0].loss == pytest.approx(outcomes[1].loss, rel=1e-6)
    assert outcomes[0].grad_norm == pytest.approx(outcomes[1].grad_norm, rel=1e-6)


@pytest.mark.parametrize(
    "pattern", [r"experts\.gate_up_proj$", *(pytest.param(p, marks=slow) for p in (r"experts\.", r"mlp\.gate", "attn"))]
)
def test_freezing_by_name_is_that_of_whole_layers(pattern):
    spec, batch = sparse_spec(), random_batch(sparse_spec())
    kept = trainable([pattern])
    (ours, whole) = grouped_and_whole(spec, 3, trainable=kept)
    assert ours.store.num_trainable == whole.store.num_trainable < spec.num_parameters
    _, expected = whole.loss_and_grads(batch)
    _, grads = ours.loss_and_grads(batch)
    assert_same_gradients(grads, expected, SAME)
    assert state.frozen_hashes(ours.store) == state.frozen_hashes(whole.store)


@slow
def test_backward_ends_at_the_first_experts_if_all_before_them_is_frozen():
    spec = small_spec(1, moe=MOE)
    ours, whole = grouped_and_whole(spec, 3, trainable=lambda name: "experts." in name or "lm_head" in name)
    (_, got), (_, expected) = (model.loss_and_grads(random_batch(spec)) for model in (ours, whole))
    assert_same_gradients(got, expected, SAME)


def test_in_bfloat16_groups_are_no_farther_from_the_exact_result():
    """The sum over groups is kept in float32."""
    spec = small_spec(1, moe=dataclasses.replace(MOE, num_experts=8, top_k=4))
    batch = random_batch(spec)
    rounded = {name: w.astype("bfloat16").astype(np.float32) for name, w in random_weights(spec).items()}
    _, exact = loss_and_grads(spec, rounded, [batch])
    errors = []
    for groups in (8, 1):
        _, grads = make_model(in_expert_groups(spec, groups), rounded, execution("bfloat16")).loss_and_grads(batch)
        errors.append(np.median(list(relative_errors(grads, exact).values())))
    assert errors[0] < 1.1 * errors[1] < 0.1


def test_two_devices_compute_what_one_does():
    finish([start(2, "expert_groups")], 300)


def test_groups_of_one_size_are_compiled_once(monkeypatch):
    spec = in_expert_groups(small_spec(3, moe=dataclasses.replace(MOE, num_experts=8)), 4)
    programs = {"layer_forward": [], "layer_backward": []}
    for name, called in programs.items():
        make = getattr(templates, name)
        monkeypatch.setattr(templates, name, lambda *key, make=make, to=called: to.append(make(*key)) or to[-1])
    make_model(spec, random_weights(spec)).loss_and_grads(random_batch(spec))
    for called in programs.values():
        assert len(called) == 3 * 5
        # The rest of a layer, a group, and the last group, which gives hidden states.
        assert [program._cache_size() for program in set(called)] == [1] * 3


def test_what_is_kept_for_backward_is_what_the_plan_counts(monkeypatch):
    spec, batch = in_expert_groups(sparse_spec(), 3), random_batch(sparse_spec())
    kept, put = [], Activations.put
    monkeypatch.setattr(
        Activations,
        "put",
        lambda self, block, m, x: (kept.extend(templates.jax.tree.leaves(x)), put(self, block, m, x)),
    )
    make_model(spec, random_weights(spec)).loss_and_grads(batch)
    head_input = batch.token_ids.size * spec.hidden_size * 4
    assert sum(x.nbytes for x in kept) + head_input == spec.kept_bytes(batch.token_ids.size, 4)


def test_layers_in_parts_keep_no_intermediates():
    spec = in_expert_groups(sparse_spec(), 2)
    with pytest.raises(ValueError, match="keep_layers must be 0"):
        Pipeline(make_model(spec, random_weights(spec)).store, execution(), Settings(keep_layers=1))


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_files_are_read_and_written_as_without_groups(tmp_path, family):
    """From experts one by one, and from stacked ones; the files that are written are equal byte for byte."""
    config = raw_config(family)
    tensors = random_weights(spec_from_config(config))
    stacked = folder_with(tmp_path / "stacked", config, tensors)
    options = {"dtype": "float32", "device": "cpu"}
    whole = mt.load(stacked, **options)
    mt.save(whole, tmp_path / "whole", dtype="float32")
    for source in (stacked, tmp_path / "whole"):
        ours = mt.load(source, **options, memory=MemoryConfig(expert_groups=3))
        assert not ours.notes and ours.spec.expert_groups == 3
        for name, expected in tensors.items():
            np.testing.assert_array_equal(ours.store.tensors[name].read(), expected)
        mt.save(ours, tmp_path / "grouped", dtype="float32")
        written = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("grouped", "whole")]
        assert written[0] == written[1]


def test_random_weights_are_those_of_whole_layers(tmp_path):
    folder = folder_with(tmp_path / "config", raw_config("qwen2_moe"), {})
    ours, whole = (
        mt.load(folder, dtype="float32", device="cpu", init="random", seed=3, memory=MemoryConfig(expert_groups=groups))
        for groups in (4, 1)
    )
    for name, tensor in whole.store.tensors.items():
        np.testing.assert_array_equal(ours.store.tensors[name].read(), tensor.read())


@pytest.mark.parametrize("before, after", [(1, 3), (4, 1), (2, 3)])
@pytest.mark.parametrize("resident", [(), pytest.param((3,), marks=slow)])
def test_a_checkpoint_does_not_know_in_how_many_groups_experts_streamed(tmp_path, before, after, resident):
    spec = sparse_spec()
    stores, rng = [], np.random.default_rng(0)
    for groups in (before, after):
        store = make_model(in_expert_groups(spec, groups), random_weights(spec), resident=resident).store
        HostOptimizer(store, OptimizerConfig(), TrainingConfig(), 10)
        stores.append(store)
    expected = {}
    for name, tensor in stores[0].tensors.items():
        for key, array in tensor.state().items():
            values = rng.normal(size=array.shape) if array.dtype.kind == "f" else np.full(array.shape, 7)
            expected[name, key] = values.astype(array.dtype)
            array.write(0, expected[name, key].reshape(-1))
    done = []
    state.save(tmp_path / "checkpoint-1", stores[0], {"step": 1}, done_with=done.append)
    assert done == list(range(len(stores[0].blocks)))
    assert state.load(tmp_path / "checkpoint-1", stores[1]) == {"step": 1}
    got = {(name, key): a for name, t in stores[1].tensors.items() for key, a in state_arrays(t).items()}
    assert got.keys() == expected.keys()
    for where, values in expected.items():
        np.testing.assert_array_equal(got[where], values)


# ---------------------------------------------------------------------- a run


def test_a_run_says_so_and_continues_as_it_was(project, tmp_path, capsys):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.5}
    folder = write_model(
        tmp_path / "sparse", model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], head_dim=8, **experts
    )
    model = {"name": str(folder)}

    def run(out, groups, steps):
        config = project.config(
            out,
            model=model,
            training={"num_steps": steps, "lr_scheduler_type": "constant", "resume_from_checkpoint": "auto"},
            optimizer={"type": "sgd"},
            memory={"expert_groups": groups},
        )
        mt.Trainer(config).fit()
        return [line for line in records(project.folder / out) if "grad_norm" in line], saved_weights(
            project.folder / out
        )

    whole, expected = run("whole", 1, 4)
    capsys.readouterr()
    run("grouped", 3, 2)
    assert "plan       experts of a layer stream in 3 groups: " in capsys.readouterr().out
    assert state.read_run(project.folder / "grouped" / "checkpoint-2")["position"]["expert_groups"] == 3
    grouped, weights = run("grouped", "auto", 4)
    assert state.read_run(project.folder / "grouped" / "checkpoint-4")["position"]["expert_groups"] == 3
    for got, want in zip(grouped, whole, strict=True):
        for key in ("loss", "grad_norm", "router_loss"):
            assert got[key] == pytest.approx(want[key], rel=1e-5)
    assert weights.keys() == expected.keys()
    assert max(relative_errors(weights, expected).values()) < 1e-5


# ---------------------------------------------------------------------- refusals


def test_what_cannot_be_cut_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match="memory.expert_groups: 2 .* it has no experts"):
        in_expert_groups(small_spec(1), 2)
    with pytest.raises(UserError, match="memory.expert_groups: 7 .* have 6 experts; set 6 or auto"):
        in_expert_groups(small_spec(1, moe=MOE), 7)
    with pytest.raises(UserError, match="memory.expert_groups: .* a norm follows its experts"):
        in_expert_groups(small_spec(1, moe=MOE, norms=NormNames(mlp_out="norm")), 2)
    assert in_expert_groups(small_spec(1), 1) == small_spec(1)
    folder = folder_with(tmp_path / "config", raw_config("qwen2_moe"), {})
    with pytest.raises(UserError, match="optimizer.type: .* whole tensors, and experts stream in 2 groups"):
        mt.load(folder, device="cpu", init="random", layout="whole", memory=MemoryConfig(expert_groups=2))


def test_groups_change_no_name_or_shape():
    for family in ("qwen3_moe", "gpt_oss", "deepseek_v2"):
        spec = spec_from_config(raw_config(family))
        assert list(model_tensors(in_expert_groups(spec, 3)).items()) == list(model_tensors(spec).items())
        assert in_expert_groups(spec, 3).num_parameters == spec.num_parameters
