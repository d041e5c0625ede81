"""Next-token loss, computed in tiles of tokens so that full logits never exist."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from megatrain_jax.models.blocks import Head, Weights, bind, finish_logits
from megatrain_jax.models.parts import full_precision


def split_tiles(x_BxS: jax.Array, tile: int) -> jax.Array:
    """``[batch, seq, ...]`` to ``[tiles, batch, width, ...]`` with about `tile` tokens in each; zeros fill the last.

    Tiles run along the sequence, so a batch that is sharded over devices stays sharded within every tile.
    """
    batch, seq = x_BxS.shape[:2]
    width = min(seq, max(1, tile // batch))
    count = -(-seq // width)
    padding = [(0, 0), (0, count * width - seq)] + [(0, 0)] * (x_BxS.ndim - 2)
    x = jnp.pad(x_BxS, padding).reshape(batch, count, width, *x_BxS.shape[2:])
    return jnp.moveaxis(x, 1, 0)


def join_tiles(x: jax.Array, seq: int) -> jax.Array:
    """The inverse of `split_tiles` for a sequence of length `seq`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :seq]


def cross_entropy(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``sum(weights * -log softmax(logits)[targets])`` and its gradient with respect to `logits`, both float32.

    Args:
      logits: float32 ``[..., vocab]``.
      targets: int32 ``[...]``.
      weights: float32 ``[...]``.
    """
    log_z = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    loss = (weights * (log_z - chosen)).sum()
    is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]
    grad = (jnp.exp(logits - log_z[..., None]) - is_target) * weights[..., None]
    return loss, grad


def head_loss(head: Head, weights: Weights, x_BxSxD, targets_BxS, loss_weights_BxS, *, tile: int) -> jax.Array:
    """Weighted sum of next-token losses, float32 scalar; see `cross_entropy`."""
    h = head.apply(bind(weights), x_BxSxD, method=Head.normalise)

    def body(loss, operands):
        h_t, targets_t, weights_t = operands
        logits = finish_logits(head.spec, head.apply(bind(weights), h_t, method=Head.project))
        return loss + cross_entropy(logits, targets_t, weights_t)[0], None

    operands = [split_tiles(a, tile) for a in (h, targets_BxS, loss_weights_BxS)]
    return jax.lax.scan(body, jnp.float32(0), operands)[0]


def head_loss_and_grads(
    head: Head, trainable: Weights, frozen: Weights, x_BxSxD, targets_BxS, loss_weights_BxS, *, tile: int
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Loss of the head with its gradients, in one pass over tiles of about `tile` tokens.

    Logits, softmax, the loss and the accumulation of the projection's gradient are float32; the two matmuls of the
    gradient read the softmax in the dtype of `x`.

    Returns:
      The loss as `head_loss` gives it, its gradient with respect to `x`, and one with respect to every tensor of
      `trainable` (the projection's in float32).
    """
    norm_paths = [path for path in trainable if path != "lm_head.weight"]
    weight_VxD = (trainable | frozen)["lm_head.weight"]
    dtype, precision = x_BxSxD.dtype, full_precision(x_BxSxD.dtype)

    def normalise(norms, x):
        return head.apply(bind(trainable | frozen | norms), x, method=Head.normalise)

    h, norm_vjp = jax.vjp(normalise, {path: trainable[path] for path in norm_paths}, x_BxSxD)
    learn = "lm_head.weight" in trainable

    def body(carry, operands):
        loss, dw = carry
        h_t, targets_t, weights_t = operands
        raw = head.apply(bind(trainable | frozen), h_t, method=Head.project)
        logits, finish_vjp = jax.vjp(functools.partial(finish_logits, head.spec), raw)
        tile_loss, dlogits = cross_entropy(logits, targets_t, weights_t)
        dlogits = finish_vjp(dlogits)[0].astype(dtype)
        dh_t = jnp.einsum("bsv,vd->bsd", dlogits, weight_VxD, precision=precision)
        if learn:
            dw += jnp.einsum("bsv,bsd->vd", dlogits, h_t, precision=precision, preferred_element_type=jnp.float32)
        return (loss + tile_loss, dw), dh_t

    dw = jnp.zeros(weight_VxD.shape, jnp.float32) if learn else jnp.zeros((), jnp.float32)
    operands = [split_tiles(a, tile) for a in (h, targets_BxS, loss_weights_BxS)]
    (loss, dw), dh = jax.lax.scan(body, (jnp.float32(0), dw), operands)
    grads, dx = norm_vjp(join_tiles(dh, x_BxSxD.shape[1]))
    return loss, dx, grads | ({"lm_head.weight": dw} if learn else {})
