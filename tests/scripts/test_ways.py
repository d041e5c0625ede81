"""Ways that crash or hang leave the others alone, and what they said before is kept."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SCRIPT = """
import os, sys, time
from ways import each_in_a_process

def run(way, small):
    yield {"way": way, "first": True}
    if way == "crashes":
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(3)
    if way == "hangs":
        time.sleep(600)
    yield {"way": way, "small": small}

each_in_a_process(__file__, "Ways.", {"crashes": 60, "hangs": 3, "works": 60}, run)
"""


def test_a_way_that_fails_leaves_the_others_alone(tmp_path):
    script, results = tmp_path / "script.py", tmp_path / "results.json"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), "--small", "--json", str(results)]
    done = subprocess.run(command, env={"PYTHONPATH": str(SCRIPTS)}, capture_output=True, text=True, check=True)
    found = json.loads(results.read_text())
    assert [json.loads(line) for line in done.stdout.splitlines()] == found
    assert [record["way"] for record in found] == ["crashes", "crashes", "hangs", "hangs", "works", "works"]
    assert found[1]["error"] == "out of luck" and found[3]["error"].startswith("stopped after 3 s")
    assert found[5] == {"way": "works", "small": True}
