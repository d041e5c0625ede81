"""What a tensor holds before training, as the families of transformers initialise it."""

from __future__ import annotations

import concurrent.futures
import functools
import os

import numpy as np

from megatrain_jax.models.spec import ModelSpec

_PART = 1 << 20  # elements


def random_source(seed: int, number: int) -> np.random.Generator:
    """What tensor number `number` of a model, in block order, is drawn from."""
    return np.random.default_rng([seed, number])


def initial_value(spec: ModelSpec, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """A random tensor, float32.

    Matrices, embeddings and the bias of a router are drawn from ``normal(0, initializer_range)``; other biases are 0. Norms start as the identity: at 1,
    or at 0 where the weight is added to 1. Decay rates of gated delta layers are drawn from ``uniform(0.01, 16)``, and their
    time steps are 1.

    Args:
      name: of the tensor, as on disk.
    """
    if name.endswith("A_log"):
        return np.log(rng.uniform(0.01, 16.0, shape)).astype(np.float32)
    if name.endswith("dt_bias"):
        return np.ones(shape, np.float32)
    if name.endswith("bias") and not name.endswith("router.bias"):
        return np.zeros(shape, np.float32)
    if name.removesuffix(".weight").endswith("norm"):
        from_zero = spec.norm == "rms_offset" and not name.endswith("linear_attn.norm.weight")
        return np.full(shape, 0 if from_zero else 1, np.float32)
    return _normal(shape, spec.initializer_range, rng)


def _normal(shape: tuple[int, ...], deviation: float, rng: np.random.Generator) -> np.ndarray:
    """Drawn in parts by all cores, each from a source of its own: an embedding would take one of them for ten seconds."""
    value = np.empty(shape, np.float32)
    flat = value.reshape(-1)
    parts = [flat[start : start + _PART] for start in range(0, flat.size, _PART)]

    def draw(part: np.ndarray, source: np.random.Generator) -> None:
        source.standard_normal(out=part, dtype=np.float32)
        part *= np.float32(deviation)

    list(_workers().map(draw, parts, rng.spawn(len(parts))))
    return value


@functools.lru_cache(maxsize=1)
def _workers() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="megatrain-initial")
