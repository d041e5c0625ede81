"""Several devices and several processes compute what one device does; each test runs in processes of its own."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
slow = pytest.mark.exhaustive


def start(devices: int, *args) -> subprocess.Popen:
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}".strip(),
        "PYTHONPATH": str(REPOSITORY),
    }
    command = [sys.executable, "-W", "error", "-m", "tests.end_to_end.on_devices", *map(str, args)]
    return subprocess.Popen(
        command, env=env, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(processes: list[subprocess.Popen], seconds: float) -> str:
    """Their output; fails if one of them fails, or does not end in time."""
    try:
        outputs = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs[0]


@pytest.mark.parametrize(
    "tied, micro_batches",
    [("tied", 2), pytest.param("untied", 1, marks=slow), pytest.param("untied", 3, marks=slow)],
)
def test_gradients_on_eight_devices(tied, micro_batches):
    finish([start(8, "gradients", tied, micro_batches, 8)], 300)


@pytest.mark.parametrize("devices, tied, micro_batches", [(1, "tied", 1), pytest.param(2, "untied", 2, marks=slow)])
def test_gradients_in_two_processes(devices, tied, micro_batches):
    finish(in_two_processes(devices, "gradients", tied, micro_batches, 2 * devices), 300)


def test_what_compiles_on_several_devices_has_them_to_itself():
    finish([start(2, "first_passes")], 300)


def test_what_stays_on_several_devices_is_split_over_them():
    finish([start(4, "resident_memory")], 300)


@pytest.mark.parametrize("repeats", [2, pytest.param(10, marks=slow)])
def test_fifty_steps_on_eight_devices_end(repeats):
    assert finish([start(8, "training_steps", 50, repeats)], 400).count("ended") == repeats


@slow
def test_steps_in_two_processes():
    finish(in_two_processes(2, "training_steps", 10, 1), 300)


def in_two_processes(devices: int, *args) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return [start(devices, "in_process", number, port, *args) for number in range(2)]
