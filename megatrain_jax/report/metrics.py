"""metrics.jsonl: what happened at each step, one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class MetricsLog:
    """An append-only file of records, each with the system before `write` returns.

    Args:
      path: the file; its folder exists.
      resume_step: the step of the checkpoint that the run continues from. Records of later steps, which are about to
        happen again, and a line torn by a crash are dropped; a crash while dropping leaves the file as it was. None
        starts an empty file.
    """

    def __init__(self, path: str | os.PathLike, resume_step: int | None = None):
        self._path = Path(path)
        kept = []
        if resume_step is not None and self._path.exists():
            kept = [record for record in read_metrics(self._path) if record["step"] <= resume_step]
        part = self._path.with_name(f"{self._path.name}.part")
        with named_errors(self._path), open(part, "w", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(record, allow_nan=False)}\n" for record in kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self._path)
        self._file = open(self._path, "a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record: "step" and whatever belongs to it; texts, numbers, booleans, None, mappings of these.

        Numbers may be NumPy or JAX scalars. JSON has no infinity and no NaN: such a number is written as null and its
        name (``outer.inner`` in a mapping) listed under "nonfinite".
        """
        nonfinite: list[str] = []
        plain = _plain(record, "", nonfinite) | ({"nonfinite": nonfinite} if nonfinite else {})
        with named_errors(self._path):
            self._file.write(f"{json.dumps(plain, allow_nan=False)}\n")
            self._file.flush()

    def sync(self) -> None:
        """Waits until everything is on disk, so that no crash of the machine can put a checkpoint ahead of its records."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        with named_errors(self._path):
            self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextlib.contextmanager
def named_errors(path: str | os.PathLike) -> Iterator[None]:
    """Adds to an OSError which file it is about: a write that fails, unlike an open, does not say."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or os.fspath(path)) from error


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The records of a metrics file, without a last line that is still being written."""
    with open(path, encoding="utf-8") as file:
        lines = file.readlines()
    if lines and not lines[-1].endswith("\n"):
        del lines[-1]
    return [json.loads(line) for line in lines]


def host_peak_bytes() -> int:
    """The most memory this process has had resident so far, in bytes."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _plain(value: Any, name: str, nonfinite: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{name}.{key}".lstrip("."), nonfinite) for key, item in value.items()}
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite.append(name)
        return None
    return value
