"""What layers are made of: linear maps, norms, the gated MLP."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from megatrain_jax.models.spec import LayerSpec

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def full_precision(dtype: jnp.dtype) -> str | None:
    """Precision of a matmul on `dtype`: float32 means float32, also on a GPU that would round it to TF32."""
    return "highest" if dtype == jnp.float32 else None


class Linear(nn.Module):
    """``x @ weight.T + bias``; ``weight [out, in]``, ``bias [out]``.

    Without a bias it is accumulated and returned in `out_dtype` if that is given.
    """

    out_features: int
    bias: bool = False
    out_dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.param("weight", nn.initializers.zeros, (self.out_features, x.shape[-1]))
        if self.bias:
            return affine(x, weight, self.param("bias", nn.initializers.zeros, (self.out_features,)))
        return jnp.einsum(
            "...i,oi->...o", x, weight, precision=full_precision(x.dtype), preferred_element_type=self.out_dtype
        )


@jax.custom_vjp
def affine(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """``x @ weight.T + bias`` in the dtype of `x`, rounded once. The matmuls of its gradient read that dtype too."""
    precision = full_precision(x.dtype)
    y = jnp.einsum("...i,oi->...o", x, weight, precision=precision, preferred_element_type=jnp.float32)
    return (y + bias.astype(jnp.float32).reshape((1,) * (y.ndim - 1) + (-1,))).astype(x.dtype)


def _affine_forward(x: jax.Array, weight: jax.Array, bias: jax.Array):
    return affine(x, weight, bias), (x, weight, bias)


def _affine_backward(residuals, dy: jax.Array):
    x, weight, bias = residuals
    precision = full_precision(x.dtype)
    dx = jnp.einsum("...o,oi->...i", dy, weight, precision=precision)
    rows, columns = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    dweight = jnp.einsum("to,ti->oi", rows, columns, precision=precision)
    return dx, dweight, rows.astype(jnp.float32).sum(axis=0).astype(bias.dtype)


affine.defvjp(_affine_forward, _affine_backward)


class Norm(nn.Module):
    """``x / rms(x)`` in float32 times a weight (arXiv 1910.07467); see `LayerSpec.norm` for the kinds.

    The weight has the shape of the last `axes` axes of `x`; the mean is over the last one.
    """

    eps: float
    kind: str = "rms"
    axes: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.param("weight", nn.initializers.ones, x.shape[-self.axes :])
        weight = weight.reshape((1,) * (x.ndim - self.axes) + weight.shape)
        y = x.astype(jnp.float32)
        if self.kind == "layer":
            y -= jnp.mean(y, axis=-1, keepdims=True)
        y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        if self.kind == "rms":
            return y.astype(x.dtype) * weight
        weight = weight.astype(jnp.float32)
        return (y * (1.0 + weight if self.kind == "rms_offset" else weight)).astype(x.dtype)


def times(x: jax.Array, factor: float) -> jax.Array:
    """``x * factor`` rounded once: the factor is not rounded to the dtype of `x`."""
    return x if factor == 1.0 else (x.astype(jnp.float32) * factor).astype(x.dtype)


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))`` (arXiv 2002.05202)."""

    spec: LayerSpec

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        s = self.spec
        if s.fused_gate_up:
            gate, up = jnp.split(Linear(2 * s.intermediate_size, s.mlp_bias, name="gate_up_proj")(x), 2, axis=-1)
        else:
            gate = Linear(s.intermediate_size, s.mlp_bias, name="gate_proj")(x)
            up = Linear(s.intermediate_size, s.mlp_bias, name="up_proj")(x)
        gate, up = checkpoint_name(gate, "gate"), checkpoint_name(up, "up")
        h = ACTIVATIONS[s.activation](gate.astype(jnp.float32)) * up.astype(jnp.float32)
        return Linear(s.hidden_size, s.mlp_bias, name="down_proj")(h.astype(x.dtype))
