"""What the tests for a CUDA GPU share."""

import jax
import pytest


def _gpus() -> int:
    try:
        return len(jax.devices("cuda"))
    except RuntimeError:
        return 0


needs_gpu = pytest.mark.skipif(not _gpus(), reason="needs a CUDA GPU")
needs_two_gpus = pytest.mark.skipif(_gpus() < 2, reason="needs two CUDA GPUs")
