"""What the machine can do at most: matmuls, the link, the host's memory. `bench.py` prints a step beside these.

    python scripts/ceilings.py [--device cpu]

All data is random: zeros and denormal numbers would flatter or slow every one of the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="as model.device")
    options = parser.parse_args()
    from megatrain_jax.stream.transfer import make_mesh

    print(json.dumps(ceilings(make_mesh(options.device))))


def ceilings(mesh) -> dict:
    """Measures them on the first device of `mesh`, in a few seconds; on smaller data where that is the CPU.

    Returns:
      matmul_tflops: bfloat16, square, float32 accumulation.
      h2d_gbps, d2h_gbps: from and to page-locked memory, 1e9 bytes a second; None where the device shares the host's.
      duplex_gbps: both directions at once, their sum.
      first_touch_gbps: writing memory that was never touched.
      triad_gbps: ``a = b + 3 c`` in float32 on all cores, the write counted once.
      update_gbps: a loop that reads and writes what Adam must on the split master (26 bytes a parameter), in as many
        threads as the fused optimizer takes. None without numba, as the triad.
    """
    matmul, link, host = (8192, 1 << 29, 1 << 27) if mesh.has_own_memory else (512, 0, 1 << 22)
    return {"matmul_tflops": _matmul(mesh.devices[0], matmul), **_link(mesh, link), **_host(host)}


def _matmul(device, n: int) -> float:
    import jax
    import jax.numpy as jnp

    with jax.default_device(device):
        a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    times = 10
    chain = jax.jit(lambda a, b: jax.lax.fori_loop(0, times, lambda _, x: (x @ b) * jnp.bfloat16(n**-0.5), a))
    return 2e-12 * times * n**3 / _seconds(lambda: chain(a, b).block_until_ready())


def _link(mesh, nbytes: int) -> dict:
    names = ("h2d_gbps", "d2h_gbps", "duplex_gbps")
    if not mesh.has_own_memory:
        return dict.fromkeys(names)
    import jax
    import numpy as np

    from megatrain_jax.host.pages import Pages

    pages = Pages(nbytes, lock=True)
    pages.array[:] = np.random.default_rng(0).integers(0, 255, nbytes, np.uint8)
    there = mesh.sharding() if mesh.size == 1 else jax.sharding.SingleDeviceSharding(mesh.devices[0])
    on_device = jax.device_put(pages.array, there)
    come = lambda: jax.device_put(pages.array, there)  # noqa: E731
    leave = lambda: mesh.to_host(on_device)  # noqa: E731
    moves = ((come,), (leave,), (come, leave))
    rates = [
        1e-9 * len(ways) * nbytes / _seconds(lambda w=ways: jax.block_until_ready([f() for f in w])) for ways in moves
    ]
    return dict(zip(names, rates))


def _host(n: int) -> dict:
    import numpy as np

    rng = np.random.default_rng(0)
    block = rng.uniform(0.5, 1, 1 << 20).astype(np.float32)
    start = time.perf_counter()
    touched = np.full(n, 0.7, np.float32)
    rates = {"first_touch_gbps": 1e-9 * touched.nbytes / (time.perf_counter() - start)}
    try:
        import numba
    except ImportError:
        return rates | {"triad_gbps": None, "update_gbps": None}
    a, b, mu, nu = touched, *(np.resize(block, n) for _ in range(3))
    hi, lo, grad = (np.resize(block.view(np.uint16), n) for _ in range(3))
    options = {"parallel": True, "error_model": "numpy", "fastmath": {"contract"}}

    @numba.njit(**options)
    def triad(a, b, c):
        for i in numba.prange(a.size):
            a[i] = b[i] + np.float32(3) * c[i]

    @numba.njit(**options)
    def move(hi, lo, mu, nu, grad):
        for i in numba.prange(hi.size):
            g = np.float32(grad[i])
            hi[i] ^= np.uint16(1)
            lo[i] ^= np.uint16(1)
            mu[i] = np.float32(0.9) * mu[i] + np.float32(1e-6) * g
            nu[i] = np.float32(0.9) * nu[i] + np.float32(1e-6) * g

    cores = os.cpu_count() or 1
    numba.set_num_threads(min(cores, numba.config.NUMBA_NUM_THREADS))
    rates["triad_gbps"] = 12e-9 * n / _seconds(lambda: triad(a, b, mu))
    numba.set_num_threads(max(1, min(cores - 2, numba.config.NUMBA_NUM_THREADS)))
    rates["update_gbps"] = 26e-9 * n / _seconds(lambda: move(hi, lo, mu, nu, grad))
    return rates


def _seconds(call: Callable[[], object], repeats: int = 5) -> float:
    """The median of some calls, after one that compiles and warms up."""
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
