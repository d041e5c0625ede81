"""The soak in short: a few kills, a few steps; and that it fails where it must."""

import json

import pytest

from scripts import soak
from tests.end_to_end.conftest import Project, write_model


@pytest.fixture
def config(tmp_path, monkeypatch):
    for name, value in {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }.items():
        monkeypatch.setenv(name, value)
    project = Project(tmp_path, write_model(tmp_path / "model"))
    evaluation = {"eval_strategy": "steps", "eval_steps": 7}
    return str(project.write(training={"num_steps": 60}, checkpoint={"save_steps": 3}, eval=evaluation))


def test_without_a_configuration_there_is_a_small_model(config, capsys, monkeypatch):
    monkeypatch.setattr(soak, "_resident", lambda pid: 1000)
    assert soak.main(["memory", "--steps", "6", "checkpoint.save_steps=2"]) == 0
    assert "(+0.00%)" in capsys.readouterr().out


def test_a_run_that_is_killed_ends_as_one_that_is_not(config, capsys):
    assert soak.main(["kills", "--config", config, "--kills", "3"]) == 0
    assert "equal      after 3 kills" in capsys.readouterr().out


def test_memory_of_a_short_run_is_measured(config, capsys, monkeypatch):
    monkeypatch.setattr(soak, "_resident", lambda pid: 1000)
    assert soak.main(["memory", "--config", config, "--steps", "20"]) == 0
    assert "(+0.00%)" in capsys.readouterr().out


def test_memory_that_grows_fails(config, capsys, monkeypatch):
    sizes = iter(range(1000, 10**9))
    monkeypatch.setattr(soak, "_resident", lambda pid: next(sizes))
    assert soak.main(["memory", "--config", config, "--steps", "100"]) == 1
    assert capsys.readouterr().out.endswith("failed     memory grows\n")


@pytest.mark.parametrize("what", ["weights", "state", "records"])
def test_a_difference_of_one_bit_fails(tmp_path, what):
    for name in ("whole", "broken"):
        other = name == "broken"
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "checkpoint-2").mkdir()
        (tmp_path / name / "model" / "model.safetensors").write_bytes(bytes([other and what == "weights"]))
        files = {"float32/0": {"crc32c": "0" if other and what == "state" else "1"}}
        (tmp_path / name / "checkpoint-2" / "manifest.json").write_text(json.dumps({"body": {"files": files}}))
        loss = 2.0 if other and what == "records" else 1.0
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": loss, "seconds": other}) + "\n")
    with pytest.raises(soak.SoakError, match={"weights": "model", "state": "checkpoint-2", "records": "line 1"}[what]):
        soak._compare(tmp_path / "whole", tmp_path / "broken")
