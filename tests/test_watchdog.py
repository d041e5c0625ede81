"""What is waited for, for how long, and what comes of it."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatrain_jax import watchdog
from megatrain_jax.watchdog import Watchdog, progressed, waiting

ROOT = Path(__file__).resolve().parents[1]


class Heard:
    """Takes what a watchdog says."""

    def __init__(self):
        self.warnings, self.ends, self.ended = [], [], threading.Event()

    def end(self, message):
        self.ends.append(message)
        self.ended.set()

    def watch(self, seconds):
        return Watchdog(seconds, self.warnings.append, self.end)


def test_a_wait_that_goes_on_is_warned_of_once_and_then_ends_the_run():
    heard = Heard()
    with heard.watch(1.0), waiting("the update of block 3"):
        assert heard.ended.wait(20)
    (warning,), (end,) = heard.warnings, heard.ends
    assert warning.startswith("waiting    MainThread waits for the update of block 3 since ")
    assert "no progress for 1 s: MainThread waits for the update of block 3 since 1 s" in end and "\n" not in end


def test_all_that_wait_are_named_the_longest_first():
    heard, go = Heard(), threading.Event()

    def other():
        with waiting("the gradients of block 3"):
            go.wait()

    with heard.watch(1.0), waiting("the update of block 3"):
        time.sleep(0.4)
        thread = threading.Thread(target=other, name="optimizer")
        thread.start()
        assert heard.ended.wait(20)
    go.set()
    thread.join()
    (end,) = heard.ends
    assert end.index("MainThread waits for the update of block 3") < end.index(
        "optimizer waits for the gradients of block 3"
    )


def test_progress_is_no_wait_however_long_it_takes():
    heard = Heard()
    with heard.watch(0.5):
        for block in range(30):
            with waiting(f"block {block}"):
                time.sleep(0.05)
    assert heard.ends == []


def test_work_that_goes_on_elsewhere_is_progress_for_all_until_it_stops():
    heard = Heard()
    with heard.watch(0.5), waiting("the update of block 3"):
        for _ in range(30):
            time.sleep(0.05)
            progressed()
        assert heard.ends == []
        assert heard.ended.wait(20)


def test_a_wait_that_fails_is_over():
    heard = Heard()
    with heard.watch(0.3):
        with pytest.raises(OSError), waiting("the disk"):
            raise OSError
        time.sleep(0.6)
    assert heard.warnings == heard.ends == [] and not watchdog._waits


def test_time_in_which_the_process_was_stopped_does_not_count(tmp_path):
    """As when a laptop sleeps, or after Ctrl-Z."""
    mark = tmp_path / "waits"
    code = (
        "import pathlib, sys, time\n"
        "from megatrain_jax.watchdog import Watchdog, waiting\n"
        "ends = []\n"
        "with Watchdog(2.0, lambda line: None, ends.append), waiting('the device'):\n"
        f"    pathlib.Path({str(mark)!r}).touch()\n"
        "    time.sleep(4)\n"
        "sys.exit(7 if ends else 0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as child:
        while not mark.exists():
            time.sleep(0.02)
        time.sleep(0.2)
        child.send_signal(signal.SIGSTOP)
        time.sleep(3.5)
        child.send_signal(signal.SIGCONT)
        assert child.wait(60) == 0


def test_zero_is_off():
    heard, before = Heard(), threading.active_count()
    with heard.watch(0), waiting("the device"):
        assert threading.active_count() == before
