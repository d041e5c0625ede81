"""The full training state on disk through Orbax, block by block.

A checkpoint is a folder ``checkpoint-N`` with one Orbax tree a block and ``meta.json``. It is written beside its final
name and renamed when everything is there, and renamed away before it is deleted, so a folder of that name is whole.
Arrays have their logical shapes: the layout of the store, and the number of devices, may differ when it is read.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from megatrain_jax.config import UserError
from megatrain_jax.host.store import HostStore

_NAME = re.compile(r"checkpoint-(\d+)")
_PARTIAL = ".partial"  # ends the name of a folder that is being written or deleted
_FORMAT = 2
_KEY = "training.resume_from_checkpoint"

# Orbax warns of each block that there is nothing to merge, which is so because OCDBT is off.
logging.getLogger("absl").addFilter(lambda record: "Skipping merge of OCDBT" not in record.getMessage())


def save(folder: Path, store: HostStore, meta: Mapping[str, Any]) -> None:
    """Writes masters and optimizer state of every trainable tensor; frozen ones are as they were loaded.

    Nothing may update the store meanwhile. One block is copied at a time.

    Args:
      folder: ``.../checkpoint-N``.
      store: what to write.
      meta: plain values that `load` returns.

    Raises:
      UserError: the folder cannot be written; what was there before still is.
    """
    part = folder.with_name(folder.name + _PARTIAL)
    keys: dict[str, list[str]] = {}
    try:
        for left_over in folder.parent.glob(f"checkpoint-*{_PARTIAL}"):
            shutil.rmtree(left_over)
        part.mkdir(parents=True)
        for block in range(len(store.blocks)):
            arrays = {tensor.name: tensor.state_arrays() for tensor in store.owned(block).values()}
            if arrays:
                keys |= {name: list(state) for name, state in arrays.items()}
                _orbax().save(part / _block_name(block), [list(state.values()) for state in arrays.values()])
        content = {"format": _FORMAT, "shapes": _shapes(store), "keys": keys, "files": _sizes(part), "meta": dict(meta)}
        with open(part / "meta.json", "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.rename(part, folder)
    except (OSError, ValueError) as error:  # TensorStore reports a full disk as a ValueError
        shutil.rmtree(part, ignore_errors=True)
        reason = " ".join(str(error).split())
        raise UserError(f"cannot save the checkpoint '{folder}': {reason}; free space there and resume") from error


def load(folder: Path, store: HostStore) -> dict[str, Any]:
    """Reads a checkpoint into a store whose optimizer state was made; returns its `meta`.

    Raises:
      UserError: it is not a whole checkpoint, or one of another model, optimizer or set of frozen tensors.
    """
    content = _read(folder)
    saved, expected = content["shapes"], _shapes(store)
    if saved != expected:
        name = next(n for n in (*expected, *saved) if saved.get(n) != expected.get(n))
        raise UserError(
            f"{_KEY}: '{folder}' is of another model or other model.freeze: {name} is {_found(saved, name)} there and "
            f"{_found(expected, name)} here; choose another output_dir"
        )
    sizes = _sizes(folder)
    if wrong := [name for name, size in content["files"].items() if sizes.get(name) != size]:
        raise UserError(
            f"{_KEY}: '{folder}' is damaged, delete it to resume from an older one: '{wrong[0]}' has "
            f"{sizes.get(wrong[0], 0)} of {content['files'][wrong[0]]} bytes"
        )
    for block in range(len(store.blocks)):
        tensors = store.owned(block).values()
        if not tensors:
            continue
        try:
            states = _orbax().restore(folder / _block_name(block))
            for tensor, arrays in zip(tensors, states, strict=True):
                tensor.load_state_arrays(dict(zip(content["keys"][tensor.name], arrays, strict=True)))
        except KeyError as error:
            raise UserError(f"{_KEY}: '{folder}' is of another optimizer: {error.args[0]}") from error
    return content["meta"]


def read_meta(folder: Path) -> dict[str, Any]:
    """What was given to `save` as `meta`. Raises UserError if the folder is no whole checkpoint of this version."""
    return _read(folder)["meta"]


def checkpoints(output_dir: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first, by number."""
    found = {int(m[1]): path for path in output_dir.glob("checkpoint-*") if (m := _NAME.fullmatch(path.name))}
    return [found[number] for number in sorted(found) if (found[number] / "meta.json").is_file()]


def prune(output_dir: Path, limit: int | None) -> None:
    """Deletes all but the newest `limit` checkpoints; None keeps all."""
    for path in checkpoints(output_dir)[: -limit if limit else 0]:
        going = path.with_name(path.name + _PARTIAL)
        os.rename(path, going)
        shutil.rmtree(going)


def _read(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(
            f"{_KEY}: '{folder}' is not a whole checkpoint; give a folder checkpoint-N, auto or none"
        ) from None
    if content.get("format") != _FORMAT:
        raise UserError(f"{_KEY}: '{folder}' was written by another version; choose another output_dir")
    return content


def _shapes(store: HostStore) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in store.tensors.items() if tensor.trainable}


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file of the blocks, by its path in the checkpoint."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in folder.glob("block-*/**/*")
        if path.is_file()
    }


def _found(shapes: Mapping[str, list[int]], name: str) -> str:
    return str(shapes[name]) if name in shapes else "not trained"


def _block_name(block: int) -> str:
    return f"block-{block:05d}"


def _orbax() -> ocp.PyTreeCheckpointer:
    # Weights do not compress. One file an array without compression is three times as fast as Orbax's defaults
    # (262 against 82 MB/s of a 300 MB tree on two busy cores).
    return ocp.PyTreeCheckpointer(use_ocdbt=False, use_compression=False)
