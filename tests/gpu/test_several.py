"""Several GPUs of one process: they neither wait for each other for ever nor compute anything else than one GPU does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.conftest import needs_two_gpus

pytestmark = needs_two_gpus
ROOT = Path(__file__).parents[2]


def losses(device: str, arguments: str, folder: Path) -> list[float]:
    """Of the last step, first with clipping and then without: 48 layers, as many calls of a template in flight as may be."""
    command = [
        *(sys.executable, "scripts/bench.py", "--shape", "tiny", "--layers", "48", "--batch", "8", "--seq", "256"),
        *("--steps", "20", "--clip", "1", "0", "--no-ceilings", "--device", device, "--json", str(folder / "out.json")),
        *arguments.split(),
    ]
    # The tests before have taken most of the devices' memory for this process.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    subprocess.run(command, cwd=ROOT, env=environment, timeout=240, check=True)
    return [result["loss"] for result in json.loads((folder / "out.json").read_text())]


@pytest.mark.parametrize("memory", ["", "--keep 0 --resident 0"])
def test_all_gpus_train_as_one_does(tmp_path, memory):
    one, all_of_them = (losses(device, memory, tmp_path) for device in ("cuda:0", "all"))
    assert all_of_them == pytest.approx(one, rel=5e-4)
