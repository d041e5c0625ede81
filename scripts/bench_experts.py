"""Ways to multiply tokens by the weights of their experts on one GPU: forward and both gradients, checked, then timed.

    python scripts/bench_experts.py --json experts.json

Rows lie sorted by expert, expert e having sizes[e] of them. For weights [E, out, in] a way gives
y = x @ w[e].T, dx = dy @ w[e] and dw[e] = dy.T @ x of the rows of e. Each way runs in a process of its own: one that
crashes or hangs leaves the others alone, and a result that is off by 5e-3 or more is not timed. Needs jax and numpy only; tokamax
is tried if it is installed.
"""

from __future__ import annotations

import functools
import itertools
import time

from ways import each_in_a_process

EXPERTS, HIDDEN, INNER, TOP = 128, 2048, 768, 8
SECONDS = {"pallas": 45, "triton": 30, "tiles": 30, "tokamax": 60, "layout": 15}


def main() -> None:
    each_in_a_process(__file__, __doc__, SECONDS, run)


# ---------------------------------------------------------------------- ways: (x, w, sizes), (dy, w, sizes), (dy, x, sizes)


def pallas_ways():
    """The Hopper kernels that jax ships, by block sizes."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    names = ("block_m", "block_n", "block_k", "max_concurrent_steps", "grid_block_n")
    for tiles, dw_tiles in (
        ((128, 128, 64, 4, 4), (128, 128, 64, 4, 4)),
        ((128, 192, 64, 4, 4), (128, 128, 64, 4, 1)),
        ((192, 128, 64, 4, 2), (128, 128, 128, 2, 4)),
        ((64, 256, 64, 4, 1), (64, 128, 64, 6, 2)),
        ((128, 128, 64, 5, 1), (64, 128, 128, 3, 4)),
    ):
        how, dw_how = (dict(zip(names, blocks, strict=True)) for blocks in (tiles, dw_tiles))
        yield (
            how | {"dw_blocks": dw_tiles},
            lambda x, w, sizes, how=how: ragged_dot(x, w, group_sizes=sizes, transpose_rhs=True, **how),
            lambda dy, w, sizes, how=how: ragged_dot(dy, w, group_sizes=sizes, **how),
            lambda dy, x, sizes, how=dw_how: transposed_ragged_dot(dy, x, group_sizes=sizes, **how),
        )


def triton_ways():
    """A plain Triton kernel on rows padded so that no tile has two experts."""
    for (rows, columns, depth), warps, stages in (
        ((128, 128, 64), 8, 3),
        ((128, 128, 64), 4, 4),
        ((128, 256, 64), 8, 3),
    ):
        how = dict(rows=rows, columns=columns, depth=depth, warps=warps, stages=stages)
        yield (
            how,
            lambda x, w, sizes, how=how: triton_rows(x, w, sizes, transpose=True, **how),
            lambda dy, w, sizes, how=how: triton_rows(dy, w, sizes, transpose=False, **how),
            lambda dy, x, sizes, how=how: triton_weights(dy, x, sizes, **how),
        )


def _call(kernel, out, grid, warps, stages):
    import jax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=grid,
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=jax.default_backend() == "cpu",
    )


def triton_rows(x, w, sizes, *, transpose, rows, columns, depth, warps, stages):
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    out = w.shape[1] if transpose else w.shape[2]
    experts = jnp.repeat(jnp.arange(len(sizes)), -(-sizes // rows), total_repeat_length=x.shape[0] // rows)

    def kernel(experts_ref, x_ref, w_ref, y_ref):
        # Programs of one tile of rows follow one another, so that they share it in the cache.
        i, j = pl.program_id(0) // (out // columns), pl.program_id(0) % (out // columns)
        expert = experts_ref[i]

        def step(k, acc):
            a = triton.load(x_ref.at[pl.ds(i * rows, rows), pl.ds(k * depth, depth)])
            if transpose:
                b = triton.load(w_ref.at[expert, pl.ds(j * columns, columns), pl.ds(k * depth, depth)])
                return acc + triton.dot(a, b, trans_b=True)
            return acc + triton.dot(
                a, triton.load(w_ref.at[expert, pl.ds(k * depth, depth), pl.ds(j * columns, columns)])
            )

        acc = jax.lax.fori_loop(0, x.shape[1] // depth, step, jnp.zeros((rows, columns), jnp.float32))
        triton.store(y_ref.at[pl.ds(i * rows, rows), pl.ds(j * columns, columns)], acc.astype(y_ref.dtype))

    grid = (x.shape[0] // rows * (out // columns),)
    return _call(kernel, jax.ShapeDtypeStruct((x.shape[0], out), x.dtype), grid, warps, stages)(experts, x, w)


def triton_weights(dy, x, sizes, *, rows, columns, depth, warps, stages):
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    ends = jnp.cumsum(-(-sizes // rows) * rows)
    starts = ends - -(-sizes // rows) * rows

    def kernel(starts_ref, ends_ref, dy_ref, x_ref, dw_ref):
        expert, i, j = pl.program_id(2), pl.program_id(0), pl.program_id(1)
        start, end = starts_ref[expert], ends_ref[expert]

        def step(k, acc):
            a = triton.load(dy_ref.at[pl.ds(start + k * depth, depth), pl.ds(i * 128, 128)])
            b = triton.load(x_ref.at[pl.ds(start + k * depth, depth), pl.ds(j * columns, columns)])
            return acc + triton.dot(a, b, trans_a=True)

        acc = jax.lax.fori_loop(0, (end - start) // depth, step, jnp.zeros((128, columns), jnp.float32))
        triton.store(dw_ref.at[expert, pl.ds(i * 128, 128), pl.ds(j * columns, columns)], acc.astype(dw_ref.dtype))

    grid = (dy.shape[1] // 128, x.shape[1] // columns, len(sizes))
    out = jax.ShapeDtypeStruct((len(sizes), dy.shape[1], x.shape[1]), x.dtype)
    return _call(kernel, out, grid, warps, stages)(starts, ends, dy, x)


def tile_ways():
    """Plain XLA on rows padded so that no tile has two experts: a scan over batches of tiles."""
    for tile, batch in ((256, 32), (512, 16), (512, 64), (1024, 16)):
        yield (
            dict(rows=tile, batch=batch),
            functools.partial(tile_rows, tile=tile, batch=batch, transpose=True),
            functools.partial(tile_rows, tile=tile, batch=batch, transpose=False),
            functools.partial(tile_weights, tile=tile, batch=batch),
        )


def _tiles(x, sizes, tile, batch):
    import jax.numpy as jnp

    count = x.shape[0] // tile
    experts = jnp.repeat(jnp.arange(len(sizes)), -(-sizes // tile), total_repeat_length=count)
    return x.reshape(count // batch, batch, tile, -1), experts.reshape(count // batch, batch)


def tile_rows(x, w, sizes, *, tile, batch, transpose):
    import jax
    import jax.numpy as jnp

    def step(_, operands):
        x, experts = operands
        return None, jnp.einsum("tri,toi->tro" if transpose else "tri,tio->tro", x, w[experts])

    y = jax.lax.scan(step, None, _tiles(x, sizes, tile, batch))[1]
    return y.reshape(x.shape[0], -1)


def tile_weights(dy, x, sizes, *, tile, batch):
    import jax
    import jax.numpy as jnp

    def step(dw, operands):
        (dy, experts), (x, _) = operands
        return dw.at[experts].add(jnp.einsum("tro,tri->toi", dy, x, preferred_element_type=jnp.float32)), None

    zero = jnp.zeros((len(sizes), dy.shape[1], x.shape[1]), jnp.float32)
    return jax.lax.scan(step, zero, (_tiles(dy, sizes, tile, batch), _tiles(x, sizes, tile, batch)))[0].astype(x.dtype)


def tokamax_ways():
    import jax
    import tokamax

    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    for how in ("mosaic", "triton"):
        yield (
            dict(implementation=how),
            lambda x, w, sizes, how=how: tokamax.ragged_dot(x, w.swapaxes(1, 2), sizes, implementation=how),
            lambda dy, w, sizes, how=how: tokamax.ragged_dot(dy, w, sizes, implementation=how),
            lambda dy, x, sizes, how=how: tokamax.ragged_dot_general(dy, x, sizes, numbers, implementation=how),
        )


WAYS = {"pallas": pallas_ways, "triton": triton_ways, "tiles": tile_ways, "tokamax": tokamax_ways}


# ---------------------------------------------------------------------------------------------------- check and time


def padded(sizes, how, total):
    """Rows to allocate, and the first row of each expert, for a way that wants whole tiles (``rows`` in `how`)."""
    import numpy as np

    tile = how.get("rows", 1)
    taken = -(-sizes // tile) * tile
    count = total if tile == 1 else (total // tile + len(sizes)) * tile
    step = tile * how.get("batch", 1)
    return -(-count // step) * step, np.cumsum(taken) - taken


def check(how, forward, backward_x, backward_w):
    """Relative errors against NumPy in float64, with an expert that has no row and sizes that no tile divides."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    sizes, width, depth = np.array([300, 0, 17, 1, 706, 128, 129, 767]), 768, 512
    count, starts = padded(sizes, how, sizes.sum())
    x, dy = np.zeros((count, depth), np.float32), np.zeros((count, width), np.float32)
    spans = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    for span, size in zip(spans, sizes, strict=True):
        x[span], dy[span] = rng.normal(size=(size, depth)), rng.normal(size=(size, width))
    w = rng.normal(size=(len(sizes), width, depth)).astype(np.float32)
    x, dy, w = (jnp.asarray(a, jnp.bfloat16) for a in (x, dy, w))
    x64, dy64, w64 = (np.asarray(a, np.float64) for a in (x, dy, w))
    y, dx, dw = np.zeros((count, width)), np.zeros((count, depth)), np.zeros(w.shape)
    for e, span in enumerate(spans):
        y[span], dx[span], dw[e] = x64[span] @ w64[e].T, dy64[span] @ w64[e], dy64[span].T @ x64[span]
    rows = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    on_device = jnp.asarray(sizes, jnp.int32)
    errors = {}
    for name, f, args, want, where in (
        ("forward", forward, (x, w), y, rows),
        ("dx", backward_x, (dy, w), dx, rows),
        ("dw", backward_w, (dy, x), dw, slice(None)),
    ):
        got = np.asarray(jax.jit(f)(*args, on_device), np.float64)[where]
        errors[name] = float(np.linalg.norm(got - want[where]) / np.linalg.norm(want))
    return errors


def measure(f, *args) -> float:
    """Seconds of a call, the least of a few."""
    import jax

    f = jax.jit(f)
    jax.block_until_ready(f(*args))
    times = []
    for _ in range(4):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(time.perf_counter() - start)
    return min(times)


def routed(tokens: int):
    """Rows of each expert, the busiest with several times as many as the mean."""
    import numpy as np

    rng = np.random.default_rng(1)
    share = rng.dirichlet(np.full(EXPERTS, 2.0))
    return rng.multinomial(tokens * TOP, share)


def run(way: str, small: bool):
    import jax
    import jax.numpy as jnp

    if way == "layout":
        yield from run_layout(small)
        return
    key = jax.random.key(0)
    normal = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1)
    good = []
    for how, *passes in WAYS[way]():
        record = {"way": way, **how}
        try:
            record["errors"] = check(how, *passes)
            right = {name: f for (name, error), f in zip(record["errors"].items(), passes, strict=True) if error < 5e-3}
            good.append((how, right))
        except Exception as error:  # whatever a candidate does, the others are measured
            record["error"] = f"{type(error).__name__}: {error}"[:400]
        yield record
    for tokens, (how, right) in itertools.product(() if small else (65536, 32768), good):
        sizes = routed(tokens)
        count, _ = padded(sizes, how, tokens * TOP)
        on_device = jnp.asarray(sizes, jnp.int32)
        for name, (out, into) in (("gate_up", (2 * INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            record = {"way": way, **how, "tokens": tokens, "matmul": name, "rows_computed": count / (tokens * TOP)}
            x, dy, w = normal(key, (count, into)), normal(key, (count, out)), normal(key, (EXPERTS, out, into))
            operands = {"forward": (x, w), "dx": (dy, w), "dw": (dy, x)}
            for what, f in right.items():
                try:
                    seconds = measure(f, *operands[what], on_device)
                    record[what] = {
                        "ms": round(seconds * 1e3, 2),
                        "tflops": round(2 * tokens * TOP * out * into / seconds / 1e12, 1),
                    }
                except Exception as error:
                    record[what] = f"{type(error).__name__}: {error}"[:300]
            yield record
            del x, dy, w, operands


def run_layout(small: bool):
    """What everything around the matmuls costs: sort, gather into rows, sum back into tokens."""
    import jax
    import jax.numpy as jnp

    for tokens in (1024,) if small else (65536, 32768):
        key = jax.random.key(0)
        x = jax.random.normal(key, (tokens, HIDDEN), jnp.bfloat16)
        experts = jax.lax.top_k(jax.random.normal(key, (tokens, EXPERTS)), TOP)[1]
        weights = jnp.full((tokens, TOP), 1 / TOP)
        sort = lambda experts: jnp.argsort(experts.reshape(-1), stable=True)  # noqa: E731

        def counted(experts):
            """Position of each choice in the sorted order by counting, without a sort."""
            hot = jax.nn.one_hot(experts.reshape(-1), EXPERTS, dtype=jnp.int32)
            before = jnp.cumsum(hot, 0)
            starts = jnp.cumsum(before[-1]) - before[-1]
            return jnp.take_along_axis(before - 1 + starts[None], experts.reshape(-1)[:, None], 1)[:, 0]

        order = jax.jit(sort)(experts)
        places = jax.jit(jnp.argsort)(order).reshape(tokens, TOP)
        gather = lambda x, order: x[order // TOP]  # noqa: E731
        rows = jax.jit(gather)(x, order)

        def combine(rows, places, weights):
            parts = (rows[places[:, k]].astype(jnp.float32) * weights[:, k : k + 1] for k in range(TOP))
            return sum(parts).astype(rows.dtype)

        both = lambda gate_up: jax.nn.silu(gate_up[:, :INNER]) * gate_up[:, INNER:]  # noqa: E731
        yield {
            "way": "layout",
            "tokens": tokens,
            "sort_ms": measure(sort, experts) * 1e3,
            "count_ms": measure(counted, experts) * 1e3,
            "gather_ms": measure(gather, x, order) * 1e3,
            "combine_ms": measure(combine, rows, places, weights) * 1e3,
            "activation_ms": measure(both, rows[:, : 2 * INNER]) * 1e3,
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
        }


if __name__ == "__main__":
    main()
