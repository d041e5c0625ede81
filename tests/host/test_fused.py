"""What the kernels need of the machine; what they compute is held to optax by test_optimizer.py."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

from megatrain_jax.host import fused

ROOT = Path(__file__).parents[2]

WITHOUT_A_CACHE = """
from numba.core import caching

def refuse(self):
    raise PermissionError("read-only")

for locator in vars(caching).values():
    if isinstance(locator, type) and hasattr(locator, "ensure_cache_path"):
        locator.ensure_cache_path = refuse

import numpy as np
from megatrain_jax.host import fused

kernel = fused.make_kernel("sgd", lambda step: (0.5, 1, 1))
hi, lo = np.full(3, 0x3F80, np.uint16), np.zeros(3, np.int16)
kernel(hi, lo, [np.zeros(3, np.float32)], np.ones(3, np.float32), 1.0, 0)
print(fused._OPTIONS["cache"], (hi.astype(np.uint32) << 16).view(np.float32))
"""


def test_a_machine_without_a_writable_folder_compiles_each_time():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_CACHE], cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "False [0.5 0.5 0.5]\n", "")


@pytest.mark.parametrize("cores", range(1, 40, 3))
def test_updates_leave_two_cores_to_those_who_dispatch(monkeypatch, cores):
    """Of those that the process may use, which in a container can be fewer than the machine has."""
    asked = []
    monkeypatch.setattr(fused.os, "sched_getaffinity", lambda pid: set(range(100, 100 + cores)))
    monkeypatch.setattr(fused.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(fused.config, "NUMBA_NUM_THREADS", 16)
    monkeypatch.setattr(fused, "set_num_threads", asked.append)
    kernel = fused.make_kernel("sgd", lambda step: (0.5, 1, 1))
    kernel(np.zeros(3, np.uint16), np.zeros(3, np.int16), [np.zeros(3, np.float32)], np.ones(3, np.float32), 1.0, 0)
    assert asked == [min(max(1, cores - 2), 16)]
