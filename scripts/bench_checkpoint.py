"""Speed of saving and restoring a checkpoint beside what the disk can do, and the memory that each adds.

python scripts/bench_checkpoint.py [--gib 4] [--tensor-mib 256] [--rounds 3] [--folder DIR]

`dd` with direct I/O is the measure. Rounds alternate, because disks that others use, or that are throttled, are not the same
from one minute to the next; the ratio is that of the medians. Restoring reads from the disk: the cache is dropped before. On a machine that does nothing else,
less than four fifths of `dd`, or more memory than three times the largest tensor, fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from megatrain_jax.checkpoint import state
from megatrain_jax.config import OptimizerConfig, TrainingConfig
from megatrain_jax.host.optimizer import HostOptimizer
from megatrain_jax.host.store import HostStore
from megatrain_jax.models.part_specs import RopeSpec
from megatrain_jax.models.spec import LayerSpec, ModelSpec

BLOCK = 4 << 20  # bytes that dd moves at a time
SHARE, TENSORS = 0.8, 3.0  # of the speed of dd at least; of the largest tensor at most
DD = {"save": "dd write", "restore": "dd read"}  # what each is measured beside


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4, help="of a checkpoint (default: 4)")
    parser.add_argument("--tensor-mib", type=int, default=256, help="of each float32 tensor (default: 256)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to measure")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    size, found, added = measure(options.folder, options.gib, options.tensor_mib, options.rounds)
    rate = {what: size / statistics.median(seconds) / 1e9 for what, seconds in found.items()}
    failed = []
    for what, beside in DD.items():
        share, tensors = rate[what] / rate[beside], added[what] / (options.tensor_mib << 20)
        print(
            f"{what:8} {rate[what]:.2f} GB/s, dd {rate[beside]:.2f} GB/s: {share:.0%}; adds {added[what] / 2**20:.0f} MiB, "
            f"{tensors:.2f} of the largest tensor"
        )
        print(f"         rounds: {', '.join(f'{size / s / 1e9:.2f}' for s in found[what])}; dd "
              f"{', '.join(f'{size / s / 1e9:.2f}' for s in found[beside])}")  # fmt: skip
        failed += [f"{what} is slower than {SHARE:.0%} of dd"] if share < SHARE else []
        failed += [f"{what} adds more than {TENSORS:g} of the largest tensor"] if tensors > TENSORS else []
    for line in failed:
        print(f"failed   {line}")
    return 1 if failed else 0


def measure(on: Path, gib: float, tensor_mib: int, rounds: int) -> tuple[int, dict[str, list[float]], dict[str, int]]:
    """Bytes of a checkpoint; seconds of each round by what was done; and the bytes of memory that "save" and "restore" add."""
    store = make_store(tensor_mib << 20, round(gib * 2**10 / 3 / tensor_mib))
    size = sum(12 * tensor.size for tensor in store.tensors.values())
    found: dict[str, list[float]] = {what: [] for pair in DD.items() for what in pair}
    added, count = dict.fromkeys(DD, 0), f"count={size // BLOCK}"
    with tempfile.TemporaryDirectory(dir=on) as work:
        file, folder = Path(work) / "dd", Path(work) / "checkpoint-1"
        for _ in range(rounds):
            found[DD["save"]].append(
                timed(lambda: dd("if=/dev/zero", f"of={file}", count, "oflag=direct", "conv=fsync"))
            )
            seconds, peak = with_peak(lambda: state.save(folder, store, {}))
            found["save"].append(seconds)
            added["save"] = max(added["save"], peak)
            drop_cache(folder)
            found[DD["restore"]].append(timed(lambda: dd(f"if={file}", "of=/dev/null", "iflag=direct")))
            seconds, peak = with_peak(lambda: state.load(folder, store))
            found["restore"].append(seconds)
            added["restore"] = max(added["restore"], peak)
            shutil.rmtree(folder)
            file.unlink()
    return size, found, added


def make_store(tensor_bytes: int, count: int) -> HostStore:
    """A store with `count` float32 tensors of `tensor_bytes`, one a block, and the state of adamw."""
    layer = LayerSpec(
        hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeSpec(), norm_eps=1e-5
    )
    spec = ModelSpec("llama", 97, 32, (layer,) * max(count - 2, 0), 1e-5, False, 64)
    shape = (tensor_bytes // 4 // 1024, 1024)
    shapes = [{"weight": shape}, *[{"mlp.up_proj.weight": shape}] * max(count - 2, 0), {"norm.weight": shape}]
    store = HostStore(spec, shapes, wire_dtype="bfloat16")
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    for tensor in store.tensors.values():
        tensor.assign(values)
    HostOptimizer(store, OptimizerConfig(), TrainingConfig(), 10)
    return store


def dd(*arguments: str) -> None:
    subprocess.run(["dd", f"bs={BLOCK}", *arguments], check=True, stderr=subprocess.DEVNULL)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def with_peak(work: Callable[[], object]) -> tuple[float, int]:
    """Seconds that `work` takes, and how many bytes of anonymous memory it adds at most."""
    before, peak, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        seconds = timed(work)
    finally:
        done.set()
        watcher.join()
    return seconds, max(peak - before, 0)


def anonymous() -> int:
    """Bytes of anonymous memory that this process has resident."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def drop_cache(folder: Path) -> None:
    """Lets the kernel forget the content of files, so that reading them asks the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)
    sys.exit(main())
