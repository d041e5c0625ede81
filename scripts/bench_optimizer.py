"""Speed of the host's optimizer on one layer, beside a plain loop that moves the same bytes, as JSON.

    python scripts/bench_optimizer.py

adamw on a bfloat16 wire, no accelerator in use. `loop` reads and writes what the layout must and computes next to nothing;
`share` is that of its speed. The ways take turns, and the best of their turns counts. Needs numba.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

LAYER = 233_046_016  # parameters of a layer of the 7b-wide shape of bench.py


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=LAYER, help="parameters of the tensor")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--chunk", type=int, action="append", help="elements that one call updates, to try others")
    parser.add_argument(
        "--tile", type=int, action="append", help="elements of one turn of the loop in it, to try others"
    )
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

    import jax
    import numba

    from megatrain_jax.host import layouts
    from megatrain_jax.host.pages import Pages

    jax.config.update("jax_cpu_enable_async_dispatch", False)  # as when a GPU trains (stream/transfer.py)
    cores = len(os.sched_getaffinity(0))
    threads = max(1, min(numba.config.NUMBA_NUM_THREADS, cores - 2))  # as many as the kernels and optax take
    grad = Pages(2 * options.size, lock=False).array.view(layouts.rounding.BFLOAT16)  # aligned as what a device sent
    grad[...] = _random(options.size, 1, 0.01)
    calls, moved = {}, {"loop, split": 26, "loop, plain": 28, "fused": 26}
    calls["loop, split"], calls["loop, plain"] = _loops(options.size, grad, threads)
    calls["fused"] = _update("split", options.size, grad)
    for chunk, tile in itertools.product(options.chunk or [layouts.CHUNK], options.tile or [layouts.TILE]):
        layouts.CHUNK, layouts.TILE = chunk, tile
        name = f"optax, chunk {chunk}, tile {tile}"
        calls[name], moved[name] = _update("chunks", options.size, grad), 28
    seconds = {name: [] for name in calls}
    for turn in range(options.turns + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    best = {name: min(times) for name, times in seconds.items()}
    result = {"parameters": options.size, "cores": cores, "threads": threads, "jax": jax.__version__}
    for name, second in best.items():
        loop = best["loop, split" if moved[name] == 26 else "loop, plain"]
        result[name] = {
            "giga_parameters_per_second": round(options.size / second * 1e-9, 6),
            "bytes_per_parameter": moved[name],
            "gbps": round(moved[name] * options.size / second * 1e-9, 3),
            "share": round(loop / second, 4),
        }
    print(json.dumps(result))


def _random(size: int, seed: int, scale: float):
    """Float32 ``[size]``. Ordinary numbers: zeros and subnormal ones have speeds of their own."""
    import numpy as np

    return np.resize(np.random.default_rng(seed).normal(scale=scale, size=1 << 20).astype(np.float32), size)


def _update(layout: str, size: int, grad) -> Callable[[], None]:
    """One step of a tensor that is kept in a layout."""
    import numpy as np
    import optax

    from megatrain_jax.config import OptimizerConfig
    from megatrain_jax.host.optimizer import make_rule
    from megatrain_jax.host.pages import Pages
    from megatrain_jax.host.store import HostTensor, Rows

    tensor = HostTensor("layer", (size,), owner=0, trainable=True, rows=Rows())
    tensor.allocate([Pages(2 * size, lock=False).array.view(grad.dtype)], layout)
    tensor.assign(_random(size, 2, 0.02))
    rule = make_rule(OptimizerConfig(), 0.1, optax.constant_schedule(1e-4), decay=True, layout=layout)
    tensor.init_state(rule)
    return lambda: tensor.update(rule, [grad], np.float32(0.5))


def _loops(size: int, grad, threads: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Loops over the bytes of the split and of the plain layout."""
    import numba
    import numpy as np

    p, mu, nu = (_random(size, seed, scale) for seed, scale in ((3, 0.02), (4, 0.01), (5, 0.01)))
    hi, lo = (np.resize(np.random.default_rng(seed).integers(0, 1 << 16, 1 << 20, np.uint16), size) for seed in (6, 7))
    grad, f = grad.view(np.uint16), np.float32
    options = {"parallel": True, "nogil": True, "error_model": "numpy", "fastmath": {"contract"}}

    @numba.njit(**options)
    def split(hi, lo, mu, nu, grad):
        for i in numba.prange(hi.size):
            g = f(grad[i])
            hi[i] ^= np.uint16(1)
            lo[i] ^= np.uint16(1)
            mu[i] = f(0.9) * mu[i] + f(1e-6) * g
            nu[i] = f(0.9) * nu[i] + f(1e-6) * g

    @numba.njit(**options)
    def plain(p, wire, mu, nu, grad):
        for i in numba.prange(p.size):
            g = f(grad[i])
            p[i] = f(0.9) * p[i] + f(1e-6) * g
            wire[i] = grad[i]
            mu[i] = f(0.9) * mu[i] + f(1e-6) * g
            nu[i] = f(0.9) * nu[i] + f(1e-6) * g

    def run(loop, *arrays):
        numba.set_num_threads(threads)
        loop(*arrays, mu, nu, grad)

    return functools.partial(run, split, hi, lo), functools.partial(run, plain, p, hi)


if __name__ == "__main__":
    main()
