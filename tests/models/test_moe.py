"""Router, experts and statistics against the modules of transformers, with the same weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatrain_jax.models.blocks import bind, tensor_shapes
from megatrain_jax.models.moe import MoE, RouterStats, balance_loss, choose_experts
from megatrain_jax.models.part_specs import MoESpec, RopeSpec
from megatrain_jax.models.spec import Context, LayerSpec

LAYER = LayerSpec(32, 24, 4, 2, 8, RopeSpec(), 1e-6, moe=MoESpec(6, 2, 20))
SMALL = dict(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
)
GROUPED = dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=20, n_group=4, topk_group=2)
DEEPSEEK = MoESpec(8, 3, 20, score="sigmoid", choice_bias=True, groups=4, top_groups=2, group_score="top2")
DEEPSEEK = dataclasses.replace(DEEPSEEK, scaling=2.5, shared_size=20, balanced=False)
V2 = dict(GROUPED, n_shared_experts=2, routed_scaling_factor=1.5, q_lora_rank=None, kv_lora_rank=16)
QWEN = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20)

# transformers' module, its config, and ours.
CASES = {
    "mixtral": (
        "mixtral.MixtralSparseMoeBlock",
        dict(num_local_experts=6, intermediate_size=20),
        MoESpec(6, 2, 20),
    ),
    "qwen3 normalised": ("qwen3_moe.Qwen3MoeSparseMoeBlock", dict(QWEN, norm_topk_prob=True), MoESpec(6, 2, 20)),
    "qwen3": (
        "qwen3_moe.Qwen3MoeSparseMoeBlock",
        dict(QWEN, norm_topk_prob=False),
        MoESpec(6, 2, 20, normalise=False),
    ),
    "qwen2": (
        "qwen2_moe.Qwen2MoeSparseMoeBlock",
        dict(QWEN, shared_expert_intermediate_size=28),
        MoESpec(6, 2, 20, normalise=False, shared_size=28, shared="shared_expert", shared_gate=True),
    ),
    "gpt-oss": (
        "gpt_oss.GptOssMLP",
        dict(num_local_experts=6, num_experts_per_tok=3, intermediate_size=20, swiglu_limit=0.5, swiglu_alpha=1.3),
        MoESpec(6, 3, 20, "router", True, "chosen_softmax", clamped=True, limit=0.5, alpha=1.3),
    ),
    "deepseek v2": (
        "deepseek_v2.DeepseekV2Moe",
        dict(V2, topk_method="greedy"),
        MoESpec(8, 3, 20, normalise=False, scaling=1.5, shared_size=40, balanced=False),
    ),
    "deepseek v2 groups": (
        "deepseek_v2.DeepseekV2Moe",
        dict(V2, topk_method="group_limited_greedy"),
        MoESpec(8, 3, 20, normalise=False, scaling=1.5, groups=4, top_groups=2, shared_size=40, balanced=False),
    ),
    "deepseek v3": ("deepseek_v3.DeepseekV3MoE", dict(GROUPED, norm_topk_prob=True), DEEPSEEK),
    "deepseek v3 not normalised": (
        "deepseek_v3.DeepseekV3MoE",
        dict(GROUPED, norm_topk_prob=False),
        dataclasses.replace(DEEPSEEK, normalise=False),
    ),
    "glm4": (
        "glm4_moe.Glm4MoeMoE",
        dict(GROUPED, n_group=1, topk_group=1),
        dataclasses.replace(DEEPSEEK, groups=1, top_groups=1, scaling=1.0),
    ),
}


def context(batch: int, seq: int, padding: int = 0) -> Context:
    segments = np.ones((batch, seq), np.int32)
    segments[:, seq - padding :] = 0
    return Context(jnp.zeros((batch, seq), jnp.int32), jnp.asarray(segments))


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32)


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_transformers(name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    where, changes, moe = CASES[name]
    family, module = where.split(".")
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **changes})
    config._experts_implementation = "eager"
    theirs = getattr(__import__(f"transformers.models.{family}.modeling_{family}", fromlist=[module]), module)(config)
    layer = dataclasses.replace(LAYER, moe=moe)
    for number, tensor in enumerate(theirs.state_dict().values()):
        tensor.copy_(torch.from_numpy(np.array(normal(*tensor.shape, seed=number, scale=0.4))))
    weights = {name: jnp.asarray(tensor.numpy()) for name, tensor in theirs.state_dict().items()}
    expected_shapes = {
        path.removeprefix("mlp."): shape for path, shape in tensor_shapes(layer).items() if path.startswith("mlp.")
    }
    assert {name: w.shape for name, w in weights.items()} == expected_shapes
    x, dy = normal(2, 19, 32, seed=90), normal(2, 19, 32, seed=91)

    def ours(w, x, dy):
        y, pull = jax.vjp(lambda w, x: MoE(layer).apply(bind(w), x, context(2, 19))[0], w, x)
        return y, *pull(dy)

    y, dw, dx = jax.jit(ours)(weights, x, dy)

    their_x = torch.from_numpy(np.array(x)).requires_grad_()
    out = theirs(their_x)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(torch.from_numpy(np.array(dy)))
    close = lambda got, want: np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)  # noqa: E731
    close(y, out.detach().numpy())
    close(dx, their_x.grad.numpy())
    buffers = {name for name, _ in theirs.named_buffers()}
    for name, parameter in theirs.named_parameters():
        close(dw[name], parameter.grad.numpy())
    for name in buffers:
        assert (np.asarray(dw[name]) == 0).all()


@pytest.mark.parametrize("padding", [0, 5])
def test_auxiliary_loss_is_pooled_as_transformers_pools_it(padding):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    gates = [normal(6, 32, seed=seed) for seed in range(3)]
    xs = [normal(2, 9, 32, seed=10 + seed) for seed in range(3)]
    here = context(2, 9, padding)

    def pooled(gates):
        parts = []
        for gate, x in zip(gates, xs, strict=True):
            zeros = {
                path.removeprefix("mlp."): jnp.zeros(s) for path, s in tensor_shapes(LAYER).items() if "mlp." in path
            }
            parts.append(MoE(LAYER).apply(bind(zeros | {"gate.weight": gate}), x, here)[1])
        return balance_loss(jax.tree.map(lambda *leaves: sum(leaves), *parts))

    loss, grads = jax.jit(jax.value_and_grad(pooled))(gates)
    weights = [torch.from_numpy(np.array(gate)).requires_grad_() for gate in gates]
    logits = tuple(torch.from_numpy(np.array(x)).reshape(-1, 32) @ w.T for x, w in zip(xs, weights, strict=True))
    mask = torch.from_numpy(np.array(here.segment_ids)) if padding else None
    expected = load_balancing_loss_func(logits, 6, 2, mask)
    expected.backward()
    np.testing.assert_allclose(loss, expected.detach(), rtol=1e-5)
    for grad, weight in zip(grads, weights, strict=True):
        np.testing.assert_allclose(grad, weight.grad, rtol=1e-3, atol=1e-7)


def test_statistics_are_sums_and_leave_padding_out():
    weights = {path.removeprefix("mlp."): normal(*s) for path, s in tensor_shapes(LAYER).items() if "mlp." in path}
    x = normal(2, 9, 32)
    run = jax.jit(
        lambda x, padding: MoE(LAYER).apply(bind(weights), x, context(*x.shape[:2], padding))[1], static_argnums=1
    )
    whole, real, rest = run(x, 4), run(x[:, :5], 0), run(x[:, 5:], 0)
    for got, want in zip(whole, real, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    for got, one, two in zip(run(x, 0), real, rest, strict=True):
        np.testing.assert_allclose(got, one + two, rtol=1e-5)
    assert float(whole.tokens) == 10 and float(whole.counts_E.sum()) == 20


def test_balanced_experts_have_the_least_auxiliary_loss():
    even = RouterStats(jnp.full(4, 8.0), jnp.full(4, 4.0), jnp.float32(16))
    assert float(balance_loss(even)) == pytest.approx(2)  # top_k
    skewed = RouterStats(jnp.array([16.0, 16, 0, 0]), jnp.array([8.0, 8, 0, 0]), jnp.float32(16))
    assert float(balance_loss(skewed)) == pytest.approx(4)
    assert float(balance_loss(RouterStats(jnp.zeros(4), jnp.zeros(4), jnp.float32(0)))) == 0


def test_experts_outside_the_best_groups_are_not_chosen():
    spec = dataclasses.replace(DEEPSEEK, top_k=2, groups=2, top_groups=1)
    logits = jnp.array([[9.0, -9, -9, -9, 2, 2, -9, -9]])  # sigmoid: the second group has two good experts
    assert sorted(choose_experts(logits, spec)[0][0].tolist()) == [4, 5]
    best = dataclasses.replace(spec, group_score="max")
    assert 0 in choose_experts(logits, best)[0][0].tolist()


def test_counted_parameters_are_those_of_the_template():
    for _, _, moe in CASES.values():
        layer = dataclasses.replace(LAYER, moe=moe)
        assert layer.num_parameters == sum(int(np.prod(s)) for s in tensor_shapes(layer).values())
        per_expert = layer.mlp_parameters - moe.num_parameters(32, 0)
        assert layer.num_parameters - layer.active_parameters == per_expert // moe.num_experts * (
            moe.num_experts - moe.top_k
        )
