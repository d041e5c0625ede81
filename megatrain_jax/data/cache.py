"""Tokenised samples on disk: written once, whole or not at all, and read as they lie, whatever memory there is.

A cache is a folder of plain arrays laid end to end (`_COLUMNS`) and a ``meta.json``, named by a hash of everything that
it follows from. It is written beside its name and renamed when all of it is on the disk, so a folder of that name is
whole unless somebody damaged it; what is there is measured against ``meta.json`` before it is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatrain_jax.config import UserError
from megatrain_jax.data.chat import Sample

# Of every token, and of every sample: its tokens, how many of them are supervised, whether a unit begins with it.
# "weights" is empty where all that is supervised weighs 1; else it has a hole for each such sample, which reads as zeros.
_COLUMNS = {
    "token_ids": np.dtype(np.int32),
    "supervised": np.dtype(bool),
    "weights": np.dtype(np.float32),
    "lengths": np.dtype(np.int32),
    "asked": np.dtype(np.int32),
    "begins_unit": np.dtype(bool),
}
_BUILDING = "building-"


@dataclasses.dataclass(frozen=True)
class Samples(Sequence[Sample]):
    """Some of the samples of a cache, in order; a `Sample` is read from the disk when it is asked for.

    Attributes:
      columns: the arrays of the cache, by name.
      offsets: int64 ``[all samples + 1]``, where the tokens of each begin.
      chosen: int64 ``[samples]``, which of all they are.
    """

    columns: dict[str, np.ndarray]
    offsets: np.ndarray
    chosen: np.ndarray

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return dataclasses.replace(self, chosen=self.chosen[index])
        number = self.chosen[index]
        here = slice(self.offsets[number], self.offsets[number + 1])
        weights = self.columns["weights"][here] if len(self.columns["weights"]) else None
        return Sample(self.columns["token_ids"][here], self.columns["supervised"][here], weights)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each."""
        return self.columns["lengths"][self.chosen]

    @property
    def supervised_tokens(self) -> int:
        return int(self.columns["asked"][self.chosen].sum(dtype=np.int64))


NO_SAMPLES = Samples(
    {name: np.zeros(0, dtype) for name, dtype in _COLUMNS.items()}, np.zeros(1, np.int64), np.zeros(0, np.int64)
)


@dataclasses.dataclass(frozen=True)
class Cache:
    """What a cache holds.

    Attributes:
      samples: all of them.
      units: int64 ``[units + 1]``, where groups begin that no split may divide.
      notes: what its maker wanted to remember; plain JSON.
    """

    samples: Samples
    units: np.ndarray
    notes: dict[str, Any]


class Writer:
    """Appends samples to the files of a cache in the making."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._files = {name: open(folder / f"{name}.bin", "wb") for name in _COLUMNS}
        self._tokens = 0

    def add(self, unit: Sequence[Sample]) -> None:
        """Appends samples that belong together."""
        for i, sample in enumerate(unit):
            row = {
                **sample._asdict(),
                "lengths": len(sample.token_ids),
                "asked": np.count_nonzero(sample.supervised),
                "begins_unit": i == 0,
            }
            with _writing(self._folder.parent):
                if sample.weights is None:
                    del row["weights"]
                else:
                    self._files["weights"].seek(_COLUMNS["weights"].itemsize * self._tokens)
                for name, value in row.items():
                    self._files[name].write(np.ascontiguousarray(value, _COLUMNS[name]).data)
            self._tokens += len(sample.token_ids)

    def finish(self, notes: dict[str, Any]) -> None:
        """Everything is on the disk when this returns."""
        weights = self._files["weights"]
        if weights.tell():
            weights.truncate(_COLUMNS["weights"].itemsize * self._tokens)
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self.close()
        sizes = {name: (self._folder / f"{name}.bin").stat().st_size for name in _COLUMNS}
        with open(self._folder / "meta.json", "w", encoding="utf-8") as file:
            json.dump({"bytes": sizes, "notes": notes}, file)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(self._folder)

    def close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # on a full disk, what `finish` has not heard of is given up
                file.close()


def make_key(*parts: Any) -> str:
    """A name for what follows from `parts`: texts, bytes, or what JSON can say; the same wherever it is made."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        text = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True, default=repr).encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


def hash_files(files: Iterable[Path]) -> str:
    """Of the contents of files, in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        with open(file, "rb") as opened:
            digest.update(hashlib.file_digest(opened, "blake2b").digest())
    return digest.hexdigest()


def open_or_build(folder: Path, key: str, build: Callable[[Writer], dict[str, Any]]) -> Cache:
    """The cache named `key` in `folder`, which `build` fills first if it is not there or damaged.

    Any number of processes may do so at once: each builds its own, and the first to be whole is used by all.

    Args:
      build: appends all samples, at least one, and returns the notes.

    Raises:
      UserError: the folder cannot be written.
    """
    found = _open(folder / key)
    if found is not None:
        return found
    with contextlib.ExitStack() as undo:
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(folder)
            making = folder / f"{_BUILDING}{uuid.uuid4().hex}"
            making.mkdir()  # as readable for others as they set it
            undo.callback(shutil.rmtree, making, ignore_errors=True)
            undo.enter_context(_lock(making))
            writer = undo.enter_context(contextlib.closing(Writer(making)))
        notes = build(writer)
        with _writing(folder):
            writer.finish(notes)
            os.unlink(making / "lock")
            _put_in_place(making, folder / key)
    found = _open(folder / key)
    if found is None:
        raise UserError(f"dataset.cache_dir: '{folder / key}' was changed while it was made; run again")
    return found


def _open(folder: Path) -> Cache | None:
    """The cache in `folder`, or None if there is none that is whole."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if any((folder / f"{name}.bin").stat().st_size != meta["bytes"][name] for name in _COLUMNS):
            return None
        columns = {name: _column(folder / f"{name}.bin", dtype) for name, dtype in _COLUMNS.items()}
        notes = meta["notes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    offsets = np.zeros(len(columns["lengths"]) + 1, np.int64)
    np.cumsum(columns["lengths"], out=offsets[1:])
    count = len(columns["lengths"])
    tokens = len(columns["token_ids"])
    if offsets[-1] != tokens or len(columns["begins_unit"]) != count or len(columns["weights"]) not in (0, tokens):
        return None
    units = np.append(np.flatnonzero(columns["begins_unit"]), count)
    return Cache(Samples(columns, offsets, np.arange(count)), units, notes)


def _column(file: Path, dtype: np.dtype) -> np.ndarray:
    if not file.stat().st_size:  # which cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(file, dtype, "r").view(np.ndarray)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise UserError(f"dataset.cache_dir: cannot write in '{folder}' ({why}); choose another folder") from error


def _lock(making: Path) -> IO[bytes]:
    """Marks a folder as being worked on until the result is closed or this process ends, in whatever way."""
    lock = open(making / "locking", "wb")
    with contextlib.suppress(OSError):  # some file systems have no locks; what is abandoned then stays
        fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(making / "locking", making / "lock")  # nobody sees it before it is locked
    return lock


def _put_in_place(made: Path, final: Path) -> None:
    try:
        os.rename(made, final)
    except OSError:
        if not final.is_dir():
            raise
        if _open(final) is not None:
            return  # another process was first
        with tempfile.TemporaryDirectory(prefix=_BUILDING, dir=final.parent) as aside:
            with contextlib.suppress(FileNotFoundError):  # another process is mending it too
                os.rename(final, Path(aside) / "damaged")
            with contextlib.suppress(OSError):
                os.rename(made, final)
    _sync_folder(final.parent)


def _remove_abandoned(folder: Path) -> None:
    """Takes away what processes left that ended while they built: nobody holds its lock."""
    for making in folder.glob(f"{_BUILDING}*"):
        with contextlib.suppress(OSError), open(making / "lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(making, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
