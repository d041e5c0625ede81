"""The oracle of the stream: the same model as one unstreamed function, and plain optax on its whole tree."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from megatrain_jax.config import OptimizerConfig, TrainingConfig
from megatrain_jax.host.optimizer import HostOptimizer
from megatrain_jax.host.store import HostStore
from megatrain_jax.model import Model, unpadded_batch
from megatrain_jax.models.attention import AttentionOptions
from megatrain_jax.models.blocks import DecoderLayer, Embedding, Head, bind, model_tensors, tensor_shapes
from megatrain_jax.models.moe import balance_loss
from megatrain_jax.models.spec import Batch, ModelSpec
from megatrain_jax.stream.events import Recorder
from megatrain_jax.stream.pipeline import Pipeline, Settings
from megatrain_jax.stream.resident import ResidentTensor
from megatrain_jax.stream.templates import Execution
from megatrain_jax.stream.transfer import Mesh
from megatrain_jax.stream.updater import Updater

Weights = dict[str, np.ndarray]

# Sizes that neither 2 nor 8 devices divide.
ODD = dict(hidden_size=30, intermediate_size=45, num_heads=3, num_kv_heads=1, head_dim=10)


@functools.cache
def execution(dtype: str = "float32", devices: int = 1) -> Execution:
    """One for all tests of a process, so that they share compiled templates."""
    return Execution(Mesh(tuple(jax.devices()[:devices])), np.dtype(dtype), AttentionOptions(), 16)


def random_weights(spec: ModelSpec, seed: int = 0) -> Weights:
    """Weights of which none is trivial: norms around 1, biases not 0."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(size=shape) * (0.3 if len(shape) == 1 else 0.15)).astype(np.float32) + ("norm" in name)
        for name, shape in model_tensors(spec).items()
    }


def random_batch(spec: ModelSpec, seed: int = 0, rows: int = 3, seq: int = 12, *, packed: bool = False) -> Batch:
    """About half of the targets are supervised, by different weights; a packed row holds samples and padding."""
    rng = np.random.default_rng(seed)
    batch = unpadded_batch(rng.integers(0, spec.vocab_size, (rows, seq)))
    weights = np.where(rng.random((rows, seq)) < 0.5, rng.uniform(0.5, 2, (rows, seq)), 0).astype(np.float32)
    batch = batch._replace(loss_weights=weights)
    if packed:
        first, second = seq // 3, seq - 2
        segments = np.repeat([[1] * first + [2] * (second - first) + [0] * (seq - second)], rows, 0).astype(np.int32)
        positions = np.concatenate([np.arange(first), np.arange(second - first), np.arange(seq - second)])
        positions = np.broadcast_to(positions.astype(np.int32), segments.shape)
        batch = batch._replace(segment_ids=segments, positions=positions, loss_weights=weights * (segments > 0))
    return batch


def make_model(
    spec: ModelSpec,
    weights: Mapping[str, np.ndarray],
    run: Execution | None = None,
    *,
    trainable: Callable[[str], bool] = lambda name: True,
    layout: str = "chunks",
    resident: Collection[int] = (),
) -> Model:
    run = run or execution()
    store = HostStore(
        spec,
        [tensor_shapes(block) for block in spec.blocks],
        wire_dtype=run.dtype.name,
        rows=run.mesh.rows,
        trainable=trainable,
        layout=layout,
        resident=resident,
        make_resident=functools.partial(ResidentTensor, mesh=run.mesh, dtype=run.dtype),
    )
    for name, tensor in store.tensors.items():
        tensor.assign(weights[name])
    return Model(spec, store, run, {}, Path())


def hidden_states(spec: ModelSpec, weights: Mapping[str, jax.Array], x: jax.Array, context) -> tuple[jax.Array, list]:
    """The output of the last layer for the output of the embedding, and the statistics of the routers."""
    routers = []
    for i, layer in enumerate(spec.layers):
        mine = {path: weights[spec.tensor_name(i + 1, path)] for path in tensor_shapes(layer)}
        x, stats = DecoderLayer(layer).apply(bind(mine), x, context)
        routers += [stats] if stats else []
    return x, routers


def logits_of(spec: ModelSpec, weights: Mapping[str, jax.Array], batch: Batch) -> tuple[jax.Array, list]:
    embedding, head = spec.blocks[0], spec.blocks[-1]
    x = Embedding(embedding).apply(bind({"weight": weights["model.embed_tokens.weight"]}), batch.token_ids)
    x, routers = hidden_states(spec, weights, x, batch.context)
    number = len(spec.blocks) - 1
    mine = {path: weights[spec.tensor_name(number, path)] for path in tensor_shapes(head)}
    return Head(head).apply(bind(mine), x), routers


@functools.cache
def _sum_and_grads(spec: ModelSpec, dtype: str):
    def summed(weights, batches, divisor):
        weights = {name: w.astype(dtype) for name, w in weights.items()}
        loss, routers = jnp.float32(0), []
        for batch in batches:
            logits, stats = logits_of(spec, weights, batch)
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.targets[..., None], -1)[..., 0]
            loss -= (batch.loss_weights * chosen).sum() / divisor
            routers += stats
        if spec.router_aux_loss_coef:
            loss += spec.router_aux_loss_coef * balance_loss(jax.tree.map(lambda *parts: sum(parts), *routers))
        return loss

    return jax.jit(jax.value_and_grad(summed))


def loss_and_grads(
    spec: ModelSpec, weights: Mapping[str, np.ndarray], batches: Sequence[Batch], dtype: str = "float32"
) -> tuple[float, Weights]:
    """Mean loss of some micro-batches and all its gradients, by `jax.grad` of one function of the whole model."""
    divisor = np.float32(sum(float(batch.loss_weights.sum(dtype=np.float64)) for batch in batches))
    # An auxiliary loss is one of all micro-batches; without it they are done one by one, which compiles once.
    together = [tuple(batches)] if spec.router_aux_loss_coef else [(batch,) for batch in batches]
    parts = [_sum_and_grads(spec, dtype)(dict(weights), some, divisor) for some in together]
    grads = {name: sum(np.asarray(g[name], np.float64) for _, g in parts).astype(np.float32) for name in weights}
    return float(sum(np.float64(loss) for loss, _ in parts)), grads


def relative_errors(got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Norm of the difference over the norm, of every tensor; the two must name the same ones."""
    assert set(got) == set(expected)
    for name in expected:
        assert got[name].shape == expected[name].shape and got[name].dtype == np.float32, name
    norm = np.linalg.norm
    return {name: float(norm(got[name] - expected[name]) / norm(expected[name])) for name in expected}


def assert_same_gradients(got, expected, tolerance: float) -> None:
    errors = relative_errors(got, expected)
    assert max(errors.values()) <= tolerance, {name: e for name, e in errors.items() if not e <= tolerance}


def global_norm(grads: Mapping[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.square(grad, dtype=np.float64).sum() for grad in grads.values())))


@contextlib.contextmanager
def training(
    model: Model,
    settings: Settings = Settings(),
    *,
    optimizer: OptimizerConfig = OptimizerConfig(),
    config: TrainingConfig = TrainingConfig(learning_rate=1e-3, warmup_steps=2, weight_decay=0.1),
    total_steps: int = 20,
    record: Recorder | None = None,
) -> Iterator[tuple[Pipeline, Updater]]:
    """A pipeline with its optimizer thread, ended at exit."""
    record = record or Recorder()
    updater = Updater(model.store, HostOptimizer(model.store, optimizer, config, total_steps), record)
    try:
        yield Pipeline(model.store, model.run, settings, record, updater), updater
    finally:
        updater.close()
        record.close()


class PlainOptax:
    """The whole model updated by one optax transformation, as one would without streaming."""

    def __init__(self, spec: ModelSpec, weights: Weights, transformation: optax.GradientTransformation):
        self.spec, self.weights, self._tx = spec, dict(weights), transformation
        self._state = transformation.init(self.weights)
        self._update = jax.jit(self._tx.update)

    def step(self, batches: Sequence[Batch], *, skip_nonfinite: bool = False) -> tuple[float, float]:
        """The loss and the norm of the gradients before anything is done to them."""
        loss, grads = loss_and_grads(self.spec, self.weights, batches)
        norm = global_norm(grads)
        if not skip_nonfinite or np.isfinite(norm):
            updates, self._state = self._update(grads, self._state, self.weights)
            self.weights = jax.tree.map(np.asarray, optax.apply_updates(self.weights, updates))
        return loss, norm


def nearest_bfloat16(values: np.ndarray) -> np.ndarray:
    """What a finite float32 is rounded to, by arithmetic in float64: the nearest, and of two equally near the one away from 0."""
    size = np.abs(values.astype(np.float64))
    unit = 2.0 ** np.maximum(np.frexp(size)[1] - 8, -133)  # distance of bfloat16 numbers; below 2**-126 it is the same
    with np.errstate(over="ignore"):
        return np.copysign(np.floor(size / unit + 0.5) * unit, values).astype(ml_dtypes.bfloat16)


def state_arrays(tensor) -> dict[str, np.ndarray]:
    """Copies of the arrays of a tensor's training state, whole, by key."""
    out = {key: np.empty(array.shape, array.dtype) for key, array in tensor.state().items()}
    for key, array in tensor.state().items():
        array.read(0, out[key].reshape(-1))
    return out


def load_state_arrays(tensor, arrays: Mapping[str, np.ndarray]) -> None:
    """The inverse of `state_arrays`."""
    state = tensor.state()
    assert set(state) == set(arrays)
    for key, array in arrays.items():
        state[key].write(0, array.reshape(-1))
