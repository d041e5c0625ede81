"""manifest.json: what a checkpoint is, and what its files must be."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatrain_jax.config import UserError

NAME = "manifest.json"
FORMAT = 3
KEY = "training.resume_from_checkpoint"
_PACKAGES = ("jax", "jaxlib", "numpy", "optax", "tensorstore")


class DamagedError(UserError):
    """A checkpoint is not as it was written.

    Attributes:
      finding: the message without what to do.
    """

    def __init__(self, finding: str, remedy: str):
        super().__init__(f"{KEY}: {finding}; {remedy}")
        self.finding = finding


def damaged(folder: Path, what: str) -> DamagedError:
    return DamagedError(f"'{folder}' is damaged: {what}", "delete it to resume from an older one")


def write(folder: Path, body: Mapping[str, Any]) -> None:
    """Writes the manifest, with the versions of what computed and its own hash, and waits until it is on disk."""
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES} | {"python": platform.python_version()}
    body = {"format": FORMAT, "versions": versions, **body}
    write_file(folder / NAME, json.dumps({"sha256": _hash(body), "body": body}, indent=1).encode())


def read(folder: Path) -> dict[str, Any]:
    """The body of a manifest.

    Raises:
      DamagedError: there is none, or it is not as it was written.
      UserError: it is of another version.
    """
    try:
        text = (folder / NAME).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        finding = f"'{folder}' is not a whole checkpoint: it has no {NAME}"
        raise DamagedError(finding, "give a folder checkpoint-N, auto or none") from None
    except (OSError, ValueError) as error:
        raise damaged(folder, f"{NAME} cannot be read ({error})") from None
    try:
        content = json.loads(text)
        body = content["body"]
        intact = content["sha256"] == _hash(body)
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise damaged(folder, f"{NAME} does not have the content that was written")
    if body["format"] != FORMAT:
        raise UserError(f"{KEY}: '{folder}' was written by another version; choose another output_dir")
    return body


def describe_files(folder: Path, chunks: Iterable[Path], others: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Length and hash of files by their path in the folder. A chunk ends in the CRC-32C that it was written with."""
    described = {path: {"bytes": path.stat().st_size, "crc32c": _tail(path)} for path in chunks}
    for path in others:
        data = path.read_bytes()
        described[path] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return {path.relative_to(folder).as_posix(): entry for path, entry in described.items()}


def check_files(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises DamagedError unless every file is there in its length, with its hash or, of a chunk, with its CRC.

    That a chunk has the content of which that is the CRC is seen when it is read.
    """
    for name, entry in files.items():
        path = folder / name
        try:
            size = path.stat().st_size if path.is_file() else None
            if size != entry["bytes"]:
                there = "is missing" if size is None else f"has {size:,} of {entry['bytes']:,} bytes"
                raise damaged(folder, f"'{name}' {there}")
            if "crc32c" in entry:
                same = _tail(path) == entry["crc32c"]
            else:
                same = hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]
        except OSError as error:
            raise damaged(folder, f"'{name}' cannot be read ({error.strerror})") from None
        if not same:
            raise damaged(folder, f"'{name}' does not have the content that was written")


def write_file(path: Path, data: bytes) -> None:
    """Writes a file and waits until it is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _tail(path: Path) -> str:
    with open(path, "rb") as file:
        file.seek(-4, os.SEEK_END)
        return file.read().hex()
