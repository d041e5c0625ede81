"""The full training state on disk through Orbax, block by block.

A checkpoint is a folder ``checkpoint-N`` with one Orbax tree a block and ``meta.json``. It is written beside its final
name and renamed when everything is there, so a folder of that name is whole. Arrays have their logical shapes: the
layout of the store, and the number of devices, may differ when it is read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from megatrain_jax.config import UserError
from megatrain_jax.host.store import HostStore, HostTensor

_NAME = re.compile(r"checkpoint-(\d+)")
_FORMAT = 1


def save(folder: Path, store: HostStore, meta: Mapping[str, Any]) -> None:
    """Writes masters and optimizer state of every trainable tensor; frozen ones are as they were loaded.

    Nothing may update the store meanwhile. One block is copied at a time.

    Args:
      folder: ``.../checkpoint-N``.
      store: what to write.
      meta: plain values that `load` returns.

    Raises:
      UserError: the folder cannot be written.
    """
    part = folder.with_name(f"{folder.name}.writing")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for block in range(len(store.blocks)):
            if tensors := _tensors(store, block):
                _checkpointer().save(part / _block_name(block), [list(t.state_arrays().values()) for t in tensors])
        with open(part / "meta.json", "w", encoding="utf-8") as file:
            json.dump({"format": _FORMAT, **meta}, file)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)
    except OSError as error:
        raise UserError(f"cannot save the checkpoint '{folder}': {error.strerror or error}") from error


def load(folder: Path, store: HostStore) -> dict[str, Any]:
    """Reads a checkpoint into a store whose optimizer state was made; returns its `meta`.

    Raises:
      UserError: it is not a whole checkpoint, or one of another model, optimizer or set of frozen tensors.
    """
    meta = read_meta(folder)
    for block in range(len(store.blocks)):
        tensors = _tensors(store, block)
        path = folder / _block_name(block)
        if path.is_dir() != bool(tensors):
            raise UserError(f"'{folder}' is of another model or other model.freeze: block {block} does not match")
        if not tensors:
            continue
        saved = _checkpointer().restore(path)
        try:
            for tensor, arrays in zip(tensors, saved, strict=True):
                keys = list(tensor.state_arrays())
                tensor.load_state_arrays(dict(zip(keys, arrays, strict=True)))
        except (ValueError, KeyError) as error:
            raise UserError(f"'{folder}' is of another model or optimizer: {error}") from error
    return meta


def read_meta(folder: Path) -> dict[str, Any]:
    """The plain values of a checkpoint. Raises UserError if there is no whole checkpoint."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"training.resume_from_checkpoint: '{folder}' is not a whole checkpoint ({error})") from None
    if meta.pop("format", None) != _FORMAT:
        raise UserError(f"training.resume_from_checkpoint: '{folder}' was written by another version")
    return meta


def checkpoints(output_dir: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first, by number."""
    found = [path for path in output_dir.glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted((p for p in found if (p / "meta.json").exists()), key=lambda p: int(_NAME.fullmatch(p.name)[1]))


def prune(output_dir: Path, limit: int | None) -> None:
    """Deletes all but the newest `limit` checkpoints."""
    for path in checkpoints(output_dir)[: -limit if limit else 0]:
        shutil.rmtree(path)


def _tensors(store: HostStore, block: int) -> list[HostTensor]:
    return list(store.owned(block).values())


def _block_name(block: int) -> str:
    return f"block-{block:05d}"


def _checkpointer() -> ocp.PyTreeCheckpointer:
    return ocp.PyTreeCheckpointer()
