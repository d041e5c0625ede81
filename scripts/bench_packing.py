"""Ways to keep attention inside the samples of packed rows on one GPU: checked against plain masks, then timed.

    python scripts/bench_packing.py --json packing.json

Rows of 4096 tokens are packed by best fit from lengths drawn as exp(N(5.8, 0.9)), clipped to [16, 4096]: mean 490, as
in mixtures of instructions and short dialogues. A way is one attention function. Each is held to attention in float32
with a plain mask, forward and gradients, with and without a sliding window; then one attention and one whole 7B-wide
layer (hidden 3584, inner 18944, 28 heads, 4 key heads) are timed, forward and backward, on 8 such rows. "full" is the
rate to compare with: the same rows as if each were one sample. "sorted" packs nothing: samples of similar length share
a batch. Each way runs in a process of its own: one that crashes or hangs leaves the others alone. All of it takes about
two minutes; every line is printed as soon as it is known.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from ways import each_in_a_process

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SECONDS = {
    "full": 25,
    "causal_bias": 25,
    "offsets": 25,
    "offsets_128": 25,
    "tokamax": 30,
    "pallas": 30,
    "sorted": 25,
    "bias": 25,
    "xla": 25,
}
SEQ, ROWS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 4096, 8, 3584, 18944, 28, 4, 128


def main() -> None:
    records = each_in_a_process(__file__, __doc__, SECONDS, run)
    rates = {record["way"]: record["layer"]["tokens_per_second"] for record in records if "layer" in record}
    for way, rate in rates.items():
        print(f"{way:12} {rate:10,.0f} tokens/s  {rate / rates.get('full', rate):6.1%} of full rows")


# ---------------------------------------------------------------------- ways: (q, k, v, segment_ids, window) -> attention


def full(q, k, v, segment_ids, window):
    """cuDNN, as if every row were one sample."""
    import jax

    size = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=size, implementation="cudnn")


def causal_bias(q, k, v, segment_ids, window):
    """What the package does: causal cuDNN with a mask that tells samples apart, added to the scores."""
    from megatrain_jax.models.attention import AttentionOptions, attend

    return attend(q, k, v, segment_ids, window=window, options=AttentionOptions("cudnn", segments=True))


def bias(q, k, v, segment_ids, window):
    """cuDNN with the whole mask added to the scores."""
    import jax

    from megatrain_jax.models.attention import causal_mask

    return jax.nn.dot_product_attention(q, k, v, mask=causal_mask(segment_ids, window), implementation="cudnn")


def xla(q, k, v, segment_ids, window):
    """Scores in memory."""
    import jax

    from megatrain_jax.models.attention import causal_mask

    return jax.nn.dot_product_attention(q, k, v, mask=causal_mask(segment_ids, window), implementation="xla")


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


def offsets(q, k, v, segment_ids, window, most: int = 32):
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
        sliding_window_length=window,
    )


def offsets_128(q, k, v, segment_ids, window):
    return offsets(q, k, v, segment_ids, window, most=128)


def tokamax(q, k, v, segment_ids, window):
    """The Hopper kernel of tokamax, told the first key of every query; it skips the blocks before it."""
    import jax.numpy as jnp
    from tokamax._src.ops.attention.base import Mask
    from tokamax._src.ops.attention.pallas_mosaic_gpu import PallasMosaicGpuFlashAttention

    place = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    changes = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    first = jnp.maximum.accumulate(jnp.where(changes, place, 0), axis=1)
    if window is not None:
        first = jnp.maximum(first, place - window + 1)
    return PallasMosaicGpuFlashAttention()(q, k, v, mask=Mask(k_start=first[:, None], is_causal=True))


def pallas(q, k, v, segment_ids, window):
    """The Triton kernel that jax ships; no windows, and keys repeated for their queries."""
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    if window is not None:
        raise NotImplementedError("no sliding windows")
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    sizes = BlockSizes(block_q=128, block_k=64, block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64)
    return mha(q, k, v, segment_ids, sm_scale=q.shape[-1] ** -0.5, causal=True, block_sizes=sizes)


# ---------------------------------------------------------------------- checks and times


def sample_lengths(count: int):
    import numpy as np

    return np.clip(np.exp(np.random.default_rng(0).normal(5.8, 0.9, count)), 16, SEQ).astype(np.int64)


def packed_rows(rows: int, seq: int):
    """int32 ``[rows, seq]`` segment ids of some of many packed rows, and the real tokens in them."""
    import numpy as np

    from megatrain_jax.data.packing import plan_rows

    lengths = np.minimum(sample_lengths(20_000), seq)
    plan = plan_rows(lengths, "best_fit", seq)
    ids = np.zeros((rows, seq), np.int32)
    for row, number in enumerate(np.random.default_rng(1).permutation(len(plan))[:rows]):
        pieces = range(plan.offsets[number], plan.offsets[number + 1])
        filled = np.repeat(np.arange(1, len(pieces) + 1), [plan.stops[i] for i in pieces])
        ids[row, : len(filled)] = filled
    return ids, int((ids > 0).sum())


def error(got, expected) -> float:
    import jax.numpy as jnp

    got, expected = (jnp.asarray(x, jnp.float32) for x in (got, expected))
    return float(jnp.linalg.norm((got - expected).ravel()) / jnp.linalg.norm(expected.ravel()))


def check(attention: Callable, window: int | None) -> dict:
    """Relative errors of the output and of the gradients of q, k, v; bfloat16 itself makes about 0.004."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rows, seq = 3, 512
    ids = np.zeros((rows, seq), np.int32)
    for row, cuts in enumerate(([0, 100, 101, 300, 512], [0, 512], [0, 7, 200, 333, 400, 501])):
        for segment, (start, stop) in enumerate(zip(cuts, cuts[1:]), 1):
            ids[row, start:stop] = segment
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(rows, seq, heads, HEAD) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, dy = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes))

    def both(attention, q, k, v, dy):
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, ids, window), q, k, v)
        return out, *pull(dy)

    with jax.default_matmul_precision("highest"):
        expected = jax.jit(lambda *x: both(xla, *x))(*(x.astype(jnp.float32) for x in (q, k, v, dy)))
    got = jax.jit(lambda *x: both(attention, *x))(q, k, v, dy)
    return {name: round(error(a, b), 5) for name, a, b in zip(("out", "dq", "dk", "dv"), got, expected)}


def measure(function: Callable, *arguments) -> tuple[float, int]:
    """Seconds a call, and the bytes of scratch that it was compiled with."""
    import jax

    compiled = jax.jit(function).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    jax.block_until_ready(compiled(*arguments))
    start, calls = time.perf_counter(), 0
    while calls < 10 or time.perf_counter() - start < 0.5:
        result = compiled(*arguments)
        calls += 1
        if calls % 5 == 0:
            jax.block_until_ready(result)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls, memory.temp_size_in_bytes if memory else 0


def time_attention(attention: Callable, ids) -> dict:
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(*ids.shape, heads, HEAD) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, dy = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes))

    def both(q, k, v, dy, ids):
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, ids, None), q, k, v)
        return out, pull(dy)

    forward, _ = measure(lambda q, k, v, ids: attention(q, k, v, ids, None), q, k, v, ids)
    whole, scratch = measure(both, q, k, v, dy, ids)
    return {"forward_ms": forward * 1e3, "forward_backward_ms": whole * 1e3, "scratch_gib": scratch / 2**30}


def time_layer(attention: Callable, ids) -> tuple[float, int]:
    """Seconds of one layer, forward and backward, and its bytes of scratch."""
    import jax
    import jax.numpy as jnp

    from megatrain_jax.models import blocks
    from megatrain_jax.models.attention import AttentionOptions
    from megatrain_jax.models.spec import Context, LayerSpec, RopeSpec

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

    way = lambda q, k, v, ids, *, window, **_: attention(q, k, v, ids, window)  # noqa: E731
    with mock.patch.object(blocks, "attend", way):
        return measure(both, weights, x, dy, jnp.asarray(ids))


def run(way: str, small: bool) -> Iterator[dict]:
    import jax

    record = {"way": way, "device": jax.devices()[0].device_kind, "jax": jax.__version__}
    if way == "sorted":
        if not small:
            yield record | run_sorted()
        return
    attention = globals()[way]
    if way != "full":
        for name, window in (("check", None), ("check_window", 100)):
            try:
                record[name] = check(attention, window)
            except Exception as problem:  # noqa: BLE001 (whatever a kernel raises is a result)
                record[name] = f"{type(problem).__name__}: {problem}"[:300]
        yield dict(record)
    if small:
        return
    ids, real = packed_rows(ROWS, SEQ)
    tokens = ids.size if way == "full" else real
    record["rows"] = {"real_tokens": real, "of": ids.size, "most_segments": int(ids.max())}
    record["attention"] = time_attention(attention, ids)
    seconds, scratch = time_layer(attention, ids)
    record["layer"] = {"ms": seconds * 1e3, "tokens_per_second": tokens / seconds, "scratch_gib": scratch / 2**30}
    yield record


def run_sorted() -> dict:
    """Samples padded to the next of a few lengths, and batches of one length only: real tokens by the time they take."""
    import numpy as np

    lengths, total, seconds, steps = sample_lengths(20_000), 0, 0.0, {}
    below = 0
    for seq in (256, 512, 1024, 2048, SEQ):
        mine = lengths[(lengths > below) & (lengths <= seq)]
        rows = ROWS * SEQ // seq
        steps[seq], _ = time_layer(full, np.ones((rows, seq), np.int32))
        seconds += steps[seq] * len(mine) / rows
        total += int(mine.sum())
        below = seq
    milliseconds = {str(seq): each * 1e3 for seq, each in steps.items()}
    return {"layer": {"tokens_per_second": total / seconds, "ms_by_length": milliseconds}}


if __name__ == "__main__":
    main()
