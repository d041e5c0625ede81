"""How much memory the machine, and the container that this process is in, still have for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_NO_LIMIT = 1 << 60  # cgroup v1 writes the largest number of pages where there is no limit


def host_memory(root: Path = Path("/")) -> int | None:
    """Bytes of host memory that this process can still take, None if the system does not say.

    That is what the machine can give without swapping (MemAvailable: unused memory and the page cache), or what is left
    within the limit of a control group that this process is in, its reclaimable cache counted as free, if that is less.

    A machine that `grows` has at any time little more than is used. There a limit that exceeds the machine's present size
    is taken as a promise; without one, MemAvailable stands, which errs on the side of refusing: `memory.host_budget` is
    how a user who knows better says so. Memory that is missing for another reason (a balloon, pages that a driver holds)
    is never counted, because nothing tells whether it would be given back in time.

    Args:
      root: of the file system.
    """
    groups = list(_limits(root))
    free = [limit - used for limit, used in groups]
    with contextlib.suppress(OSError, KeyError, ValueError):
        machine = {name: kib * 1024 for name, kib in _fields(root / "proc/meminfo").items()}
        if not (grows(root) and any(limit > machine["MemTotal"] for limit, _ in groups)):
            free.append(machine["MemAvailable"])
    return max(min(free), 0) if free else None


def anonymous_memory(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process has taken and that no file backs; 0 if the system does not say."""
    with contextlib.suppress(OSError, KeyError):
        return 1024 * _fields(root / "proc/self/status")["RssAnon"]
    return 0


def grows(root: Path = Path("/")) -> bool:
    """Whether the machine is one to which memory is added while it runs (a virtual machine with a virtio-mem device)."""
    return any((root / "sys/bus/virtio/drivers/virtio_mem").glob("virtio*"))


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of every control group with a limit that this process is in; of both versions."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            names = (
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                if controllers
                else ("memory.max", "memory.current", "inactive_file")
            )
            # In a container the path may be that on the host, which is not there; the top is then the container's own.
            here = Path(path.lstrip("/"))
            for folder in {top / here, *(top / parent for parent in here.parents), top}:
                with contextlib.suppress(OSError, KeyError, ValueError):
                    limit, used = (int((folder / name).read_text()) for name in names[:2])
                    if limit < _NO_LIMIT:
                        yield limit, used - _fields(folder / "memory.stat")[names[2]]


def _fields(path: Path) -> dict[str, int]:
    """Numbers of a file with a name and a number on each line."""
    rows = (line.replace(":", " ").split() for line in path.read_text(encoding="ascii").splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
