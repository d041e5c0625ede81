"""What only shows in long runs: a run that is killed again and again, and memory over a thousand steps.

python scripts/soak.py kills [--config FILE] [--kills 50] [section.key=value ...]
python scripts/soak.py memory [--config FILE] [--steps 1000] [section.key=value ...]

`kills` trains once without a break, and once with SIGKILLs at random moments, a third of them while a checkpoint is being
written. Weights, optimizer state and records of both must be equal to the last bit. The run must be long enough for that
many kills, and save often.

`memory` compares the host memory of the second half of the steps with that of the first, and the peak of device memory:
1 % more fails.

Without a configuration it is a model of two layers with random weights, on the CPU, that saves every 3 of its 800 steps and
evaluates every 50.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMES = {"tokens_per_second", "seconds", "host_peak_bytes", "device_peak_bytes", "eval_seconds"}
START = 60.0  # seconds; the longest that a kill waits for its moment
LOOK = 0.002  # seconds between two looks at what the run has written


class SoakError(Exception):
    """What must hold does not."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "memory"])
    parser.add_argument("--config", metavar="FILE", help="YAML file of the run")
    parser.add_argument("--kills", type=int, default=50, help="SIGKILLs (default: 50)")
    parser.add_argument("--steps", type=int, default=1000, help="steps of which memory is watched (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_intermixed_args(arguments)
    with tempfile.TemporaryDirectory(prefix="soak-") as work:
        config = options.config or _make_project(Path(work))
        try:
            if options.what == "kills":
                kills(Path(work), config, options.overrides, options.kills, random.Random(options.seed))
            else:
                memory(Path(work), config, options.overrides, options.steps)
        except SoakError as error:
            print(f"failed     {error}", flush=True)
            return 1
    return 0


def _make_project(folder: Path) -> str:
    """Makes a small model and data for it; the file with the configuration."""
    sys.path.insert(0, str(ROOT))
    from tests.end_to_end.conftest import Project, write_model

    evaluation = {"eval_strategy": "steps", "eval_steps": 50}
    project = Project(folder, write_model(folder / "base"))
    return str(project.write(training={"num_steps": 800}, checkpoint={"save_steps": 3}, eval=evaluation))


# ---------------------------------------------------------------------- kills


def kills(work: Path, config: str, overrides: list[str], count: int, rng: random.Random) -> None:
    """Raises SoakError unless a run with `count` SIGKILLs ends as one without."""
    whole, broken = work / "whole", work / "broken"
    _finish(_start(config, overrides, whole), whole)
    met = {"starting": 0, "saving": 0, "training": 0}
    for number in range(count):
        process = _start(config, overrides, broken)
        moment = ("saving", "training", "starting")[number % 3]
        _await(moment, process, broken, rng)
        if process.poll() is not None:
            raise SoakError(
                f"the run ended by itself after {number} kills, with code {process.returncode}; give it more steps"
            )
        if moment == "saving" and not any(broken.glob("*.partial")):
            moment = "training"  # it was over before it could be met
        process.kill()
        process.communicate()
        met[moment] += 1
        print(f"kill       {number + 1}, {moment}, at step {len(_steps(broken))}", flush=True)
    _finish(_start(config, overrides, broken), broken)
    _compare(whole, broken)
    print(f"equal      after {count} kills: {', '.join(f'{n} while {moment}' for moment, n in met.items())}")


def _await(moment: str, process: subprocess.Popen, out: Path, rng: random.Random) -> None:
    """Returns at a random instant of a phase of the run, or when it has ended."""
    deadline, before = time.monotonic() + START, len(_steps(out))
    if moment == "starting":
        deadline = time.monotonic() + rng.uniform(0, 5)
    wanted = before + rng.randrange(1, 6)
    while process.poll() is None and time.monotonic() < deadline:
        if moment == "training" and len(_steps(out)) >= wanted:
            break
        # A folder from the run before is there until this one saves.
        if moment == "saving" and len(_steps(out)) > before and any(out.glob("*.partial")):
            time.sleep(rng.uniform(0, 0.05))
            return
        time.sleep(LOOK)
    time.sleep(rng.uniform(0, 0.02))


def _compare(whole: Path, broken: Path) -> None:
    for a in sorted((whole / "model").iterdir()):
        if a.read_bytes() != (broken / "model" / a.name).read_bytes():
            raise SoakError(f"model/{a.name} differs")
    last = max(whole.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2])).name
    states = [json.loads((out / last / "manifest.json").read_text())["body"] for out in (whole, broken)]
    if states[0]["files"] != states[1]["files"]:
        raise SoakError(f"{last} differs")
    first, second = _records(whole), _records(broken)
    if first != second:
        where = next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))
        raise SoakError(f"metrics.jsonl differs from line {where + 1} on")


# ---------------------------------------------------------------------- memory


def memory(work: Path, config: str, overrides: list[str], steps: int) -> None:
    """Raises SoakError if memory of the second half of the steps is more than 1 % above that of the first."""
    out = work / "out"
    process = _start(config, [*overrides, f"training.num_steps={steps}", "logging.log_interval=1"], out)
    halves: tuple[list[int], list[int]] = ([], [])
    while process.poll() is None:
        if done := len(_steps(out)):
            halves[done > steps // 2].append(_resident(process.pid))
        time.sleep(0.05)
    _finish(process, out)
    first, second = (statistics.median([size for size in half if size]) for half in halves)
    peaks = [line["device_peak_bytes"] for line in _lines(out) if "device_peak_bytes" in line]
    before, after = peaks[len(peaks) // 2 - 1] or 0, peaks[-1] or 0
    print(
        f"host       {first / 2**20:.1f} MiB in the first half, {second / 2**20:.1f} in the second ({second / first - 1:+.2%})"
    )
    print(f"device     peak {before / 2**20:.1f} MiB after the first half, {after / 2**20:.1f} after the second")
    if second > 1.01 * first or after > 1.01 * before:
        raise SoakError("memory grows")


def _resident(pid: int) -> int:
    """Bytes of anonymous memory of a process, 0 if it has ended."""
    try:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return int(fields["RssAnon"].split()[0]) * 1024
    except (OSError, KeyError):
        return 0


# ---------------------------------------------------------------------- a run


def _start(config: str, overrides: list[str], out: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "megatrain_jax.train", "--config", config, *overrides, f"output_dir={out}"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen, out: Path) -> None:
    _, err = process.communicate()
    if process.returncode:
        raise SoakError(f"the run into {out.name} ended with code {process.returncode}: {err.strip()[-500:]}")


def _lines(out: Path) -> list[dict]:
    """Records of a run so far, without a line that is being written."""
    try:
        text = (out / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _steps(out: Path) -> list[int]:
    return [line["step"] for line in _lines(out) if "loss" in line]


def _records(out: Path) -> list[dict]:
    return [{key: value for key, value in line.items() if key not in TIMES} for line in _lines(out)]


if __name__ == "__main__":
    sys.exit(main())
