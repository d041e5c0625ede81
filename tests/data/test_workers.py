"""Workers change nothing but the time: order, exceptions, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatrain_jax.config import UserError
from megatrain_jax.data import workers

ROOT = Path(__file__).parents[2]


def square(x):
    time.sleep(0.01 * (x % 3))
    return x * x, os.getpid()


def fails_at_five(x):
    if x == 5:
        raise UserError("file.jsonl:6: it is broken")
    return x


class Stubborn(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def raises_what_cannot_be_pickled(x):
    raise Stubborn("this", "that")


def prints(x):
    print("a library says hello")
    return x


def dies(x):
    os.kill(os.getpid(), signal.SIGKILL)


def hangs_after_one(x):
    time.sleep(1000 * (x > 1))
    return x


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def no_thread_left():
    return not [thread for thread in threading.enumerate() if thread.name.startswith("data-worker")]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_results_come_in_order(count):
    results, pids = zip(*workers.ordered_map(square, range(12), count), strict=True)
    assert results == tuple(x * x for x in range(12))
    assert (os.getpid() in pids) == (count == 0) and len(set(pids)) == max(count, 1)
    assert not any(alive(pid) for pid in pids if pid != os.getpid()) and no_thread_left()


@pytest.mark.parametrize("count", [0, 2])
def test_the_first_exception_in_order_is_raised_as_it_was(count):
    seen = []
    with pytest.raises(UserError) as caught:
        seen.extend(workers.ordered_map(fails_at_five, range(30), count))
    assert str(caught.value) == "file.jsonl:6: it is broken" and seen == [0, 1, 2, 3, 4][: len(seen)]
    assert no_thread_left()
    with pytest.raises(OSError, match="gone"):
        list(workers.ordered_map(fails_at_five, gone_after(2), count))
    assert no_thread_left()


def gone_after(count):
    yield from range(count)
    raise OSError("gone")


def test_an_exception_that_cannot_be_pickled_keeps_its_words():
    with pytest.raises(RuntimeError, match="this and that"):
        list(workers.ordered_map(raises_what_cannot_be_pickled, [1], 1))


def test_what_is_printed_does_no_harm(capfd):
    assert list(workers.ordered_map(prints, [1, 2], 1)) == [1, 2]
    assert capfd.readouterr().err.count("hello") == 2


def test_a_worker_that_is_killed_ends_the_map_with_the_reason():
    with pytest.raises(RuntimeError, match=r"ended by SIGKILL.*dataset\.num_workers"):
        list(workers.ordered_map(dies, range(9), 2))
    assert no_thread_left()


def test_items_are_not_read_far_ahead_and_closing_ends_the_workers():
    taken = []
    results = workers.ordered_map(square, (taken.append(i) or i for i in range(1000)), 2)
    pid = next(results)[1]
    assert len(taken) <= 6 and alive(pid)
    results.close()
    assert not alive(pid) and no_thread_left()


def test_workers_end_with_a_parent_that_is_killed():
    code = (
        "import os, sys; from tests.data.test_workers import square; from megatrain_jax.data import workers\n"
        "results = workers.ordered_map(square, range(1000), 2)\n"
        "print(*{next(results)[1] for _ in range(6)}, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -9
    pids = [int(pid) for pid in done.stdout.split()]
    assert pids
    until = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def test_what_hangs_is_ended_with_the_map():
    results = workers.ordered_map(hangs_after_one, range(9), 2)
    assert next(results) == 0
    start = time.monotonic()
    results.close()
    assert time.monotonic() - start < 10 and no_thread_left()


def test_chunks_are_consecutive():
    assert list(workers.chunked(range(7), 3, int, 100)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(workers.chunked(range(7), 3, int, 5)) == [[0, 1, 2], [3, 4], [5], [6]]
    assert list(workers.chunked([], 3, int, 5)) == []
