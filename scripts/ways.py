"""Ways to compute the same, each in a process of its own: one that crashes or hangs leaves the others alone."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping


def each_in_a_process(
    script: str, description: str, seconds: Mapping[str, float], run: Callable[[str, bool], Iterable[dict]]
) -> list[dict]:
    """The command line of a script that compares ways; prints every record as a line of JSON.

    Args:
      script: the file, which is run again with ``--only`` for each way.
      description: of the command.
      seconds: that each way may take, by its name.
      run: ``(way, small) -> records``, in the present process.

    Returns:
      The records of all ways, those of ways that failed with an ``error``; none in a process of one way.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=seconds, help="run this way in the present process")
    parser.add_argument("--json", help="where the results go, besides the standard output")
    parser.add_argument(
        "--small", action="store_true", help="check only, on any backend (kernels interpreted on a CPU)"
    )
    options = parser.parse_args()
    if options.only:
        for record in run(options.only, options.small):
            print(json.dumps(record), flush=True)
        return []
    records = []
    for way, limit in seconds.items():
        command = [sys.executable, script, "--only", way, *["--small"] * options.small]
        with (
            tempfile.TemporaryFile("w+", errors="replace") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
        ):
            began, timer = time.monotonic(), threading.Timer(limit, process.kill)
            timer.start()
            for line in process.stdout:
                if line.startswith("{"):
                    print(line, end="", flush=True)
                    records.append(json.loads(line))
            if process.wait():
                errors.seek(0)
                late = f"stopped after {limit} s; " if time.monotonic() - began >= limit else ""
                records.append({"way": way, "error": late + errors.read().strip()[-600:]})
                print(json.dumps(records[-1]), flush=True)
            timer.cancel()
    if options.json:
        with open(options.json, "w", encoding="ascii") as file:
            json.dump(records, file, indent=1)
    return records
