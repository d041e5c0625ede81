"""Ways to keep attention inside the samples of packed rows on one GPU: timed, and checked against plain masks.

    python scripts/bench_packing.py --json packing.json

Rows of 4096 tokens are packed by best fit from lengths drawn as exp(N(5.8, 0.9)), clipped to [16, 4096]: mean 490, as
in mixtures of instructions and short dialogues. A way is one attention function. It is timed on 8 such rows, forward and
backward; what it gave for one of them, output and gradients, is held to attention in float32 with a plain mask; and one
whole 7B-wide layer (hidden 3584, inner 18944, 28 heads, 4 key heads) is timed on the same rows. "full" is the rate to
compare with: rows as if each were one sample. "sorted" packs nothing: samples of similar length share a batch, padded to
the next of a few lengths. Only its attention is timed at each length; the rest of a layer works token by token.

Each way runs in a process of its own: one that crashes or hangs leaves the others alone. They share what the first ones
compiled and tuned. Every line is printed as soon as it is known. "tokamax" needs the package of that name.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from ways import each_in_a_process

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WAYS = ("full", "causal_bias", "pallas", "tokamax", "sorted", "offsets", "offsets_128", "bias", "xla")
SECONDS = 60
SEQ, ROWS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 4096, 8, 3584, 18944, 28, 4, 128
LENGTHS = (256, 512, 1024, 2048, SEQ)


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
        records = each_in_a_process(__file__, __doc__, dict.fromkeys(WAYS, SECONDS), run)
    rates = {record["way"]: record["layer"]["tokens_per_second"] for record in records if "layer" in record}
    for way, rate in rates.items():
        print(f"{way:12} {rate:10,.0f} tokens/s  {rate / rates.get('full', rate):6.1%} of full rows")


# ---------------------------------------------------------------------- ways: (q, k, v, segment_ids) -> attention


def full(q, k, v, segment_ids):
    """cuDNN, as if every row were one sample."""
    import jax

    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def causal_bias(q, k, v, segment_ids):
    """What the package does: causal cuDNN with a mask that tells samples apart, added to the scores."""
    from megatrain_jax.models.attention import AttentionOptions, attend

    return attend(q, k, v, segment_ids, window=None, options=AttentionOptions("cudnn", segments=True))


def bias(q, k, v, segment_ids):
    """cuDNN with the whole mask added to the scores."""
    import jax

    from megatrain_jax.models.attention import causal_mask

    return jax.nn.dot_product_attention(q, k, v, mask=causal_mask(segment_ids, None), implementation="cudnn")


def xla(q, k, v, segment_ids):
    """Scores in memory."""
    import jax

    from megatrain_jax.models.attention import causal_mask

    return jax.nn.dot_product_attention(q, k, v, mask=causal_mask(segment_ids, None), implementation="xla")


def segment_layout(segment_ids, most: int):
    """Lengths int32 ``[rows, most]`` and offsets int32 ``[rows, most + 1]`` of a row's segments, -1 where there is none.

    Padding is a segment too: what a kernel leaves out stays unwritten, and 0 * NaN is NaN.
    """
    import jax.numpy as jnp

    changes = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    number = jnp.cumsum(changes, axis=1, dtype=jnp.int32)
    lengths = jnp.sum(number[:, :, None] == jnp.arange(most, dtype=jnp.int32)[None, None], axis=1, dtype=jnp.int32)
    there = lengths > 0
    offsets = jnp.where(there, jnp.cumsum(lengths, axis=1, dtype=jnp.int32) - lengths, -1)
    return jnp.where(there, lengths, -1), jnp.pad(offsets, ((0, 0), (0, 1)), constant_values=-1)


def offsets(q, k, v, segment_ids, most: int = 32):
    """cuDNN with the lengths and offsets of up to `most` segments a row; jax keeps this interface to itself."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    lengths, starts = segment_layout(segment_ids, most)
    return dot_product_attention(
        q,
        k,
        v,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=starts,
        kv_offsets=starts,
        scale=q.shape[-1] ** -0.5,
        mask_type=MaskType.PADDING_CAUSAL,
    )


def offsets_128(q, k, v, segment_ids):
    return offsets(q, k, v, segment_ids, most=128)


def tokamax(q, k, v, segment_ids):
    """The Hopper kernel of tokamax, told the first key of every query; it skips the blocks before it."""
    import jax.numpy as jnp
    from tokamax._src.ops.attention.base import Mask
    from tokamax._src.ops.attention.pallas_mosaic_gpu import PallasMosaicGpuFlashAttention

    place = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    changes = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    first = jnp.maximum.accumulate(jnp.where(changes, place, 0), axis=1)
    return PallasMosaicGpuFlashAttention()(q, k, v, mask=Mask(k_start=first[:, None], is_causal=True))


def pallas(q, k, v, segment_ids):
    """The Triton kernel that jax ships, with keys repeated for their queries; interpreted on a CPU."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    sizes = BlockSizes(block_q=128, block_k=64, block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64)
    how = {"sm_scale": q.shape[-1] ** -0.5, "causal": True, "interpret": jax.default_backend() == "cpu"}
    return mha(q, k, v, segment_ids, block_sizes=sizes, **how)


# ---------------------------------------------------------------------- times and checks


def sample_lengths(count: int):
    import numpy as np

    return np.clip(np.exp(np.random.default_rng(0).normal(5.8, 0.9, count)), 16, SEQ).astype(np.int64)


def packed_rows(rows: int, seq: int):
    """int32 ``[rows, seq]`` segment ids of some of many packed rows; the first ends in padding, as some row may."""
    import numpy as np

    from megatrain_jax.data.packing import plan_rows

    lengths = np.minimum(sample_lengths(20_000), seq)
    plan = plan_rows(lengths, "best_fit", seq)
    ids = np.zeros((rows, seq), np.int32)
    for row, number in enumerate(np.random.default_rng(1).permutation(len(plan))[:rows]):
        pieces = range(plan.offsets[number], plan.offsets[number + 1])
        filled = np.repeat(np.arange(1, len(pieces) + 1), [plan.stops[i] for i in pieces])
        ids[row, : len(filled)] = filled
    ids[0, -50:] = 0
    return ids


def forward_and_backward(attention: Callable) -> Callable:
    import jax

    def both(q, k, v, dy, ids):
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, ids), q, k, v)
        return out, *pull(dy)

    return both


def measure(function: Callable, *arguments) -> tuple:
    """What a call returns, the seconds it takes, and the bytes of scratch that it was compiled with."""
    import jax

    compiled = jax.jit(function).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    result = jax.block_until_ready(compiled(*arguments))
    start, calls = time.perf_counter(), 0
    while calls < 5 or time.perf_counter() - start < 0.4:
        result = compiled(*arguments)
        calls += 1
        if calls % 5 == 0:
            jax.block_until_ready(result)
    jax.block_until_ready(result)
    return result, (time.perf_counter() - start) / calls, memory.temp_size_in_bytes if memory else 0


def operands(rows: int, seq: int) -> list:
    """Random q, k, v, and the gradient of the output."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(rows, seq, heads, HEAD) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes)]


def errors(got: tuple, inputs: list, ids) -> dict:
    """Relative errors of the first row's output and gradients of q, k, v; bfloat16 itself makes about 0.004."""
    import jax
    import jax.numpy as jnp

    with jax.default_matmul_precision("highest"):
        first = [x[:1].astype(jnp.float32) for x in inputs]
        expected = jax.jit(forward_and_backward(xla))(*first, ids[:1])

    def error(a, b) -> float:
        return float(jnp.linalg.norm((a[:1].astype(jnp.float32) - b).ravel()) / jnp.linalg.norm(b.ravel()))

    return {name: round(error(a, b), 5) for name, a, b in zip(("out", "dq", "dk", "dv"), got, expected)}


def time_layer(attention: Callable, ids) -> tuple[float, int]:
    """Seconds of one layer, forward and backward, and its bytes of scratch."""
    import jax
    import jax.numpy as jnp

    from megatrain_jax.models import blocks
    from megatrain_jax.models.attention import AttentionOptions
    from megatrain_jax.models.part_specs import RopeSpec
    from megatrain_jax.models.spec import Context, LayerSpec

    spec = LayerSpec(HIDDEN, INNER, HEADS, KV_HEADS, HEAD, RopeSpec(), 1e-6)
    weights = {
        path: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) * 0.02
        for i, (path, shape) in enumerate(blocks.tensor_shapes(spec).items())
    }
    x, dy = (jax.random.normal(jax.random.key(99 + i), (*ids.shape, HIDDEN), jnp.bfloat16) for i in range(2))
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    layer = blocks.DecoderLayer(spec, AttentionOptions())

    def both(weights, x, dy, ids):
        context = Context(positions, ids)
        (_, stats), pull = jax.vjp(lambda w, x: layer.apply(blocks.bind(w), x, context), weights, x)
        return pull((dy, stats))

    with mock.patch.object(blocks, "attend", lambda q, k, v, ids, **_: attention(q, k, v, ids)):
        _, seconds, scratch = measure(both, weights, x, dy, jnp.asarray(ids))
    return seconds, scratch


def run(way: str, small: bool) -> Iterator[dict]:
    import jax
    import jax.numpy as jnp

    record = {"way": way, "device": jax.devices()[0].device_kind, "jax": jax.__version__}
    rows, seq = (2, 512) if small else (ROWS, SEQ)
    if way == "sorted":
        yield from () if small else run_sorted(record)
        return
    attention, ids = globals()[way], jnp.asarray(packed_rows(rows, seq))
    tokens = ids.size if way == "full" else int((ids > 0).sum())
    inputs = operands(rows, seq)
    if small:
        got = jax.jit(forward_and_backward(attention))(*inputs, ids)
    else:
        got, seconds, scratch = measure(forward_and_backward(attention), *inputs, ids)
        rows_are = {"real_tokens": tokens, "of": ids.size, "most_segments": int(ids.max())}
        yield record | {"rows": rows_are, "attention": {"ms": seconds * 1e3, "scratch_gib": scratch / 2**30}}
    if way != "full":
        yield record | {"relative_errors": errors(got, inputs, ids)}
    if not small:
        del got, inputs
        seconds, scratch = time_layer(attention, ids)
        rate = tokens / seconds
        yield record | {"layer": {"ms": seconds * 1e3, "tokens_per_second": rate, "scratch_gib": scratch / 2**30}}


def run_sorted(record: dict) -> Iterator[dict]:
    """Samples padded to the next of `LENGTHS`, and batches of one length only: real tokens by the time they take."""
    import jax.numpy as jnp
    import numpy as np

    attention = {}
    for seq in reversed(LENGTHS):
        rows = ROWS * SEQ // seq
        ids = jnp.ones((rows, seq), jnp.int32)
        attention[seq] = measure(forward_and_backward(full), *operands(rows, seq), ids)[1]
        yield record | {"attention": {"ms": attention[seq] * 1e3, "rows": rows, "tokens_in_a_row": seq}}
    whole, _ = time_layer(full, jnp.ones((ROWS, SEQ), jnp.int32))
    lengths = sample_lengths(20_000)
    bucket = np.searchsorted(LENGTHS, lengths)
    layers = [whole - attention[SEQ] + attention[seq] for seq in LENGTHS]
    batches = np.bincount(bucket, minlength=len(LENGTHS)) * np.array(LENGTHS) / (ROWS * SEQ)
    yield record | {"layer": {"tokens_per_second": int(lengths.sum()) / float(batches @ layers)}}


if __name__ == "__main__":
    main()
