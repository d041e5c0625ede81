"""What a run is and needs, as arithmetic on a configuration."""

import collections
import dataclasses
import re

import pytest

from megatrain_jax import preparation
from megatrain_jax.config import UserError
from megatrain_jax.stream.transfer import Mesh, make_mesh
from tests.end_to_end.conftest import Project, write_data, write_model


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path, write_model(tmp_path / "model"))


def test_epochs_are_counted_in_steps(project):
    sections = {"training": {"num_steps": None, "num_train_epochs": 1.5, "gradient_accumulation_steps": 2}}
    assert preparation.prepare(project.config(**sections)).total_steps == 6  # 4 steps an epoch
    project.tree["dataset"]["path"] = str(write_data(project.folder / "train.jsonl", 16))
    assert preparation.prepare(project.config(**sections)).total_steps == 6


def test_frozen_parameters_are_counted_and_named(project):
    config = project.config(model={"freeze": ["layers.0", "(?i)EMBED"]})
    prepared = preparation.prepare(config)
    layer = 32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 48 + 64
    assert prepared.trained == layer + 32
    assert "M frozen)" in preparation.describe(config, prepared)[0]


@pytest.mark.parametrize(
    "kind, per_parameter", [("adamw", 8), ("sgd", 4), ("lion", 4), ("amsgrad", 12), ("sign_sgd", 0)]
)
def test_optimizer_state_is_counted_as_optax_makes_it(project, kind, per_parameter):
    assert preparation._optimizer_bytes(project.config(optimizer={"type": kind})) == per_parameter


def test_a_run_that_continues_spends_memory_as_before_if_that_fits(project, monkeypatch):
    config = project.config()
    prepared, mesh = preparation.prepare(config), make_mesh("cpu")
    assert preparation.plan(config, prepared, mesh).keep_layers == 2
    assert preparation.resumed_plan(config, prepared, mesh, 1, 0, 1).keep_layers == 1
    asked = project.config(memory={"keep_intermediates": 0})
    assert preparation.resumed_plan(asked, prepared, mesh, 1, 0, 1).keep_layers == 0
    first = preparation.plan(asked, prepared, mesh)
    monkeypatch.setattr(preparation, "host_memory", lambda: int(first.host * 1.06))
    assert preparation.plan(config, prepared, mesh).keep_layers == 0
    assert preparation.resumed_plan(config, prepared, mesh, 1, 0, 1).keep_layers == 0


@pytest.mark.parametrize(
    "platform, dtype, backend, resident, softcap, expected",
    [
        ("cpu", "float32", "auto", 0, None, "attention: XLA; adamw: optax on the host"),
        ("cuda", "bfloat16", "optax", 0, None, "attention: cuDNN; adamw: optax on the host"),
        ("cuda", "bfloat16", "fused", 0, None, "attention: cuDNN; adamw: fused kernels on the host"),
        ("cuda", "float32", "auto", 2, None, "attention: XLA; adamw: optax on the host, optax on the device"),
        (
            "cuda",
            "bfloat16",
            "fused",
            0,
            50.0,
            "attention: XLA in tiles (capped scores, sinks); adamw: fused kernels on",
        ),
    ],
)
def test_a_run_says_which_kernels_compute(project, monkeypatch, platform, dtype, backend, resident, softcap, expected):
    if backend == "fused":
        pytest.importorskip("numba")
    monkeypatch.setattr(Mesh, "platform", platform)
    config = project.config(
        model={"dtype": dtype}, optimizer={"backend": backend}, memory={"resident_blocks": resident}
    )
    prepared = preparation.prepare(config)
    layers = tuple(dataclasses.replace(layer, attention_softcap=softcap) for layer in prepared.spec.layers)
    prepared = dataclasses.replace(prepared, spec=dataclasses.replace(prepared.spec, layers=layers))
    monkeypatch.setattr(Mesh, "has_own_memory", False)
    mesh = make_mesh("cpu")
    p = preparation.plan(config, prepared, mesh)
    *_, line = preparation.describe_plan(config, prepared, p, mesh)
    assert line.startswith(f"kernels    {expected}") and len(p.resident) == resident


def test_a_run_in_groups_goes_on_in_groups_and_other_optimizers_are_refused(project, tmp_path):
    experts = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "architectures": None,
    }
    model = {"name": str(write_model(tmp_path / "sparse", model_type="qwen3_moe", **experts))}
    config, mesh = project.config(model=model), make_mesh("cpu")
    prepared = preparation.prepare(config)
    assert preparation.resumed_plan(config, prepared, mesh, 0, 0, 3).expert_groups == 3
    asked = project.config(model=model, memory={"expert_groups": 2})
    p = preparation.resumed_plan(asked, prepared, mesh, 0, 0, 3)
    assert p.expert_groups == 2
    assert "experts of a layer stream in 2 groups" in preparation.describe_plan(asked, prepared, p, mesh)[-1]
    assert "expert_groups" not in preparation.identity(asked, prepared)["model"]
    whole = project.config(model=model, memory={"expert_groups": 2}, optimizer={"type": "lamb"})
    with pytest.raises(UserError, match="optimizer.type: .* experts stream in 2 groups"):
        preparation.plan(whole, prepared, mesh)


def on_a_disk_with(monkeypatch, free):
    usage = collections.namedtuple("Usage", "total used free")
    monkeypatch.setattr(preparation.shutil, "disk_usage", lambda path: usage(1 << 50, 0, free))


@pytest.mark.parametrize(
    "checkpoint, checkpoints",
    [
        ({"save_steps": 2, "save_total_limit": 2}, 3),
        ({"save_steps": 2, "save_total_limit": 9}, 6),
        ({"save_steps": 2, "save_total_limit": None}, 6),
        ({"save_strategy": "epoch", "save_total_limit": 5}, 3),
        ({"save_steps": 1000}, 2),
        ({"save_strategy": "no"}, 0),
    ],
)
@pytest.mark.parametrize("final", [True, False])
def test_a_disk_must_hold_all_that_is_there_at_once(project, monkeypatch, checkpoint, checkpoints, final):
    """adamw: 12 bytes a parameter in a checkpoint; 4 in the model, which is saved as float32 here."""
    config = project.config(
        training={"num_steps": 9}, checkpoint=checkpoint | {"save_dtype": "float32", "save_final": final}
    )
    n = preparation.prepare(config).spec.num_parameters
    needed = n * (12 * checkpoints + 4 * final)
    on_a_disk_with(monkeypatch, needed)
    preparation.prepare(config)
    if needed:
        on_a_disk_with(monkeypatch, needed - 1)
        with pytest.raises(UserError) as error:
            preparation.prepare(config)
        assert re.match(rf"output_dir: {checkpoints} more checkpoints of .* need .* are free there; ", str(error.value))


def test_checkpoints_that_are_there_need_no_more_room(project, monkeypatch):
    config = project.config(training={"num_steps": 9}, checkpoint={"save_steps": 1, "save_total_limit": 3})
    each = 12 * preparation.prepare(config).spec.num_parameters
    monkeypatch.setattr(preparation.state, "checkpoints", lambda output: [output / f"checkpoint-{n}" for n in there])
    for count, more in ((0, 4), (1, 3), (3, 1), (5, 1)):
        there = range(count)
        on_a_disk_with(monkeypatch, int(each * (more + 4 / 12)) + 1)
        preparation.prepare(config)
        on_a_disk_with(monkeypatch, int(each * (more + 4 / 12)) - 2)
        with pytest.raises(UserError, match=f"output_dir: {more} more checkpoints"):
            preparation.prepare(config)


@pytest.mark.parametrize("grows", [False, True])
def test_a_machine_whose_memory_grows_is_refused_with_that_remedy(project, monkeypatch, grows):
    config, mesh = project.config(), make_mesh("cpu")
    prepared = preparation.prepare(config)
    monkeypatch.setattr(preparation, "host_memory", lambda: 1000)
    monkeypatch.setattr(preparation, "grows", lambda: grows)
    with pytest.raises(UserError, match="^memory.host_budget: ") as error:
        preparation.plan(config, prepared, mesh)
    assert ("memory is added to this machine" in str(error.value)) is grows
