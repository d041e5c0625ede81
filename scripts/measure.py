"""Runs the benchmarks of training steps in docs/benchmarks.md, and writes its tables from what they printed.

    python scripts/measure.py                    # every run that one GPU can do, each in a process of its own
    python scripts/measure.py step peers         # those of these tables
    python scripts/measure.py 7b-wide-14-8x1024  # this one
    python scripts/measure.py --tables           # nothing is run: only the tables, from docs/benchmarks/*.json

A run that fails or takes too long is named, and the exit code is then 1; what it had measured until then is kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "benchmarks.md"


@dataclasses.dataclass(frozen=True)
class Run:
    """One process.

    Attributes:
      table: where its results go.
      name: of the file of its results.
      arguments: the script and what it is given.
      seconds: it is stopped after.
      picture: its timeline, in docs/images.
    """

    table: str
    name: str
    arguments: str
    seconds: int = 150
    picture: str | None = None


_STREAMED = "--keep 0 --resident 0"
RUNS = (
    Run("step", "7b-wide-14-32x1024", "bench.py --layers 14 --batch 32 --clip 1 0"),
    Run("step", "7b-wide-14-8x1024", "bench.py --layers 14 --batch 8 --clip 1 --no-ceilings"),
    Run("step", "7b-wide-14-64x1024", "bench.py --layers 14 --batch 64 --clip 1 0 --steps 4 --no-ceilings", picture="timeline"),
    Run(
        "step", "7b-wide-14-4x16x1024-40gib",
        "bench.py --layers 14 --batch 16 --micro-batches 4 --device-budget 40 --clip 1 --steps 4 --no-ceilings",
        picture="timeline-40gib",
    ),
    Run("step", "7b-wide-28-64x1024", "bench.py --layers 28 --batch 64 --clip 1 --steps 4 --no-ceilings", 200),
    Run("streamed", "7b-wide-14-streamed-32x1024", f"bench.py --layers 14 {_STREAMED} --clip 1 0 --steps 4 --no-ceilings"),
    Run("depth", "7b-wide-7-streamed-64x1024", f"bench.py --layers 7 {_STREAMED} --batch 64 --clip 0 --steps 3 --no-ceilings"),
    Run("depth", "7b-wide-14-streamed-64x1024", f"bench.py --layers 14 {_STREAMED} --batch 64 --clip 0 --steps 3 --no-ceilings"),
    Run("depth", "7b-wide-28-streamed-64x1024", f"bench.py --layers 28 {_STREAMED} --batch 64 --clip 0 --steps 3 --no-ceilings", 200),
    Run("experts", "30b-a3b-12-64x1024", "bench.py --shape 30b-a3b --layers 12 --batch 64 --clip 1 --steps 3 --no-ceilings"),
    Run("peers", "deepspeed-7b-wide-14", "baselines/deepspeed_zero3.py --layers 14 --batch 32 8 --steps 3", 300),
    Run("peers", "fsdp2-7b-wide-14", "baselines/fsdp2_offload.py --layers 14 --batch 32 8 --steps 3", 300),
    Run("large", "14b-wide-48-64x1024", "bench.py --shape 14b-wide --batch 64 --clip 1 --steps 3 --host-budget 230 --no-ceilings", 400),
    Run(
        "large", "14b-wide-48-2-gpus-128x1024",
        "bench.py --shape 14b-wide --device all --batch 128 --clip 1 --steps 3 --host-budget 230 --no-ceilings", 400,
    ),
)  # fmt: skip
LARGE = "large"  # the table of runs that need more memory or GPUs than most machines have; they are run when named


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*dict.fromkeys(run.table for run in RUNS), *(run.name for run in RUNS)]
    parser.add_argument("what", nargs="*", metavar="TABLE or NAME", help=f"among {', '.join(known)}")
    parser.add_argument(
        "--docs", type=Path, default=DOCS, help="the page with the tables, beside benchmarks/ and images/"
    )
    parser.add_argument("--tables", action="store_true", help="run nothing")
    options = parser.parse_args()
    if unknown := set(options.what) - set(known):
        parser.error(f"{', '.join(sorted(unknown))}: no such table or run")
    failed = []
    if not options.tables:
        wanted = [
            run for run in RUNS if {run.table, run.name} & set(options.what) or not options.what and run.table != LARGE
        ]
        failed = [run.name for run in wanted if not measure(run, options.docs)]
    if options.docs.is_file():
        options.docs.write_text(with_tables(options.docs.read_text(), options.docs.parent / "benchmarks"))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


def measure(run: Run, docs: Path) -> bool:
    """Whether it ended well."""
    results, images = docs.parent / "benchmarks", docs.parent / "images"
    for folder in (results, images):
        folder.mkdir(parents=True, exist_ok=True)
    script, *arguments = run.arguments.split()
    command = [sys.executable, str(ROOT / "scripts" / script), *arguments, "--json", str(results / f"{run.name}.json")]
    if run.picture:
        command += ["--timeline", str(images / f"{run.picture}.png")]
    print(f"{run.name}: {run.arguments}", flush=True)
    began = time.monotonic()
    try:
        code = subprocess.run(command, timeout=run.seconds).returncode
    except subprocess.TimeoutExpired:
        code = f"stopped after {run.seconds} s"
    print(f"{run.name}: {time.monotonic() - began:.0f} s, exit code {code}", flush=True)
    return code == 0


# ---------------------------------------------------------------------- tables


def with_tables(page: str, results: Path) -> str:
    """The page with what stands between ``<!-- table: NAME -->`` and ``<!-- end -->`` replaced."""

    def table(found: re.Match) -> str:
        name = found[1]
        paths = [results / f"{run.name}.json" for run in RUNS if run.table == name]
        records = [record for path in paths if path.is_file() for record in json.loads(path.read_text())]
        return f"<!-- table: {name} -->\n{markdown(COLUMNS.get(name, STEP), records)}<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", table, page, flags=re.DOTALL)


def markdown(columns: dict[str, Callable[[dict], str]], records: Iterable[dict]) -> str:
    rows = [[*columns], ["---"] * len(columns), *([cell(record) for cell in columns.values()] for record in records)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _arguments(record: dict) -> str:
    """What was asked for, without what does not change the result; `--clip` has a column of its own."""
    shown = re.sub(r"--(steps|json|timeline|clip)( [^-]\S*)+|--no-ceilings", "", record["command"])
    return f"`{' '.join(shown.split()[2:])}`"


def _busy(record: dict) -> str:
    return f"{record['shares']['device_busy']:.1%}"


def _plan(record: dict) -> str:
    return f"{record['resident_blocks']} / {record['keep_layers']}"


def _measured(record: dict) -> str:
    return ", ".join(filter(None, (record["date"], record.get("commit"))))


_RATE = {
    "s / step": lambda r: f"{r['seconds_per_step']:#.3g}",
    "tokens/s": lambda r: f"{r['tokens_per_second']:,.0f}",
}
_MEMORY = {
    "GPU GiB": lambda r: f"{r['device_peak_gib']:.1f}",
    "host GiB": lambda r: f"{r['host_used_peak_gib']:.1f}",
}
STEP = {
    "arguments": _arguments,
    "clipped at": lambda r: f"{r['clip']:g}" if r["clip"] else "no",
    **_RATE,
    "model TFLOP/s": lambda r: f"{r['model_tflops']:.0f}",
    "blocks that stay / layers not recomputed": _plan,
    **_MEMORY,
    "device busy": _busy,
    "measured": _measured,
}
COLUMNS = {
    "depth": {
        "layers": lambda r: str(r["layers"]),
        "s / step": lambda r: f"{r['seconds_per_step']:.3f}",
        "device busy": _busy,
        "host bytes a parameter": lambda r: f"{r['host_bytes_per_parameter']:.1f}",
        "measured": _measured,
    },
    "peers": {
        "system": lambda r: r["system"],
        "tokens a step": lambda r: f"{r['tokens_per_step']:,}",
        **_RATE,
        **_MEMORY,
        "forward / backward / optimizer s": lambda r: " / ".join(f"{s:.2f}" for s in r["seconds"].values()),
        "measured": _measured,
    },
}

if __name__ == "__main__":
    sys.exit(main())
