"""Random weights against those that transformers draws for the same config."""

import json

import numpy as np
import pytest

from megatrain_jax.models.families import spec_from_config
from megatrain_jax.models.initial import initial_value
from tests.families import first_cases, raw_config


@pytest.mark.parametrize("name", first_cases())
def test_constants_are_those_of_transformers_and_the_rest_is_drawn_as_widely(name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    raw = raw_config(name) | {"hidden_size": 128, "vocab_size": 512, "intermediate_size": 128, "initializer_range": 0.1}
    spec = spec_from_config(raw)
    config = transformers.AutoConfig.for_model(raw.pop("model_type"), **json.loads(json.dumps(raw)))
    model = transformers.AutoModelForCausalLM.from_config(config)
    for number, (tensor, parameter) in enumerate(model.named_parameters()):
        theirs = parameter.detach().float().numpy()
        ours = initial_value(spec, tensor, theirs.shape, np.random.default_rng(number))
        assert ours.dtype == np.float32 and ours.shape == theirs.shape
        if theirs.std() == 0:
            np.testing.assert_array_equal(ours, theirs, err_msg=tensor)
        elif theirs.size < 64:  # too few to compare their spread
            many = initial_value(spec, tensor, (1 << 20,), np.random.default_rng(number))
            assert many.min() <= theirs.min() and theirs.max() <= many.max(), tensor
        else:
            noise = 4 / np.sqrt(theirs.size)  # of two small samples
            np.testing.assert_allclose(ours.std(), theirs.std(), rtol=max(0.1, noise), err_msg=tensor)
            atol = max(0.01, noise * theirs.std())
            np.testing.assert_allclose(ours.mean(), theirs.mean(), rtol=0.2, atol=atol, err_msg=tensor)
