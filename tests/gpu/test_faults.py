"""Faults that only a CUDA GPU and its driver can show. Elsewhere these skip; see test_gpu.py."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatrain_jax.host.memory import grows, host_memory
from megatrain_jax.host.pages import Pages, check_locking
from tests.gpu.conftest import needs_gpu

ROOT = Path(__file__).parents[2]


pytestmark = needs_gpu

# A computation that never ends. The runtime may hold its caller at the call or at the wait for the result.
ENDLESS = """
import jax, jax.numpy as jnp
x = jnp.ones(1 << 20)
loop = jax.jit(lambda x: jax.lax.while_loop(lambda x: x[0] >= 0, lambda x: jnp.abs(jnp.sin(x)), x)).lower(x).compile()
endless = lambda: loop(x).block_until_ready()
"""


def process(code, **environment):
    # The tests before have taken most of the device's memory for this process.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | environment
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_limit_of_the_shell_does_not_bind_the_driver():
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, before[1]))
    try:
        check_locking()
        Pages(1 << 30, lock=True)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def test_free_host_memory_is_there():
    """Where memory is added on demand, more than is there now is believed only below a limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    print(f"free {host_memory() / 2**30:.1f} GiB of {total / 2**30:.1f} GiB now, grows: {grows()}")
    assert host_memory() > 1 << 30 and (grows() or host_memory() <= total)


@pytest.mark.parametrize(
    "code, expected",
    [
        (
            "import jax.numpy as jnp\nfrom megatrain_jax.stream.transfer import make_mesh\n"
            "mesh = make_mesh('cuda')\nkept = [mesh.to_host(jnp.ones(1 << 28)) for _ in range(4)]\n"
            "import jax; jax.block_until_ready(kept)",
            "UserError: host memory: jax's pool of pinned memory has no room",
        ),
        ("import jax.numpy as jnp\njnp.ones((1 << 42,), 'int8').block_until_ready()", "RESOURCE_EXHAUSTED"),
    ],
    ids=["host", "device"],
)
def test_exhausted_memory_is_told_apart(code, expected):
    done = process(code, XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB="1")
    _, err = done.communicate(timeout=120)
    assert done.returncode and expected in err, err[-2000:]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_a_wait_for_the_device(number):
    code = (
        f"{ENDLESS}\nfrom megatrain_jax.signals import ended_by_interrupt, stop_signals\n"
        "with ended_by_interrupt(), stop_signals(lambda line: print(line, flush=True)):\n"
        "    print('waits', flush=True)\n    endless()"
    )
    with process(code) as run:
        too_late = threading.Timer(90, run.kill)
        too_late.start()
        try:
            assert run.stdout.readline() == "waits\n"
            time.sleep(1)
            run.send_signal(number)
            assert run.stdout.readline().startswith("stopping")
            began = time.monotonic()
            run.send_signal(number)
            assert run.wait(60) == 128 + number and time.monotonic() - began < 10
        finally:
            too_late.cancel()
            run.kill()


def test_a_device_that_never_answers_is_named_and_the_process_ends():
    code = (
        f"{ENDLESS}\nfrom megatrain_jax.watchdog import Watchdog, waiting\n"
        "with Watchdog(3, print), waiting('the device to finish the forward of block 3'):\n    endless()"
    )
    with process(code) as run:
        try:
            _, err = run.communicate(timeout=90)
        finally:
            run.kill()
        assert run.returncode == 1 and "waits for the device to finish the forward of block 3" in err.splitlines()[-1]
