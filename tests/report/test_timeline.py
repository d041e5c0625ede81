"""Timelines: spans held against a simulated device whose schedule is known."""

import importlib.util
import itertools
import json
import random
from typing import NamedTuple

import numpy as np
import pytest

import megatrain_jax as mt
from megatrain_jax.report.timeline import LANES, Profile, Span, busy_share, draw, spans, write_trace
from tests.end_to_end.conftest import Project, compile_once, write_model


class Event(NamedTuple):
    what: str
    block: int
    micro_batch: int | None
    when: float


def simulate(seed, layers=4, micro_batches=2, steps=2, late=0.0):
    """Events and true spans of steps on a device that works in order, seen up to `late` seconds late."""
    rng = random.Random(seed)
    now, events, truth, free, had = 0.0, [], [], {}, {}

    def issue(lane, what, block, m, need):
        nonlocal now
        now += rng.uniform(0, 0.3)
        start = max(now, free.get(lane, 0.0), had.get((need, block), 0.0))
        stop = start + rng.uniform(0.1, 2)
        free[lane] = had[lane, block] = stop
        truth.append(Span(lane, what, block, m, start, stop))
        events.extend([Event(what, block, m, now), Event(f"{what} done", block, m, stop + rng.uniform(0, late))])

    for _ in range(steps):
        for what, blocks in (
            ("forward", range(layers + 1)),
            ("loss", [layers + 1]),
            ("backward", range(layers, -1, -1)),
        ):
            for block in blocks:
                if what != "backward" or block:
                    issue("copy in", "h2d", block, None, None)
                for m in range(micro_batches):
                    issue("compute", what, block, m, "copy in")
                if what != "forward":
                    issue("copy out", "d2h", block, None, "compute")
        for block in range(layers + 2):
            start = now = max(now, free["copy out"])
            events.extend([Event("wait", block, None, start), Event("update", block, None, start)])
            now += rng.uniform(0.1, 1)
            events.extend([Event("update done", block, None, now), Event("waited", block, None, now)])
            truth.append(Span("waits", "wait", block, None, start, now))
            truth.append(Span("optimizer", "update", block, None, start, now))
    return sorted(events, key=lambda event: event.when), truth


@pytest.mark.parametrize("seed", range(10))
def test_spans_are_the_schedule_of_a_device_that_works_in_order(seed):
    events, truth = simulate(seed)
    assert sorted(spans(events)) == sorted(truth)


@pytest.mark.parametrize("seed", range(10))
def test_what_is_seen_late_still_does_not_overlap(seed):
    events, truth = simulate(seed, late=1.5)
    found = spans(events)
    assert len(found) == len(truth)
    for lane in LANES:
        mine = [span for span in found if span.lane == lane]
        assert mine
        assert all(span.start <= span.stop for span in mine)
        assert all(a.stop <= b.start for a, b in itertools.pairwise(mine))
    issued = {(e.what, e.block, e.micro_batch): e.when for e in reversed(events)}  # of the first step
    for span in found:
        assert span.start >= issued[span.what, span.block, span.micro_batch]


def test_halves_of_pairs_are_left_out():
    events = [
        Event("update done", 3, None, 0.5),
        Event("forward", 1, 0, 1.0),
        Event("forward done", 1, 0, 2.0),
        Event("forward", 2, 0, 1.5),
    ]
    assert spans(events) == [Span("compute", "forward", 1, 0, 1.0, 2.0)]
    assert spans([]) == []


@pytest.mark.parametrize("seed", range(5))
def test_two_parts_of_the_time_hold_what_the_whole_holds(seed):
    events, truth = simulate(seed)
    end = max(span.stop for span in truth)
    cut = random.Random(seed).uniform(0, end)
    parts = [spans(events, 0, cut), spans(events, cut, end)]
    assert all(0 <= span.start < span.stop <= cut for span in parts[0])
    assert all(cut <= span.start < span.stop <= end for span in parts[1])
    for lane in LANES:
        total = lambda found, lane=lane: sum(span.stop - span.start for span in found if span.lane == lane)  # noqa: E731
        assert total(parts[0]) + total(parts[1]) == pytest.approx(total(truth), rel=1e-12)


# Weights of block 1 arrive at 3 while block 0 computes from 1 to 2: the device idles from 2 to 3.
GAP = [
    Event("h2d", 0, None, 0.0),
    Event("h2d done", 0, None, 1.0),
    Event("h2d", 1, None, 0.5),
    Event("forward", 0, 0, 0.75),
    Event("forward", 1, 0, 0.875),
    Event("forward done", 0, 0, 2.0),
    Event("h2d done", 1, None, 3.0),
    Event("forward done", 1, 0, 5.0),
    Event("loss", 2, 0, 4.0),
    Event("loss done", 2, 0, 5.0),
]


def test_busy_share():
    assert busy_share(GAP) == 3 / 4  # from 1 to 5
    assert busy_share(GAP, [0.0, 6.0]) == 3 / 6
    assert busy_share(GAP, [1.5, 2.0, 3.5]) == 1 / 2
    assert busy_share(GAP[:3]) == 0
    assert busy_share([]) == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_trace_is_what_its_format_asks_for(seed, tmp_path):
    events, _ = simulate(seed)
    events = [event._replace(when=event.when + 12345.678) for event in events]
    marks = [events[10].when, events[-10].when]
    write_trace(events, tmp_path / "trace.json", marks)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = {e["tid"]: e["args"]["name"] for e in trace if e["ph"] == "M" and e["name"] == "thread_name"}
    assert sorted(named.values()) == sorted(LANES)
    slices = [e for e in trace if e["ph"] == "X"]
    assert len(slices) + sum(e["ph"] == "M" for e in trace) == len(trace)
    for slice_, span in zip(slices, spans(events, *marks), strict=True):
        assert (named[slice_["tid"]], slice_["name"]) == (span.lane, f"{span.what} {span.block}")
        assert slice_["args"] == {"block": span.block, "micro_batch": span.micro_batch}
        assert slice_["ts"] == pytest.approx((span.start - marks[0]) * 1e6, abs=0.001)
        assert slice_["dur"] == pytest.approx((span.stop - span.start) * 1e6, abs=0.0011)
    for tid in named:  # in nanoseconds, as viewers read them
        mine = [(round(e["ts"] * 1000), round(e["dur"] * 1000)) for e in slices if e["tid"] == tid]
        assert all(dur >= 0 for _, dur in mine)
        assert all(a + dur <= b for (a, dur), (b, _) in itertools.pairwise(mine))


def red(png):
    """Pixels in the colour of an idle device."""
    image = pytest.importorskip("matplotlib.image").imread(png)[..., :3]
    return np.sum(np.all(np.abs(image - np.array([0xF9, 0xD0, 0xCD]) / 255) < 0.01, axis=-1))


def test_an_idle_device_is_seen(tmp_path):
    pytest.importorskip("matplotlib")
    seen = []
    for idle in (0.0, 2.0, 4.0):
        whole = [Event("forward", 0, 0, idle), Event("forward done", 0, 0, 8.0)]
        assert draw(whole, tmp_path / "t.png", [0.0, 8.0])
        seen.append(red(tmp_path / "t.png"))
    assert [path.name for path in tmp_path.iterdir()] == ["t.png"]
    assert seen[1] > 10 * seen[0]  # the legend alone
    assert (seen[2] - seen[0]) / (seen[1] - seen[0]) == pytest.approx(2, rel=0.05)


def test_nothing_to_draw_draws_nothing(tmp_path, monkeypatch):
    assert not draw(GAP[:3], tmp_path / "t.png")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not draw(GAP, tmp_path / "t.png")
    assert not list(tmp_path.iterdir())


def test_a_profile_shows_its_steps_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    clock = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    profile, lines = Profile(tmp_path, 3, 2), []
    for step in range(1, 8):
        lines.append(profile.step_begins(step))
        # An update runs into the next step.
        for what, block in (("update done", step - 1), ("forward", step), ("forward done", step), ("update", step)):
            profile(Event(what, block, 0, float(next(clock))))
        profile.step_ends(step)
    assert profile.finish() is None
    assert [line is not None for line in lines] == [False] * 5 + [True, False]
    trace = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = [e["name"] for e in trace if e["ph"] == "X"]
    assert names == ["update 2", "forward 3", "update 3", "forward 4", "update 4"]


def test_a_profile_of_steps_that_were_not_trained_says_so(tmp_path):
    late, early = Profile(tmp_path, 3, 2), Profile(tmp_path, 9, 1)
    assert "no step from 3 to 4" in late.step_begins(7)
    early.step_begins(7)
    assert "no step from 9 to 9" in early.finish()
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    with compile_once(tmp_path_factory.mktemp("compiled")):
        yield


@pytest.mark.parametrize("num_steps", [3, 6])
def test_a_run_writes_its_timeline(num_steps, compiled, tmp_path, capsys):
    project = Project(tmp_path, write_model(tmp_path / "model"))
    profile = {"enabled": True, "start_step": 2, "num_steps": 2}
    heard = []
    config = project.config(training={"num_steps": num_steps}, logging={"progress": "plain", "profile": profile})
    mt.Trainer(config, heard.append).fit()
    out = tmp_path / "out"
    assert (out / "timeline.png").exists() or importlib.util.find_spec("matplotlib") is None
    assert "profile    timeline.json" in capsys.readouterr().out
    trace = json.loads((out / "timeline.json").read_text())["traceEvents"]
    names = [e["name"] for e in trace if e["ph"] == "X"]
    assert all(names.count(f"forward {block}") == 2 for block in range(3))
    assert names.count("loss 3") == 2
    # The step has returned when its forward was seen to end; the end of its backward may be seen a little after that.
    assert all(1 <= names.count(f"backward {block}") <= 3 for block in range(3))
    assert {"h2d 1", "d2h 1", "update 1"} <= set(names)
    assert sum(event.what == "loss" for event in heard) == num_steps
