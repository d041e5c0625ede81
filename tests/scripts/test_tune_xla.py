"""The timing of XLA's options runs the templates as they are."""

import argparse
from pathlib import Path

import pytest


@pytest.mark.exhaustive
def test_a_small_layer_on_the_cpu(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "scripts")
    import tune_xla

    options = argparse.Namespace(shape="tiny", batch=2, seq=32, device="cpu")
    found = tune_xla.time_layer(options, {"xla_gpu_enable_triton_gemm": False})
    assert found.keys() == {"compile_seconds", "kept_ms", "recomputed_ms"} and min(found.values()) > 0
