"""The command that says what a run will need."""

import os
import subprocess
import sys

import pytest

from megatrain_jax import plan
from tests.end_to_end.conftest import ROOT, Project, write_model


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path, write_model(tmp_path / "model"))


def test_a_plan_names_the_memory_and_writes_nothing(project):
    config = project.write()
    before = sorted(project.folder.rglob("*"))
    command = [sys.executable, "-W", "error", "-m", "megatrain_jax.plan", "--config", str(config)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    starts = [line.split()[0] for line in done.stdout.splitlines()]
    assert starts == ["model", "template", "data", "eval", "training", "memory", "stream", "kernels"]
    assert sorted(project.folder.rglob("*")) == before


def test_a_plan_that_cannot_work_is_refused_as_the_run_would_be(project, capsys):
    config = project.write(memory={"host_budget": 1e-6})
    assert plan.main(["--config", str(config)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: memory.host_budget: ") and err.count("\n") == 1
