"""SHA256SUMS: hashes of the weight files of a folder, in the format of the sha256sum tool.

safetensors has no hash of its own, so that a bit that flips in a weight goes unseen without one.
"""

from __future__ import annotations

import contextlib
import hashlib
import posixpath
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatrain_jax.config import UserError

NAME = "SHA256SUMS"
_LINE = re.compile(r"(?P<sum>[0-9a-fA-F]{64}) [ *](?P<name>.+)")
_PIECE = 1 << 20  # bytes


def read_sums(folder: Path) -> dict[str, str]:
    """The hashes by file name; empty if the folder has none.

    Raises:
      UserError: a line is not as sha256sum writes it.
    """
    path = folder / NAME
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); get the file again or remove it") from None
    found = {}
    for number, line in enumerate(lines, 1):
        if (match := _LINE.fullmatch(line)) is None:
            raise UserError(f"{path}: line {number} is not as sha256sum writes it; get the file again or remove it")
        found[posixpath.normpath(match["name"])] = match["sum"].lower()
    return found


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Writes the file; `sums` are hexadecimal hashes by file name."""
    (folder / NAME).write_text("".join(f"{value}  {name}\n" for name, value in sums.items()), encoding="utf-8")


@contextlib.contextmanager
def verified(file: Path, expected: str | None) -> Iterator[None]:
    """Hashes a file in a thread while the caller reads it, so that the disk is asked once; None verifies nothing.

    Raises:
      UserError: at the end, if the file has another hash.
    """
    if expected is None:
        yield
        return
    stop = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="megatrain-hash") as thread:
        found = thread.submit(hash_file, file, stop)
        try:
            yield
        except BaseException:
            stop.set()
            raise
        if found.result() != expected:
            raise UserError(
                f"{file}: does not have the hash that {NAME} says; get the file again, or remove {NAME} if the file was "
                "changed on purpose"
            )


def hash_file(file: Path, stop: threading.Event | None = None) -> str:
    """The hexadecimal SHA-256 of a file, read from its beginning to its end, or until `stop` is set."""
    value = hashlib.sha256()
    with open(file, "rb", buffering=0) as stream:
        while (piece := stream.read(_PIECE)) and not (stop and stop.is_set()):
            value.update(piece)
    return value.hexdigest()
