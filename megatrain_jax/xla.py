"""Options of XLA that were measured to pay. The user's XLA_FLAGS win."""

from __future__ import annotations

import os
from collections.abc import Mapping

Options = dict[str, bool | str]

# On a GPU, by what a 7B-wide layer of 32 x 1024 tokens takes on an H200: forward and backward with intermediates kept /
# backward with the forward computed again (scripts/tune_xla.py, docs/benchmarks.md).
GPU_OPTIONS: Options = {
    # cuBLAS is better at large matmuls than what XLA makes: 74.4 / 68.5 ms instead of 76.2 / 71.6.
    "xla_gpu_enable_triton_gemm": False,
    # Its newer interface on top: 74.6 / 67.3 ms.
    "xla_gpu_enable_cublaslt": True,
}

# And on several GPUs of one process, where making a CUDA graph on one of them while they exchange data can make each wait
# for the other (openxla/xla#37936). On one GPU graphs gain nothing: 76.4 / 70.5 ms without them.
MULTI_GPU_OPTIONS: Options = GPU_OPTIONS | {"xla_gpu_enable_command_buffer": ""}

# For updates on the host. Where the processor has vectors of 512 bits, XLA prefers those of 256: on an H200's host an element
# of adamw takes 0.90 ns in cache with these and 0.78 with those.
UPDATE_OPTIONS: Options = {"xla_cpu_prefer_vector_width": "512"}


def template_options(platform: str, devices: int) -> Options:
    """For the templates on some devices of a platform of jax, "gpu" or "cpu"."""
    if platform != "gpu":
        return {}
    return _without_users(GPU_OPTIONS if devices == 1 else MULTI_GPU_OPTIONS)


def update_options() -> Options:
    """For updates by the CPU backend."""
    return _without_users(UPDATE_OPTIONS)


def _without_users(options: Mapping[str, bool | str]) -> Options:
    set_by_user = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in set_by_user}
