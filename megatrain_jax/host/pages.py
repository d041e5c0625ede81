"""Page-aligned host memory, page-locked where an accelerator reads it.

Copies between the host and a GPU reach the speed of the link only from page-locked memory. Ordinary pages are
allocated and then registered with the driver, so exactly the bytes asked for are locked; a pool of the runtime would
round them up.
"""

from __future__ import annotations

import mmap
import weakref

import numpy as np

from megatrain_jax.config import UserError


class Pages:
    """Zeroed anonymous memory, released with the object.

    Args:
      nbytes: size in bytes.
      lock: register the pages with the CUDA driver.

    Attributes:
      array: uint8 ``[nbytes]``, aligned to a page.

    Raises:
      UserError: the driver refuses to lock that much, or `cuda-bindings` is not installed.
    """

    def __init__(self, nbytes: int, *, lock: bool):
        buffer = mmap.mmap(-1, max(nbytes, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            buffer.madvise(mmap.MADV_HUGEPAGE)
        self.array = np.frombuffer(buffer, np.uint8)[:nbytes]
        if lock and nbytes:
            address = self.array.ctypes.data
            _register(address, nbytes)
            weakref.finalize(self, _release, address, nbytes)


_locked = 0  # bytes


def check_locking() -> None:
    """Locks a page and releases it, so that what `Pages` needs is known to be there before anything large is allocated.

    Raises:
      UserError: as `Pages`.
    """
    Pages(mmap.PAGESIZE, lock=True)


def _runtime():
    try:
        from cuda.bindings import runtime
    except ImportError:
        raise UserError("memory.pin_memory: needs cuda-bindings: pip install 'megatrain_jax[cuda]'") from None
    return runtime


def _register(address: int, nbytes: int) -> None:
    global _locked
    runtime = _runtime()
    (status,) = runtime.cudaHostRegister(address, nbytes, runtime.cudaHostRegisterPortable)
    if status == runtime.cudaError_t.cudaSuccess:
        # The driver must know the pages as locked, or every copy would silently take the slow route.
        status, _ = runtime.cudaHostGetFlags(address)
    if status != runtime.cudaError_t.cudaSuccess:
        # The driver locks pages itself: the limit of the shell (ulimit -l) does not bind it, memory does.
        raise UserError(
            f"memory.pin_memory: the driver could not lock {nbytes / 2**30:.2f} GiB of host memory beside "
            f"{_locked / 2**30:.2f} GiB locked before ({status.name}); raise the memory limit of the container, take a "
            "smaller model, or set memory.pin_memory: false, with which copies are slower"
        )
    _locked += nbytes


def _release(address: int, nbytes: int) -> None:
    global _locked
    _runtime().cudaHostUnregister(address)
    _locked -= nbytes
