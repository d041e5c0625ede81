"""What every test shares: a strict jax and small models."""

import gc
import os
from pathlib import Path

# Nearly all the time of these tests is compilation. Processes that the tests start inherit this.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import pytest

from megatrain_jax.models.part_specs import RopeSpec
from megatrain_jax.models.spec import LayerSpec, ModelSpec

jax.config.update("jax_numpy_rank_promotion", "raise")


def small_spec(layers: int = 2, *, tied: bool = False, **layer) -> ModelSpec:
    """A model small enough for any test; `layer` overrides fields of its `LayerSpec`."""
    fields = dict(
        hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeSpec(), norm_eps=1e-5
    )
    one = LayerSpec(**(fields | layer))
    return ModelSpec("llama", 97, one.hidden_size, (one,) * layers, one.norm_eps, tied, 64)


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory):
    """Tests leave the user's own caches alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def programs_forgotten():
    """The kernel gives a process 65,530 mappings, a compiled program takes several, and XLA crashes when there are no more."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 15_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def optimized_xla():
    """What is compiled is compiled as for a user, for tests of the last bits."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()


@pytest.fixture
def spec() -> ModelSpec:
    return small_spec()
