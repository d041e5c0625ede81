"""What is saved comes back bit for bit, no folder looks whole that is not, and no damage goes unseen."""

import errno
import json
import os
import random
import shutil

import numpy as np
import pytest
import tensorstore

from megatrain_jax.checkpoint import manifest, state, tensors
from megatrain_jax.config import OptimizerConfig, TrainingConfig, UserError
from megatrain_jax.host.optimizer import HostOptimizer
from tests.conftest import small_spec
from tests.reference import execution, load_state_arrays, make_model, random_weights, state_arrays


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Several chunks even for small models."""
    monkeypatch.setattr(tensors, "SMALLEST", 1 << 13)
    monkeypatch.setattr(tensors, "PIECE", 1 << 13)


def trained(spec, *, kind="adamw", dtype="float32", seed=0, trainable=lambda name: True, layout="chunks", resident=()):
    """A store whose every number, optimizer state included, is random."""
    rng = np.random.default_rng(seed)
    run = execution(dtype)
    model = make_model(spec, random_weights(spec, seed), run, trainable=trainable, layout=layout, resident=resident)
    store = model.store
    HostOptimizer(store, OptimizerConfig(type=kind), TrainingConfig(), 10)
    for tensor in store.tensors.values():
        if tensor.trainable:
            fill = lambda a: rng.integers(1, 99, a.shape) if a.dtype.kind == "i" else rng.normal(size=a.shape)  # noqa: E731
            load_state_arrays(tensor, {k: np.asarray(fill(a), a.dtype) for k, a in state_arrays(tensor).items()})
    return store


def arrays(store):
    return {(n, k): a for n, t in store.tensors.items() if t.trainable for k, a in state_arrays(t).items()}


def assert_equal(a, b):
    first, second = arrays(a), arrays(b)
    assert first.keys() == second.keys() and first
    for key in first:
        assert first[key].dtype == second[key].dtype
        assert first[key].tobytes() == second[key].tobytes(), key


def assert_equal_wires(a, b):
    for name, tensor in a.tensors.items():
        assert np.concatenate(tensor.wire).tobytes() == np.concatenate(b.tensors[name].wire).tobytes(), name


@pytest.mark.parametrize(
    "tied, kind, dtype, layout",
    [
        (True, "adamw", "float32", "chunks"),
        (False, "lion", "bfloat16", "chunks"),
        (True, "adamw", "bfloat16", "split"),
        (False, "lamb", "float32", "whole"),
    ],
)
def test_round_trip(tmp_path, tied, kind, dtype, layout):
    spec = small_spec(2, tied=tied)
    store = trained(spec, kind=kind, dtype=dtype, layout=layout)
    run = {"step": 2, "exact": 0.1 + 0.2, "nested": {"a": 1}}
    state.save(tmp_path / "checkpoint-2", store, run, files={"model/config.json": b"{}"})
    assert len(list((tmp_path / "checkpoint-2" / "float32").glob("*"))) > 8
    other = trained(spec, kind=kind, dtype=dtype, seed=1, layout=layout)
    assert state.load(tmp_path / "checkpoint-2", other) == run == state.read_run(tmp_path / "checkpoint-2")
    assert (tmp_path / "checkpoint-2" / "model" / "config.json").read_bytes() == b"{}"
    assert_equal(store, other)
    assert_equal_wires(store, other)


SETTINGS = [
    {"layout": "chunks"},
    {"layout": "whole"},
    {"layout": "split", "dtype": "bfloat16"},
    {"layout": "chunks", "resident": (0, 2)},
]


@pytest.mark.parametrize("here", range(4))
@pytest.mark.parametrize("there", range(4))
def test_any_layout_reads_what_any_other_wrote(tmp_path, here, there):
    spec = small_spec(2, tied=True, hidden_size=30, intermediate_size=45, num_heads=3, num_kv_heads=1, head_dim=10)
    store = trained(spec, **SETTINGS[here])
    state.save(tmp_path / "checkpoint-2", store, {})
    other = trained(spec, seed=1, **SETTINGS[there])
    state.load(tmp_path / "checkpoint-2", other)
    assert_equal(store, other)


def test_any_program_that_reads_zarr_reads_the_arrays(tmp_path):
    """By what zarr.json says alone."""
    store = trained(small_spec(2))
    state.save(tmp_path / "checkpoint-2", store, {})
    opened = {}
    for dtype in ("float32", "int32"):
        kvstore = {"driver": "file", "path": str(tmp_path / "checkpoint-2" / dtype)}
        opened[dtype] = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}).result().read().result()
    places = manifest.read(tmp_path / "checkpoint-2")["tensors"]
    for (name, key), expected in arrays(store).items():
        place = places[name][key]
        found = opened[place["dtype"]][place["offset"] :][: expected.size].reshape(place["shape"])
        assert found.dtype == expected.dtype and found.tobytes() == expected.tobytes(), (name, key)


def test_frozen_tensors_are_not_written_but_known_by_their_hash(tmp_path):
    spec = small_spec(2)
    trainable = lambda name: ".layers.1." in name  # noqa: E731
    store = trained(spec, trainable=trainable)
    state.save(tmp_path / "checkpoint-2", store, {})
    assert all(".layers.1." in name for name in manifest.read(tmp_path / "checkpoint-2")["tensors"])
    other = trained(spec, trainable=trainable, seed=1)
    assert state.frozen_hashes(other) != state.frozen_hashes(store)
    state.load(tmp_path / "checkpoint-2", other)
    assert_equal(store, other)
    again = trained(spec, trainable=trainable, seed=0)
    assert state.frozen_hashes(again) == state.frozen_hashes(store)
    assert state.frozen_hashes(trained(spec)) == {}


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(spec=small_spec(3)), r"model.layers.2.\S+ is not trained there and \[.*\] here"),
        (dict(spec=small_spec(2, intermediate_size=64)), r"is \[.*48.*\] there and \[.*64.*\] here"),
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


def test_a_save_is_synced_before_it_has_its_name(tmp_path, monkeypatch):
    """Everything that Python writes, and every folder; TensorStore syncs its own files."""
    synced, at_rename = set(), []
    fsync, rename = os.fsync, os.rename

    def record(descriptor):
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def renamed(source, target):
        at_rename.append((set(synced), {str(p) for p in [source, *source.rglob("*")]}))
        synced.clear()
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "rename", renamed)
    folder = tmp_path / "checkpoint-1"
    state.save(folder, trained(small_spec(1)), {}, files={"model/config.json": b"{}"})
    ((before, there),) = at_rename
    by_tensorstore = {path for path in there if os.path.dirname(path).endswith(("float32", "int32"))}
    assert before == there - by_tensorstore and any(path.endswith("manifest.json") for path in before)
    assert synced == {str(tmp_path)}


@pytest.mark.parametrize("at", [0, 1, 7, 30])
def test_a_save_that_is_killed_leaves_nothing_that_looks_whole(tmp_path, monkeypatch, at):
    store, calls = trained(small_spec(2)), []
    state.save(tmp_path / "checkpoint-1", store, {"step": 1})

    def check():
        if len(calls) == at:
            raise Killed
        calls.append(None)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(state.shutil, "rmtree", lambda *args, **kwargs: None)
        state.save(tmp_path / "checkpoint-2", store, {"step": 2}, check=check)
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

    def full(self):
        raise error

    monkeypatch.setattr(tensors.Writer, "flush", full)
    with pytest.raises(
        UserError, match="cannot save the checkpoint '.*checkpoint-2': .*(No space left on device|full); free space"
    ) as raised:
        state.save(tmp_path / "checkpoint-2", store, {})
    assert "\n" not in str(raised.value)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]


def test_too_little_space_is_seen_before_anything_is_written(tmp_path, monkeypatch):
    store = trained(small_spec(2))
    size = sum(array.nbytes for array in arrays(store).values())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(state.shutil, "disk_usage", lambda path: usage._replace(free=size))  # no room for the CRCs
    with pytest.raises(
        UserError, match=r"checkpoint-2': \S*[1-9]\S* GB needed, \S*[1-9]\S* GB free; free space there and resume"
    ):
        state.save(tmp_path / "checkpoint-2", store, {})
    assert list(tmp_path.iterdir()) == []


def test_the_newest_is_by_number(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-100", "checkpoint-x", "checkpoint-200.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-300").write_text("")
    assert [p.name for p in state.checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10", "checkpoint-100"]
    state.prune(tmp_path, None)
    assert len(state.checkpoints(tmp_path)) == 3
    state.prune(tmp_path, 2)
    assert [p.name for p in state.checkpoints(tmp_path)] == ["checkpoint-10", "checkpoint-100"]
    assert not (tmp_path / "checkpoint-9").exists()


def test_a_deletion_that_is_killed_leaves_nothing_that_looks_whole(tmp_path, monkeypatch):
    for number in (1, 2):
        (tmp_path / f"checkpoint-{number}").mkdir()

    def killed(path):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(state.shutil, "rmtree", killed)
        state.prune(tmp_path, 1)
    assert state.checkpoints(tmp_path) == [tmp_path / "checkpoint-2"]


@pytest.mark.parametrize("content", [None, "", "{", "[]", json.dumps({"format": 1}), json.dumps({})])
def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(state.DamagedError, match="training.resume_from_checkpoint: .*(whole checkpoint|is damaged)"):
        state.read_run(tmp_path)


def damages(folder, rng, count):
    """Ways to damage a folder: a file and its new content, None for no file; every file and class is met."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = file.read_bytes()
        bits = {0, 7, len(data) * 8 - 1, *(rng.randrange(len(data) * 8) for _ in range(count))}
        for bit in bits:
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            yield file, bytes(flipped)
        for length in {0, 1, len(data) // 2, len(data) - 1, *(rng.randrange(len(data)) for _ in range(count))}:
            yield file, data[:length]
        yield file, data + b"\0"
        yield file, bytes(len(data))
        yield file, None


def test_every_damage_is_seen_and_the_file_named(tmp_path):
    """Every file, truncated anywhere, a bit flipped anywhere, gone, longer, zeroed, or exchanged for another one."""
    folder, store = tmp_path / "checkpoint-1", trained(small_spec(1, tied=True))
    state.save(folder, store, {"step": 1}, files={"model/config.json": b'{"a": 1}'})
    others = list(folder.glob("float32/[0-9]*"))
    met = set()
    swaps = [(a, b.read_bytes()) for a, b in zip(others, others[1:])]
    for file, content in [*damages(folder, random.Random(0), 3), *swaps]:
        original = file.read_bytes()
        if content == original:
            continue
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(state.DamagedError) as raised:
            state.load(folder, store)
        assert file.name in str(raised.value) and "\n" not in str(raised.value)
        file.write_bytes(original)
        met.add(file.relative_to(folder).parts[0])
    assert met == {"float32", "int32", "model", "manifest.json"}
    state.load(folder, store)
