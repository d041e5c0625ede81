"""Every key of every family's config: what is not computed with is refused, or has no effect in transformers either."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
from typing import Any

import pytest

from megatrain_jax.config import UserError
from megatrain_jax.models.decoder import DEFAULTS
from megatrain_jax.models.families import _NEUTRAL, _SPECIAL, spec_from_config
from megatrain_jax.models.rope import rope_frequencies
from megatrain_jax.models.sparse import SPARSE_KEYS
from tests.families import CASES, first_cases, raw_config

NOT_KEYS = [None, True, False, -1, 0, 1, 3, 0.5, -2.5, "x", "", [], {}, [1], [None], [[]], {"a": 1}, float("nan")]
NOT_KEYS += [
    float("inf"),
    10**30,
    10**400,
    ["full_attention"],
    {"full_attention": 3},
    {"rope_type": []},
    {"type": None},
]
NOT_KEYS += [
    {"rope_type": "yarn", "factor": "x"},
    {"quant_method": []},
    {"quant_method": "fp8", "weight_block_size": "ab"},
]


def cases():
    first = set(first_cases())
    return [pytest.param(name, marks=() if name in first else pytest.mark.exhaustive) for name in CASES]


@pytest.mark.parametrize("name", cases())
def test_no_value_of_a_key_is_met_with_anything_but_a_spec_or_a_refusal_in_one_line(name):
    raw = raw_config(name)
    keys = {*raw, *DEFAULTS, *_NEUTRAL, *_SPECIAL, *SPARSE_KEYS, "architectures", "quantization_config"}
    refused = 0
    for key in sorted(keys):
        for value in NOT_KEYS:
            try:
                hash(spec_from_config(raw | {key: value}))
            except UserError as error:
                refused += 1
                assert "\n" not in str(error)
    assert refused > len(keys)


# What no computation depends on, whatever a model does with it, and what is made of the rest.
OF_NO_CONCERN = {"model_type", "id2label", "label2id", "architectures", "dtype", "torch_dtype", "transformers_version"}
# How transformers hands back what it computed.
OF_NO_CONCERN |= {"return_dict", "output_hidden_states", "output_attentions"}
# In a config that has a language model in it, these belong to another part of the model.
OTHER_PARTS = {"text_config", "vision_config", "get_text_config"}
LISTS = {
    "layer_types": lambda value: [["full_attention"] * len(value), ["sliding_attention"] * len(value)],
    "no_rope_layers": lambda value: [[0] * len(value), [1] * len(value)],
    "mlp_only_layers": lambda value: [[0], [1]],
}


def alternatives(key: str, value: Any) -> list[Any]:
    """Other values of the kind of `value`; of a key that is null, of any kind."""
    if key in ("hidden_act", "hidden_activation"):
        return ["gelu", "relu", "tanh"]
    if key in LISTS and value is not None:
        return LISTS[key](value)
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [2 * value, value + 1] if value else [0.5] if isinstance(value, float) else [1, 2]
    if value is None:
        return [True, 2, 0.5]
    return ["other"] if isinstance(value, str) else []


@functools.cache
def full_config(name: str) -> str:
    """The config of a case with every default written out, as JSON."""
    import transformers

    raw = raw_config(name)
    return transformers.AutoConfig.for_model(raw.pop("model_type"), **raw).to_json_string(use_diff=False)


def config_of(raw: dict[str, Any]):
    """transformers' own, or None if it takes none of these values."""
    import transformers

    raw = json.loads(json.dumps(raw))
    try:
        return transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)
    except Exception:
        return None


def all_keys(name: str) -> list[str]:
    """Those of the class, and those that the code of the model reads."""
    config = config_of(json.loads(full_config(name)))
    modeling = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    read = re.findall(r"config(?:\.|, \")(\w+)", inspect.getsource(modeling))
    own = {key for key in {*config.to_dict(), *vars(config), *read} if not key.startswith("_")}
    return sorted(own - OF_NO_CONCERN - OTHER_PARTS)


def logits(raw: dict[str, Any], weights: dict | None = None):
    """Of transformers, and the model's weights; those given are loaded, which raises unless they are all of them."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(raw), attn_implementation="eager").float().eval()
    if weights is None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
    else:
        model.load_state_dict(weights)
    ids = torch.randint(3, 96, (2, 21), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(ids, use_cache=False).logits, model.state_dict()


@pytest.mark.parametrize("name", first_cases())
def test_keys_that_change_nothing_here_change_nothing_in_transformers(name):
    torch, _ = pytest.importorskip("torch"), pytest.importorskip("transformers")
    raw = json.loads(full_config(name))
    spec = spec_from_config(raw)
    ignored: list[dict[str, Any]] = []
    for key in all_keys(name):
        for value in alternatives(key, raw.get(key)):
            changed = raw | {key: value}
            if config_of(changed) is None:
                continue
            try:
                if spec_from_config(changed) == spec:
                    ignored.append({key: value})
            except UserError:
                pass
    # All at once, as long as they do nothing together either.
    rounds: list[dict[str, Any]] = []
    for change in ignored:
        for together in rounds:
            if not together.keys() & change.keys() and same_spec(raw | together | change, spec):
                together |= change
                break
        else:
            rounds.append(change)
    assert len(ignored) > 5
    expected, weights = logits(raw)
    for together in rounds:
        found, _ = logits(raw | together, weights)
        if not torch.equal(found, expected):
            guilty = [c for c in together.items() if not torch.equal(logits(raw | dict([c]), weights)[0], expected)]
            pytest.fail(f"ignored, yet transformers computes with it: {guilty or together}")


def same_spec(raw: dict[str, Any], spec) -> bool:
    try:
        return config_of(raw) is not None and spec_from_config(raw) == spec
    except UserError:
        return False


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 16}
ROTARY = [
    {"rope_type": "default"},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5},
    LLAMA3 | ORIGINAL,
    LLAMA3 | ORIGINAL | {"low_freq_factor": 2.0, "high_freq_factor": 2.5},
    LLAMA3 | ORIGINAL | {"partial_rotary_factor": 0.5},
    YARN | ORIGINAL,
    YARN | ORIGINAL | {"partial_rotary_factor": 0.5},
    YARN | ORIGINAL | {"beta_fast": 4.0, "beta_slow": 0.5},
    YARN | ORIGINAL | {"truncate": False},
    YARN | ORIGINAL | {"attention_factor": 1.7},
    YARN | ORIGINAL | {"mscale": 0.7},
    YARN | ORIGINAL | {"mscale": 0.7, "mscale_all_dim": 0.4},
    {"rope_type": "yarn", "factor": 0.5, **ORIGINAL},
    *(
        {"rope_type": "longrope", "short_factor": [1.1] * n, "long_factor": [3.0] * n, **ORIGINAL, **more}
        for n in (2, 4, 8)
        for more in ({}, {"factor": 3.0}, {"attention_factor": 1.3}, {"partial_rotary_factor": 0.5})
    ),
]
ONE_ROTARY = [name for name in first_cases() if name.split()[0] not in ("gemma3_text", "olmo3")]


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", ONE_ROTARY)
def test_rotary_settings_mean_what_they_do_in_transformers_or_are_refused(name, spelling):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    read = 0
    for settings in ROTARY:
        raw = {key: value for key, value in raw_config(name).items() if not key.startswith("rope_")}
        if name == "mixtral":
            raw["head_dim"] = 8  # transformers does not derive it here
        if name == "phi3":
            del raw["head_dim"]  # and here it does not look at it where it counts the factors
        raw |= (
            {spelling: {"rope_theta": 5e3} | settings}
            if spelling == "rope_parameters"
            else {"rope_theta": 5e3} | {spelling: settings}
        )
        try:
            layers = spec_from_config(json.loads(json.dumps(raw))).layers
        except UserError:
            continue
        config = config_of(raw)
        assert config is not None, settings
        theirs = transformers.AutoModelForCausalLM.from_config(config).model.rotary_emb
        for layer in layers:
            if layer.rope is not None:
                size = layer.head_dim if layer.latent is None else layer.latent.rope_dim
                ours = rope_frequencies(layer.rope, size)
                torch.testing.assert_close(torch.from_numpy(ours), theirs.inv_freq, rtol=1e-6, atol=0)
                assert layer.rope.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-6), settings
        read += 1
    assert read >= 2


# Read by each family in the same line of `decoder`; the models of transformers that these give are in `CASES` of others.
COMMON = {"hidden_act", "hidden_activation", "initializer_range", "rms_norm_eps", "layer_norm_eps"}


@pytest.mark.parametrize("family", [name.split()[0] for name in first_cases()])
def test_every_key_that_is_read_has_a_case_with_another_value_than_the_default(family):
    """So that `tests/end_to_end/test_transformers.py` compares what it does."""
    pytest.importorskip("transformers")
    names = [name for name in CASES if name.split()[0] == family]
    defaults = json.loads(config_of({"model_type": family}).to_json_string(use_diff=False))
    tried = [json.loads(full_config(name)) for name in names]
    read = set()
    for raw in tried:
        spec = spec_from_config(raw)
        for key in all_keys(names[0]):
            for value in alternatives(key, raw.get(key)):
                try:
                    if config_of(raw | {key: value}) is not None and spec_from_config(raw | {key: value}) != spec:
                        read.add(key)
                except UserError:
                    pass
    assert len(read) > 10
    same = {key for key in read - COMMON if all(raw.get(key) == defaults.get(key) for raw in tried)}
    assert not same, f"add a case of {family} with other values"
