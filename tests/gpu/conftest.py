"""What the tests for a CUDA GPU share."""

import jax
import pytest


def _has_gpu() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


needs_gpu = pytest.mark.skipif(not _has_gpu(), reason="needs a CUDA GPU")
