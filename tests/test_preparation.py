"""What a run is and needs, as arithmetic on a configuration."""

import pytest

from megatrain_jax import preparation
from megatrain_jax.stream.transfer import make_mesh
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
    assert preparation.resumed_plan(config, prepared, mesh, 1, 0).keep_layers == 1
    asked = project.config(memory={"keep_intermediates": 0})
    assert preparation.resumed_plan(asked, prepared, mesh, 1, 0).keep_layers == 0
    first = preparation.plan(asked, prepared, mesh)
    monkeypatch.setattr(preparation, "host_memory", lambda: int(first.host * 1.06))
    assert preparation.plan(config, prepared, mesh).keep_layers == 0
    assert preparation.resumed_plan(config, prepared, mesh, 1, 0).keep_layers == 0
