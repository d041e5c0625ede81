"""The full training state on disk: masters and optimizer state of every trained tensor, exactly.

A checkpoint is a folder ``checkpoint-N`` with a flat array for each dtype (`tensors.py`) and ``manifest.json``
(`manifest.py`), which says where in it each array of each tensor is. It is written beside its final name, synced, and renamed when everything is there, and renamed away
before it is deleted, so a folder of that name is whole. Arrays do not depend on the layout of the store, on where a
block was, on the number of devices, or on the groups that experts stream in; any of these may differ when it is read.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatrain_jax.checkpoint import manifest, tensors
from megatrain_jax.checkpoint.manifest import KEY, DamagedError
from megatrain_jax.config import UserError
from megatrain_jax.host.store import HostStore, HostTensor

__all__ = ["KEY", "DamagedError"]  # besides what is defined here

MODEL_FOLDER = "model"  # in a checkpoint: the model's config.json and tokenizer
_NAME = re.compile(r"checkpoint-(\d+)")
_PARTIAL = ".partial"  # ends the name of a folder that is being written or deleted
_HASHED = 1 << 20  # elements
_DAMAGED = ".damaged"


def save(
    folder: Path,
    store: HostStore,
    run: Mapping[str, Any],
    *,
    files: Mapping[str, bytes] = {},
    done_with: Callable[[int], None] = lambda block: None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Writes masters and optimizer state of every trainable tensor; frozen ones are as they were loaded.

    Nothing may update a block before `done_with` is called with its number. Never more than a few pieces of tensors are
    copied at once, together no larger than twice the largest array.

    Args:
      folder: ``.../checkpoint-N``.
      store: what to write.
      run: plain values that go into the manifest as they are.
      files: small files to keep beside, by their path in the folder.
      done_with: called after each block, in the order in which a step updates them.
      check: called before every piece; what it raises ends the save.

    Raises:
      UserError: the folder cannot be written, or there is too little space; what was there before still is.
    """
    part = folder.with_name(folder.name + _PARTIAL)
    places, flat, largest = _layout(store, part)
    writers: dict[str, tensors.Writer] = {}
    try:
        for left_over in folder.parent.glob(f"checkpoint-*{_PARTIAL}"):
            shutil.rmtree(left_over)
        _check_space(folder, sum(array.stored_bytes for array in flat.values()))
        part.mkdir(parents=True)
        writers |= {dtype: tensors.Writer(array, largest) for dtype, array in flat.items()}
        for blocks, owned in store.units():
            for tensor in owned:
                for array in tensor.state().values():
                    start, size = 0, math.prod(array.shape)
                    while start < size:
                        check()
                        piece = writers[array.dtype.name].next_piece(size - start)
                        array.read(start, piece)
                        start += piece.size
            for block in blocks:
                done_with(block)
        for writer in writers.values():
            writer.flush()
        for name, data in files.items():
            manifest.write_file(part / name, data)
        chunks = [file for array in flat.values() for file in array.files]
        others = [array.metadata for array in flat.values()] + [part / name for name in files]
        content = {"shapes": _shapes(store), "tensors": places, "run": dict(run)}
        content["arrays"] = {dtype: {"size": array.size, "chunk": array.chunk} for dtype, array in flat.items()}
        manifest.write(part, content | {"files": manifest.describe_files(part, chunks, others)})
        for path, _, _ in os.walk(part):
            manifest.sync_folder(Path(path))
        os.rename(part, folder)
        manifest.sync_folder(folder.parent)
    except BaseException as error:
        for writer in writers.values():
            writer.settle()
        shutil.rmtree(part, ignore_errors=True)
        # TensorStore reports a full disk as a ValueError.
        if isinstance(error, OSError | ValueError) and not isinstance(error, UserError):
            reason = " ".join(str(error).split())
            raise UserError(f"cannot save the checkpoint '{folder}': {reason}; free space there and resume") from error
        raise


def load(folder: Path, store: HostStore) -> dict[str, Any]:
    """Reads a checkpoint into a store whose optimizer state was made; returns what `save` was given as `run`.

    Raises:
      DamagedError: a file is not as it was written. The store is then in no defined state: load another into it.
      UserError: it is not a whole checkpoint, or one of another model, optimizer or set of frozen tensors.
    """
    content = check(folder, store)
    largest = _layout(store, folder)[2]
    limit = largest // 2  # a tensor of a block on the device is held twice until it is there
    try:
        with contextlib.ExitStack() as stack:
            readers = {
                dtype: stack.enter_context(tensors.Reader(tensors.FlatArray(folder / dtype, dtype, **array), limit))
                for dtype, array in content["arrays"].items()
            }
            for name, arrays in content["tensors"].items():
                state = store.tensors[name].state()
                for key, place in arrays.items():
                    start = 0
                    for piece in readers[place["dtype"]].read(math.prod(place["shape"])):
                        state[key].write(start, piece)
                        start += piece.size
    except ValueError as error:
        raise manifest.damaged(folder, " ".join(str(error).split())) from error
    return content["run"]


def read_master(folder: Path, content: Mapping[str, Any], name: str) -> np.ndarray:
    """The float32 master of a trained tensor, from a checkpoint's manifest and files. Raises DamagedError."""
    place = content["tensors"][name]["master"]
    out = np.empty(place["shape"], np.float32)
    array = tensors.FlatArray(folder / place["dtype"], place["dtype"], **content["arrays"][place["dtype"]])
    try:
        tensors.read_range(array, place["offset"], out.reshape(-1))
    except ValueError as error:
        raise manifest.damaged(folder, " ".join(str(error).split())) from error
    return out


def check(folder: Path, store: HostStore) -> dict[str, Any]:
    """The manifest of a checkpoint that is whole, as far as is seen without reading its arrays, and fits a store.

    Raises as `load`.
    """
    content = manifest.read(folder)
    saved, expected = content["shapes"], _shapes(store)
    if saved != expected:
        name = next(n for n in (*expected, *saved) if saved.get(n) != expected.get(n))
        raise UserError(
            f"{KEY}: '{folder}' is of another model or other model.freeze: {name} is {_found(saved, name)} there and "
            f"{_found(expected, name)} here; choose another output_dir"
        )
    for name, arrays in _layout(store, folder)[0].items():
        there, here = (
            {k: (p["dtype"], p["shape"]) for k, p in each.items()} for each in (content["tensors"][name], arrays)
        )
        if there != here:
            key = next(key for key in here | there if there.get(key) != here.get(key))
            raise UserError(
                f"{KEY}: '{folder}' is of another optimizer: {key} of {name} is {there.get(key)} there and {here.get(key)} "
                "here; set optimizer.type back or choose another output_dir"
            )
    manifest.check_files(folder, content["files"])
    return content


def read_run(folder: Path) -> dict[str, Any]:
    """What was given to `save` as `run`. Raises as `manifest.read`."""
    return manifest.read(folder)["run"]


def checkpoints(output_dir: Path) -> list[Path]:
    """Checkpoints of a run, oldest first, by number."""
    found = {int(m[1]): path for path in output_dir.glob("checkpoint-*") if (m := _NAME.fullmatch(path.name))}
    return [found[number] for number in sorted(found) if found[number].is_dir()]


def step_of(folder: Path) -> int:
    """The number in the name of one of `checkpoints`."""
    return int(_NAME.fullmatch(folder.name)[1])


def prune(output_dir: Path, limit: int | None) -> None:
    """Deletes all but the newest `limit` checkpoints; None keeps all."""
    for path in checkpoints(output_dir)[: -limit if limit else 0]:
        going = path.with_name(path.name + _PARTIAL)
        os.rename(path, going)
        shutil.rmtree(going)


def set_aside(folder: Path) -> Path:
    """Renames a damaged checkpoint so that it is none any more, and says how."""
    aside = folder.with_name(folder.name + _DAMAGED)
    if aside.exists():
        shutil.rmtree(aside)
    os.rename(folder, aside)
    return aside


def frozen_hashes(store: HostStore) -> dict[str, str]:
    """CRC-32 of the float32 value of every tensor that is not trained and so not in checkpoints, by name."""

    def crc(tensor: HostTensor) -> str:
        master, value = tensor.state()["master"], 0
        for start in range(0, tensor.size, _HASHED):
            piece = np.empty(min(_HASHED, tensor.size - start), np.float32)
            master.read(start, piece)
            value = zlib.crc32(piece, value)
        return f"{value:08x}"

    frozen = [tensor for tensor in store.tensors.values() if not tensor.trainable]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip([tensor.name for tensor in frozen], pool.map(crc, frozen), strict=True))


def _layout(store: HostStore, folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, tensors.FlatArray], int]:
    """Where everything goes: dtype, shape and offset by tensor and key; the flat arrays by dtype; bytes of the largest."""
    places, sizes, largest = {}, {}, 0
    for _, owned in store.units():
        for tensor in owned:
            places[tensor.name] = {}
            for key, array in tensor.state().items():
                dtype, size = array.dtype.name, math.prod(array.shape)
                offset = sizes.get(dtype, 0)
                places[tensor.name][key] = {"dtype": dtype, "shape": list(array.shape), "offset": offset}
                sizes[dtype] = offset + size
                largest = max(largest, size * array.dtype.itemsize)
    chunk = tensors.chunk_bytes(largest)
    flat = {
        dtype: tensors.FlatArray(folder / dtype, dtype, size, min(size, chunk // np.dtype(dtype).itemsize))
        for dtype, size in sizes.items()
    }
    return places, flat, largest


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise UserError(
            f"cannot save the checkpoint '{folder}': {needed / 1e9:.3g} GB needed, {free / 1e9:.3g} GB free; free space "
            "there and resume"
        )


def _shapes(store: HostStore) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in store.tensors.items() if tensor.trainable}


def _found(shapes: Mapping[str, list[int]], name: str) -> str:
    return str(shapes[name]) if name in shapes else "not trained"
