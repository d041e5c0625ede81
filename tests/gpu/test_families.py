"""Every family once on a CUDA GPU, with its fused attention and kernels of experts. Elsewhere these skip; see test_gpu.py."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from megatrain_jax.host.store import HostStore
from megatrain_jax.model import Model, attention_kernel
from megatrain_jax.models.attention import AttentionOptions
from megatrain_jax.models.blocks import tensor_shapes
from megatrain_jax.models.families import spec_from_config
from megatrain_jax.models.spec import ModelSpec
from megatrain_jax.stream.templates import Execution
from megatrain_jax.stream.transfer import make_mesh
from tests.families import CASES, first_cases, raw_config
from tests.gpu.conftest import needs_gpu
from tests.reference import loss_and_grads, random_batch, random_weights

pytestmark = [
    needs_gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

# Sizes that cuDNN and the kernels of experts take, and as many tokens as these kernels' tiles ask for.
WIDE = {"hidden_size": 64, "intermediate_size": 128}
EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
LATENT = {"qk_nope_head_dim": 20, "qk_rope_head_dim": 4, "v_head_dim": 16}
ROWS, SEQ = 32, 64


def wide_spec(name: str) -> ModelSpec:
    """One layer of each structure of a case, in sizes that the kernels take."""
    changes = {**WIDE, **{key: size for key, size in (EXPERTS | LATENT).items() if key in CASES[name]}}
    spec = spec_from_config(raw_config(name) | changes)
    return dataclasses.replace(spec, layers=tuple(dict.fromkeys(spec.layers)))


def on_device(spec: ModelSpec, weights, batch, device: str, dtype: str) -> tuple[float, dict[str, np.ndarray], str]:
    """Loss and gradients, streamed, and the attention kernel that was chosen."""
    mesh = make_mesh(device)
    kernel = attention_kernel("auto", spec, mesh, dtype)
    store = HostStore(
        spec, [tensor_shapes(block) for block in spec.blocks], wire_dtype=dtype, lock_pages=mesh.has_own_memory
    )
    for name, tensor in store.tensors.items():
        tensor.assign(weights[name])
    run = Execution(mesh, np.dtype(dtype), AttentionOptions(kernel), 1024)
    return *Model(spec, store, run, {}, Path()).loss_and_grads(batch), kernel


def distances(got, expected) -> dict[str, float]:
    """Norm of the difference over the norm of each gradient, and of all together as "" ."""
    square = lambda x: float(np.square(x, dtype=np.float64).sum())  # noqa: E731
    parts = {name: (square(got[name] - expected[name]), square(expected[name])) for name in got}
    parts[""] = tuple(sum(part) for part in zip(*parts.values()))
    return {name: (error / size) ** 0.5 if size else error for name, (error, size) in parts.items()}


def compare(name: str, device: str = "cuda") -> dict[str, object]:
    """Gradients in bfloat16 on `device` and, by one function of the whole model, on the CPU; distances from float32."""
    spec = wide_spec(name)
    weights = {n: w.astype(ml_dtypes.bfloat16).astype(np.float32) for n, w in random_weights(spec).items()}
    batch = random_batch(spec, rows=ROWS, seq=SEQ, packed=True)
    with jax.default_device(jax.devices("cpu")[0]):
        exact_loss, exact = loss_and_grads(spec, weights, [batch])
        plain_loss, plain = loss_and_grads(spec, weights, [batch], "bfloat16")
    loss, grads, kernel = on_device(spec, weights, batch, device, "bfloat16")
    plain_off = distances({n: plain[n] for n in grads}, exact)
    allowed = {n: 2 * max(off, plain_off[""]) for n, off in plain_off.items()}
    off = distances(grads, exact)
    return {
        "family": name.split()[0],
        "kernel": kernel,
        "loss off": abs(loss - exact_loss) / exact_loss,
        "plain loss off": abs(plain_loss - exact_loss) / exact_loss,
        "off": off[""],
        "plain off": plain_off[""],
        "too far": {n: (off[n], plain_off[n]) for n in off if not off[n] <= allowed[n]},
    }


@functools.cache
def fused(name: str) -> bool:
    """Whether any attention of a family may be fused: not if it is capped or has sinks."""
    return any(s.delta is None and s.attention_softcap is None and not s.sinks for s in wide_spec(name).layers)


@pytest.mark.parametrize("name", first_cases())
def test_bfloat16_on_the_gpu_is_as_close_to_float32_as_on_the_cpu(name):
    found = compare(name)
    print(found)
    assert found["kernel"] == "cudnn" or not fused(name)
    assert not found["too far"] and found["loss off"] < 1e-2
