"""What only the mesh knows: of the CPU backend beside it, and of a copy that fails."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from megatrain_jax.config import UserError
from megatrain_jax.stream.pipeline import Settings
from megatrain_jax.stream.transfer import Mesh, make_mesh
from tests.conftest import small_spec
from tests.reference import make_model, random_batch, random_weights, training

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("device, inline", [("cuda", True), ("auto", False), ("cpu", False)])
def test_beside_an_accelerator_the_cpu_backend_computes_in_the_thread_that_calls(device, inline):
    if device == "auto" and os.path.exists("/proc/driver/nvidia/version"):
        inline = True
    code = (
        "import jax, jax.numpy as jnp\n"
        "from megatrain_jax.config import UserError\n"
        "from megatrain_jax.stream.transfer import make_mesh\n"
        "try:\n"
        f"    make_mesh({device!r})\n"
        "except UserError:\n"
        "    pass\n"
        "a = jax.device_put(jnp.full((400, 400), 1e-3), jax.local_devices(backend='cpu')[0])\n"
        "long = jax.jit(lambda a: jax.lax.fori_loop(0, 100, lambda _, x: x @ a, a))\n"
        "long(a).block_until_ready()\n"
        "print(long(a).is_ready())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"{inline}\n"


@pytest.mark.parametrize("words, known", [("RESOURCE_EXHAUSTED: Out of memory", True), ("INTERNAL: link down", False)])
def test_a_pool_of_the_host_that_is_exhausted_does_not_pass_for_the_device(monkeypatch, words, known):
    """As on an accelerator: the CPU backend has no such pool."""
    mesh, x = make_mesh("cpu"), jnp.ones(1 << 20)

    def refuse(*args):
        raise jax.errors.JaxRuntimeError(words)

    monkeypatch.setattr(Mesh, "has_own_memory", True)
    monkeypatch.setattr(jax, "device_put", refuse)
    expected = (UserError, "host memory: .*pinned") if known else (jax.errors.JaxRuntimeError, "link down")
    for take in (lambda: mesh.to_host(x), lambda: mesh.reserve_pinned(1 << 20)):
        with pytest.raises(expected[0], match=expected[1]):
            take()


@pytest.mark.parametrize("settings", [Settings(), Settings(offload_activations=True), Settings(keep_layers=1)])
def test_what_comes_back_lands_in_pinned_memory(monkeypatch, settings):
    """Where a device has memory of its own: gradients and block inputs, never by way of ordinary pages."""
    monkeypatch.setattr(Mesh, "has_own_memory", True)
    back, landed, to_host = [], [], Mesh.to_host
    monkeypatch.setattr(Mesh, "to_host", lambda self, x: back.append(to_host(self, x)) or back[-1])
    spec = small_spec(2)
    with training(make_model(spec, random_weights(spec)), settings) as (pipeline, _):
        pipeline.gradients([random_batch(spec)], lambda block, grads: landed.append((block, grads)))
    assert [block for block, _ in landed] == [3, 2, 1, 0]
    assert {x.sharding.memory_kind for x in back} == {"pinned_host"}
    inputs = 2 if settings.offload_activations else 0
    tensors = sum(len(grads.arrays) for _, grads in landed)
    assert len(back) == inputs + tensors + 4  # the squared norm comes with each block
    assert all(any(x is array for x in back) for _, grads in landed for array in grads.arrays.values())


def test_pinned_memory_is_taken_before_it_is_needed_in_one_piece_for_each_device(monkeypatch):
    put, taken = jax.device_put, []
    monkeypatch.setattr(jax, "device_put", lambda x, where: taken.append(put(x, where)) or taken[-1])
    mesh = Mesh((jax.devices("cpu")[0],) * 2)
    mesh.reserve_pinned(1001)
    assert not taken  # there is no pool on the CPU
    monkeypatch.setattr(Mesh, "has_own_memory", True)
    mesh.reserve_pinned(0)
    assert not taken
    mesh.reserve_pinned(1001)
    assert [(x.nbytes, x.sharding.memory_kind) for x in taken] == 2 * [(501, "pinned_host")]


def test_what_jax_takes_besides_is_known(monkeypatch):
    """Pools of powers of two or of their limit, an index of all that is managed, and what was measured."""
    one, two = (Mesh((jax.devices("cpu")[0],) * n) for n in (1, 2))
    assert one.runtime_bytes(1 << 40) == 0
    monkeypatch.setattr(Mesh, "has_own_memory", True)
    monkeypatch.setattr(Mesh, "memory_bytes", lambda self: 128 << 30)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "9")
    gib = lambda size: size / 2**30  # noqa: E731
    assert gib(one.runtime_bytes(0)) == pytest.approx(128 / 32 + 1.25)
    assert gib(one.runtime_bytes(5 << 30)) == (8 - 5) + (8 + 128) / 32 + 1.25
    assert gib(one.runtime_bytes(8 << 30)) == (8 + 128) / 32 + 1.25
    assert gib(one.runtime_bytes(81 << 27)) == (9 + 128) / 32 + 1.25  # 10.125 GiB, more than may be
    assert gib(two.runtime_bytes(6 << 30)) == (8 - 6) + (8 + 2 * 128) / 32 + 1.25 + 2
