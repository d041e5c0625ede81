"""The benchmarks of packed rows: what runs without a GPU is right, and what is counted is what was trained on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.exhaustive


def run(*command):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("way", ["xla", "pallas"])
def test_a_way_agrees_with_masks(way):
    (record,) = run("scripts/bench_packing.py", "--only", way, "--small")
    assert set(record["relative_errors"]) == {"out", "dq", "dk", "dv"}
    assert max(record["relative_errors"].values()) < 0.006


def test_a_whole_run_on_packed_rows(tmp_path):
    results = tmp_path / "results.json"
    shape = "--shape tiny --layers 1 --batch 2 --seq 256 --steps 2 --device cpu".split()
    packed, full = run("scripts/bench_packed_run.py", *shape, "--json", results)
    assert json.loads(results.read_text()) == [packed, full]
    assert (packed["way"], full["way"]) == ("packed", "full")
    assert full["filled"] == 1.0 and full["samples"] == 2 * 4 and 0.5 < packed["filled"] <= 1.0
    for result in packed, full:
        assert result["tokens_in_a_row"] == 256
        # Real tokens only: rows of a step, less their padding, by the time that a step takes.
        most = 2 * 256 / (result["step_ms"] / 1e3)
        assert 0.25 * most < result["tokens_per_second"] < 1.75 * most
        assert 0 <= result["data_wait_ms"]["median"] <= result["data_wait_ms"]["longest"] < result["step_ms"]
