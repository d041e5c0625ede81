"""Experts through the stream: loss with the auxiliary loss of the whole step, and every gradient, as without streaming."""

from __future__ import annotations

import dataclasses

import numpy as np
import optax
import pytest

import megatrain_jax as mt
from megatrain_jax.model import trainable
from megatrain_jax.models.part_specs import MoESpec
from megatrain_jax.models.spec import ModelSpec
from megatrain_jax.stream.pipeline import Pipeline, Settings
from tests.conftest import small_spec
from tests.end_to_end.conftest import records, saved_weights, write_model
from tests.end_to_end.test_devices import finish, start
from tests.reference import (
    PlainOptax,
    assert_same_gradients,
    execution,
    loss_and_grads,
    make_model,
    random_batch,
    random_weights,
    training,
)

slow = pytest.mark.exhaustive
MOE = MoESpec(6, 2, 20, shared_size=12, shared_gate=True)


def sparse_spec(coefficient: float = 0.3, **changes) -> ModelSpec:
    """A dense layer between two with experts."""
    spec = small_spec(3, moe=MOE, **changes)
    dense = dataclasses.replace(spec.layers[1], moe=None)
    return dataclasses.replace(spec, layers=(spec.layers[0], dense, spec.layers[2]), router_aux_loss_coef=coefficient)


def gradients_with(model, batches, settings: Settings) -> tuple[float, dict[str, np.ndarray]]:
    grads = {}

    def sink(block, landing):
        for path, tensor in model.store.owned(block).items():
            grads[tensor.name] = np.array(landing.arrays[path], np.float32)

    loss, _, _ = Pipeline(model.store, model.run, settings).gradients(batches, sink)
    return float(loss), grads


@pytest.mark.parametrize("keep_layers", [0, pytest.param(1, marks=slow), 3])
def test_micro_batches_with_padding_have_one_auxiliary_loss(keep_layers):
    spec = sparse_spec()
    weights, batches = random_weights(spec), [random_batch(spec, seed, packed=seed == 1) for seed in range(2)]
    expected_loss, expected = loss_and_grads(spec, weights, batches)
    without, _ = loss_and_grads(dataclasses.replace(spec, router_aux_loss_coef=0.0), weights, batches)
    assert expected_loss > without + 0.3  # balanced experts would add 0.3 * top_k
    loss, grads = gradients_with(make_model(spec, weights), batches, Settings(keep_layers=keep_layers))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_same_gradients(grads, expected, 1e-5)


def test_an_expert_that_no_token_goes_to_has_a_zero_gradient_and_stays_as_it_was():
    spec = small_spec(1, moe=dataclasses.replace(MOE, shared_size=0, shared_gate=False))
    weights = random_weights(spec)
    router = "model.layers.0.mlp.gate.weight"
    # The first tokens of the vocabulary are used alone, so that few experts are met.
    batch = random_batch(spec, rows=1, seq=4)
    batch = batch._replace(token_ids=np.zeros_like(batch.token_ids))
    model = make_model(spec, weights)
    _, grads = model.loss_and_grads(batch)
    per_expert = np.abs(grads["model.layers.0.mlp.experts.down_proj"]).max(axis=(1, 2))
    assert (per_expert == 0).any() and (per_expert > 0).any() and np.isfinite(grads[router]).all()
    with training(model) as (pipeline, updater):
        assert pipeline.train_step([batch]).applied
        updater.drain()
    assert all(np.isfinite(tensor.read()).all() for tensor in model.store.tensors.values())


def test_groups_of_micro_batches_are_refused_where_the_loss_is_one_of_the_whole_step():
    spec, batches = sparse_spec(), [random_batch(sparse_spec(), seed) for seed in range(2)]
    model = make_model(spec, random_weights(spec))
    with pytest.raises(ValueError, match="auxiliary loss of routers is one of the whole step"):
        gradients_with(model, batches, Settings(group_size=1))


@slow
def test_without_an_auxiliary_loss_groups_change_nothing():
    spec = sparse_spec(0.0)
    weights, batches = random_weights(spec), [random_batch(spec, seed) for seed in range(2)]
    loss, norm = PlainOptax(spec, weights, optax.sgd(1e-2)).step(batches)
    for group_size in (None, 1):
        with training(make_model(spec, weights), Settings(group_size=group_size)) as (pipeline, updater):
            outcome = pipeline.train_step(batches)
            updater.drain()
        assert outcome.loss == pytest.approx(loss, rel=1e-5) and outcome.grad_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize(
    "pattern", [r"experts\.", *(pytest.param(p, marks=slow) for p in (r"mlp\.gate\.", r"rs\.0\."))]
)
def test_frozen_experts_or_routers_leave_the_other_gradients_as_they_are(pattern):
    spec = sparse_spec()
    weights, batch = random_weights(spec), random_batch(spec)
    _, expected = loss_and_grads(spec, weights, [batch])
    kept = trainable([pattern])
    _, grads = make_model(spec, weights, trainable=kept).loss_and_grads(batch)
    assert_same_gradients(grads, {name: grad for name, grad in expected.items() if kept(name)}, 1e-5)


def test_the_bias_of_the_choice_is_exact_on_the_wire_and_never_trained():
    moe = MoESpec(6, 2, 20, score="sigmoid", choice_bias=True, balanced=False)
    spec = small_spec(1, moe=moe)
    weights = random_weights(spec)
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    weights[name] = np.array([8.001, 8.002, 8.003, 8.004, 8.005, 8.006], np.float32)  # all alike in bfloat16
    for resident in ((), (1,)):
        model = make_model(spec, weights, execution("bfloat16"), resident=resident)
        assert not model.store.tensors[name].trainable
        batch = random_batch(spec)
        with training(model) as (pipeline, updater):
            pipeline.train_step([batch])
            updater.drain()
        np.testing.assert_array_equal(model.store.tensors[name].read(), weights[name])
        placed = model.run.mesh.put_weights(model.store.blocks[1])
        assert placed["mlp.gate.e_score_correction_bias"].dtype == np.float32


def test_losses_without_training_have_no_auxiliary_part():
    spec = sparse_spec()
    weights, batch = random_weights(spec), random_batch(spec)
    model = make_model(spec, weights)
    plain, _ = loss_and_grads(dataclasses.replace(spec, router_aux_loss_coef=0.0), weights, [batch])
    total = Pipeline(model.store, model.run).losses([batch])
    assert total / batch.loss_weights.sum() == pytest.approx(plain, rel=1e-5)
    assert model.logits(batch.token_ids).shape == (*batch.token_ids.shape, spec.vocab_size)


def test_eight_devices_pool_what_their_routers_did():
    finish([start(8, "experts")], 300)


def test_a_run_reports_the_auxiliary_loss_and_writes_experts_one_by_one(project, tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.5}
    folder = write_model(
        tmp_path / "sparse", model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], head_dim=8, **experts
    )
    model = {"name": str(folder)}
    mt.Trainer(project.config("with", model=model, training={"num_steps": 2})).fit()
    for record in (line for line in records(project.folder / "with") if "grad_norm" in line):
        assert 0.5 * 2 <= record["router_loss"] < record["loss"]  # balanced experts add 0.5 * top_k
    saved = saved_weights(project.folder / "with")
    assert saved["model.layers.1.mlp.experts.3.up_proj.weight"].shape == (16, 32)
    assert not any("gate_up_proj" in name for name in saved)
    off = model | {"config_overrides": {"router_aux_loss_coef": 0}}
    mt.Trainer(project.config("without", model=off, training={"num_steps": 1})).fit()
    assert all("router_loss" not in line for line in records(project.folder / "without"))
