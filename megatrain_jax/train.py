"""Command line: a config in, a trained model out.

python -m megatrain_jax.train --config configs/quickstart.yaml [section.key=value ...] [--dry-run]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence

from megatrain_jax.config import Config, UserError, load_config
from megatrain_jax.signals import ended_by_interrupt

_KEY = re.compile(
    rf"((?:{'|'.join(field.name for field in dataclasses.fields(Config))})(?:\.\w+)?): "
)  # a key of the configuration at the start of a message


def main(arguments: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
      Its exit code: 0, also when a signal ended the run and it was saved; 2 for something that the user can mend; 1 for
      gradients that are not finite where such steps are not to be skipped, or not so many. docs/faults.md has them all.
    """
    parser = argparse.ArgumentParser(prog="python -m megatrain_jax.train", description="Train a language model.")
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file")
    parser.add_argument("--dry-run", action="store_true", help="read config and data, say what would run, and stop")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces a value of the file")
    options = parser.parse_intermixed_args(arguments)
    return run(_dry_run if options.dry_run else _train, options.config, options.overrides)


def _train(config: Config) -> None:
    from megatrain_jax import trainer

    trainer.Trainer(config).fit()


def _dry_run(config: Config) -> None:
    from megatrain_jax import preparation

    prepared = preparation.prepare(config)
    print("\n".join([*preparation.describe(config, prepared), preparation.describe_needs(config, prepared)]))


def run(work: Callable[[Config], None], config_file: str, overrides: Sequence[str]) -> int:
    """Does `work` on a configuration, jax being imported no sooner than there; the exit code, errors in one line."""
    try:
        with ended_by_interrupt():
            config = load_config(config_file, overrides)
            settle_environment(config)
            work(config)
    except UserError as error:
        return _fail(2, locate(str(error), config_file, overrides))
    except ArithmeticError as error:
        return _fail(1, str(error))
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        what = str(error).splitlines()[0]
        remedy = "lower training.batch_size, dataset.max_seq_len or memory.device_budget"
        return _fail(2, f"device memory: a computation did not get what it needs ({what}); {remedy}")
    except OSError as error:
        if error.filename is None:
            raise
        return _fail(2, f"'{error.filename}': {error.strerror}; mend that, and the same command continues")
    return 0


def locate(message: str, config: str, overrides: Sequence[str]) -> str:
    """Adds to a message about a key of the configuration where its value comes from, unless it says so already."""
    found = _KEY.match(message)
    if found is None or message.endswith(")") and "(in " in message:
        return message
    override = next((o for o in reversed(overrides) if o.partition("=")[0].strip() == found[1]), None)
    return f"{message} (in {config})" if override is None else f"{message} (in the override {override!r})"


def settle_environment(config: Config) -> None:
    """Process-wide settings of jax, all of them, before it is imported; what the user's environment says wins."""
    gpus = max(1, len(_gpu_bytes())) if config.model.device == "all" else 1
    settings = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": str(_device_fraction(config)),
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": str(pinned_pool_gib(config, gpus)),
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    if config.model.device == "all":
        # One process with several GPUs hangs if the driver synchronises them between the launches of a collective, as it
        # does to load a kernel that is called for the first time.
        settings |= {"NCCL_LAUNCH_MODE": "GROUP", "CUDA_MODULE_LOADING": "EAGER"}
    if config.model.device == "cpu":
        settings["JAX_PLATFORMS"] = "cpu"
    elif os.path.exists("/proc/driver/nvidia/version"):
        # Compiled programs outlive the process: on one H200 a 7B-wide model was ready in 10 s instead of 30.
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        settings["JAX_COMPILATION_CACHE_DIR"] = os.path.join(cache, "megatrain_jax", "xla")
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    if config.training.deterministic:
        # Of two equal flags XLA takes the last one.
        os.environ["XLA_FLAGS"] = f"--xla_gpu_deterministic_ops=true {os.environ.get('XLA_FLAGS', '')}".strip()
    logging.getLogger("absl").setLevel(logging.ERROR)


def pinned_pool_gib(config: Config, gpus: int = 1) -> int:
    """Limit of each of jax's pools of pinned memory, one for a GPU, in GiB: the gradients and block inputs that can be in
    flight at once, and a little more, since they come and go.

    Weights are outside the pools. A pool is taken whole if more than half of it is needed, so its limit is not higher than
    need be: block inputs count only where they may have to leave the device.
    """
    from megatrain_jax.models.families import read_config, spec_from_config

    spec = spec_from_config(read_config(config.model.name, config.model.config_overrides))
    itemsize = 2 if config.model.dtype == "bfloat16" else 4
    tokens = config.training.batch_size * config.training.gradient_accumulation_steps * config.dataset.max_seq_len
    # Whether experts will stream in groups, which keeps more, is not known yet unless the configuration says so.
    grouped = dataclasses.replace(spec, expert_groups=1 if config.memory.expert_groups == 1 else 2)
    inputs = grouped.kept_bytes(tokens, itemsize)
    gradients, memory = itemsize * spec.num_parameters, config.memory
    # Not less than what passes through another pool with this limit, for copies from ordinary memory.
    most, least = (max(4, math.ceil((1.05 * (gradients + n) / gpus + 2**28) / 2**30)) for n in (inputs, 0))
    offload = memory.offload_activations
    if offload == "auto" and most > least:
        device = min(_gpu_bytes(), default=0)
        if memory.device_budget != "auto":
            device = min(memory.device_budget * 2**30, device)
        # What a layer's backward computes with, as the planner counts it, and as much again for all that it counts besides.
        width = max(
            5 * s.intermediate_size + 4 * s.hidden_size if s.moe is None else _values(s.moe, s) for s in spec.layers
        )
        working = itemsize * config.training.batch_size * config.dataset.max_seq_len * width
        offload = inputs + 2 * working >= gpus * device
    return most if offload else least


def _values(moe, layer) -> int:
    """For a token, in the backward of a layer with experts."""
    return moe.top_k * (6 * moe.intermediate_size + 4 * layer.hidden_size) + 5 * moe.shared_size + 4 * layer.hidden_size


def _device_fraction(config: Config) -> float:
    """Of a device's memory, what jax takes: the rest is for cuDNN, NCCL and compiled programs, or for others."""
    most, budget = 0.92, config.memory.device_budget
    if budget == "auto" or not _gpu_bytes():
        return most
    # The plan keeps to the budget; it leaves out some, and what lies between two arrays.
    return min(most, round((1.05 * budget + 0.5) * 2**30 / min(_gpu_bytes()), 4))


@functools.lru_cache(maxsize=1)
def _gpu_bytes() -> tuple[float, ...]:
    """Memory of each GPU, asked of the driver's own tool because jax must not be imported yet; none without it."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        sizes = tuple(float(line) * 2**20 for line in found.splitlines())
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()
    # Which they are does not matter much, how many does.
    return sizes if visible is None else tuple(sorted(sizes))[: len(visible.split(","))]


def _fail(code: int, message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
