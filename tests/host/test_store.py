"""The store keeps exactly what it is given, in place, however it is cut into chunks and rows."""

import functools
import math
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from megatrain_jax.config import OptimizerConfig, TrainingConfig
from megatrain_jax.host import layouts
from megatrain_jax.host.in_place import make_update
from megatrain_jax.host.layouts import Rule
from megatrain_jax.host.optimizer import ELEMENTWISE, HostOptimizer
from megatrain_jax.host.store import HostStore, Rows
from megatrain_jax.models.blocks import model_tensors, tensor_shapes
from tests.conftest import small_spec
from tests.reference import load_state_arrays, nearest_bfloat16, state_arrays

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TIES = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, -1 - 3 * 2**-8], np.float32)  # of bfloat16
EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"


# Few and odd: every length is compiled for itself.
TINY = [{"weight": (3, 61)}, {}, {"norm.weight": (5,)}]


def make_store(shapes=TINY, *, wire="bfloat16", rows=1, trainable=lambda name: True, layout="chunks") -> HostStore:
    if layout == "split":
        pytest.importorskip("numba")
    held = Rows(rows, tuple(range(rows)))
    store = HostStore(small_spec(1), shapes, wire_dtype=wire, rows=held, trainable=trainable, layout=layout)
    rng = np.random.default_rng(0)
    for tensor in store.tensors.values():
        tensor.assign(rng.standard_normal(tensor.shape).astype(np.float32))
    return store


def small_chunks(monkeypatch, chunk: int, tile: int = 24) -> None:
    monkeypatch.setattr(layouts, "CHUNK", chunk)
    monkeypatch.setattr(layouts, "TILE", tile)


def wire_of(tensor) -> np.ndarray:
    """What would arrive at a device."""
    return np.concatenate(tensor.wire)[: tensor.size].reshape(tensor.shape)


def rounded(value: np.ndarray, wire: str) -> np.ndarray:
    return nearest_bfloat16(value) if wire == "bfloat16" else value.astype(wire)


def rows_of(tensor, value: np.ndarray) -> list[np.ndarray]:
    flat = np.zeros(tensor.row_length * tensor.rows.count, value.dtype)
    flat[: tensor.size] = value.reshape(-1)
    return list(flat.reshape(tensor.rows.count, -1))


def host_optimizer(store, **optimizer) -> HostOptimizer:
    config = TrainingConfig(learning_rate=1e-2, warmup_steps=3, weight_decay=0.1)
    return HostOptimizer(store, OptimizerConfig(**optimizer), config, 20)


def run_steps(store, host, steps, dtype=np.float32) -> None:
    for step in steps:
        rng = np.random.default_rng(step)
        for tensor in store.tensors.values():
            grad = rng.standard_normal(tensor.shape).astype(dtype)
            if tensor.trainable:
                host.update(tensor, rows_of(tensor, grad), 0.5)


@pytest.mark.parametrize("source", [BFLOAT16, np.float16, np.float32], ids=str)
@pytest.mark.parametrize("wire", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("trainable", [True, False], ids=["trained", "frozen"])
def test_what_is_assigned_is_read_and_what_crosses_is_rounded(monkeypatch, source, wire, rows, trainable):
    small_chunks(monkeypatch, 64)
    store = make_store(wire=wire, rows=rows, trainable=lambda name: trainable)
    for name, tensor in store.tensors.items():
        value = np.random.default_rng(1).standard_normal(tensor.shape).astype(source)
        value.reshape(-1)[:4] = TIES.astype(source)
        store.tensors[name].assign(value)
        np.testing.assert_array_equal(store.tensors[name].read(), value.astype(np.float32))
        np.testing.assert_array_equal(wire_of(store.tensors[name]), rounded(value.astype(np.float32), wire))


def test_the_split_master_is_exact_and_its_upper_half_is_the_nearest_bfloat16():
    tensor = make_store(layout="split").tensors[EMBED]
    bits = np.random.default_rng(0).integers(0, 1 << 32, tensor.size, dtype=np.uint32)
    bits[:6] = np.array([0x00000001, 0x80000000, 0x7F7F7FFF, 0x00007FFF, 0x3F808000, 0x00008000], np.uint32)
    values = bits.view(np.float32)
    values[~np.isfinite(values)] = 1.5
    values[np.abs(values) > 3e38] = -0.0
    tensor.assign(values.reshape(tensor.shape))
    assert tensor.read().tobytes() == values.tobytes()
    assert wire_of(tensor).tobytes() == nearest_bfloat16(values).tobytes()


@pytest.mark.parametrize("layout", ["chunks", "split"])
def test_an_update_rounds_ties_and_nan_as_an_assignment_does(layout):
    store = make_store(layout=layout)
    tensor, host = store.tensors[NORM], host_optimizer(store, type="sgd")
    tensor.assign(np.append(TIES, np.float32(3)))
    host.update(tensor, rows_of(tensor, np.zeros(5, np.float32)), 1.0)
    assert wire_of(tensor).tobytes() == nearest_bfloat16(np.append(TIES, np.float32(3))).tobytes()
    # Half a unit more would turn the first two into zero.
    gradient = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0, 0], np.uint32).view(np.float32)
    host.update(tensor, rows_of(tensor, gradient), 1.0)
    for values in (tensor.read(), wire_of(tensor).astype(np.float32)):
        assert np.isnan(values).tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("exact_rows", [(0,), (1,), (0, 1), ()])
def test_a_frozen_tensor_keeps_values_that_the_wire_cannot_hold_in_some_of_its_rows(exact_rows):
    store = make_store(rows=2, trainable=lambda name: False)
    tensor = store.tensors[EMBED]
    value = np.full(tensor.size, 1 / 3, np.float32)
    for row in exact_rows:
        value[row * tensor.row_length : (row + 1) * tensor.row_length] = 1.5
    value = value.reshape(tensor.shape)
    for again in (value, value[::-1].copy(), value):
        tensor.assign(again)
        np.testing.assert_array_equal(tensor.read(), again)


def test_a_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"model.norm.weight: expected shape \(5,\), got \(6,\)"):
        make_store().tensors[NORM].assign(np.zeros(6, np.float32))


def test_updates_do_not_depend_on_chunks_or_rows(monkeypatch):
    results = []
    for chunk, tile, rows in [(1 << 20, 1 << 14, 1), (64, 64, 1), (64, 7, 2)]:
        small_chunks(monkeypatch, chunk, tile)
        store = make_store(rows=rows)
        run_steps(store, host_optimizer(store), range(3))
        results.append({name: tensor.read() for name, tensor in store.tensors.items()})
    for other in results[1:]:
        for name, value in results[0].items():
            np.testing.assert_allclose(other[name], value, rtol=0, atol=2.4e-7)


@pytest.mark.parametrize("wire", ["bfloat16", "float32"])
def test_every_update_is_in_place_and_leaves_the_rounded_master_on_the_wire(monkeypatch, wire):
    small_chunks(monkeypatch, 64)
    store = make_store(wire=wire)
    host = host_optimizer(store)

    def addresses():
        rows = [row for t in store.tensors.values() for row in t._rows]
        leaves = [leaf for row in rows for each in row.state().values() for leaf, _ in each]
        chunks = [chunk.params for row in rows for chunk in row._chunks]
        wires = [row.ctypes.data for t in store.tensors.values() for row in t.wire]
        state = [leaf.ctypes.data for leaf in leaves if leaf.ndim]
        return [chunk.unsafe_buffer_pointer() for chunk in chunks] + state + wires

    before = addresses()
    assert len(before) >= 2 * 4
    for step in range(4):
        run_steps(store, host, [step], BFLOAT16)
        assert addresses() == before
        for tensor in store.tensors.values():
            np.testing.assert_array_equal(wire_of(tensor), rounded(tensor.read(), wire))


def ordinary(rng, shape) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def any_finite(rng, shape) -> np.ndarray:
    """Every exponent, subnormal numbers too."""
    values = rng.integers(0, 1 << 32, shape, dtype=np.uint32).view(np.float32)
    return np.where(np.isfinite(values), values, np.float32(1))


def bits_of(values: np.ndarray) -> tuple[bytes, bytes]:
    """Of the numbers, and where they are: one NaN is like another."""
    number = values == values
    return values[number].tobytes(), number.tobytes()


def assert_same_bits(plain, split) -> None:
    for name, tensor in split.tensors.items():
        expected = state_arrays(plain.tensors[name]) | {"wire": wire_of(plain.tensors[name])}
        got = state_arrays(tensor) | {"wire": wire_of(tensor)}
        assert set(got) == set(expected)
        for key, value in expected.items():
            assert bits_of(got[key]) == bits_of(value), (name, key)


@pytest.mark.usefixtures("optimized_xla")
@pytest.mark.parametrize("kind", ["adamw", "adam", "lion", "sgd"])
@pytest.mark.parametrize("dtype", [BFLOAT16, np.float32], ids=["bfloat16", "float32"])
def test_the_kernels_are_optax_bit_for_bit(kind, dtype):
    """Weights with weight decay and without, whatever their values and those of the gradients."""
    shapes = [{"weight": (171, 601)}, {}, {"norm.weight": (1021,)}]
    for draw, steps in ((ordinary, 20), (any_finite, 4)):
        plain, split = make_store(shapes), make_store(shapes, layout="split", rows=3)
        rng = np.random.default_rng(1)
        for name, tensor in plain.tensors.items():
            value = draw(rng, tensor.shape)
            tensor.assign(value)
            split.tensors[name].assign(value)
        hosts = host_optimizer(plain, type=kind, backend="optax"), host_optimizer(split, type=kind)
        for _ in range(steps):
            for name, tensor in plain.tensors.items():
                with np.errstate(over="ignore"):
                    grad = draw(rng, tensor.shape).astype(dtype)
                for store, host in zip((plain, split), hosts, strict=True):
                    host.update(store.tensors[name], rows_of(store.tensors[name], grad), 0.37)
        assert_same_bits(plain, split)


@pytest.mark.usefixtures("optimized_xla")
@pytest.mark.parametrize(
    "kind, warmup",
    [("constant", 7), ("linear", 0), ("cosine", 7), ("cosine_with_min_lr", 0), ("wsd", 7), ("inverse_sqrt", 7)],
)
def test_the_kernels_take_the_rate_and_the_corrections_that_optax_takes(kind, warmup):
    plain, split = make_store(), make_store(layout="split")
    config = TrainingConfig(learning_rate=3e-4, lr_scheduler_type=kind, warmup_steps=warmup, weight_decay=0.1)
    hosts = [HostOptimizer(store, OptimizerConfig(), config, 40) for store in (plain, split)]
    for count in (*range(40), 99, 1_000, 12_345, 1_000_000):
        for store, host in zip((plain, split), hosts, strict=True):
            counts = [a for t in store.tensors.values() for a in t.state().values() if a.dtype == np.int32]
            assert len(counts) == 2 * 2
            for array in counts:
                array.write(0, np.int32([count]))
            run_steps(store, host, [count], BFLOAT16)
        assert_same_bits(plain, split)


@pytest.mark.parametrize("kind", ["adamw", "adam", "lion", "sgd"])
def test_a_table_updated_in_parts_is_one_updated_at_once_bit_for_bit(kind):
    rng, shapes = np.random.default_rng(0), [{"weight": (23, 61)}, {}, {"norm.weight": (5,)}]
    whole, parts = make_store(shapes, layout="split"), make_store(shapes, layout="split")
    hosts = [host_optimizer(store, type=kind) for store in (whole, parts)]
    tables = [store.tensors[EMBED] for store in (whole, parts)]
    assert tables[1].is_table and not make_store(layout="split", rows=2).tensors[EMBED].is_table
    for _ in range(4):
        grads = rows_of(tables[0], rng.standard_normal(tables[0].shape).astype(BFLOAT16))
        hosts[0].update(tables[0], grads, 0.5)
        order = rng.permutation(tables[1].shape[0])
        for i, numbers in enumerate((order[:7], order[7:8], order[8:])):
            before = state_arrays(tables[1])
            hosts[1].update_table_rows(tables[1], grads, 0.5, np.sort(numbers), last=i == 2)
            others = np.setdiff1d(order, numbers)
            for key, array in state_arrays(tables[1]).items():
                assert array.ndim == 0 or bits_of(array[others]) == bits_of(before[key][others])
    assert_same_bits(whole, parts)


def test_updates_do_not_depend_on_the_thread_in_which_the_cpu_backend_computes():
    code = (
        "import sys, jax\n"
        "jax.config.update('jax_cpu_enable_async_dispatch', sys.argv[1] == 'async')\n"
        "from tests.host import test_store as t\n"
        "t.layouts.CHUNK, t.layouts.LEAST, t.layouts.TILE = 96, 96, 24\n"
        "store = t.make_store([{'weight': (23, 61)}, {}, {'norm.weight': (5,)}])\n"
        "t.run_steps(store, t.host_optimizer(store, backend='optax'), range(4), t.BFLOAT16)\n"
        "print(*(array.tobytes().hex() for _, array in sorted(t.state_arrays(store.tensors[t.EMBED]).items())))\n"
    )
    run = functools.partial(subprocess.run, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    one, other = (run([sys.executable, "-c", code, mode]).stdout for mode in ("async", "inline"))
    assert one == other and len(one) > 23 * 61 * 3 * 8


def test_an_update_is_compiled_once_for_each_size_of_chunks(monkeypatch):
    small_chunks(monkeypatch, 96)
    monkeypatch.setattr(layouts, "LEAST", 96)
    store = make_store([{"weight": (500,)}, {}, {}])
    host, tensor = host_optimizer(store, backend="optax"), store.tensors[EMBED]
    run_steps(store, host, range(3), BFLOAT16)
    row = tensor._rows[0]
    update = make_update(host.rule(tensor).step, row._tree, layouts.TILE, tensor.wire[0].dtype)
    assert update._cache_size() == len({chunk.size for chunk in row._chunks}) == 2


@pytest.mark.skipif(layouts.TILE == layouts.CHUNK, reason="before jax 0.11 a chunk is updated at once")
@pytest.mark.parametrize("kind", sorted(ELEMENTWISE))
def test_an_update_tile_by_tile_takes_the_memory_of_some_tiles(kind):
    """XLA may copy a whole array to keep it from being overwritten too soon, which no pointer shows."""
    size = 20 * layouts.TILE
    store = make_store([{"weight": (size,)}, {}, {}])
    rule = host_optimizer(store, type=kind, backend="optax").rule(store.tensors[EMBED])
    row = store.tensors[EMBED]._rows[0]
    (chunk,) = row._chunks
    scratch, grads = layouts._allocate((size,), np.uint16), np.zeros(3 * size, BFLOAT16)
    operands = chunk.leaves, scratch, grads, chunk.at, np.float32(1)
    compiled = make_update(rule.step, row._tree, layouts.TILE, BFLOAT16).lower(*operands).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= chunk.params.nbytes  # it measures
    in_place = kind in (
        "adam",
        "adamax",
        "adamaxw",
        "adamw",
        "amsgrad",
        "nadam",
        "nadamw",
        "radam",
        "sgd",
        "sign_sgd",
        "yogi",
    )
    assert memory.temp_size_in_bytes < (4096 if in_place else 8 * 4 * layouts.TILE)
    with pytest.raises(ValueError, match=f"a chunk of {size} elements is not made of tiles of {layouts.TILE - 1}"):
        make_update(rule.step, row._tree, layouts.TILE - 1, BFLOAT16).lower(*operands)


@pytest.mark.parametrize("threads", [1, 14])
@pytest.mark.parametrize("size", [0, 1, 63, 64, 1000, 1024, 5000, 20_000, 100_001, 1 << 20])
def test_chunks_are_whole_tiles_in_equal_numbers_for_each_thread(monkeypatch, size, threads):
    small_chunks(monkeypatch, 4096, 64)
    monkeypatch.setattr(layouts, "LEAST", 512)
    monkeypatch.setattr(layouts, "_threads", lambda: threads)
    lengths = layouts._chunk_lengths(size)
    assert sum(lengths) == size and max(lengths) <= 4096
    tiles = [n for n in lengths if n and n % 64 == 0]
    assert size - sum(tiles) < 64 and len({*tiles[:-1]}) <= 1  # what is over is a chunk of its own
    rounds = math.ceil(size / 4096 / threads)
    if size >= threads * 512:
        assert (rounds - 1) * threads < len(tiles) <= rounds * threads  # nobody has more than one more than need be
    else:
        assert len(tiles) <= threads and min(tiles[:-1], default=512) >= 448


def test_state_that_moved_is_an_error():
    tensor = make_store().tensors[NORM]
    rule = Rule(lambda params: (), lambda p, s, g, scale: ([a + 1 for a in p], s))
    tensor.init_state(rule)
    users = [np.asarray(chunk.params) for row in tensor._rows for chunk in row._chunks]  # not to be donated
    with pytest.raises(RuntimeError, match="the CPU backend moved"):
        tensor.update(rule, rows_of(tensor, users[0]), np.float32(1))


@pytest.mark.parametrize(
    "kind, before, after",
    [
        ("adamw", 1, 1),
        ("adamw", 1, 3),
        ("adamw", 8, 2),
        pytest.param("lion", 1, 1, marks=pytest.mark.exhaustive),
        pytest.param("sgd", 8, 2, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("layout", ["chunks", "split"])
def test_saved_state_is_restored_bit_for_bit_and_goes_on(monkeypatch, kind, before, after, layout):
    small_chunks(monkeypatch, 64)
    trainable = lambda name: name != NORM  # noqa: E731
    first = make_store(rows=before, trainable=trainable, layout=layout)
    host = host_optimizer(first, type=kind)
    run_steps(first, host, range(2))
    saved = {name: state_arrays(tensor) for name, tensor in first.tensors.items()}

    second = make_store(rows=after, trainable=trainable, layout=layout)
    other = host_optimizer(second, type=kind)
    run_steps(second, other, range(7, 9))  # whatever is there is replaced
    for name, tensor in second.tensors.items():
        load_state_arrays(tensor, saved[name])
        restored = state_arrays(tensor)
        assert set(restored) == set(saved[name])
        for key, value in saved[name].items():
            assert value.shape in (tensor.shape, ())
            np.testing.assert_array_equal(restored[key], value)
        np.testing.assert_array_equal(wire_of(tensor), wire_of(first.tensors[name]))
    run_steps(first, host, range(2, 5))
    run_steps(second, other, range(2, 5))
    # Loops of another length may be vectorised differently, which is worth a last bit.
    atol = 0 if before == after else 2.4e-7
    for name, tensor in second.tensors.items():
        np.testing.assert_allclose(tensor.read(), first.tensors[name].read(), rtol=0, atol=atol)


@pytest.mark.parametrize("layout, rows", [("chunks", 1), ("chunks", 3), ("split", 3), ("whole", 1)])
def test_state_is_reached_by_ranges_wherever_they_begin(monkeypatch, layout, rows):
    small_chunks(monkeypatch, 16)
    first, second = (make_store(rows=rows, layout=layout) for _ in range(2))
    hosts = [host_optimizer(store, backend="auto" if layout == "split" else "optax") for store in (first, second)]
    run_steps(first, hosts[0], [0, 1])
    for name, tensor in first.tensors.items():
        whole, state = state_arrays(tensor), second.tensors[name].state()
        assert len(whole) >= 4 and "master" in whole
        for key, value in whole.items():
            flat = value.reshape(-1)
            for start in range(0, flat.size, 7):
                state[key].write(start, flat[start : start + 7])
            got = np.empty(flat.size, flat.dtype)
            for start in range(0, flat.size, 11):
                second.tensors[name].state()[key].read(start, got[start : start + 11])
            assert got.tobytes() == flat.tobytes(), key
        np.testing.assert_array_equal(wire_of(second.tensors[name]), wire_of(tensor))
    run_steps(first, hosts[0], [2])
    run_steps(second, hosts[1], [2])
    for name, tensor in first.tensors.items():
        assert tensor.read().tobytes() == second.tensors[name].read().tobytes()


def test_moments_are_those_of_adam_in_the_shape_of_the_tensor():
    store = make_store(rows=3)
    run_steps(store, host_optimizer(store, beta1=0.75, beta2=0.5), [0])
    grad = 0.5 * np.random.default_rng(0).standard_normal((3, 61)).astype(np.float32)
    state = state_arrays(store.tensors[EMBED])
    (mu,) = (value for key, value in state.items() if key.endswith("mu"))
    (nu,) = (value for key, value in state.items() if key.endswith("nu"))
    np.testing.assert_allclose(mu, 0.25 * grad, rtol=1e-6)
    np.testing.assert_allclose(nu, 0.5 * grad**2, rtol=1e-6)


def test_a_frozen_tensor_has_no_state_and_a_tied_head_is_the_embedding():
    spec = small_spec(2, tied=True)
    shapes = [tensor_shapes(block) for block in spec.blocks]
    frozen = lambda name: ".0.mlp" in name  # noqa: E731
    store = HostStore(spec, shapes, wire_dtype="bfloat16", trainable=lambda name: not frozen(name))
    for tensor in store.tensors.values():
        if tensor.trainable:
            tensor.init_state(Rule(lambda params: [], None))
    for name, tensor in store.tensors.items():
        assert tensor.trainable != frozen(name)
        assert frozen(name) == isinstance(tensor._rows[0], layouts.FrozenRow)
    assert store.blocks[3]["lm_head.weight"] is store.blocks[0]["weight"]
    assert store.owners(3) == {0, 3} and store.owners(2) == {2}
    assert set(store.owned(3)) == {"norm.weight"} and set(store.owned(0)) == {"weight"}
    assert not any(path.startswith("mlp") for path in store.owned(1))
    assert store.num_parameters == sum(math.prod(shape) for shape in model_tensors(spec).values())
    assert store.num_parameters - store.num_trainable == 3 * 32 * 48


def test_a_process_with_some_of_the_rows_holds_and_reads_only_those():
    tensor = HostStore(small_spec(1), TINY, wire_dtype="bfloat16", rows=Rows(3, (1,))).tensors[EMBED]
    value = np.arange(183, dtype=np.float32).reshape(3, 61)
    tensor.assign(value)
    np.testing.assert_array_equal(tensor.read_row(0), value.reshape(-1)[61:122])
    assert [row.shape for row in tensor.wire] == [(61,)]
    with pytest.raises(ValueError, match="this process holds 1 of 3 rows"):
        tensor.read()


def test_rows_cross_on_boundaries_that_are_read_in_place():
    for tensor in make_store(rows=3).tensors.values():
        assert all(row.ctypes.data % 64 == 0 for row in tensor.wire)
