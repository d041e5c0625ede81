"""One run at a time, and no lock that outlives its process."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from megatrain_jax.checkpoint import lock
from megatrain_jax.checkpoint.lock import LOCK, locked
from megatrain_jax.config import UserError
from tests.end_to_end.conftest import ROOT

HOLD = """
import sys, time
from pathlib import Path
from megatrain_jax.checkpoint.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "out")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_process_is_refused_by_name(tmp_path, holder):
    with pytest.raises(UserError, match=rf"output_dir: '.*out' is in use by another run \(process {holder.pid} on "):
        with locked(tmp_path / "out"):
            pass
    assert (tmp_path / "out" / LOCK).exists()


def test_a_process_that_was_killed_holds_nothing(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "out" / LOCK).exists()
    with locked(tmp_path / "out") as held:
        assert held
        assert (tmp_path / "out" / LOCK).read_text().startswith(f"process {os.getpid()} on ")


def test_the_same_process_is_refused_too(tmp_path):
    with locked(tmp_path), pytest.raises(UserError, match="in use"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_folders_that_were_made_and_not_used_go_again(tmp_path):
    with locked(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "file").touch()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["file"]
    (tmp_path / "empty").mkdir()
    with locked(tmp_path / "empty"):
        pass
    assert (tmp_path / "empty").is_dir()


@pytest.mark.parametrize("replaced", [False, True])
def test_whoever_comes_as_the_lock_is_given_up_gets_a_lock_that_others_see(tmp_path, monkeypatch, replaced):
    """The file that was opened is taken away between opening and locking, and perhaps another one made."""
    whole, calls = fcntl.flock, []

    def late(file, how):
        if not calls:
            os.rename(tmp_path / LOCK, tmp_path / "old")
            if replaced:
                (tmp_path / LOCK).touch()
        calls.append(file)
        whole(file, how)

    monkeypatch.setattr(lock.fcntl, "flock", late)
    with locked(tmp_path):
        assert len(calls) == 2
        with pytest.raises(UserError, match="in use"), locked(tmp_path):
            pass


@pytest.mark.parametrize("number, supported", [(errno.ENOSYS, False), (errno.EIO, True)])
def test_a_file_system_without_locks_is_told_apart_from_one_that_fails(tmp_path, monkeypatch, number, supported):
    def refuse(file, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    if supported:
        with pytest.raises(UserError, match="is not a writable folder"), locked(tmp_path):
            pass
    else:
        with locked(tmp_path) as held:
            assert held is False


def test_a_path_through_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"output_dir: .*Not a directory"), locked(tmp_path / "file" / "out"):
        pass
