"""metrics.jsonl: valid JSON, every step once, whatever happened."""

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from megatrain_jax.report import metrics
from megatrain_jax.report.metrics import MetricsLog, read_metrics


def strict(line):
    """JSON by the standard, which knows no NaN."""

    def refuse(name):
        raise ValueError(name)

    return json.loads(line, parse_constant=refuse)


@pytest.mark.parametrize("seed", range(30))
def test_after_crashes_and_resumes_every_step_is_there_once(seed, tmp_path):
    rng = random.Random(seed)
    path = tmp_path / "metrics.jsonl"
    saved, resume = 0, None
    for run in range(5):
        with MetricsLog(path, resume) as log:
            start = resume or 0
            for step in range(start + 1, start + rng.randrange(2, 9)):
                log.write({"step": step, "loss": rng.random(), "run": run})
                if rng.random() < 0.3:
                    log.write({"step": step, "eval_loss": rng.random()})
                if rng.random() < 0.5:
                    saved = step
        if rng.random() < 0.5:  # killed in the middle of a line that belongs to a later step
            with open(path, "a") as file:
                file.write(json.dumps({"step": step + 1, "loss": 1.25})[: rng.randrange(1, 20)])
        resume = saved
    with MetricsLog(path, resume) as log:
        log.write({"step": saved + 1, "loss": 0.0})
    steps = [record["step"] for record in map(strict, path.read_text().splitlines()) if "loss" in record]
    assert steps == list(range(1, saved + 2))


def test_a_record_is_in_the_file_once_it_is_written(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl")
    for step in range(3):
        log.write({"step": step})
        assert [record["step"] for record in read_metrics(tmp_path / "m.jsonl")] == list(range(step + 1))
    log.close()


def test_numbers_that_are_not_finite_are_null_and_named(tmp_path):
    record = {
        "step": 3,
        "loss": float("nan"),
        "norm": np.float32("-inf"),
        "time": {"forward": np.float64(0.5), "backward": float("inf")},
        "name": "NaN",
        "rows": np.int64(4),
        "flag": True,
        "none": None,
    }
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.write(record)
        log.write({"step": 4, "loss": 1.0})
    first, second = map(strict, (tmp_path / "m.jsonl").read_text().splitlines())
    assert first.pop("nonfinite") == ["loss", "norm", "time.backward"]
    assert first == record | {"loss": None, "norm": None, "time": {"forward": 0.5, "backward": None}}
    assert second == {"step": 4, "loss": 1.0}


def test_a_new_run_starts_an_empty_file(tmp_path):
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.write({"step": 1})
    MetricsLog(tmp_path / "m.jsonl").close()
    assert read_metrics(tmp_path / "m.jsonl") == []


def test_a_crash_while_dropping_lines_loses_none(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    with MetricsLog(path) as log:
        for step in range(5):
            log.write({"step": step})
    before = path.read_bytes()

    def crash(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", crash)
        MetricsLog(path, resume_step=2)
    assert path.read_bytes() == before


@pytest.mark.parametrize("proc", [True, False])
def test_host_peak_memory_outlives_what_took_it(proc):
    hide = "" if proc else "metrics.open = lambda *a, **k: (_ for _ in ()).throw(FileNotFoundError())"
    program = f"""if True:
        import importlib.util
        spec = importlib.util.spec_from_file_location("metrics", {metrics.__file__!r})
        metrics = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(metrics)
        {hide}
        before = metrics.host_peak_bytes()
        size = before + 2**26
        block = b"x" * size
        del block
        peak = metrics.host_peak_bytes()
        print(before, size, peak)
    """
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    before, size, peak = map(int, output.split())
    assert 2**20 < before < size <= peak < before + size + 2**24
