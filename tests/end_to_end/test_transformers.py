"""Every family against transformers: logits, loss, gradients, export, and bfloat16, from random weights."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

import megatrain_jax as mt
from megatrain_jax.models.spec import Batch
from tests.families import CASES, raw_config
from tests.reference import assert_same_gradients, global_norm

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SAMPLES = (21, 9)  # lengths; the first is beyond every window and every original context, the second within some
# Between them these compute everything that any case does.
USUAL = {
    "gemma2",
    "gemma3_text",
    "phi3 partial longrope tied",
    "glm4",
    "olmo3",
    "smollm3",
    "granite",
    "cohere2",
    "qwen3_5_text",
}
USUAL |= {"qwen2_moe", "gpt_oss", "deepseek_v3"}


def cases(usual: set[str]):
    marks = {name: () if name in usual else pytest.mark.exhaustive for name in CASES}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


def build(name: str, folder):
    """A model of transformers with weights of which none is trivial, saved beside the config of the case."""
    raw = raw_config(name)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(raw.pop("model_type"), **json.loads(json.dumps(raw)))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(0.15 * noise)
            parameter.copy_(parameter.bfloat16())  # so that bfloat16 starts from the same weights
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw_config(name)))
    return model


def tokens(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 96, (2, length)).astype(np.int32)


def logits_of(model, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(ids, dtype=torch.long)).logits.float().numpy()


def packed_samples() -> tuple[Batch, list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """Rows of two samples and some padding, and each sample alone: tokens, targets, weights."""
    rng = np.random.default_rng(1)
    apart = []
    for seed, length in enumerate(SAMPLES):
        weights = np.where(rng.random((2, length)) < 0.5, rng.uniform(0.5, 2, (2, length)), 0).astype(np.float32)
        apart.append((tokens(seed, length), tokens(seed + 7, length), weights))
    padding = np.zeros((2, 2), np.int32)
    ids, targets, weights = (np.concatenate([*(s[i] for s in apart), padding], axis=1) for i in range(3))
    segments = np.repeat([[1] * SAMPLES[0] + [2] * SAMPLES[1] + [0] * 2], 2, axis=0).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in (*SAMPLES, 2)]).astype(np.int32)
    positions = np.broadcast_to(positions, segments.shape)
    return Batch(ids, targets, weights.astype(np.float32), positions, segments), apart


def auxiliary_loss(model, routers: list[tuple]):
    """Of transformers, for logits of routers that come from several calls."""
    pooled = tuple(torch.cat(layer) for layer in zip(*routers, strict=True))
    config = model.config
    return sys.modules[type(model).__module__].load_balancing_loss_func(
        pooled, pooled[0].shape[-1], config.num_experts_per_tok
    )


@cases(USUAL)
def test_logits_gradients_and_export_are_those_of_transformers(name, tmp_path):
    theirs = build(name, tmp_path / "theirs")
    model = mt.load(tmp_path / "theirs", dtype="float32", device="cpu")
    ids = tokens(0, SAMPLES[0])
    expected = logits_of(theirs, ids)
    assert expected.std() > 0.05
    np.testing.assert_allclose(model.logits(ids), expected, rtol=0, atol=1e-4)

    batch, apart = packed_samples()
    loss, grads = model.loss_and_grads(batch)
    theirs.zero_grad()
    total, coefficient, routers = 0.0, model.spec.router_aux_loss_coef, []
    asked = {"output_router_logits": True} if coefficient else {}
    for sample, targets, weights in apart:
        out = theirs(torch.tensor(sample, dtype=torch.long), **asked)
        log_p = out.logits.log_softmax(-1)
        routers.append(out.router_logits if coefficient else ())
        chosen = log_p.gather(-1, torch.tensor(targets, dtype=torch.long)[..., None])[..., 0]
        total = total - (torch.tensor(weights) * chosen).sum() / batch.loss_weights.sum()
    if coefficient:
        total = total + coefficient * auxiliary_loss(theirs, routers)
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-5)
    shared = theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert shared == model.spec.tie_word_embeddings
    expected_grads = {n: p.grad.numpy() for n, p in theirs.named_parameters()}
    # The bias of keys without positions moves all scores of a query alike: its gradient is 0 but for rounding.
    nothing = {n for n, g in expected_grads.items() if np.linalg.norm(g) <= 1e-6 * global_norm(expected_grads)}
    assert all(n.endswith("k_proj.bias") for n in nothing)
    assert all(np.linalg.norm(grads.pop(n)) <= 1e-6 * global_norm(expected_grads) for n in nothing)
    assert_same_gradients(grads, {n: g for n, g in expected_grads.items() if n not in nothing}, 1e-4)

    mt.save(model, tmp_path / "ours", dtype="float32")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    np.testing.assert_allclose(logits_of(again.eval(), ids), expected, rtol=0, atol=1e-6)


@cases({"gemma2"})
def test_bfloat16_is_as_close_to_float32_as_transformers_is(name, tmp_path):
    theirs = build(name, tmp_path / "theirs")
    model = mt.load(tmp_path / "theirs", dtype="bfloat16", device="cpu")
    # Many tokens: one that bfloat16 sends to another expert, by chance here or there, counts as much as a thousand others.
    ids = np.concatenate([tokens(seed, SAMPLES[0]) for seed in range(128)])
    exact = logits_of(theirs, ids)
    distance = lambda logits: np.sqrt(np.mean(np.square(logits - exact)))  # noqa: E731
    assert 0 < distance(model.logits(ids)) <= distance(logits_of(theirs.bfloat16(), ids))
