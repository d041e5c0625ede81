"""What the tests of several devices and processes run in processes of their own: a function by name, then its arguments."""

from __future__ import annotations

import dataclasses
import sys

import jax
import numpy as np

from megatrain_jax.config import OptimizerConfig, TrainingConfig
from megatrain_jax.stream.pipeline import Settings
from tests.conftest import small_spec
from tests.reference import (
    ODD,
    PlainOptax,
    assert_same_gradients,
    execution,
    loss_and_grads,
    make_model,
    random_batch,
    random_weights,
    training,
)


def gradients(tied: str, micro_batches: str, devices: str) -> None:
    """Of sizes and rows that the devices do not divide."""
    assert jax.device_count() == int(devices)
    spec = small_spec(2, tied=tied == "tied", sliding_window=4, qk_norm=True, **ODD)
    batches = [random_batch(spec, seed) for seed in range(int(micro_batches))]
    weights = random_weights(spec)
    model = make_model(spec, weights, execution(devices=jax.device_count()))
    loss, grads = model.loss_and_grads(*batches)
    expected_loss, expected = loss_and_grads(spec, weights, batches)
    assert abs(loss - expected_loss) <= 1e-5 * expected_loss, (loss, expected_loss)
    assert_same_gradients(grads, expected, 1e-5)
    logits = model.logits(batches[0].token_ids)
    alone = make_model(spec, weights, dataclasses.replace(execution(), mesh=_one_device())).logits(batches[0].token_ids)
    np.testing.assert_allclose(logits, alone, rtol=0, atol=1e-5)


def experts() -> None:
    """Two micro-batches of rows that the devices do not divide, with the auxiliary loss of all of them."""
    from tests.end_to_end.test_experts import sparse_spec

    spec = sparse_spec(**ODD)
    batches = [random_batch(spec, seed) for seed in range(2)]
    weights = random_weights(spec)
    model = make_model(spec, weights, execution(devices=jax.device_count()))
    loss, grads = model.loss_and_grads(*batches)
    expected_loss, expected = loss_and_grads(spec, weights, batches)
    assert abs(loss - expected_loss) <= 1e-5 * expected_loss, (loss, expected_loss)
    assert_same_gradients(grads, expected, 1e-5)


def expert_groups() -> None:
    """Groups of experts and the auxiliary loss, on sizes and rows that the devices do not divide."""
    from megatrain_jax.models.moe import in_expert_groups
    from tests.end_to_end.test_experts import MOE

    spec = dataclasses.replace(small_spec(1, moe=MOE, **ODD), router_aux_loss_coef=0.3)
    batch, weights = random_batch(spec, packed=True), random_weights(spec)
    model = make_model(in_expert_groups(spec, 4), weights, execution(devices=jax.device_count()))
    loss, grads = model.loss_and_grads(batch)
    expected_loss, expected = loss_and_grads(spec, weights, [batch])
    assert abs(loss - expected_loss) <= 1e-5 * expected_loss, (loss, expected_loss)
    assert_same_gradients(grads, expected, 1e-5)


def packed(how: str) -> None:
    """Packed rows against samples alone."""
    from tests.end_to_end.test_packed import on_devices

    on_devices(how)


def training_steps(steps: str, repeats: str) -> None:
    """Some steps end, again and again, where they would without streaming."""
    import optax

    spec, steps = small_spec(1, tied=True, **ODD), int(steps)
    weights, batches = random_weights(spec), [random_batch(spec, seed) for seed in range(4)]
    config = TrainingConfig(learning_rate=1e-2, lr_scheduler_type="constant")
    plain = PlainOptax(spec, weights, optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1e-2, momentum=0.9)))
    for step in range(steps):
        plain.step([batches[step % 4]])
    for repeat in range(int(repeats)):
        model = make_model(spec, weights, execution(devices=jax.device_count()))
        with training(
            model, Settings(max_grad_norm=0.5), optimizer=OptimizerConfig(type="sgd"), config=config, total_steps=steps
        ) as (pipeline, updater):
            for step in range(steps):
                pipeline.train_step([batches[step % 4]])
            updater.drain()
        for name, tensor in model.store.tensors.items():
            rows = np.stack([tensor.read_row(i) for i in range(len(tensor.rows.local))])
            flat = np.zeros(tensor.row_length * tensor.rows.count, np.float32)
            flat[: tensor.size] = plain.weights[name].reshape(-1)
            expected = flat.reshape(tensor.rows.count, -1)[list(tensor.rows.local)]
            np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-5, err_msg=name)
        print("repeat", repeat, "ended", flush=True)


def first_passes() -> None:
    """Of each kind one that is awaited call by call, because it compiles; then others, which run ahead."""
    from megatrain_jax.stream import pipeline as module

    spec, most, ahead = small_spec(2), module.RUN_AHEAD, []

    class Watcher(module._RunAhead):
        def dispatched(self, marker, what, block):
            super().dispatched(marker, what, block)
            ahead.append(len(self._markers))

    module._RunAhead = Watcher
    pipeline = module.Pipeline(
        make_model(spec, random_weights(spec), execution(devices=jax.device_count())).store,
        execution(devices=jax.device_count()),
    )
    gradients = lambda **shape: pipeline.gradients([random_batch(spec, **shape)], lambda *_: None)  # noqa: E731
    losses = lambda: pipeline.losses([random_batch(spec)])  # noqa: E731
    for call, new in [
        (gradients, True),
        (gradients, False),
        (losses, True),
        (losses, False),
        (lambda: gradients(rows=8), True),
        (lambda: gradients(packed=True), True),
        (gradients, False),
    ]:
        ahead.clear()
        call()
        assert max(ahead) == (0 if new else most), (new, ahead)


def resident_memory() -> None:
    """Of weights and moments that stay on the devices each holds its share, before the first step and after it."""
    devices, spec = jax.device_count(), small_spec(1)
    model = make_model(spec, random_weights(spec), execution(devices=devices), resident=(0, 1, 2))

    def check() -> None:
        for tensor in model.store.tensors.values():
            for leaf in jax.tree.leaves((tensor._params, tensor._state)):
                held = [shard.data.nbytes for shard in leaf.addressable_shards]
                assert held == [leaf.nbytes // devices if leaf.ndim else leaf.nbytes] * devices, (tensor.name, held)

    with training(model, Settings(max_grad_norm=0.5)) as (pipeline, updater):
        check()
        pipeline.train_step([random_batch(spec)])
        updater.drain()
        check()


def run(config: str, out: str) -> None:
    """A run of a configuration file; `model.device` has no word for several CPUs."""
    import megatrain_jax as mt
    from megatrain_jax import trainer
    from megatrain_jax.config import load_config
    from megatrain_jax.stream.transfer import Mesh

    trainer.make_mesh = lambda device: Mesh(tuple(jax.devices()))
    mt.Trainer(load_config(config, [f"output_dir={out}"])).fit()
    print("ran on", jax.device_count())


def in_process(number: str, port: str, name: str, *args: str) -> None:
    """The same as one of two processes."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(number))
    globals()[name](*args)


def _one_device():
    from megatrain_jax.stream.transfer import Mesh

    return Mesh((jax.local_devices()[0],))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
