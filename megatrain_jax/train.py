"""Command line: a config in, a trained model out.

    python -m megatrain_jax.train --config configs/quickstart.yaml [section.key=value ...] [--dry-run]
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings

from megatrain_jax.config import Config, UserError, load_config


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, or 2 for something that the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m megatrain_jax.train", description="Train a language model.")
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file")
    parser.add_argument("--dry-run", action="store_true", help="read config and data, say what would run, and stop")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces a value of the file")
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config, options.overrides)
        settle_environment(config)
        # Only now may jax be imported.
        from megatrain_jax import trainer

        if options.dry_run:
            prepared = trainer.prepare(config)
            print("\n".join(trainer.describe(config, prepared)))
            print(trainer.describe_needs(config, prepared))
            return 0
        trainer.Trainer(config).fit()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def settle_environment(config: Config) -> None:
    """Process-wide settings of jax, all of them, before it is imported; what the user's environment says wins."""
    settings = {
        # The rest is for cuDNN, NCCL and compiled programs.
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": str(pinned_pool_gib(config)),
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    if config.model.device == "cpu":
        settings["JAX_PLATFORMS"] = "cpu"
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    if config.training.deterministic:
        os.environ["XLA_FLAGS"] = f"--xla_gpu_deterministic_ops=true {os.environ.get('XLA_FLAGS', '')}".strip()
    logging.getLogger("absl").setLevel(logging.ERROR)


def pinned_pool_gib(config: Config) -> int:
    """Limit of jax's pinned memory pool in GiB: the gradients and block inputs that can be in flight, and a quarter more.

    It is a limit and not an allocation; the weights are outside the pool.
    """
    from megatrain_jax.models.families import read_config, spec_from_config

    spec = spec_from_config(read_config(config.model.name, config.model.config_overrides))
    itemsize = 2 if config.model.dtype == "bfloat16" else 4
    tokens = config.training.batch_size * config.training.gradient_accumulation_steps * config.dataset.max_seq_len
    inputs = (len(spec.layers) + 1) * tokens * spec.hidden_size
    return max(8, -(-int(1.25 * itemsize * (spec.num_parameters + inputs)) // 2**30))


if __name__ == "__main__":
    sys.exit(main())
