"""Disks that are full, read-only or taken away while a run writes to them."""

import contextlib
import os
import subprocess
from pathlib import Path

import pytest

import megatrain_jax as mt
from megatrain_jax import train
from megatrain_jax.checkpoint import state
from tests.end_to_end.conftest import ROOT, records, saved_weights

SECTIONS = {"training": {"num_steps": 4}, "checkpoint": {"save_steps": 2, "save_total_limit": None}}


@contextlib.contextmanager
def small_disk(folder: Path, size: int, options: str = ""):
    """A file system of its own of so many bytes."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}{options}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs to be root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_up(disk: Path) -> None:
    if not (disk / "other").exists():
        with contextlib.suppress(OSError), open(disk / "other", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))


def run_on(project, disk, capsys):
    code = train.main(["--config", str(project.write(**SECTIONS)), f"output_dir={disk / 'out'}"])
    return code, capsys.readouterr().err


def test_a_disk_that_is_too_small_is_refused_with_the_figures(project, capsys):
    with small_disk(project.folder / "disk", 256 << 10):
        code, err = run_on(project, project.folder / "disk", capsys)
        assert code == 2 and err.startswith("error: output_dir: ") and " GB are free there; " in err
        assert list((project.folder / "disk").iterdir()) == []


def test_a_disk_that_fills_up_ends_the_run_and_the_same_command_continues(project, capsys, monkeypatch):
    disk = project.folder / "disk"
    with small_disk(disk, 4 << 20):

        def listener(event):
            if event.what == "update" and (disk / "out" / "checkpoint-2").exists():
                fill_up(disk)

        config = project.config(str(disk / "out"), **SECTIONS)
        with pytest.raises((mt.UserError, OSError)) as error:
            mt.Trainer(config, listener).fit()
        assert "No space left on device" in str(error.value) or "GB needed" in str(error.value)
        assert str(disk / "out") in str(error.value)
        assert [path.name for path in state.checkpoints(disk / "out")][-1] == "checkpoint-2"
        assert not list((disk / "out").glob("*.partial")) and not (disk / "out" / "model").exists()
        os.remove(disk / "other")
        code, err = run_on(project, disk, capsys)
        assert (code, err) == (0, "")
        mt.Trainer(project.config("whole", **SECTIONS)).fit()
        assert records(disk / "out") == records(project.folder / "whole")
        for name, value in saved_weights(project.folder / "whole").items():
            assert value.tobytes() == saved_weights(disk / "out")[name].tobytes(), name


@pytest.mark.parametrize(
    "kib, expected", [(20, "error: cannot save the checkpoint"), (1, "config.yaml': File too large; ")]
)
def test_a_file_size_limit_ends_the_run_with_its_cause(project, kib, expected):
    """As a quota does: the write of one file fails, in whichever library makes it."""
    out = project.folder / "out"
    command = [*project.command(str(project.write(**SECTIONS)), f"output_dir={out}")]
    limited = ["bash", "-c", f'ulimit -f {kib}; exec "$0" "$@"', *command]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": ""}
    done = subprocess.run(limited, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and expected in done.stderr.splitlines()[-1], done.stderr
    assert state.checkpoints(out) == [] and not list(out.glob("*.partial")) and not (out / ".lock").exists()


@pytest.mark.parametrize("existing", [True, False])
def test_a_read_only_disk_is_refused_at_once(project, capsys, existing):
    disk = project.folder / "disk"
    with small_disk(disk, 4 << 20):
        if existing:
            (disk / "out").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        code, err = run_on(project, disk, capsys)
        assert code == 2 and err.count("\n") == 1
        assert err.startswith("error: output_dir: ") and "is not a writable folder; choose another" in err


def test_metrics_that_cannot_be_written_end_the_run_with_their_name(project):
    """A record less would be a hole in what the run says of itself."""
    disk = project.folder / "disk"
    sections = {"training": {"num_steps": 99}, "checkpoint": {"save_strategy": "no", "save_final": False}}
    with small_disk(disk, 1 << 20):
        fill = lambda event: event.what == "update" and fill_up(disk)  # noqa: E731
        with pytest.raises(OSError, match="No space left on device") as error:
            mt.Trainer(project.config(str(disk / "out"), **sections), fill).fit()
        assert error.value.filename == str(disk / "out" / "metrics.jsonl")


def test_output_that_nobody_reads_is_no_reason_to_end(project):
    """As with ``| head``: the run goes on, and is saved."""
    out = project.folder / "out"
    command = [*project.command(str(project.write(**SECTIONS)), f"output_dir={out}")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
        assert (process.wait(), err) == (0, "")
    assert [line["step"] for line in records(out)] == [1, 2, 3, 4] and (out / "model").exists()
