"""The progress line: what it says is true, and it can be read by people and by grep."""

import io
import random
import re

import pytest

from megatrain_jax.report.progress import format_duration, make_progress

RECORD = {
    "loss": 2.34561,
    "learning_rate": 1e-5,
    "grad_norm": 1.2341,
    "tokens_per_second": 812.4,
    "supervised_share": 0.43,
}


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def seconds(text):
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([dhms])", text))


@pytest.mark.parametrize("seed", range(200))
def test_a_duration_is_right_to_its_smaller_unit(seed):
    duration = 10 ** random.Random(seed).uniform(-1, 6.5)
    unit = 1 if duration < 3599 else 60 if duration < 86399 else 3600
    assert seconds(format_duration(duration)) == pytest.approx(duration, abs=unit)


def test_plain_lines():
    stream = io.StringIO()
    with make_progress("plain", 200, stream=stream, clock=Clock()) as progress:
        progress.step({"step": 10} | RECORD)
        progress.message("saved")
        progress.step({"step": 11, "loss": float("nan"), "skipped_steps": 2, "grad_norm": None})
    first, message, second = stream.getvalue().splitlines()
    assert first == "step  10/200  loss 2.3456  lr 1.00e-05  grad norm 1.234  812 tokens/s  supervised 43%"
    assert message == "saved"
    assert second == "step  11/200  loss nan  skipped 2  eta 0s"


@pytest.mark.parametrize("start", [0, 150])
@pytest.mark.parametrize("interval", [1, 7])
def test_the_time_left_is_that_of_the_recent_pace(start, interval):
    """Even after a resume, whose earlier steps took no time of this process, and a first step that compiled."""
    stream, clock, total = io.StringIO(), Clock(), 1000
    with make_progress("plain", total, start, stream=stream, clock=clock) as progress:
        clock.now += 500.0
        for step in range(start + interval, start + 60 * interval, interval):
            progress.step({"step": step})
            clock.now += 2.0 * interval
    first, *lines = stream.getvalue().splitlines()
    assert "eta" not in first
    for line in lines:
        step, eta = int(line.split()[1].split("/")[0]), line.split("eta ")[1]
        assert eta == format_duration(2.0 * (total - step))


def test_the_time_left_follows_a_change_of_pace():
    stream, clock = io.StringIO(), Clock()
    with make_progress("plain", 1000, stream=stream, clock=clock) as progress:
        for step in range(1, 101):
            progress.step({"step": step})
            clock.now += 1.0 if step < 70 else 10.0
    assert seconds(stream.getvalue().splitlines()[-1].split("eta ")[1]) == 900 * 10


def test_off_prints_messages_alone():
    stream = io.StringIO()
    with make_progress("off", 10, stream=stream) as progress:
        progress.step({"step": 1} | RECORD)
        progress.message("warning: disk is nearly full")
    assert stream.getvalue() == "warning: disk is nearly full\n"


def test_auto_is_a_live_line_on_a_terminal_alone():
    for stream, live in ((io.StringIO(), False), (Terminal(), True)):
        with make_progress("auto", 10, stream=stream) as progress:
            progress.step({"step": 1} | RECORD)
        assert ("\x1b[" in stream.getvalue()) is live


@pytest.mark.parametrize("columns", [60, 90, 160])
def test_the_live_line_stays_one_line_below_the_messages(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream, clock = Terminal(), Clock()
    with make_progress("rich", 200, 40, stream=stream, clock=clock) as progress:
        for step in (41, 42):
            progress.step({"step": step} | RECORD)
            clock.now += 3.0
        progress.message("eval loss [2.5] saved")
        progress.step({"step": 43} | RECORD)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).replace("\r", "\n")
    lines = [line for line in text.split("\n") if line.strip()]
    assert "eval loss [2.5] saved" in lines[:-1]  # brackets are no markup
    assert re.search(r"step 43/200  eta 7m51s  loss 2\.3456  lr 1", lines[-1])
    assert all(len(line) <= columns for line in lines)
    assert ("supervised 43%" in lines[-1]) is (columns == 160)


@pytest.mark.parametrize("mode", ["plain", "off"])
def test_a_stream_that_takes_nothing_more_ends_nothing(mode):
    class Closed(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    with make_progress(mode, 10, stream=Closed(), clock=Clock()) as progress:
        progress.step({"step": 1})
        progress.message("saved")


def test_the_live_line_leaves_the_cursor_to_a_terminal_whose_process_is_killed():
    stream = Terminal()
    with make_progress("rich", 10, stream=stream, clock=Clock()) as progress:
        progress.step({"step": 1})
        shown = stream.getvalue()
    assert "\x1b[?25h" in shown and shown.rindex("\x1b[?25h") > shown.rfind("\x1b[?25l")
