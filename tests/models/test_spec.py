"""Properties of specs, for every family."""

import math

import pytest

from megatrain_jax.models.blocks import model_tensors
from megatrain_jax.models.families import spec_from_config
from tests.families import CASES, raw_config


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_those_of_the_templates(name):
    spec = spec_from_config(raw_config(name))
    assert spec.num_parameters == sum(math.prod(shape) for shape in model_tensors(spec).values())


@pytest.mark.parametrize("name", CASES)
def test_each_distinct_structure_is_described_once_and_each_layer_belongs_to_one(name):
    spec = spec_from_config(raw_config(name))
    lines = [line.removeprefix("layers ").split(": ", 1) for line in spec.describe_templates()]
    assert len(lines) == len({text for _, text in lines}) == len(set(spec.layers))
    numbers = [
        range(int(run.split("-")[0]), int(run.split("-")[-1]) + 1) for runs, _ in lines for run in runs.split(", ")
    ]
    assert sorted(n for run in numbers for n in run) == list(range(len(spec.layers)))
    for runs, _ in lines:
        mine = {
            spec.layers[n]
            for run in runs.split(", ")
            for n in range(int(run.split("-")[0]), int(run.split("-")[-1]) + 1)
        }
        assert len(mine) == 1
