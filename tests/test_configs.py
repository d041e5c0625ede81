"""The ready-made configurations, and what their headers promise."""

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from megatrain_jax import preparation, train
from megatrain_jax.config import load_config
from megatrain_jax.models.families import spec_from_config
from megatrain_jax.stream.transfer import Mesh
from tests.families import CASES
from tests.real_models import SMALLEST

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


READY = [path for path in CONFIGS if path.stem != "quickstart"]


def test_every_family_has_a_configuration():
    named = {SMALLEST[path.stem]["model_type"] for path in READY}
    # These differ from one of the others in the number of norms, and in experts.
    assert {name.split()[0] for name in CASES} == named | {"glm", "qwen3_5_moe_text"}


@pytest.mark.parametrize("path", READY, ids=lambda path: path.name)
def test_the_memory_in_a_header_is_what_the_plan_says(path, tmp_path, monkeypatch):
    text, data = path.read_text(), tmp_path / "rows.jsonl"
    data.touch()
    spec = spec_from_config(SMALLEST[path.stem])
    billions = float(re.search(r"([\d.]+) B parameters", text)[1])
    assert billions == round(spec.num_parameters / 1e9, 2 if billions < 100 else 1)
    totals = {int(each): int(total) for each, total in re.findall(r"x (\d+) bytes = (\d+) GB", text)}
    monkeypatch.setattr(preparation, "host_memory", lambda: 1 << 45)
    monkeypatch.setattr(preparation, "check_locking", lambda: None)
    monkeypatch.setattr(train, "_gpu_bytes", lambda: (H200.memory,))
    (tmp_path / "config.json").write_text(json.dumps(SMALLEST[path.stem]))
    groups = re.search(r"in (\d+) groups", text)
    for backend, (each, total) in zip(("fused", "optax"), totals.items(), strict=True):
        overrides = [f"model.name={tmp_path}", f"dataset.path={data}", f"optimizer.backend={backend}"]
        config = load_config(path, overrides)
        monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(train.pinned_pool_gib(config)))
        prepared = preparation.Preparation(spec, spec.num_parameters, Rows(config.dataset.max_seq_len), None, 1)
        plan = preparation.plan(config, prepared, H200)
        assert total == round(billions * each) and plan.state + plan.gradients <= each * spec.num_parameters
        config = load_config(path, [*overrides, "memory.resident_blocks=0"])
        plan = preparation.plan(config, prepared, H200)
        assert plan.state + plan.gradients == each * spec.num_parameters
        assert plan.expert_groups == (int(groups[1]) if groups else 1)
        assert 5e9 < plan.beside < 7e9 + 0.02 * each * spec.num_parameters


class Rows(NamedTuple):
    sequence_length: int


class Accelerator(NamedTuple):
    memory: int
    size: int = 1
    has_own_memory: bool = True
    platform: str = "cuda"
    compute_capability: tuple[int, int] = (9, 0)
    local: tuple[int, ...] = (0,)
    runtime_bytes = Mesh.runtime_bytes

    def memory_bytes(self) -> int:
        return self.memory * 92 // 100


H200 = Accelerator(143_771 << 20)
