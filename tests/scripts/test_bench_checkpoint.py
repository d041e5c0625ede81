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
