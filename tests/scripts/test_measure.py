"""The tables of docs/benchmarks.md say what the runs printed, and a run that fails costs no other."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def measure(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("measure")


def test_the_page_shows_what_is_in_the_files(measure):
    page = measure.DOCS.read_text()
    assert measure.with_tables(page, measure.DOCS.parent / "benchmarks") == page
    assert {f"<!-- table: {run.table} -->" in page for run in measure.RUNS} == {True}


def test_runs_give_tables_and_one_that_fails_is_named(measure, monkeypatch, tmp_path, capsys):
    tiny = "bench.py --shape tiny --batch 2 --seq 16 --steps 1 --no-ceilings"
    runs = (
        measure.Run("step", "both", f"{tiny} --clip 1 0", 300, picture="drawn"),
        measure.Run("step", "refused", "bench.py --shape no-such-folder", 300),
        measure.Run("depth", "slow", tiny, 0),
        measure.Run("large", "not asked for", tiny, 300),
    )
    monkeypatch.setattr(measure, "RUNS", runs)
    monkeypatch.setattr(sys, "argv", ["measure.py", "--docs", str(tmp_path / "page.md")])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "page.md").write_text("before\n<!-- table: step -->\nold\n<!-- end -->\nafter\n")
    assert measure.main() == 1
    assert capsys.readouterr().err.splitlines()[-1] == "failed: refused, slow"
    records = json.loads((tmp_path / "benchmarks" / "both.json").read_text())
    assert [record["clip"] for record in records] == [1, 0]
    assert (tmp_path / "images" / "drawn.png").stat().st_size > 10_000
    before, _, head, rule, clipped, unclipped, _, after = (tmp_path / "page.md").read_text().splitlines()
    assert (before, after) == ("before", "after")
    assert head.count("|") == rule.count("|") == clipped.count("|")
    arguments = "`--shape tiny --batch 2 --seq 16`"
    for line, clip, record in zip((clipped, unclipped), ("1", "no"), records, strict=True):
        assert line.startswith(f"| {arguments} | {clip} | {record['seconds_per_step']:#.3g} |")


def test_a_name_that_is_not_known_is_refused():
    done = subprocess.run([sys.executable, ROOT / "scripts/measure.py", "stepp"], capture_output=True, text=True)
    assert done.returncode == 2 and "stepp: no such table or run" in done.stderr
