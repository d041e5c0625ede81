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
    header, rest = re.fullmatch(r"((?:#[^\n]*\n)+)(.*)", path.read_text(), re.DOTALL).groups()
    if "eval_path" in rest:
        overrides.append(f"dataset.eval_path={data}")
    config = load_config(path, overrides)
    assert Path(config.output_dir).name == path.stem
    assert f"python -m megatrain_jax.train --config configs/{path.name}" in header


@pytest.mark.parametrize("path", [p for p in CONFIGS if p.stem != "quickstart"], ids=lambda path: path.name)
def test_the_memory_in_a_header_is_what_its_model_takes(path):
    text = path.read_text()
    billions = float(re.search(r"([\d.]+) B parameters", text)[1])
    parts = re.search(r"master (\d+) .*, two moments (\d+), held\n# gradients (\d+)\)", text).groups()
    copy = int(re.search(r"a copy of (\d+) bytes more", text)[1])
    totals = {int(each): int(total) for each, total in re.findall(r"x (\d+) bytes = (\d+) GB", text)}
    each = sum(map(int, parts))
    assert totals == {each: round(billions * each), each + copy: round(billions * (each + copy))}
