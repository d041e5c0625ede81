"""The script runs, and its figures are of what it says; how fast a machine is, is not for a test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")
ROOT = Path(__file__).parents[2]


def test_every_way_is_timed_and_compared_with_the_loop_over_its_bytes():
    sizes = ["--size", "70000", "--chunk", "65536", "--tile", "4096"]
    command = [sys.executable, "scripts/bench_optimizer.py", *sizes, "--turns", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    ways = {"loop, split": 26, "loop, plain": 28, "fused": 26, "optax, chunk 65536, tile 4096": 28}
    assert {name: way["bytes_per_parameter"] for name, way in result.items() if isinstance(way, dict)} == ways
    for name, nbytes in ways.items():
        way, loop = result[name], result["loop, split" if nbytes == 26 else "loop, plain"]
        speed = way["giga_parameters_per_second"]
        assert way["gbps"] == pytest.approx(nbytes * speed, abs=0.001)
        assert way["share"] == pytest.approx(speed / loop["giga_parameters_per_second"], abs=0.001)
