"""The order of the stream, as properties of the events that a run records."""

import gc
import threading
import time
import tracemalloc

import jax
import numpy as np
import pytest

from megatrain_jax.stream import pipeline as pipeline_module
from megatrain_jax.stream.events import Event, Recorder
from megatrain_jax.stream.pipeline import RUN_AHEAD, Pipeline, Settings, has_plain_rows
from megatrain_jax.stream.updater import Updater
from tests.conftest import small_spec
from tests.reference import execution, make_model, random_batch, random_weights, training

COMPUTE = ("forward", "loss", "backward")
HELD, AT_ONCE = Settings(max_grad_norm=1.0), Settings(skip_nonfinite=False)


class Watcher(Recorder):
    """Keeps the events in the order in which they happened, and the marker of every compute in order of dispatch."""

    def __init__(self):
        self.events: list[Event] = []
        self.markers: list[jax.Array] = []
        super().__init__(self.events.append)

    def watch(self, what, block, micro_batch, arrays, nbytes=0):
        if what in COMPUTE:
            self.markers.append(arrays)
        super().watch(what, block, micro_batch, arrays, nbytes)


def recorded(layers, settings, micro_batches, *, tied=True, steps=2, trainable=lambda name: True) -> Watcher:
    spec = small_spec(layers, tied=tied, sliding_window=4, qk_norm=True)
    watcher = Watcher()
    model = make_model(spec, random_weights(spec), trainable=trainable)
    updater = Updater(model.store, SlowUpdates(), watcher)
    pipeline = Pipeline(model.store, model.run, settings, watcher, updater)
    for step in range(steps):
        pipeline.train_step([random_batch(spec, 10 * step + m) for m in range(micro_batches)])
    updater.close()
    watcher.close()
    return watcher


class SlowUpdates:
    """Stands in for the optimizer where only the order matters: slow enough that a thread that does not wait is seen."""

    def update(self, tensor, grads, scale):
        time.sleep(0.002)


def groups_of(settings, micro_batches) -> list[int]:
    size = settings.group_size or micro_batches
    return [min(size, micro_batches - start) for start in range(0, micro_batches, size)]


def dispatched(events, *what):
    return [event for event in events if event.what in what]


def fetched(events) -> list[int]:
    """Blocks in the order in which they were sent; the embedding's rows, one copy for a micro-batch, count once a group."""
    return [event.block for event in dispatched(events, "h2d") if not event.micro_batch]


CASES = [
    (1, HELD, 1),
    (2, HELD, 2),
    (3, AT_ONCE, 1),
    (7, HELD, 1),
    (7, AT_ONCE, 2),
    (3, HELD._replace(group_size=2), 3),
]


@pytest.fixture(
    scope="module", params=CASES, ids=[f"{c[0]} layers, {c[2]} micro-batches, {i}" for i, c in enumerate(CASES)]
)
def run(request):
    layers, settings, micro_batches = request.param
    return layers, settings, micro_batches, recorded(layers, settings, micro_batches).events


def test_blocks_compute_layer_by_layer_and_micro_batches_within_a_block(run):
    layers, settings, micro_batches, events = run
    head, one_step = layers + 1, []
    for size in groups_of(settings, micro_batches):
        one_step += [("forward", block, m) for block in range(head) for m in range(size)]
        one_step += [("loss", head, m) for m in range(size)]
        one_step += [("backward", block, m) for block in range(head - 1, -1, -1) for m in range(size)]
    assert [event[:3] for event in dispatched(events, *COMPUTE)] == one_step * 2


def test_weights_cross_once_a_pass(run):
    layers, settings, micro_batches, events = run
    groups = groups_of(settings, micro_batches)
    back = [*range(layers, 0, -1)]
    # The first layer of another group is on its way before the embedding's rows are.
    first, other = [0, 1, *range(2, layers + 2), *back], [1, 0, *range(2, layers + 2), *back]
    assert fetched(events) == [*first, *other * (len(groups) - 1)] * 2
    rows = [event for event in dispatched(events, "h2d") if event.micro_batch is not None]
    assert [event[1:3] for event in rows] == [(0, m) for size in groups for m in range(size)] * 2


@pytest.mark.parametrize("dtype, itemsize", [("bfloat16", 2), ("float32", 4)])
def test_every_weight_crosses_twice_and_every_gradient_once(dtype, itemsize):
    spec = small_spec(3, tied=True, qk_norm=True)
    watcher = Watcher()
    model = make_model(spec, random_weights(spec), execution(dtype))
    updater = Updater(model.store, SlowUpdates(), watcher)
    Pipeline(model.store, model.run, HELD, watcher, updater).train_step([random_batch(spec, m) for m in range(2)])
    updater.close()
    watcher.close()
    table, layers = spec.vocab_size * spec.hidden_size, sum(layer.num_parameters for layer in spec.layers)
    tokens = 2 * random_batch(spec).token_ids.size
    assert tokens < spec.vocab_size
    moved = {what: sum(e.nbytes for e in dispatched(watcher.events, what)) for what in ("h2d", "d2h")}
    # The tied table goes to the head, and of it the rows of the tokens to the embedding; the head's gradient of it does
    # not leave by itself.
    assert moved["h2d"] == itemsize * (tokens * spec.hidden_size + table + spec.hidden_size + 2 * layers)
    assert moved["d2h"] == itemsize * (table + spec.hidden_size + layers)


def test_a_table_smaller_than_its_rows_for_a_batch_is_sent_whole():
    """As many tokens as the table has rows: what a row is worth to one of them is no longer saved."""
    spec = small_spec(1)
    batch = random_batch(spec)
    copies = -(-spec.vocab_size // batch.token_ids.size)
    large = type(batch)(*(np.concatenate([field] * copies) for field in batch))
    for sent, expected in ((batch, batch.token_ids.size), (large, spec.vocab_size)):
        watcher = Watcher()
        pipeline = Pipeline(make_model(spec, random_weights(spec)).store, execution(), record=watcher)
        loss = pipeline.losses([sent]) / sent.loss_weights.sum()
        watcher.close()
        (first,) = [event for event in dispatched(watcher.events, "h2d") if event.block == 0]
        assert first.nbytes == 4 * expected * spec.hidden_size
        if sent is batch:
            one = loss
    assert loss == pytest.approx(one, rel=1e-6)


def test_ids_outside_the_table_are_refused():
    spec = small_spec(1)
    batch = random_batch(spec)
    batch.token_ids[1, 2] = spec.vocab_size
    with pytest.raises(ValueError, match=rf"\[0, {spec.vocab_size}\), got \d+ to {spec.vocab_size}"):
        Pipeline(make_model(spec, random_weights(spec)).store, execution()).losses([batch])


def test_the_next_block_is_on_its_way_before_this_one_computes_and_no_other_is(run):
    *_, events = run
    order = [event for event in dispatched(events, "h2d", *COMPUTE) if event.what != "h2d" or not event.micro_batch]
    second = [i for i, event in enumerate(order) if event.what == "h2d"][len(fetched(events)) // 2]
    for step in (order[:second], order[second:]):
        arrivals, begun = 0, []
        for event in step:
            if event.what == "h2d":
                assert len(begun) == max(arrivals - 1, 0)
                arrivals += 1
            elif (event.what, event.block) != ("backward", 0) and event.micro_batch == 0:  # that one needs no weights
                begun.append(event.block)
        assert len(begun) == arrivals


def test_gradients_leave_right_after_the_last_backward_of_their_block(run):
    layers, settings, micro_batches, events = run
    order = dispatched(events, "d2h", *COMPUTE)
    leaving = [event.block for event in order if event.what == "d2h"]
    assert leaving == [*range(layers + 1, -1, -1)] * len(groups_of(settings, micro_batches)) * 2
    for before, event in zip(order, order[1:], strict=False):
        if event.what == "d2h":
            assert before.block == event.block and before.what in ("loss", "backward")


def test_updates_wait_for_the_end_of_backward_only_where_the_scale_is_needed(run):
    layers, settings, _, events = run
    order = dispatched(events, "d2h", "update")
    updates = [event.block for event in order if event.what == "update"]
    assert sorted(updates) == sorted([*range(layers + 2)] * 2)
    if settings is AT_ONCE:
        for i, event in enumerate(order):
            past = [e.what for e in order[:i] if e.block == event.block]
            assert past.count("d2h") - past.count("update") == (event.what == "update")
    else:
        assert updates == [*range(layers + 2)] * 2  # in the order in which the next forward needs them
        first = next(i for i, event in enumerate(order) if event.what == "update")
        one_step = (layers + 2) * len(groups_of(settings, run[2]))
        assert all(event.what == "d2h" for event in order[:first]) and first == one_step


def test_weights_are_fetched_only_after_the_update_of_the_step_before(run):
    layers, _, _, events = run
    per_step = len(dispatched(events, "h2d")) // 2
    second_step = [i for i, event in enumerate(events) if event.what == "h2d"][per_step:]
    for i in second_step:
        block = events[i].block
        owners = {block, 0} if block == layers + 1 else {block}  # the head is tied
        done = {event.block for event in events[:i] if event.what == "update done"}
        assert owners <= done


def test_device_work_is_seen_to_end_after_it_was_dispatched(run):
    *_, events = run
    for what in ("h2d", "d2h", *COMPUTE):
        starts, ends = dispatched(events, what), dispatched(events, f"{what} done")
        assert len(starts) == len(ends) > 0
        for start, end in zip(starts, ends, strict=True):
            assert start[1:3] == end[1:3] and start.when <= end.when
    assert all(event.micro_batch is not None for event in dispatched(events, *COMPUTE))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_dispatching_thread_is_never_further_ahead_than_it_may(monkeypatch, micro_batches):
    waited, wait = [], jax.block_until_ready

    def spy(arrays):
        if threading.current_thread() is threading.main_thread():
            waited.append(id(arrays))
        return wait(arrays)

    class Counter(Watcher):
        def watch(self, what, block, micro_batch, arrays, nbytes=0):
            super().watch(what, block, micro_batch, arrays, nbytes)
            if what in COMPUTE:
                assert {id(marker) for marker in self.markers[:-RUN_AHEAD]} <= set(waited)
                # Nor does it wait for more than it must.
                assert not {id(marker) for marker in self.markers[-RUN_AHEAD:]} & set(waited)

    assert RUN_AHEAD == 2
    spec, watcher = small_spec(3, tied=True, sliding_window=4, qk_norm=True), Counter()
    pipeline = Pipeline(make_model(spec, random_weights(spec)).store, execution(), record=watcher)
    monkeypatch.setattr(pipeline_module.jax, "block_until_ready", spy)
    pipeline.gradients([random_batch(spec, m) for m in range(micro_batches)], lambda *_: None)
    watcher.close()
    assert len(watcher.markers) == micro_batches * (2 * 4 + 1)


@pytest.mark.parametrize("lowest", [pytest.param(0, marks=pytest.mark.exhaustive), 2, 4])
def test_below_the_lowest_trainable_block_there_is_no_backward_and_nothing_frozen_leaves(lowest):
    names = ["embed", ".layers.0.", ".layers.1.", ".layers.2.", "lm_head"]
    watcher = recorded(
        3, HELD, 2, tied=False, trainable=lambda name: names[lowest] in name or (lowest < 3 and "layers.2.mlp" in name)
    )
    head, trained = 4, {0: {0, 3}, 2: {2, 3}, 4: {4}}[lowest]
    events = watcher.events
    assert {event.block for event in dispatched(events, "d2h")} == trained
    assert {event.block for event in dispatched(events, "update")} == trained
    assert {event.block for event in dispatched(events, "backward")} == set(range(lowest, head))
    back = [*range(head - 1, max(lowest, 1) - 1, -1)]
    assert fetched(events) == [*range(head + 1), *back] * 2


def within(seconds: float, call):
    """The exception that a call ends with; a call that hangs fails."""
    caught = []

    def target():
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is looked at
            caught.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "the call hangs"
    (error,) = caught
    return error


@pytest.mark.parametrize("settings", [HELD, AT_ONCE], ids=["held", "at once"])
@pytest.mark.parametrize("failing", [0, 3])
def test_a_failure_in_the_optimizer_thread_reaches_the_dispatching_thread(monkeypatch, settings, failing):
    spec = small_spec(2, tied=True, sliding_window=4, qk_norm=True)
    model, batch = make_model(spec, random_weights(spec)), random_batch(spec)
    with training(model, settings) as (pipeline, updater):
        update = updater._optimizer.update

        def broken(tensor, grads, scale):
            if tensor.owner == failing:
                raise MemoryError("no memory for the update")
            update(tensor, grads, scale)

        monkeypatch.setattr(updater._optimizer, "update", broken)

        def run_on():
            for _ in range(3):
                pipeline.train_step([batch])
            updater.drain()

        start = time.perf_counter()
        error = within(60, run_on)
        assert isinstance(error, MemoryError) and str(error) == "no memory for the update"
        assert isinstance(within(10, updater.drain), MemoryError)
        assert time.perf_counter() - start < 30


def test_losses_are_sums_over_batches():
    spec = small_spec(2, tied=True, sliding_window=4, qk_norm=True)
    model = make_model(spec, random_weights(spec))
    batches = [random_batch(spec, seed) for seed in range(2)]
    means = [model.loss_and_grads(batch)[0] * batch.loss_weights.sum() for batch in batches]
    assert Pipeline(model.store, model.run).losses(batches) == pytest.approx(sum(means), rel=1e-5)


@pytest.mark.parametrize(
    "segments, plain",
    [
        ([[1, 1, 1], [1, 1, 0]], True),
        ([[0, 0, 0]], True),
        ([[1, 2, 2]], False),
        ([[0, 1, 1]], False),
        ([[2, 2, 0]], False),
        ([[1, 0, 1]], False),
    ],
)
def test_rows_are_plain_where_causality_alone_keeps_samples_apart(segments, plain):
    batch = random_batch(small_spec(), rows=len(segments), seq=3)
    assert has_plain_rows(batch._replace(segment_ids=np.array(segments, np.int32))) == plain


def test_templates_are_compiled_once_for_equal_layers_and_again_for_none():
    spec = small_spec(5, tied=True, sliding_window=4, qk_norm=True)
    model, batches = make_model(spec, random_weights(spec)), [random_batch(spec, seed) for seed in range(3)]
    model.loss_and_grads(*batches)
    compiled = []
    listener = lambda name, *_, **__: "backend_compile" in name and compiled.append(name)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        model.loss_and_grads(*batches[::-1])
        deeper = small_spec(6, tied=True, sliding_window=4, qk_norm=True)
        make_model(deeper, random_weights(deeper)).loss_and_grads(*batches)
        assert not compiled
        jax.jit(lambda x: x + 1)(0)
        assert compiled  # the listener listens
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def test_calls_leave_no_thread_behind():
    spec = small_spec(2, tied=True, sliding_window=4, qk_norm=True)
    model, batch = make_model(spec, random_weights(spec)), random_batch(spec)
    model.loss_and_grads(batch)
    before = set(threading.enumerate())
    for _ in range(3):
        model.loss_and_grads(batch)
    with training(model) as (pipeline, _):
        pipeline.train_step([batch])
    assert {t.name for t in set(threading.enumerate()) - before} <= {f"megatrain-wire_{i}" for i in range(4)}


@pytest.mark.parametrize(
    "settings",
    [
        HELD,
        pytest.param(AT_ONCE, marks=pytest.mark.exhaustive),
        pytest.param(HELD._replace(group_size=1), marks=pytest.mark.exhaustive),
        pytest.param(HELD._replace(keep_layers=1), marks=pytest.mark.exhaustive),
    ],
)
def test_steps_leave_nothing_behind(settings):
    """Memory is as it was after the first steps, whose compilations stay."""
    spec = small_spec(2, tied=True)
    model, batches = make_model(spec, random_weights(spec)), [random_batch(spec, m) for m in range(2)]
    with training(model, settings) as (pipeline, updater):

        def taken(steps):
            for _ in range(steps):
                pipeline.train_step(batches)
            updater.drain()
            gc.collect()
            arrays = jax.live_arrays()
            return len(arrays), sum(array.nbytes for array in arrays), tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            taken(3)
            arrays, nbytes, python = zip(taken(3), *(taken(30) for _ in range(8)), strict=True)
        finally:
            tracemalloc.stop()
    assert len(set(arrays)) == len(set(nbytes)) == 1
    # Bytes of Python's own; a step's smallest gradient is larger. What Python keeps of freed objects grows to a limit, what
    # is not freed grows every time.
    assert min(np.diff(python)) < 30 * 200


def test_every_dispatch_says_what_it_is_for(monkeypatch):
    """On several devices it can block: one that runs out of memory alone does not begin, and the others wait for it."""
    names, waiting = [], pipeline_module.waiting
    monkeypatch.setattr(pipeline_module, "waiting", lambda what: names.append(what) or waiting(what))
    spec = small_spec(2)
    model = make_model(spec, random_weights(spec))
    begun = lambda: [name.removeprefix("the device to begin the ") for name in names if " begin " in name]  # noqa: E731
    forward = [f"forward of block {block}" for block in range(3)]
    with training(model, Settings(keep_layers=1)) as (pipeline, updater):
        pipeline.train_step([random_batch(spec)])
        updater.drain()
        assert begun() == [*forward, "loss of block 3", *(f"backward of block {block}" for block in (2, 1, 0))]
        for call in (lambda: pipeline.losses([random_batch(spec)]), lambda: pipeline.logits(random_batch(spec))):
            names.clear()
            call()
            assert begun() == [*forward, "loss of block 3"]
