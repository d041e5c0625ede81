"""loss.png: drawn from the numbers of the file."""

import importlib.util

import numpy as np
import pytest

from megatrain_jax.report.metrics import MetricsLog
from megatrain_jax.report.plot import plot_loss, smoothed


def weighted_mean(values, i):
    """The mean that `smoothed` states, one value at a time."""
    reach = max(len(values) // 20, 2)
    total = weight = 0.0
    for j in range(max(0, i - reach), min(len(values), i + reach + 1)):
        w = 0.5 * (1 + np.cos(np.pi * (j - i) / reach))
        if np.isfinite(values[j]) and w > 1e-12:
            total, weight = total + w * values[j], weight + w
    return total / weight if weight else np.nan


@pytest.mark.parametrize("n", [1, 2, 3, 7, 50, 333])
def test_smoothing_is_a_weighted_mean_of_what_is_known(n):
    rng = np.random.default_rng(n)
    values = rng.normal(size=n)
    values[rng.random(n) < 0.2] = np.nan
    np.testing.assert_allclose(smoothed(values), [weighted_mean(values, i) for i in range(n)], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(smoothed(np.full(n, 3.5)), np.full(n, 3.5))


def write(path, steps, evals):
    with MetricsLog(path) as log:
        for step in range(1, steps + 1):
            loss = float("nan") if step == 4 else 2 + 1 / step
            log.write({"step": step, "loss": loss, "learning_rate": 1e-5 / step})
            if evals and step % 3 == 1:
                log.write({"step": step, "eval_loss": 2.5 + 1 / step})


def orange(png):
    """Share of the pixels in which red clearly leads and blue is low."""
    image = pytest.importorskip("matplotlib.image").imread(png)
    assert min(image.shape[:2]) > 600
    return np.mean((image[..., 0] > 0.7) & (image[..., 2] < 0.4))


@pytest.mark.parametrize("steps", [1, 2, 60])
def test_the_evaluation_is_drawn_if_there_was_one(steps, tmp_path):
    pytest.importorskip("matplotlib")
    for evals in (True, False):
        write(tmp_path / "m.jsonl", steps, evals)
        assert plot_loss(tmp_path / "m.jsonl", tmp_path / "loss.png")
        assert bool(orange(tmp_path / "loss.png") > 0) is evals
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "m.jsonl"]


def test_nothing_to_draw_draws_nothing(tmp_path):
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.write({"step": 0, "eval_loss": 2.0})
        log.write({"step": 1, "loss": float("nan"), "learning_rate": 1e-5})
    assert not plot_loss(tmp_path / "m.jsonl", tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_without_matplotlib_nothing_is_drawn(tmp_path, monkeypatch):
    write(tmp_path / "m.jsonl", 5, True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not plot_loss(tmp_path / "m.jsonl", tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()
