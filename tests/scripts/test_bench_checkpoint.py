"""Saving and restoring add at most three times the largest tensor, however large the whole is."""

import pytest

from megatrain_jax.checkpoint import state
from scripts import bench_checkpoint
from scripts.bench_checkpoint import make_store, with_peak

LARGEST = 64 << 20


@pytest.fixture(scope="module")
def store():
    return make_store(LARGEST, 3)


def test_memory_is_bounded_by_the_largest_tensor(tmp_path, store):
    _, saving = with_peak(lambda: state.save(tmp_path / "checkpoint-1", store, {}))
    _, restoring = with_peak(lambda: state.load(tmp_path / "checkpoint-1", store))
    assert LARGEST / 4 < saving <= 3 * LARGEST  # the lower bound: what is measured is there
    assert LARGEST / 4 < restoring <= 3 * LARGEST


def test_a_copy_of_everything_is_seen(store):
    """The measure itself: the 9 arrays of the store, copied at once, are far above the bound."""
    arrays = [array for tensor in store.tensors.values() for array in tensor.state().values()]

    def copy():
        copies = [bench_checkpoint.np.ones(array.shape, array.dtype) for array in arrays]
        for array, out in zip(arrays, copies):
            array.read(0, out.reshape(-1))

    assert with_peak(copy)[1] > 6 * LARGEST


@pytest.mark.parametrize(
    "save, restore, added, failed",
    [
        (1.25, 1.25, 3.0, []),
        (1.26, 1.0, 1.0, ["save is slower than 80% of dd"]),
        (1.0, 1.3, 3.1, ["save adds more than 3 of the largest tensor", "restore is slower than 80% of dd",
                         "restore adds more than 3 of the largest tensor"]),
    ],
)  # fmt: skip
def test_what_misses_a_bound_fails(monkeypatch, capsys, save, restore, added, failed):
    """The medians count, and the seconds of `dd` are 1."""
    seconds = {"dd write": [1, 1, 9], "save": [save, save, 50], "dd read": [1, 1, 1], "restore": [restore, restore, 99]}
    memory = dict.fromkeys(("save", "restore"), int(added * (64 << 20)))
    monkeypatch.setattr(bench_checkpoint, "measure", lambda *args: (10**9, seconds, memory))
    assert bench_checkpoint.main(["--tensor-mib", "64"]) == bool(failed)
    lines = capsys.readouterr().out.splitlines()
    assert [line.removeprefix("failed   ") for line in lines if line.startswith("failed")] == failed


def test_rounds_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_checkpoint, "with_peak", lambda work: (bench_checkpoint.timed(work), 1))
    size, seconds, added = bench_checkpoint.measure(tmp_path, gib=1 / 32, tensor_mib=4, rounds=2)
    assert size == 3 * 3 * (4 << 20) and added == {"save": 1, "restore": 1} and not list(tmp_path.iterdir())
    assert seconds.keys() == {"save", "restore", "dd write", "dd read"}
    assert all(len(each) == 2 and min(each) > 0 for each in seconds.values())
