"""Whatever breaks, the run ends soon, with the cause, and what was saved before goes on as if nothing had happened."""

import faulthandler
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

import megatrain_jax as mt
from megatrain_jax import train
from megatrain_jax.data import dataset, workers
from megatrain_jax.stream import pipeline
from tests.end_to_end.conftest import ROOT, Project, records, saved_weights, write_model
from tests.end_to_end.faults import POINTS, Fault, Injected, fail

slow = pytest.mark.exhaustive
SECTIONS = {
    "training": {"num_steps": 9},  # the loader is some steps ahead, and a save may end a step later
    "checkpoint": {"save_steps": 2, "save_total_limit": None},
    "memory": {"keep_intermediates": 1},  # so that one layer keeps its input and one what backward needs
}
LIMIT = 10  # seconds from a fault to the end


@pytest.fixture(autouse=True)
def no_test_hangs():
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run without a fault: what the others must end as."""
    folder = tmp_path_factory.mktemp("undisturbed")
    project = Project(folder, write_model(folder / "model"))
    mt.Trainer(project.config("whole", **SECTIONS)).fit()
    return project


def assert_goes_on(project, out):
    """The same run again, without the fault, ends as the undisturbed one."""
    mt.Trainer(project.config(out, **SECTIONS)).fit()
    whole, again = project.folder / "whole", project.folder / out
    for name, value in saved_weights(whole).items():
        assert value.tobytes() == saved_weights(again)[name].tobytes(), name
    assert records(whole) == records(again)


@pytest.mark.parametrize("point", POINTS)
def test_a_failure_anywhere_ends_the_run_with_its_cause(undisturbed, point):
    out = point.partition(":")[2]
    folder, before = undisturbed.folder / out, threading.enumerate()
    config = undisturbed.config(out, **SECTIONS)
    with Fault(point, lambda: (folder / "checkpoint-2" / "manifest.json").exists(), fail) as fault:
        with pytest.raises(Injected, match="broken on purpose"):
            mt.Trainer(config).fit()
        assert time.monotonic() - fault.fired < LIMIT
    names = {
        "main": "MainThread",
        "optimizer": "megatrain-optimizer",
        "saver": "megatrain-checkpoint_0",
        "loader": "data_0",
    }
    assert fault.thread == names[POINTS[point]]
    # One pool serves every run of a process; its threads begin when they are first needed.
    assert [t for t in threading.enumerate() if t not in before and "megatrain-update" not in t.name] == []
    assert not (folder / ".lock").exists() and not (folder / "model").exists()


def start(project, out, point, act, **training):
    config = project.write(f"{out}.yaml", **SECTIONS | {"training": SECTIONS["training"] | training})
    command = [sys.executable, "-m", "tests.end_to_end.faults", point, act, str(config), str(project.folder / out)]
    # A session of its own, so that whatever it leaves behind can be found.
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def left_behind(session: int) -> list[str]:
    """Command lines of the processes of a session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) == session:
                found.append((folder / "cmdline").read_text())
        except (ProcessLookupError, FileNotFoundError):
            continue
    return found


def assert_ends(process, seconds):
    """It ends within `seconds` of its fault, and nothing of it is left; its exit code and what it wrote to stderr."""
    watch = threading.Timer(60, process.kill)
    watch.start()
    try:
        fired = next((time.monotonic() for line in process.stdout if line == "fired\n"), None)
        _, err = process.communicate()
        assert fired is not None and time.monotonic() - fired < seconds, err
    finally:
        watch.cancel()
        process.kill()
    assert left_behind(process.pid) == []
    return process.returncode, err


FEW = ("stream.transfer:HostGradients.wait", "data.loader:TrainLoader.step")


@pytest.mark.parametrize("point", [pytest.param(point, marks=() if point in FEW else slow) for point in POINTS])
def test_a_failure_anywhere_ends_the_command_leaves_no_process_and_loses_nothing(undisturbed, point):
    out = f"process-{point.partition(':')[2]}"
    code, err = assert_ends(start(undisturbed, out, point, "fail"), LIMIT)
    assert code == 1 and err.splitlines()[-1].endswith("Injected: broken on purpose")
    assert not (undisturbed.folder / out / ".lock").exists()
    assert_goes_on(undisturbed, out)


WAITS = {
    "stream.transfer:Mesh.put_weights": "MainThread waits for the copy of block",
    "stream.transfer:Mesh.gradients_to_host": "MainThread waits for the copy of the gradients of block",
    "stream.transfer:Mesh.scalar": "MainThread waits for the loss",
    "stream.updater:Updater._next": "MainThread waits for the update of block",
    "stream.transfer:HostGradients.wait": "megatrain-optimizer waits for the gradients of block",
    "host.optimizer:HostOptimizer.update": "MainThread waits for the update of block",
    "data.loader:TrainLoader.step": "MainThread waits for the data of step",
    "report.metrics:MetricsLog.write": "MainThread waits for metrics.jsonl to be written",
    "host.holds:Holds.wait": "megatrain-optimizer waits for block",
    "checkpoint.tensors:Writer._land": "MainThread waits for the ",
    "checkpoint.tensors:Writer._send": "megatrain-optimizer waits for block 0 to be written to the checkpoint",
}


@pytest.mark.parametrize("point", [pytest.param(point, marks=() if point in FEW[:1] else slow) for point in WAITS])
def test_what_never_returns_is_named_and_ended_and_loses_nothing(undisturbed, point):
    out = f"hung-{point.partition(':')[2]}"
    code, err = assert_ends(start(undisturbed, out, point, "hang", watchdog_seconds=3), LIMIT + 3)
    last = err.splitlines()[-1]
    assert code == 1 and last.startswith("error: training.watchdog_seconds: no progress for 3 s: ")
    assert WAITS[point] in last and "the same command continues from the last checkpoint" in last
    assert_goes_on(undisturbed, out)


def test_a_killed_run_leaves_no_process_and_no_lock_that_holds(project):
    process = start(project, "out", "stream.transfer:HostGradients.wait", "hang", watchdog_seconds=0)
    assert "fired\n" in iter(process.stdout.readline, "")
    assert (project.folder / "out" / ".lock").exists()
    process.kill()
    process.communicate()
    deadline = time.monotonic() + LIMIT
    while (left := left_behind(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    assert mt.Trainer(project.config(**SECTIONS)).fit().step == 9
    assert not (project.folder / "out" / ".lock").exists()


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_one_goes_on(project, capsys):
    refused = []

    def listener(event):
        if event.what == "update" and not refused:
            refused.append(
                train.main(["--config", str(project.write("other.yaml")), f"output_dir={project.folder / 'out'}"])
            )

    assert mt.Trainer(project.config(**SECTIONS), listener).fit().step == 9
    err = capsys.readouterr().err
    assert refused == [2] and err.count("\n") == 1
    assert f"out' is in use by another run (process {os.getpid()} on " in err


def test_a_worker_that_dies_ends_the_run_with_its_reason(project, monkeypatch):
    """In the processes that tokenise, before the first step."""

    def call(self, item):
        self.kill()
        raise self._ended()

    monkeypatch.setattr(dataset, "_IN_THIS_PROCESS", 1)
    monkeypatch.setattr(workers._Worker, "call", call)
    cache = str(project.folder / "cache")
    with pytest.raises(RuntimeError, match="a data worker was ended by SIGKILL"):
        mt.Trainer(project.config(dataset={"num_workers": 2, "cache_dir": cache})).fit()
    assert not (project.folder / "out").exists()


def test_device_memory_that_runs_out_is_one_line_with_a_remedy(project, monkeypatch, capsys):
    def exhausted(self):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.\nmore")

    monkeypatch.setattr(pipeline._RunAhead, "admit", exhausted)
    assert train.main(["--config", str(project.write()), f"output_dir={project.folder / 'out'}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: device memory: ") and err.count("\n") == 1
    assert "trying to allocate 8 bytes" in err and "lower training.batch_size" in err


@pytest.mark.parametrize("what", ["forward", "forward done", "d2h done", "update", "update done"])
def test_a_run_ends_with_what_its_listener_raised(project, what):
    before, seen = threading.enumerate(), []

    def listener(event):
        seen.append(event.what)
        if event.what == what:
            raise LookupError(f"no place for {what}")

    with pytest.raises(LookupError, match=f"no place for {what}"):
        mt.Trainer(project.config(training={"num_steps": 40}), listener).fit()
    assert [t for t in threading.enumerate() if t not in before and "megatrain-update" not in t.name] == []
    assert seen.count("update done") < 40 * 4
