"""Page-aligned memory."""

import enum
import gc
import mmap
import sys

import numpy as np
import pytest

from megatrain_jax.config import UserError
from megatrain_jax.host import pages
from megatrain_jax.host.pages import Pages, check_locking


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


class Driver:
    """Stands in for `cuda.bindings.runtime`: locks up to a number of bytes."""

    cudaHostRegisterPortable = 1

    class cudaError_t(enum.Enum):
        cudaSuccess = 0
        cudaErrorMemoryAllocation = 2

    def __init__(self, limit):
        self.limit, self.locked = limit, {}

    def cudaHostRegister(self, address, nbytes, flags):
        if sum(self.locked.values()) + nbytes > self.limit:
            return (self.cudaError_t.cudaErrorMemoryAllocation,)
        self.locked[address] = nbytes
        return (self.cudaError_t.cudaSuccess,)

    def cudaHostGetFlags(self, address):
        return self.cudaError_t.cudaSuccess, self.cudaHostRegisterPortable

    def cudaHostUnregister(self, address):
        del self.locked[address]


def test_what_is_locked_is_released_and_a_refusal_has_the_figures(monkeypatch):
    driver = Driver(limit=3 << 30)
    monkeypatch.setattr(pages, "_runtime", lambda: driver)
    first = Pages(2 << 30, lock=True)
    assert list(driver.locked.values()) == [2 << 30]
    with pytest.raises(UserError, match=r"could not lock 1.50 GiB .* beside 2.00 GiB locked before \(cudaErrorMemory"):
        Pages(3 << 29, lock=True)
    del first
    gc.collect()
    assert driver.locked == {} and pages._locked == 0
    check_locking()
    assert driver.locked == {} and pages._locked == 0


def test_a_driver_that_locks_nothing_is_found_out_with_a_page(monkeypatch):
    monkeypatch.setattr(pages, "_runtime", lambda: Driver(limit=0))
    with pytest.raises(UserError, match="memory.pin_memory: the driver could not lock 0.00 GiB"):
        check_locking()
