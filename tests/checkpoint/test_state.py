"""What is saved comes back bit for bit, and no folder looks whole that is not."""

import errno
import json
import os
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest

from megatrain_jax.checkpoint import state
from megatrain_jax.config import OptimizerConfig, TrainingConfig, UserError
from megatrain_jax.host.optimizer import HostOptimizer
from tests.conftest import small_spec
from tests.reference import execution, make_model, random_weights


def trained(spec, *, kind="adamw", dtype="float32", seed=0, trainable=lambda name: True, layout="chunks"):
    """A store whose every number, optimizer state included, is random."""
    rng = np.random.default_rng(seed)
    store = make_model(spec, random_weights(spec, seed), execution(dtype), trainable=trainable, layout=layout).store
    HostOptimizer(store, OptimizerConfig(type=kind), TrainingConfig(), 10)
    for tensor in store.tensors.values():
        if tensor.trainable:
            fill = lambda a: rng.integers(1, 99, a.shape) if a.dtype.kind == "i" else rng.normal(size=a.shape)  # noqa: E731
            tensor.load_state_arrays({k: np.asarray(fill(a), a.dtype) for k, a in tensor.state_arrays().items()})
    return store


def arrays(store):
    return {(n, k): a for n, t in store.tensors.items() if t.trainable for k, a in t.state_arrays().items()}


def assert_equal(a, b):
    first, second = arrays(a), arrays(b)
    assert first.keys() == second.keys() and first
    for key in first:
        assert first[key].dtype == second[key].dtype
        assert first[key].tobytes() == second[key].tobytes(), key
    for name in {name for name, _ in first}:
        assert np.concatenate(a.tensors[name].wire).tobytes() == np.concatenate(b.tensors[name].wire).tobytes(), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "kind, dtype", [("adamw", "float32"), ("lion", "bfloat16"), ("sgd", "bfloat16"), ("lamb", "float32")]
)
def test_round_trip(tmp_path, tied, kind, dtype):
    spec, layout = small_spec(2, tied=tied), "whole" if kind == "lamb" else "chunks"
    store = trained(spec, kind=kind, dtype=dtype, layout=layout)
    meta = {"step": 2, "exact": 0.1 + 0.2, "nested": {"a": 1}}
    state.save(tmp_path / "checkpoint-2", store, meta)
    other = trained(spec, kind=kind, dtype=dtype, seed=1, layout=layout)
    assert state.load(tmp_path / "checkpoint-2", other) == meta == state.read_meta(tmp_path / "checkpoint-2")
    assert_equal(store, other)


def test_another_layout_reads_it(tmp_path):
    spec = small_spec(2, hidden_size=30, intermediate_size=45, num_heads=3, num_kv_heads=1, head_dim=10)
    store = trained(spec)
    state.save(tmp_path / "checkpoint-2", store, {})
    whole = trained(spec, seed=1, layout="whole")
    state.load(tmp_path / "checkpoint-2", whole)
    first, second = arrays(store), arrays(whole)
    assert {k: a.tobytes() for k, a in first.items()} == {k: a.tobytes() for k, a in second.items()}


def test_frozen_tensors_are_not_written(tmp_path):
    spec = small_spec(2)
    trainable = lambda name: ".layers.1." in name  # noqa: E731
    store = trained(spec, trainable=trainable)
    state.save(tmp_path / "checkpoint-2", store, {})
    assert [p.name for p in sorted((tmp_path / "checkpoint-2").glob("block-*"))] == ["block-00002"]
    other = trained(spec, trainable=trainable, seed=1)
    state.load(tmp_path / "checkpoint-2", other)
    assert_equal(store, other)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(spec=small_spec(3)), r"model.layers.2.\S+ is not trained there and \[.*\] here"),
        (dict(spec=small_spec(2, intermediate_size=64)), r"is \[.*48.*\] there and \[.*64.*\] here"),
        (dict(spec=small_spec(2, qk_norm=True)), r"\S+_norm.weight is not trained there"),
        (
            dict(trainable=lambda name: "embed" not in name),
            r"embed_tokens.weight is \[97, 32\] there and not trained here",
        ),
        (dict(kind="sgd"), "is of another optimizer"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, changes, message):
    state.save(tmp_path / "checkpoint-2", trained(small_spec(2)), {})
    other = trained(**{"spec": small_spec(2), "seed": 1} | changes)
    with pytest.raises(UserError, match=message):
        state.load(tmp_path / "checkpoint-2", other)


class Killed(BaseException):
    """What no handler expects, as a process that is killed runs none."""


@pytest.mark.parametrize("at", [0, 2, 3])
def test_a_save_that_is_killed_leaves_nothing_that_looks_whole(tmp_path, monkeypatch, at):
    store, save, calls = trained(small_spec(2)), ocp.PyTreeCheckpointer.save, []
    state.save(tmp_path / "checkpoint-1", store, {"step": 1})

    def killed(self, *args, **kwargs):
        if len(calls) == at:
            raise Killed
        calls.append(args)
        save(self, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(ocp.PyTreeCheckpointer, "save", killed)
        state.save(tmp_path / "checkpoint-2", store, {"step": 2})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2.partial"]
    assert state.checkpoints(tmp_path) == [tmp_path / "checkpoint-1"]
    state.save(tmp_path / "checkpoint-3", store, {"step": 3})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-3"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("RESOURCE_EXHAUSTED:\nfull")]
)
def test_a_save_that_fails_says_so_and_leaves_the_others(tmp_path, monkeypatch, error):
    store = trained(small_spec(2))
    state.save(tmp_path / "checkpoint-1", store, {})

    def full(self, *args, **kwargs):
        raise error

    monkeypatch.setattr(ocp.PyTreeCheckpointer, "save", full)
    with pytest.raises(
        UserError, match="cannot save the checkpoint '.*checkpoint-2': .*(No space left on device|full); free space"
    ) as raised:
        state.save(tmp_path / "checkpoint-2", store, {})
    assert "\n" not in str(raised.value)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]


def test_the_newest_is_by_number_and_what_is_not_whole_does_not_count(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-100", "checkpoint-x", "checkpoint-200"):
        (tmp_path / name).mkdir()
        if name != "checkpoint-200":
            (tmp_path / name / "meta.json").write_text("{}")
    (tmp_path / "checkpoint-300").write_text("")
    assert [p.name for p in state.checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10", "checkpoint-100"]
    state.prune(tmp_path, None)
    assert len(state.checkpoints(tmp_path)) == 3
    state.prune(tmp_path, 2)
    assert [p.name for p in state.checkpoints(tmp_path)] == ["checkpoint-10", "checkpoint-100"]
    assert not (tmp_path / "checkpoint-9").exists()


def test_a_deletion_that_is_killed_leaves_nothing_that_looks_whole(tmp_path, monkeypatch):
    store = trained(small_spec(1))
    for number in (1, 2):
        state.save(tmp_path / f"checkpoint-{number}", store, {})

    def killed(path):
        os.unlink(next(p for p in path.rglob("*") if p.is_file() and p.name != "meta.json"))
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(state.shutil, "rmtree", killed)
        state.prune(tmp_path, 1)
    assert state.checkpoints(tmp_path) == [tmp_path / "checkpoint-2"]


@pytest.mark.parametrize("content", [None, "", "{", json.dumps({"format": 1}), json.dumps({})])
def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "meta.json").write_text(content)
    with pytest.raises(UserError, match="training.resume_from_checkpoint: .*(whole checkpoint|another version)"):
        state.read_meta(tmp_path)


@pytest.mark.parametrize("how", ["cut", "missing"])
def test_a_damaged_file_is_named(tmp_path, how):
    store = trained(small_spec(2))
    state.save(tmp_path / "checkpoint-1", store, {})
    block = tmp_path / "checkpoint-1" / "block-00002"
    if how == "cut":
        os.truncate(max(block.glob("*/*"), key=lambda p: p.stat().st_size), 10)
    else:
        shutil.rmtree(block)
    with pytest.raises(UserError, match="checkpoint-1' is damaged, delete it") as raised:
        state.load(tmp_path / "checkpoint-1", store)
    assert "\n" not in str(raised.value)
