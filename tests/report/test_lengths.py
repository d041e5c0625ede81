"""The histogram holds every sample once."""

from __future__ import annotations

import numpy as np
import pytest

from megatrain_jax.report import lengths


@pytest.mark.parametrize("seed", range(30))
def test_every_length_is_in_the_range_that_names_it(seed):
    rng = np.random.default_rng(seed)
    limit = int(rng.integers(2, 10**6))
    values = rng.integers(1, limit + 1, rng.integers(1, 200))
    edges, counts = lengths.bins(values)
    assert 1 <= len(counts) <= 16 and counts.sum() == len(values)
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        assert count == np.count_nonzero((values >= low) & (values < high))
    lines = lengths.text_histogram(values)
    assert sum(int(line.split()[-1].replace(",", "")) for line in lines) == len(values)
    assert max(line.count("#") for line in lines) == 40
    assert all(("#" in line) == (count > 0) for line, count in zip(lines, counts, strict=True))


def test_the_picture_is_a_png_or_none(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib.image")
    file = tmp_path / "x.png"
    assert lengths.plot_lengths(np.array([3, 5, 5, 64]), 64, file)
    height, width = matplotlib.imread(file).shape[:2]
    assert (width, height) == (1280, 640)
    assert [each.name for each in tmp_path.iterdir()] == ["x.png"]
    assert not lengths.plot_lengths(np.array([]), 64, tmp_path / "none.png")
    monkeypatch.setattr(lengths.importlib.util, "find_spec", lambda name: None)
    assert not lengths.plot_lengths(np.array([3]), 64, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
