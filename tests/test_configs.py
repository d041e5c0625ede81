"""The ready-made configurations, and what their headers promise."""

import re
from pathlib import Path

import pytest

from megatrain_jax.config import load_config

CONFIGS = sorted((Path(__file__).resolve().parents[1] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_ready_made_configuration_loads_and_its_header_names_itself(path, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.touch()
    overrides = [f"model.name={tmp_path}", f"dataset.path={data}"]
    header, rest = re.fullmatch(r"((?:#.*\n)+)(.*)", path.read_text(), re.DOTALL).groups()
    if "eval_path" in rest:
        overrides.append(f"dataset.eval_path={data}")
    config = load_config(path, overrides)
    assert Path(config.output_dir).name == path.stem
    assert f"python -m megatrain_jax.train --config configs/{path.name}" in header


@pytest.mark.parametrize("path", [p for p in CONFIGS if p.stem != "quickstart"], ids=lambda path: path.name)
def test_the_memory_in_a_header_is_what_its_model_takes(path):
    billions, each, total = re.search(r"([\d.]+) B parameters x (\d+) bytes = (\d+) GB", path.read_text()).groups()
    parts = re.search(r"master (\d+), two moments (\d+), bfloat16 wire (\d+), held gradients (\d+)", path.read_text())
    assert sum(map(int, parts.groups())) == int(each)
    assert round(float(billions) * int(each)) == int(total)
