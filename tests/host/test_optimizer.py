"""Schedules against closed forms and transformers, updates against optax on the tensors themselves."""

import inspect
import math

import jax
import numpy as np
import optax
import pytest

from megatrain_jax.config import OptimizerConfig, TrainingConfig, UserError
from megatrain_jax.host import layouts, rounding
from megatrain_jax.host import optimizer as optimizer_module
from megatrain_jax.host.optimizer import (
    ELEMENTWISE,
    PER_TENSOR,
    HostOptimizer,
    clip_scale,
    make_schedule,
    make_transformation,
    needs_whole_tensors,
)
from megatrain_jax.host.store import HostStore
from tests.conftest import small_spec

PEAK, TOTAL = 3e-4, 40


def schedule(kind: str, warmup=0, **kwargs):
    config = TrainingConfig(learning_rate=PEAK, lr_scheduler_type=kind, warmup_steps=warmup, lr_scheduler_kwargs=kwargs)
    return make_schedule(config, TOTAL)


def closed_form(kind: str, step: int, warmup: int, min_lr_ratio=None, decay_ratio=0.1) -> float:
    """Learning rate of a step as a share of the peak, written out."""
    if step < warmup:
        return (step + 1) / warmup
    t, rest = step - warmup, TOTAL - warmup
    if kind == "constant":
        return 1
    if kind == "linear":
        return 1 - t / rest
    if kind == "cosine":
        return (1 + math.cos(math.pi * t / rest)) / 2
    if kind == "cosine_with_min_lr":
        floor = 0.1 if min_lr_ratio is None else min_lr_ratio
        return floor + (1 - floor) * (1 + math.cos(math.pi * t / rest)) / 2
    if kind == "wsd":
        length = min(rest, round(decay_ratio * TOTAL))
        left = min(1, (TOTAL - step) / length)
        return (min_lr_ratio or 0) + (1 - (min_lr_ratio or 0)) * left
    return math.sqrt(warmup / step) if warmup else math.sqrt(10_000 / (10_000 + step))


@pytest.mark.parametrize("warmup, warmup_steps", [(0, 0), (1, 1), (7, 7), (10, 0.25), (TOTAL, TOTAL)])
@pytest.mark.parametrize(
    "kind, kwargs",
    [
        ("constant", {}),
        ("linear", {}),
        ("cosine", {}),
        ("cosine_with_min_lr", {}),
        ("cosine_with_min_lr", {"min_lr_ratio": 0.25}),
        ("wsd", {}),
        ("wsd", {"min_lr_ratio": 0.25, "decay_ratio": 0.5}),
        ("wsd", {"decay_ratio": 0.95}),
        ("inverse_sqrt", {}),
    ],
)
def test_schedules_are_their_formulas(kind, kwargs, warmup, warmup_steps):
    rates = schedule(kind, warmup_steps, **kwargs)
    for step in range(TOTAL):
        expected = PEAK * closed_form(kind, step, warmup, **kwargs)
        assert float(rates(step)) == pytest.approx(expected, rel=2e-6, abs=PEAK * 1e-7)


@pytest.mark.parametrize(
    "kind, theirs, kwargs, their_kwargs",
    [
        ("constant", "constant_with_warmup", {}, {}),
        ("linear", "linear", {}, {}),
        ("cosine", "cosine", {}, {}),
        ("cosine_with_min_lr", "cosine_with_min_lr", {"min_lr_ratio": 0.2}, {"min_lr_rate": 0.2}),
        ("inverse_sqrt", "inverse_sqrt", {}, {}),
        (
            "wsd",
            "warmup_stable_decay",
            {"min_lr_ratio": 0.2, "decay_ratio": 0.25},
            {"min_lr_ratio": 0.2, "num_decay_steps": TOTAL // 4, "decay_type": "linear"},
        ),
    ],
)
@pytest.mark.parametrize("warmup", [0, 8])
def test_after_the_warmup_schedules_are_those_of_transformers(kind, theirs, kwargs, their_kwargs, warmup):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if theirs == "warmup_stable_decay":
        their_kwargs = their_kwargs | {"warmup_type": "linear"}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    expected = transformers.get_scheduler(
        theirs, optimizer, num_warmup_steps=warmup, num_training_steps=TOTAL, scheduler_specific_kwargs=their_kwargs
    )
    ours = schedule(kind, warmup, **kwargs)
    for step in range(TOTAL):
        if step >= warmup:
            assert float(ours(step)) == pytest.approx(expected.get_last_lr()[0], rel=2e-6, abs=PEAK * 1e-7)
        elif kind != "wsd":  # theirs is at 0 in the first step, ours a step further; theirs of wsd starts at the floor
            assert float(ours(step)) == pytest.approx(expected.get_last_lr()[0] + PEAK / warmup, rel=2e-6)
        optimizer.step()
        expected.step()


@pytest.mark.parametrize(
    "kind, warmup, kwargs, message",
    [
        ("linear", TOTAL + 1, {}, "training.warmup_steps: 41 is more than the 40 steps of the run"),
        ("linear", 0, {"min_lr_ratio": 0.1}, "linear takes none, not min_lr_ratio"),
        ("wsd", 0, {"min_lr_rate": 0.1}, "wsd takes decay_ratio, min_lr_ratio, not min_lr_rate"),
    ],
)
def test_schedules_refuse_what_they_do_not_take(kind, warmup, kwargs, message):
    with pytest.raises(UserError, match=message):
        schedule(kind, warmup, **kwargs)


@pytest.mark.parametrize("name", ["lbfgs", "polyak_sgd", "noisy_sgd", "optimistic_gradient_descent", "muon"])
def test_what_is_not_known_to_be_local_is_refused_by_name(name):
    assert hasattr(optax, name) or hasattr(optax.contrib, name)
    with pytest.raises(UserError, match=f"optimizer.type: '{name}' is not known to update each tensor by itself"):
        needs_whole_tensors(OptimizerConfig(type=name))


def test_an_unknown_optimizer_is_refused_with_those_that_exist():
    with pytest.raises(UserError, match="optimizer.type: optax has no 'adamww'; use one of adabelief, .*adamw.*yogi"):
        needs_whole_tensors(OptimizerConfig(type="adamww"))


def some_steps(transformation, pieces: dict[str, np.ndarray], grads: list[dict[str, np.ndarray]]):
    """Plain optax on a tree."""
    state = transformation.init(pieces)
    for grad in grads:
        updates, state = transformation.update(grad, state, pieces)
        pieces = optax.apply_updates(pieces, updates)
    return pieces


def transformation_of(name: str):
    return make_transformation(OptimizerConfig(type=name), 0.1, optax.constant_schedule(1e-2), decay=True)


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_elementwise_optimizers_do_not_see_where_a_tensor_is_cut(name):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(24).astype(np.float32) for _ in range(4)]
    cut = lambda a: {"a": a[:5], "b": a[5:]}  # noqa: E731
    whole = some_steps(transformation_of(name), {"w": arrays[0]}, [{"w": a} for a in arrays[1:]])
    parts = some_steps(transformation_of(name), cut(arrays[0]), [cut(a) for a in arrays[1:]])
    together = np.concatenate([parts["a"], parts["b"]])
    np.testing.assert_allclose(together, whole["w"], rtol=0, atol=5e-7)
    assert np.abs(together - arrays[0]).max() > 1e-4


@pytest.mark.parametrize("name", sorted(PER_TENSOR))
def test_whole_tensor_optimizers_do_not_see_other_tensors(name):
    rng = np.random.default_rng(0)
    trees = [{k: rng.standard_normal((3, 4)).astype(np.float32) for k in "ab"} for _ in range(4)]
    tree = some_steps(transformation_of(name), trees[0], trees[1:])
    for key in "ab":
        one = some_steps(transformation_of(name), {key: trees[0][key]}, [{key: t[key]} for t in trees[1:]])
        np.testing.assert_allclose(one[key], tree[key], rtol=0, atol=5e-7)
        assert np.abs(one[key] - trees[0][key]).max() > 1e-5


SHAPES = [{"weight": (3, 61)}, {}, {"norm.weight": (5,)}]


@pytest.mark.parametrize("name", ["adamw", "adam", "lion", "sgd", "adafactor", "lamb"])
@pytest.mark.parametrize("wire", ["bfloat16", pytest.param("float32", marks=pytest.mark.exhaustive)])
def test_updates_equal_optax_on_the_tensors(monkeypatch, name, wire):
    monkeypatch.setattr(layouts, "CHUNK", 64)
    monkeypatch.setattr(layouts, "TILE", 24)
    whole = needs_whole_tensors(OptimizerConfig(type=name))
    store = HostStore(small_spec(1), SHAPES, wire_dtype=wire, layout="whole" if whole else "chunks")
    rng = np.random.default_rng(0)
    weights = {n: rng.standard_normal(t.shape).astype(np.float32) for n, t in store.tensors.items()}
    for key, tensor in store.tensors.items():
        tensor.assign(weights[key])
    config = TrainingConfig(learning_rate=1e-2, warmup_steps=2, weight_decay=0.1)
    host = HostOptimizer(store, OptimizerConfig(type=name), config, 20)

    rates, mask = make_schedule(config, 20), {key: "norm" not in key for key in weights}
    decayed_gradient = optax.add_decayed_weights(0.1, mask=mask)
    plain = {
        "adamw": optax.adamw(rates, weight_decay=0.1, mask=mask),
        "adam": optax.chain(decayed_gradient, optax.adam(rates)),
        "lion": optax.lion(rates, weight_decay=0.1, mask=mask),
        "sgd": optax.chain(decayed_gradient, optax.sgd(rates, momentum=0.9)),
        "adafactor": optax.chain(decayed_gradient, optax.adafactor(rates)),
        "lamb": optax.lamb(rates, weight_decay=0.1, mask=mask),
    }[name]
    grads = [{n: rng.standard_normal(w.shape).astype(np.float32) for n, w in weights.items()} for _ in range(5)]
    for grad in grads:
        for key, tensor in store.tensors.items():
            host.update(tensor, [grad[key].reshape(-1)], 0.5)
    expected = some_steps(plain, weights, [jax.tree.map(lambda g: g * np.float32(0.5), grad) for grad in grads])
    for key, tensor in store.tensors.items():
        np.testing.assert_allclose(tensor.read(), expected[key], rtol=0, atol=1e-6)
        assert np.abs(tensor.read() - weights[key]).max() > 1e-3


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
@pytest.mark.parametrize("chunk", [64, 72])
def test_elementwise_optimizers_are_applied_tile_by_tile(monkeypatch, name, chunk):
    """Chunks of two or three tiles, and one that is smaller than a tile."""
    monkeypatch.setattr(layouts, "CHUNK", chunk)
    monkeypatch.setattr(layouts, "TILE", 24)
    store = HostStore(small_spec(1), [{"weight": (3, 50)}, {}, {}], wire_dtype="bfloat16")
    (tensor,) = store.tensors.values()
    rng = np.random.default_rng(0)
    weights, *grads = (rng.standard_normal((3, 50)).astype(np.float32) for _ in range(4))
    tensor.assign(weights)
    host = HostOptimizer(store, OptimizerConfig(type=name), TrainingConfig(learning_rate=1e-2, weight_decay=0.1), 20)
    for grad in grads:
        host.update(tensor, [grad.reshape(-1)], 1.0)
    schedule = make_schedule(TrainingConfig(learning_rate=1e-2), 20)
    plain = make_transformation(OptimizerConfig(type=name), 0.1, schedule, decay=True)
    expected = some_steps(plain, {"w": weights}, [{"w": grad} for grad in grads])["w"]
    np.testing.assert_allclose(tensor.read(), expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(tensor.wire[0].reshape(3, 50), rounding.to_dtype(tensor.read(), "bfloat16"))
    assert np.abs(tensor.read() - weights).max() > 1e-4


@pytest.mark.parametrize("name, decay", [("adamw", 0.01), ("lion", 0.01), ("adam", 0.0), ("sgd", 0.0)])
def test_weight_decay_left_out_has_its_default(name, decay):
    config = OptimizerConfig(type=name)
    ours, theirs = (
        some_steps(make_transformation(config, d, lambda _: 1.0, decay=True), {"w": np.ones(3)}, [{"w": np.zeros(3)}])
        for d in (None, decay)
    )
    np.testing.assert_array_equal(ours["w"], theirs["w"])
    np.testing.assert_allclose(ours["w"], 1 - decay, rtol=1e-6)


def test_betas_eps_and_momentum_reach_optax(monkeypatch):
    seen = {}
    for name in ("adamw", "sgd", "lion"):
        factory = getattr(optax, name)

        def spy(*args, _name=name, _factory=factory, **kwargs):
            seen[_name] = kwargs
            return _factory(*args, **kwargs)

        spy.__signature__ = inspect.signature(factory)
        monkeypatch.setattr(optimizer_module.optax, name, spy)
        make_transformation(
            OptimizerConfig(type=name, beta1=0.8, beta2=0.7, eps=1e-3, momentum=0.5), 0.2, lambda _: 1.0, decay=True
        )
    assert seen["adamw"] == {"weight_decay": 0.2, "b1": 0.8, "b2": 0.7, "eps": 1e-3}
    assert seen["lion"] == {"weight_decay": 0.2, "b1": 0.8, "b2": 0.7}
    assert seen["sgd"] == {"momentum": 0.5}


@pytest.mark.parametrize("norm, limit", [(0.0, 1.0), (0.5, 1.0), (1.0, 1.0), (4.0, 1.0), (4.0, 0.0), (4.0, 8.0)])
def test_clip_scale_is_that_of_optax(norm, limit):
    if limit:
        clipped, _ = optax.clip_by_global_norm(limit).update({"g": np.float32([norm])}, optax.EmptyState())
        assert clip_scale(norm, limit) * norm == pytest.approx(float(clipped["g"][0]))
    else:
        assert clip_scale(norm, limit) == 1
