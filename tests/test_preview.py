"""The command that shows data: what it counts is what is trained on, and what it marks is what is supervised."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from megatrain_jax import preview
from tests.end_to_end.conftest import ROOT, Project, write_model


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Project(tmp_path, write_model(tmp_path / "model"))


def show(project, capsys, *overrides, **sections):
    out = f"output_dir={project.folder / 'out'}"
    assert preview.main(["--config", str(project.write(**sections)), out, *overrides]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_a_preview_counts_what_is_there(project, capsys):
    rows = [{"prompt": f"{i} " * 8, "completion": "yes " * (i + 1)} for i in range(5)]
    rows += [{"prompt": "a", "completion": "b " * 500}]
    file = project.folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{\n")
    dataset = {"path": str(file), "overlong": "drop", "on_bad_record": "skip", "eval_path": None, "max_seq_len": 64}
    out = show(project, capsys, dataset=dataset, eval={"eval_strategy": "no"})
    assert "5 samples (format prompt_completion)" in out
    assert re.search(r"^dropped +1: not valid JSON$", out, re.M) and re.search(r"^dropped +1: longer than", out, re.M)
    tokens, asked = (int(found) for found in re.search(r", (\d+) tokens, (\d+) of them", out).groups())
    shown = re.findall(r"--- sample \d of 5: (\d+) tokens, (\d+) supervised", out)
    assert len(shown) == 3 and sum(int(n) for n, _ in shown) < tokens and sum(int(n) for _, n in shown) < asked
    filled = float(re.search(r"([\d.]+)% filled", out)[1])
    places = np.prod([int(n) for n in re.search(r"^rows +(\d+) of (\d+) tokens", out, re.M).groups()])
    assert filled == pytest.approx(100 * tokens / places, abs=0.05)
    assert sum(int(line.split()[-1]) for line in re.findall(r"^ +\d+ to .*", out, re.M)) == 5
    assert "\x1b" not in out
    assert (project.folder / "out" / "lengths.png").is_file() == ("picture " in out)


def test_packing_fills_rows(project, capsys):
    fills = [
        float(
            re.search(
                r"([\d.]+)% filled", show(project, capsys, f"dataset.packing={packing}", "dataset.max_seq_len=256")
            )[1]
        )
        for packing in ("none", "best_fit")
    ]
    assert fills[1] > fills[0]


def test_weights_are_shown_where_they_are_not_1(project, capsys):
    file, turn = project.folder / "weighted.jsonl", {"role": "assistant", "content": "yes"}
    with open(file, "w", encoding="ascii") as out:
        for weights in ([1, 1.0], [0.25, 2], [0, 0.5]):
            turns = [[{"role": "user", "content": "a"}, {**turn, "weight": weight}] for weight in weights]
            out.write(json.dumps({"messages": sum(turns, [])}) + "\n")
    out = show(project, capsys, dataset={"path": str(file), "eval_path": None, "max_seq_len": 64})
    told = re.findall(r"--- sample \d of 3: \d+ tokens, (\d+) supervised(.*)", out)
    assert [more for _, more in told] == ["", ", weights 0.25 to 2", ", weights 0.5 to 0.5"]
    assert int(told[0][0]) == int(told[1][0]) == 2 * int(told[2][0])


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_shows_colours_unless_told_not_to(project, capsys, monkeypatch, no_color):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1") if no_color else monkeypatch.delenv("NO_COLOR", raising=False)
    out = show(project, capsys)
    marked = re.findall(r"\{\+(.*?)\+\}" if no_color else r"\x1b\[32m(.*?)\x1b\[0m", out.partition("---")[2], re.S)
    assert len(marked) == 3 and all(text.endswith("<|im_end|>") for text in marked)
    assert ("\x1b" in out) == (not no_color)


def test_what_cannot_be_indexed_is_looked_at_in_part(project, capsys, monkeypatch):
    monkeypatch.setattr(preview, "STREAMED", 2)
    out = show(project, capsys, "dataset.streaming=true", "training.num_steps=1")
    assert out.startswith("streaming  only the first 2 records were read\n") and "2 samples (" in out


def test_what_is_wrong_with_the_data_is_one_line(project):
    (project.folder / "broken.jsonl").write_text("{\n")
    config = project.write(dataset={"path": str(project.folder / "broken.jsonl")})
    command = [sys.executable, "-W", "error", "-m", "megatrain_jax.preview", "--config", str(config)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: .*broken\.jsonl:1: not valid JSON .*\n", done.stderr)


def decode(ids, skip_special_tokens):
    return bytes(ids).decode("utf-8", "replace")


def test_what_is_supervised_is_between_marks():
    text = "ask \u00e9 \x1b[31m answer \U0001f600\n"
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    asked = np.zeros(len(ids), bool)
    begin = text.encode().index(b"answer")
    asked[begin : begin + 6] = asked[-5:-1] = True
    shown = preview.marked(decode, ids, asked, ("<", ">"))
    assert shown == "ask \u00e9 \\x1b[31m <answer> <\U0001f600>\n"
    everything = preview.marked(decode, ids, np.ones(len(ids), bool), ("<", ">"))
    assert everything == "<ask \u00e9 \\x1b[31m answer \U0001f600\n>"
    long = np.full(10**5, ord("x"), np.int32)
    shown = preview.marked(decode, long, long > 0, ("<", ">"))
    assert len(shown) < 2_000 and "[... 99,000 characters ...]" in shown
