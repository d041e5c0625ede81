"""cuDNN's attention against masks in float32, for every size of a head. Elsewhere than on a CUDA GPU these skip; see test_gpu.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatrain_jax.models.attention import AttentionOptions, attend
from megatrain_jax.stream.transfer import make_mesh


def largest_head() -> int:
    """What the kernel takes here; 0 without a GPU."""
    try:
        capability = make_mesh("cuda").compute_capability
    except Exception:
        return 0
    return 256 if capability >= (9, 0) else 128


pytestmark = pytest.mark.skipif(not largest_head(), reason="needs a CUDA GPU")

# Queries and keys, values. Latent attention pads its values.
SIZES = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]


def operands(size: int, value_size: int, seq: int = 640, seed: int = 0) -> list[jax.Array]:
    """q, k, v and a cotangent, bfloat16, with values padded to the size of keys as `mla.LatentAttention` does."""
    rng = np.random.default_rng(seed)
    shapes = [(8, size), (2, size), (2, value_size), (8, value_size)]
    arrays = (rng.standard_normal((2, seq, heads, width)).astype(np.float32) for heads, width in shapes)
    return [jnp.asarray(np.pad(x, [(0, 0)] * 3 + [(0, size - x.shape[-1])]), jnp.bfloat16) for x in arrays]


def segments_of(packed: bool, seq: int = 640) -> np.ndarray:
    """Rows with samples longer and shorter than the kernel's tiles, and padding; or one sample a row."""
    segments = np.zeros((2, seq), np.int32)
    for row, lengths in enumerate(([1, 130, 300, 7, 202], [500, 64, 70]) if packed else ([seq], [seq])):
        segments[row, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return segments


def output_and_gradients(implementation: str, q, k, v, dy, *, packed: bool, window: int | None):
    options, segments = AttentionOptions(implementation, segments=packed), jnp.asarray(segments_of(packed))

    def call(q, k, v):
        return attend(q, k, v, segments, window=window, options=options)

    out, pull = jax.vjp(call, q, k, v)
    return out, *pull(dy)


def distances(implementation: str, size: tuple[int, int], *, packed: bool, window: int | None) -> list[float]:
    """Relative, of the output and the gradients of q, k and v, in bfloat16 from XLA's in float32."""
    args = operands(*size)
    how = dict(packed=packed, window=window)
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(lambda *a: output_and_gradients("xla", *a, **how))(*(x.astype(jnp.float32) for x in args))
    got = jax.jit(lambda *a: output_and_gradients(implementation, *a, **how))(*args)
    norm = lambda x: float(np.linalg.norm(np.float32(x)))  # noqa: E731
    return [norm(np.float32(g) - np.float32(e)) / norm(e) for g, e in zip(got, exact, strict=True)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_fused_attention_is_attention(size, window, packed):
    if size[0] > largest_head():
        pytest.skip("this GPU's kernels take smaller heads only")
    found = distances("cudnn", size, packed=packed, window=window)
    assert all(off < 0.01 for off in found), found
