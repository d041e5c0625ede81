"""Hugging Face folders in and out, one tensor at a time.

Reading checks everything from the file headers before the first tensor is handed over. Writing streams each tensor
into its shard, so neither direction ever holds a second copy of the model. Only safetensors is read: a PyTorch
``.bin`` file is a pickle, which can run code.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

import ml_dtypes
import numpy as np

from megatrain_jax.checkpoint import sums
from megatrain_jax.checkpoint.stored import (
    EMBEDDING,
    HEAD,
    INDEX_FILE,
    assemble,
    differ,
    match,
    open_file,
    read_headers,
)
from megatrain_jax.config import UserError
from megatrain_jax.host import rounding
from megatrain_jax.models.names import Spelling
from megatrain_jax.models.spec import is_buffer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)

_WRITABLE = {"bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)), "float32": ("F32", np.dtype(np.float32))}
_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_UNITS = {"": 1} | {p + s: base**n for n, p in enumerate("KMGT", 1) for s, base in (("B", 1000), ("IB", 1024))}
_CHUNK = 1 << 22


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What was read.

    Attributes:
      files: the safetensors files, in the order in which they were read.
      parameters: number of values handed over.
      dtypes: safetensors names of the dtypes met, such as ``"BF16"``.
      unused: tensors of the files that the model has no place for (rotary buffers and tied heads not counted).
      unverified: names of the files that the folder's SHA256SUMS does not name, if it has one.
      head_differs: the model is tied, yet the files hold an ``lm_head.weight`` that is not the embedding (ignored).
    """

    files: tuple[Path, ...]
    parameters: int
    dtypes: tuple[str, ...]
    unused: tuple[str, ...]
    unverified: tuple[str, ...]
    head_differs: bool

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of it, a line each; tensors that differ in numbers alone are named once."""
        groups = collections.Counter(re.sub(r"\d+", "*", name) for name in self.unused)
        notes = [f"not used: {name}" + (f" ({count})" if count > 1 else "") for name, count in groups.items()]
        notes += [f"not verified: {name}, which {sums.NAME} does not name" for name in self.unverified]
        if self.head_differs:
            notes.append(f"not used: {HEAD}, which differs from the embedding although config.json ties the two")
        return tuple(notes)


def load_weights(
    folder: str | Path,
    shapes: Mapping[str, tuple[int, ...]],
    write: Callable[[str, np.ndarray], None],
    *,
    tied: bool,
    spellings: Mapping[str, Sequence[Spelling]] = {},
    fp8_block: tuple[int, int] | None = None,
    verify: bool = True,
) -> LoadReport:
    """Hands every tensor of `shapes` to `write(name, array)`, once each, in the order of the files.

    Args:
      folder: a Hugging Face folder with ``model.safetensors``, or shards and their index, or any ``*.safetensors``.
      shapes: full tensor name -> shape. Files of a base model, whose names lack the leading ``model.``, and of
        a larger model that has this one as its ``language_model`` fit too.
      write: receives an array of the dtype on file (bfloat16, float16 or float32). It must copy what it keeps.
      tied: the head is the embedding: `shapes` has no ``lm_head.weight`` and one in the files is ignored.
      spellings: how tensors may lie in the files, where that is not one tensor of the same name; see `models.names`.
      fp8_block: rows and columns that share a scale, of weights stored in FP8; None refuses such weights.
      verify: hash the files that the folder's SHA256SUMS names, if it has one, while they are read.

    Raises:
      UserError: a file is missing, broken or cut short, a tensor is missing or has the wrong shape or dtype. Nothing was
        written then. Or, seen while reading, a value is not finite or a file does not have its hash.
    """
    stored = read_headers(Path(folder))
    found = match(Path(folder), shapes, stored, spellings, fp8_block)
    places = [place for pieces in found.values() for piece in pieces for place in piece.places]
    used = {place.key for place in places}
    ignored = {HEAD} if tied else set()
    unused = sorted(key for key in stored if key not in used | ignored and not key.endswith("rotary_emb.inv_freq"))
    head_differs = tied and HEAD in stored and differ(found[EMBEDDING][0].places[0], stored[HEAD])
    files = list(dict.fromkeys(place.file for place in places))
    expected = sums.read_sums(Path(folder)) if verify else {}
    with ExitStack() as stack:
        tensors = {file: stack.enter_context(open_file(file)) for file in files}
        for file in files:
            with sums.verified(file, expected.get(file.name)):
                for name in [name for name in found if found[name][0].places[0].file == file]:
                    write(name, assemble(found[name], shapes[name], tensors))
    return LoadReport(
        files=tuple(files),
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        dtypes=tuple(sorted({place.dtype for place in places})),
        unused=tuple(unused),
        unverified=tuple(file.name for file in files if expected and file.name not in expected),
        head_differs=head_differs,
    )


def save_folder(
    out_dir: str | Path,
    tensors: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    *,
    config: Mapping[str, Any],
    source: Path | None = None,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    max_shard_size: str | int = "5GB",
) -> None:
    """Writes a folder that transformers loads: weights, their SHA256SUMS, config.json and the tokenizer files of `source`.

    Everything is written into a sibling folder that takes the place of `out_dir` at the end, so a failure leaves what
    was there before. Each shard is read back and its hash compared. Shards are filled in the order of `tensors`; a tensor larger than a shard has one of its own.

    config.json is the source's, byte for byte, if it says the same as `config`. Only if its ``dtype`` (or
    ``torch_dtype``) names another dtype than the files hold is that value changed: transformers loads weights in the
    dtype that config.json names, and would otherwise silently round float32 weights or widen bfloat16 ones.

    Args:
      out_dir: created, or replaced if it holds nothing but a saved model.
      tensors: Hugging Face tensor name -> shape, without the head where it is tied.
      read: the array of a name, of any floating dtype; cast to `dtype` piece by piece, as `host.rounding` does.
      max_shard_size: bytes, or such as ``"5GB"`` (10^9) or ``"5GiB"`` (2^30).

    Raises:
      UserError: see `check_save_folder`; a `max_shard_size` that is no size; or the disk failed while writing.
    """
    out_dir = Path(out_dir).resolve()
    sizes = {name: math.prod(shape) * _format(name, dtype)[1].itemsize for name, shape in tensors.items()}
    shards = _plan_shards(sizes, parse_size(max_shard_size))
    check_save_folder(out_dir, sum(sizes.values()))
    aside = out_dir.with_name(f".{out_dir.name}.writing")
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        hashes = {}
        for file, names in shards.items():
            with open(aside / file, "wb") as stream:
                hashes[file] = _write_shard(stream, {name: tensors[name] for name in names}, read, dtype)
                stream.flush()
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that the disk is asked
            if sums.hash_file(aside / file) != hashes[file]:
                raise UserError(f"cannot save '{file}': it is not read as it was written; check the disk")
        sums.write_sums(aside, hashes)
        if len(shards) > 1:
            weight_map = {name: file for file, names in shards.items() for name in names}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
            (aside / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        for file, data in small_files(config, source, dtype).items():
            (aside / file).write_bytes(data)
        _swap(aside, out_dir)
    except OSError as error:
        raise UserError(f"cannot save to '{out_dir}': {error}; free space there or choose another folder") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def small_files(config: Mapping[str, Any], source: Path | None, dtype: str | None = None) -> dict[str, bytes]:
    """config.json and the tokenizer files of `source`, by name; see `save_folder`. No dtype leaves config.json its own."""
    files = {"config.json": _config_bytes(config, source, dtype)}
    for file in TOKENIZER_FILES:
        if source is not None and (source / file).is_file():
            files[file] = (source / file).read_bytes()
    return files


def check_save_folder(out_dir: str | Path, size: int = 0) -> None:
    """Refuses, before any work is done, a folder that `save_folder` could not write `size` bytes into.

    Raises:
      UserError: not a folder, not writable, too little space, or it holds files that are not a saved model's.
    """
    out_dir = Path(out_dir).resolve()
    if out_dir.exists() and not out_dir.is_dir():
        raise UserError(f"cannot save to '{out_dir}': it is not a folder; choose another")
    known = {"config.json", INDEX_FILE, sums.NAME, *TOKENIZER_FILES}
    for entry in sorted(out_dir.iterdir()) if out_dir.exists() else ():
        if entry.name not in known and not _WEIGHT_FILE.fullmatch(entry.name):
            raise UserError(f"cannot save to '{out_dir}': it holds '{entry.name}', which is not of a saved model")
    parent = next(folder for folder in out_dir.parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"cannot save to '{out_dir}': '{parent}' is not a writable folder; choose another")
    free = shutil.disk_usage(parent).free
    if free < size:
        needed = f"{size / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free"
        raise UserError(f"cannot save to '{out_dir}': {needed}; free space there or choose another folder")


def parse_size(size: str | int) -> int:
    """Bytes of a size such as 1000, ``"500MB"``, ``"5GB"`` (10^9) or ``"5GiB"`` (2^30).

    Raises:
      UserError: not a size, or less than one byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B)?\s*", str(size).upper())
    unit = (match[2] or "").removeprefix("B") if match else None
    if unit not in _UNITS or (value := int(float(match[1]) * _UNITS[unit])) < 1:
        raise UserError(f"checkpoint.max_shard_size: {size!r} is not a size; write such as 5GB or 5GiB")
    return value


def _format(name: str, dtype: str) -> tuple[str, np.dtype]:
    """What a tensor is written as: `dtype`, or float32 if it is a buffer that is read in float32."""
    return _WRITABLE["float32" if is_buffer(name) else dtype]


def _plan_shards(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """File name -> tensor names, in order; files named as transformers names them."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, 1)}


def _write_shard(
    stream: BinaryIO,
    tensors: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    dtype: str,
) -> str:
    """One safetensors file: length of the header (u64), header (JSON padded to 8 bytes), tensors without gaps.

    Returns:
      The hexadecimal SHA-256 of what was written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        tag, target = _format(name, dtype)
        start, end = end, end + math.prod(shape) * target.itemsize
        header[name] = {"dtype": tag, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    written = hashlib.sha256()

    def put(data: bytes) -> None:
        written.update(data)
        stream.write(data)

    put(len(text).to_bytes(8, "little") + text)
    for name, shape in tensors.items():
        array = read(name)
        if array.shape != tuple(shape):
            raise ValueError(f"tensor '{name}' was read with shape {array.shape}, announced as {tuple(shape)}")
        flat, target = array.reshape(-1), _format(name, dtype)[1]
        for start in range(0, flat.size, _CHUNK):
            part = flat[start : start + _CHUNK]
            rounded = np.empty(part.size, target)
            rounding.assign(rounded, part)
            put(rounded.tobytes())
    return written.hexdigest()


def _config_bytes(config: Mapping[str, Any], source: Path | None, dtype: str | None) -> bytes:
    text = b""
    written = dict(config)
    if source is not None:
        with suppress(FileNotFoundError):
            text = (source / "config.json").read_bytes()
    for key in ("dtype", "torch_dtype"):
        if dtype and written.get(key) is not None:
            written[key] = dtype
    if text and json.loads(text) == written:
        return text
    return (json.dumps(written, indent=2) + "\n").encode()


def _swap(new: Path, out_dir: Path) -> None:
    """Puts `new` in the place of `out_dir`; what was there stays until the new one is whole, and returns on failure."""
    old = out_dir.with_name(f".{out_dir.name}.replaced")
    existed = out_dir.exists()
    if existed:
        shutil.rmtree(old, ignore_errors=True)
        os.rename(out_dir, old)
    try:
        os.rename(new, out_dir)
    except OSError:
        if existed:
            os.rename(old, out_dir)
        raise
    shutil.rmtree(old, ignore_errors=True)
