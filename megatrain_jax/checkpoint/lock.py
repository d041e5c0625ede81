"""One run at a time in an output folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from megatrain_jax.config import UserError

LOCK = ".lock"
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Keeps other runs out of a folder, which is made if it is missing, and removed again if nothing was put into it.

    The kernel holds the lock, on a file in the folder, and drops it with the process however that ends: one that a dead
    process left behind keeps nobody out.

    Yields:
      Whether the folder is locked: False on a file system without locks.

    Raises:
      UserError: another process holds the folder, or it cannot be written.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file, held = _acquire(folder)
        except OSError as error:
            raise UserError(
                f"output_dir: '{folder}' is not a writable folder; choose another ({error.strerror})"
            ) from error
        try:
            yield held
        finally:
            with contextlib.suppress(OSError):
                os.unlink(folder / LOCK)
            os.close(file)
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # it is no longer empty
                path.rmdir()


def _acquire(folder: Path) -> tuple[int, bool]:
    path = folder / LOCK
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            held = _lock(file, folder)
            if os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(file)):
                os.ftruncate(file, 0)
                os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return file, held
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # whoever held it has just ended and taken the file away


def _lock(file: int, folder: Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(file, 200).decode(errors="replace")
        raise UserError(
            f"output_dir: '{folder}' is in use by another run ({holder}); wait until it ends or choose another"
        ) from None
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return True
