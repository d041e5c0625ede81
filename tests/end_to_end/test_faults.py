"""Whatever breaks, the run ends soon, with the cause, and what was saved before goes on as if nothing had happened."""

import dataclasses
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

import megatrain_jax as mt
from megatrain_jax import preparation, train, trainer
from megatrain_jax.checkpoint import saver, state, tensors
from megatrain_jax.data import dataset, workers
from megatrain_jax.host.optimizer import HostOptimizer
from megatrain_jax.report import progress
from megatrain_jax.stream import pipeline, updater
from tests.end_to_end.conftest import ROOT, Project, records, saved_weights, write_model
from tests.end_to_end.faults import POINTS, Fault, Injected, fail, wait_sites

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


# Called where a thread says that it waits, so that the tests of waits meet the same.
AT_A_WAIT = {
    "stream.transfer:Mesh.put_weights",
    "stream.transfer:Mesh.gradients_to_host",
    "stream.transfer:Mesh.scalar",
    "stream.transfer:HostGradients.wait",
    "stream.pipeline:_RunAhead.admit",
    "stream.updater:Updater.wait",
    "host.holds:Holds.wait",
    "report.metrics:MetricsLog.write",
    "checkpoint.saver:Saver.result",
    "checkpoint.tensors:Writer._land",
}


@pytest.mark.parametrize("point", [pytest.param(point, marks=slow if point in AT_A_WAIT else ()) for point in POINTS])
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


SITES = wait_sites()
# All that a run can wait for: several micro-batches, evaluation, a checkpoint, a block on the device.
EVERYTHING = SECTIONS | {
    "memory": {"resident_blocks": 1},
    "training": SECTIONS["training"] | {"gradient_accumulation_steps": 2},
    "eval": {"eval_strategy": "steps", "eval_steps": 1},
}


@pytest.mark.parametrize("site", SITES)
def test_a_failure_at_any_wait_ends_the_run_with_its_cause(undisturbed, monkeypatch, site):
    sections = EVERYTHING
    if site == "stream.updater:wait_for_rows":
        # Of a table that the kernels update in turns, and slowly; an evaluation would wait for all of it.
        pytest.importorskip("numba")
        sections = EVERYTHING | {"model": {"dtype": "bfloat16"}, "eval": {"eval_strategy": "no"}}
        monkeypatch.setattr(updater, "TURN", 1)
        whole = HostOptimizer.update_table_rows
        monkeypatch.setattr(HostOptimizer, "update_table_rows", lambda *a, **k: (time.sleep(0.002), whole(*a, **k)))
    if site.removeprefix("stream.") in ("updater:__init__", "updater:add", "updater:wait_for_rows", "pipeline:_embed"):
        # Gradients of groups are summed; then no block stays on the device, and of the embedding rows are sent.
        in_groups = lambda *args: dataclasses.replace(preparation.plan(*args), group_size=1, resident=())  # noqa: E731
        monkeypatch.setattr(trainer, "plan", in_groups)
    out = site.replace(":", "-")
    before, checkpoint = threading.enumerate(), undisturbed.folder / out / "checkpoint-2" / "manifest.json"
    there = lambda: sys._getframe(2).f_lineno == SITES[site] and checkpoint.exists()  # noqa: E731
    with Fault(f"{site.partition(':')[0]}:waiting", there, fail) as fault:
        with pytest.raises(Injected, match="broken on purpose"):
            mt.Trainer(undisturbed.config(out, **sections)).fit()
        assert time.monotonic() - fault.fired < LIMIT
    # Where the wait was for the end of a thread, that end is still to come.
    deadline = time.monotonic() + LIMIT
    while left := [t for t in threading.enumerate() if t not in before and "megatrain-update" not in t.name]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
    assert not (undisturbed.folder / out / ".lock").exists()


def test_a_failure_while_a_checkpoint_is_written_is_told_before_it_is_waited_for(undisturbed, monkeypatch):
    """Its blocks were whole before the fault, so it is a checkpoint like any other."""
    folder, told, whole = undisturbed.folder / "told", threading.Event(), progress._Plain.message

    def message(self, text):
        if text.startswith(
            "failed     Injected('broken on purpose'); the checkpoint that is being written is finished"
        ):
            assert (folder / "checkpoint-4.partial").exists()
            told.set()
        whole(self, text)

    def send(self, send=tensors.Writer._send):
        assert "checkpoint-4" not in str(self._array.path) or told.wait(LIMIT)
        send(self)

    monkeypatch.setattr(progress._Plain, "message", message)
    monkeypatch.setattr(tensors.Writer, "_send", send)
    with Fault("report.metrics:MetricsLog.write", lambda: (folder / "checkpoint-4.partial").exists(), fail):
        with pytest.raises(Injected):
            mt.Trainer(undisturbed.config("told", **SECTIONS)).fit()
    assert told.is_set() and state.read_run(folder / "checkpoint-4")["position"]["step"] == 4
    assert_goes_on(undisturbed, "told")


def test_who_does_not_want_to_wait_for_a_checkpoint_after_a_failure_need_not(undisturbed, monkeypatch):
    """From Python, where Ctrl-C is an exception; it leaves no thread, or Python itself would wait."""
    folder, interrupted, before = undisturbed.folder / "interrupted", threading.Event(), threading.enumerate()
    partial = folder / "checkpoint-4.partial"

    def send(self, send=tensors.Writer._send):
        if partial.exists():
            while not interrupted.is_set():
                time.sleep(0.01)
        send(self)

    def shutdown(self, shutdown=saver.concurrent.futures.ThreadPoolExecutor.shutdown, **options):
        if savers and self is savers[-1]._thread and not interrupted.is_set():
            shutdown(self, wait=False)
            interrupted.set()
            raise KeyboardInterrupt  # in the middle of the wait
        shutdown(self, **options)

    savers, start = [], saver.Saver.start
    monkeypatch.setattr(saver.Saver, "start", lambda self, *args: savers.append(self) or start(self, *args))
    monkeypatch.setattr(tensors.Writer, "_send", send)
    monkeypatch.setattr(saver.concurrent.futures.ThreadPoolExecutor, "shutdown", shutdown)
    with Fault("report.metrics:MetricsLog.write", partial.exists, fail), pytest.raises(KeyboardInterrupt):
        mt.Trainer(undisturbed.config("interrupted", **SECTIONS)).fit()
    deadline = time.monotonic() + LIMIT
    while [t for t in threading.enumerate() if t not in before and "megatrain-checkpoint" in t.name]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [path.name for path in state.checkpoints(folder)] == [
        "checkpoint-0",
        "checkpoint-2",
    ] and not partial.exists()
    assert_goes_on(undisturbed, "interrupted")


# A fault, and a disk that has stopped to answer in the middle of a checkpoint.
HELD_UP = """
import sys
from pathlib import Path
from tests.end_to_end.faults import Fault, fail, hang
from megatrain_jax import train
config, out = sys.argv[1:]
partial = Path(out, "checkpoint-4.partial")
with Fault("checkpoint.tensors:Writer._send", partial.exists, hang), Fault("report.metrics:MetricsLog.write", partial.exists, fail):
    sys.exit(train.main(["--config", config, f"output_dir={out}"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=slow)])
def test_a_signal_ends_the_wait_for_a_checkpoint_after_a_failure(undisturbed, number):
    out = undisturbed.folder / f"held-{number.name}"
    command = [sys.executable, "-c", HELD_UP, str(undisturbed.write("held.yaml", **SECTIONS)), str(out)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert any(line.startswith("failed     Injected('broken on purpose'); ") for line in process.stdout)
        process.send_signal(number)
        assert process.wait(LIMIT) == -number
    finally:
        process.kill()
        process.stdout.close()
    assert left_behind(process.pid) == []
    assert_goes_on(undisturbed, out.name)


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
