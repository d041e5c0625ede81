"""What only the mesh knows of a copy that fails."""

import jax
import jax.numpy as jnp
import pytest

from megatrain_jax.config import UserError
from megatrain_jax.stream.transfer import Mesh, make_mesh


@pytest.mark.parametrize("words, known", [("RESOURCE_EXHAUSTED: Out of memory", True), ("INTERNAL: link down", False)])
def test_a_pool_of_the_host_that_is_exhausted_does_not_pass_for_the_device(monkeypatch, words, known):
    """As on an accelerator: the CPU backend has no such pool."""
    mesh, x = make_mesh("cpu"), jnp.ones(1 << 20)

    def refuse(*args):
        raise jax.errors.JaxRuntimeError(words)

    monkeypatch.setattr(Mesh, "has_own_memory", True)
    monkeypatch.setattr(jax, "device_put", refuse)
    expected = (UserError, "host memory: .*pinned") if known else (jax.errors.JaxRuntimeError, "link down")
    with pytest.raises(expected[0], match=expected[1]):
        mesh.to_host(x)
