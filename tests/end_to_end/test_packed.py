"""Loss and gradients of packed rows are those of the same samples, each alone in a row."""

import shutil

import numpy as np
import pytest

import megatrain_jax as mt
from megatrain_jax.data import packing
from megatrain_jax.data.chat import Sample
from megatrain_jax.models.families import spec_from_config
from megatrain_jax.models.spec import is_buffer
from tests.conftest import small_spec
from tests.end_to_end.test_devices import finish, start
from tests.end_to_end.test_resume import assert_same_end
from tests.families import raw_config
from tests.reference import ODD, assert_same_gradients, execution, loss_and_grads, make_model, random_weights

CAPACITY = 24


def packed_and_alone(spec, how, seed=0, count=11):
    """Two micro-batches of packed rows, and one batch with the same pieces of samples a row each."""
    rng = np.random.default_rng(seed)
    samples = []
    for n in rng.integers(2, CAPACITY * (2 if how == "wrapped" else 1) + 1, count):
        weights = rng.choice([0, 1, 1, 0.3, 2.5], n).astype(np.float32)
        weights[0] = 0
        samples.append(Sample(rng.integers(0, spec.vocab_size, n).astype(np.int32), weights > 0, weights))
    plan = packing.plan_rows([len(sample.token_ids) for sample in samples], how, CAPACITY)
    rows = [plan.pieces(row, samples) for row in range(len(plan))]
    half = -(-len(rows) // 2)
    packed = [packing.make_batch(part, half, CAPACITY) for part in (rows[:half], rows[half:])]
    alone = [[piece] for row in rows for piece in row]
    assert len(alone) > len(rows) > 2 and max(batch.segment_ids.max() for batch in packed) > 1
    return packed, packing.make_batch(alone, len(alone), CAPACITY)


def check(spec, how, run, tolerance=1e-5):
    packed, alone = packed_and_alone(spec, how)
    weights = random_weights(spec)
    expected_loss, expected = loss_and_grads(spec, weights, [alone])
    loss, grads = make_model(spec, weights, run).loss_and_grads(*packed)
    assert abs(loss - expected_loss) <= 1e-5 * expected_loss
    assert_same_gradients(grads, {name: expected[name] for name in grads}, tolerance)
    assert all(is_buffer(name) for name in set(expected) - set(grads))


@pytest.mark.parametrize("how", ["best_fit", "wrapped"])
@pytest.mark.parametrize("layer", [{}, {"sliding_window": 5, "qk_norm": True}])
def test_packed_rows(how, layer):
    check(small_spec(2, tied=True, **layer), how, execution())


@pytest.mark.parametrize(
    "name, layers",
    [("qwen3_next", 1)]  # a gated delta layer with experts
    + [
        pytest.param(name, layers, marks=pytest.mark.exhaustive)
        for name, layers in (
            ("qwen3_5_text bias tied", 2),
            ("gpt_oss", 2),
            ("deepseek_v3", 2),
            ("mixtral sliding tied", 1),
            ("phi3 partial longrope tied", 1),
            ("gemma3_text", 2),
        )
    ],
)
def test_packed_rows_of_other_layers(name, layers):
    """Of gated delta layers, and of experts, whose balance is one of all samples whatever rows they are in."""
    spec = spec_from_config(raw_config(name) | {"num_hidden_layers": layers})
    check(spec, "best_fit", execution(), 1e-4)


def test_packed_rows_on_eight_devices():
    finish(
        [
            start(8, "packed", "best_fit"),
        ],
        300,
    )


def on_devices(how):
    """In a process of its own, on rows and sizes that the devices do not divide."""
    check(small_spec(2, sliding_window=5, qk_norm=True, **ODD), how, execution(devices=8))


@pytest.mark.parametrize(
    "dataset",
    [
        {"streaming": True, "packing": "best_fit", "buffer_size": 5},
        pytest.param({"packing": "best_fit"}, marks=pytest.mark.exhaustive),
        pytest.param({"packing": "wrapped"}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_on_packed_rows_resumes_with_the_next_sample(project, capsys, dataset):
    sections = {"dataset": dataset, "training": {"num_steps": 4}, "checkpoint": {"save_steps": 1}}
    mt.Trainer(project.config("whole", **sections)).fit()
    first = capsys.readouterr().out
    assert ("data       streamed (messages), rows of 48" in first) == ("streaming" in dataset)
    whole, out = project.folder / "whole", project.folder / "out"
    out.mkdir()
    shutil.copytree(whole / "checkpoint-2", out / "checkpoint-2")
    shutil.copy(whole / "metrics.jsonl", out / "metrics.jsonl")
    mt.Trainer(project.config(**sections)).fit()
    assert_same_end(whole, out, 4)
