"""The benchmark says what it ran, and counts operations as its docstring promises."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_a_small_shape_on_the_cpu(tmp_path):
    arguments = "--shape tiny --layers 3 --batch 2 --seq 32 --steps 2 --micro-batches 2 --keep 1 --clip 1 0 --device cpu".split()
    picture, results = tmp_path / "step.png", tmp_path / "results.json"
    command = [sys.executable, "scripts/bench.py", *arguments, "--timeline", str(picture), "--json", str(results)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    clipped, at_once = json.loads(results.read_text())
    assert [json.loads(line) for line in done.stdout.splitlines()] == [clipped, at_once]
    assert (clipped["clip"], at_once["clip"], clipped["layers"], clipped["tokens_per_step"]) == (1.0, 0.0, 3, 128)
    for result in (clipped, at_once):
        assert result["tokens_per_second"] == pytest.approx(128 / result["seconds_per_step"])
        # hidden 64, inner 256, 4 heads of 16, 2 of them for keys, 1000 tokens
        matmuls = 3 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 256) + 64 * 1000
        flops = 6 * matmuls + 6 * 3 * 4 * 16 * 32
        assert result["model_tflops"] == pytest.approx(flops * result["tokens_per_second"] / 1e12)
        # Two layers keep nothing but their input: norms, biases and all projections but the last, and attention.
        again = 2 * 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 2 * 64 * 256 + 2 * 64 + 64 + 2 * 32) + 2 * 2 * 4 * 16 * 32
        assert result["hardware_tflops"] == pytest.approx((flops + again) * result["tokens_per_second"] / 1e12)
        assert 0 < result["shares"]["device_busy"] <= 1 and result["update_gbps"] > 0
        assert result["ceilings"]["matmul_tflops"] > 0 and result["ceilings"]["update_gbps"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_experts_are_counted_by_the_tokens_that_go_to_them(tmp_path):
    arguments = (
        "--shape tiny-experts --layers 2 --batch 2 --seq 32 --steps 1 --keep 1 --device cpu --no-ceilings".split()
    )
    command = [sys.executable, "scripts/bench.py", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (result,) = [json.loads(line) for line in done.stdout.splitlines()]
    # hidden 64, 4 heads of 16, 2 of them for keys, 2 of 8 experts of 32, 1000 tokens
    attention, norms = 64 * 64 + 2 * 64 * 32 + 64 * 64, 2 * 16 + 2 * 64
    flops = 6 * (2 * (attention + 8 * 64 + 2 * 3 * 64 * 32) + 64 * 1000) + 6 * 2 * 4 * 16 * 32
    assert result["model_tflops"] == pytest.approx(flops * result["tokens_per_second"] / 1e12)
    again = 2 * (attention + norms + 8 * 64 + 2 * 2 * 64 * 32) + 2 * 4 * 16 * 32
    assert result["hardware_tflops"] == pytest.approx((flops + again) * result["tokens_per_second"] / 1e12)
