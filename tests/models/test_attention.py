"""Attention against its formula, written out in NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatrain_jax.models.attention import AttentionOptions, attend, causal_mask


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_the_mask_is_its_definition(window):
    segments = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]], np.int32)
    mask = np.asarray(causal_mask(jnp.asarray(segments), window))
    assert mask.shape == (2, 1, 6, 6)
    for b in range(2):
        for q in range(6):
            for k in range(6):
                near = window is None or q - window < k
                assert mask[b, 0, q, k] == (k <= q and near and segments[b, q] == segments[b, k])


def written_out(q, k, v, mask):
    heads, kv_heads = q.shape[2], k.shape[2]
    out = np.zeros_like(q)
    for h in range(heads):
        kv = h // (heads // kv_heads)
        scores = np.einsum("bqd,bkd->bqk", q[:, :, h], k[:, :, kv]) / math.sqrt(q.shape[-1])
        scores = np.where(mask, scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, :, h] = np.einsum("bqk,bkd->bqd", p / p.sum(-1, keepdims=True), v[:, :, kv])
    return out


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("segmented", [True, False])
@pytest.mark.parametrize(("implementation", "seq"), [("xla", 7), ("cudnn", 8), ("cudnn", 7)])
def test_attention_is_the_formula(monkeypatch, window, segmented, implementation, seq):
    """What cuDNN is asked for is computed by XLA here."""
    asked, ours = set(), jax.nn.dot_product_attention

    def on_the_cpu(*args, implementation, **how):
        asked.add(implementation)
        return ours(*args, implementation="xla", **how)

    monkeypatch.setattr(jax.nn, "dot_product_attention", on_the_cpu)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, seq, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    segments = np.array([[1, 1, 1, 2, 2, 2, 0, 0][:seq]] * 2 if segmented else [[1] * seq] * 2, np.int32)
    visible = np.asarray(causal_mask(jnp.asarray(segments), window))[:, 0]
    options = AttentionOptions(implementation, segments=segmented)
    got = attend(*map(jnp.asarray, (q, k, v, segments)), window=window, options=options)
    # cuDNN differentiates attention with a mask over an even number of tokens only.
    assert asked == {"xla" if segmented and seq % 2 else implementation}
    np.testing.assert_allclose(got, written_out(q, k, v, visible), rtol=0, atol=2e-6)
