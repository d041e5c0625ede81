"""Page-aligned memory."""

import mmap
import sys

import numpy as np
import pytest

from megatrain_jax.config import UserError
from megatrain_jax.host.pages import Pages


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 3 << 20])
def test_memory_is_zeroed_writable_and_on_a_page(nbytes):
    pages = Pages(nbytes, lock=False)
    assert pages.array.shape == (nbytes,) and pages.array.dtype == np.uint8 and not pages.array.any()
    pages.array[:] = 7
    if nbytes:
        assert pages.array.ctypes.data % mmap.PAGESIZE == 0


def test_memory_outlives_its_owner_while_it_is_viewed():
    array = Pages(1 << 16, lock=False).array
    others = [Pages(1 << 16, lock=False).array for _ in range(8)]
    array[:] = 3
    assert not any(other.any() for other in others) and (array == 3).all()


def test_locking_without_the_driver_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(UserError, match="cuda-bindings: pip install"):
        Pages(4096, lock=True)
