"""Command line: what a configuration will need, before anything of its model is allocated.

python -m megatrain_jax.plan --config configs/quickstart.yaml [section.key=value ...]
"""

from __future__ import annotations

import argparse
import sys

from megatrain_jax.config import Config
from megatrain_jax.train import run


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; its exit code is 0, or 2 for something that the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m megatrain_jax.plan", description="Say what a run will need.")
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces a value of the file")
    options = parser.parse_intermixed_args(arguments)
    return run(_plan, options.config, options.overrides)


def _plan(config: Config) -> None:
    from megatrain_jax import preparation
    from megatrain_jax.stream.transfer import make_mesh

    prepared = preparation.prepare(config)
    mesh = make_mesh(config.model.device)
    plan = preparation.plan(config, prepared, mesh)
    lines = [*preparation.describe(config, prepared), *preparation.describe_plan(config, prepared, plan, mesh)]
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
