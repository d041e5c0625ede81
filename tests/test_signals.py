"""The first signal asks, the second acts, whatever the main thread is in."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from megatrain_jax.signals import ended_by_interrupt, stop_signals
from tests.end_to_end.conftest import ROOT

HANDLERS = (signal.SIGTERM, signal.SIGINT)


def handlers():
    return [signal.getsignal(number) for number in HANDLERS]


def test_the_first_is_noted_and_told_and_the_second_does_what_it_always_did():
    before, told = handlers(), []
    with pytest.raises(KeyboardInterrupt), stop_signals(told.append) as stop:
        assert stop.signal is None
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == "SIGTERM" and handlers() == before
        signal.raise_signal(signal.SIGINT)
    assert handlers() == before
    assert [line.split(";")[0] for line in told] == ["stopping   after this step (SIGTERM)"]


def test_nothing_is_left_behind():
    before, threads = handlers(), threading.enumerate()
    with stop_signals(print):
        assert handlers() != before
    assert handlers() == before and threading.enumerate() == threads
    assert signal.set_wakeup_fd(-1) == -1


def test_outside_the_main_thread_the_caller_keeps_its_handlers():
    before, seen = handlers(), []

    def work():
        with stop_signals(print) as stop, ended_by_interrupt():
            seen.append((handlers(), stop.signal))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, None)]


@pytest.mark.parametrize("number", HANDLERS)
def test_the_second_ends_a_process_whose_main_thread_never_comes_back(number):
    """In C, waiting for a mutex that is never unlocked: no signal interrupts that, as none interrupts a wait for a device."""
    code = """
import ctypes
from megatrain_jax.signals import ended_by_interrupt, stop_signals
lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
lock(mutex)
with ended_by_interrupt(), stop_signals(lambda line: print(line, flush=True)):
    print("stuck", flush=True)
    lock(mutex)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "stuck\n"
        time.sleep(0.3)
        process.send_signal(number)
        assert process.stdout.readline().startswith(f"stopping   after this step ({number.name}); a second")
        began = time.monotonic()
        process.send_signal(number)
        assert process.wait(20) == 128 + number
        assert time.monotonic() - began < 5
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_ctrl_c_ends_a_command_at_once_and_without_a_traceback():
    code = "import time\nfrom megatrain_jax.signals import ended_by_interrupt\nwith ended_by_interrupt():\n print(flush=True)\n time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == -signal.SIGINT and process.stderr.read() == b""


def test_an_ignored_ctrl_c_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ended_by_interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
