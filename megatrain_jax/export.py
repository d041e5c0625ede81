"""Command line: a checkpoint in, a Hugging Face folder out.

python -m megatrain_jax.export outputs/run/checkpoint-500 exported [--dtype bfloat16|float32]
"""

from __future__ import annotations

import argparse
import os
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatrain_jax.config import UserError
from megatrain_jax.models.spec import ModelSpec
from megatrain_jax.signals import ended_by_interrupt


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; its exit code is 0, or 2 for something that the user can mend."""
    parser = argparse.ArgumentParser(
        prog="python -m megatrain_jax.export", description="Write the model of a checkpoint for transformers."
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a folder checkpoint-N")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the weights")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="largest file, such as 5GB")
    options = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # weights go from disk to disk: no accelerator is taken
    try:
        with ended_by_interrupt():
            export(options.checkpoint, options.out, dtype=options.dtype, max_shard_size=options.max_shard_size)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"saved      {options.out}, for transformers")
    return 0


def export(checkpoint: Path, out: Path, *, dtype: str = "bfloat16", max_shard_size: str | int = "5GB") -> None:
    """Writes the model of a checkpoint as a Hugging Face folder, a tensor at a time, and reads it back.

    Frozen tensors are not in a checkpoint: they come from the model that the run started from, and must be what they were.

    Raises:
      UserError: the checkpoint is damaged or none, a frozen tensor is not there or another, or `out` cannot be written.
    """
    from megatrain_jax import model
    from megatrain_jax.checkpoint import manifest, state
    from megatrain_jax.models.config_keys import fp8_block
    from megatrain_jax.models.families import read_config, spec_from_config

    def read(name: str) -> np.ndarray:
        return state.read_master(checkpoint, content, name) if name in content["tensors"] else frozen(name)

    try:
        content = manifest.read(checkpoint)
        manifest.check_files(checkpoint, content["files"])
        source = checkpoint / state.MODEL_FOLDER
        config = read_config(source, {})
        spec = spec_from_config(config)
        frozen = _frozen_reader(content["run"], spec, fp8_block(config))
        model.write(out, spec, read, config, source, dtype=dtype, max_shard_size=max_shard_size)
    except manifest.DamagedError as error:
        raise UserError(f"{error.finding}; give another folder checkpoint-N") from error


def _frozen_reader(
    run: Mapping[str, Any], spec: ModelSpec, fp8_block: tuple[int, int] | None
) -> Callable[[str], np.ndarray]:
    """The float32 value of a frozen tensor by name, as the run had it."""
    from megatrain_jax.checkpoint import huggingface
    from megatrain_jax.models.blocks import model_tensors
    from megatrain_jax.models.initial import initial_value, random_source
    from megatrain_jax.models.names import spellings

    shapes, origin = model_tensors(spec), run["config"]["model"]
    numbers = {name: number for number, name in enumerate(shapes)}

    def read(name: str) -> np.ndarray:
        found: list[np.ndarray] = []
        shape = {name: shapes[name]}
        if origin["init"] == "random":
            rng = random_source(run["config"]["seed"], numbers[name])
            found.append(initial_value(spec, name, shapes[name], rng))
        else:
            keep = lambda _, array: found.append(array.astype(np.float32))  # noqa: E731
            # The hash of the tensor is below; those of the files would be computed for each tensor again.
            spelled = spellings(spec, shape)
            how = dict(spellings=spelled, fp8_block=fp8_block, verify=False)
            huggingface.load_weights(origin["name"], shape, keep, tied=False, **how)
        value = np.ascontiguousarray(found[0], np.float32)
        if f"{zlib.crc32(value.reshape(-1)):08x}" != run["identity"]["frozen"][name]:
            raise UserError(
                f"'{origin['name']}': tensor '{name}', which was frozen, is not what the run had; get that model again"
            )
        return value

    return read


if __name__ == "__main__":
    sys.exit(main())
