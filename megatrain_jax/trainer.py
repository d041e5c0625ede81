"""The training loop: batch -> step -> metrics -> eval -> checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megatrain_jax import model as models
from megatrain_jax.checkpoint import huggingface, state
from megatrain_jax.config import Config, UserError
from megatrain_jax.data import chat, loader
from megatrain_jax.host.optimizer import HostOptimizer, choose_layout, make_schedule, make_transformation
from megatrain_jax.models.blocks import model_tensors
from megatrain_jax.models.families import read_config, spec_from_config
from megatrain_jax.models.spec import Batch, ModelSpec
from megatrain_jax.report.meter import Meter
from megatrain_jax.report.metrics import MetricsLog, host_peak_bytes
from megatrain_jax.report.plot import plot_loss
from megatrain_jax.report.progress import Progress, make_progress
from megatrain_jax.report.timeline import Profile
from megatrain_jax.stream.events import Listener, Recorder
from megatrain_jax.stream.pipeline import Pipeline, Settings
from megatrain_jax.stream.planner import GIB, Plan, host_memory, make_plan, spend_room, state_bytes_per_parameter
from megatrain_jax.stream.transfer import Mesh, make_mesh
from megatrain_jax.stream.updater import Updater

EVAL_GROUP = 4  # evaluation batches that go through a block together


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What a run is, before anything of the model is allocated.

    Attributes:
      spec: the model.
      trained: parameters that are not frozen.
      dataset: tokenised samples.
      batches: the stream of training steps.
      total_steps: of the run.
    """

    spec: ModelSpec
    trained: int
    dataset: loader.DataSet
    batches: loader.TrainLoader
    total_steps: int


@dataclasses.dataclass
class Position:
    """Where a run is; with the weights and the optimizer's state it is all that a checkpoint holds.

    Attributes:
      step: steps done. The data follows from it.
      applied_steps: those that changed the weights. The learning rate follows from it.
      tokens: trained on so far, without padding.
      unrecorded: what the meter gathered since the last record.
      keep_layers, resident_blocks: what the plan spent device memory on. A run that resumes does the same as long as it
        fits, whatever memory is free then, because the last bit of a weight can depend on it.
    """

    step: int = 0
    applied_steps: int = 0
    tokens: int = 0
    unrecorded: dict[str, Any] = dataclasses.field(default_factory=dict)
    keep_layers: int = 0
    resident_blocks: int = 0

    @property
    def skipped_steps(self) -> int:
        return self.step - self.applied_steps


@dataclasses.dataclass(frozen=True)
class Summary:
    """How a run ended.

    Attributes:
      step: steps done, of which `skipped` changed nothing.
      loss: of the last step of this process, None if it did none.
      eval_loss: of the last evaluation of this process, None if there was none.
      interrupted: whether a signal ended it before its last step.
      model_dir: the Hugging Face folder, None if none was written.
    """

    step: int
    skipped: int
    loss: float | None
    eval_loss: float | None
    interrupted: bool
    model_dir: Path | None


# ---------------------------------------------------------------------- before the model is allocated


def prepare(config: Config) -> Preparation:
    """Reads everything but the weights, and refuses what cannot work. No device is touched.

    Raises:
      UserError: something in the configuration, the data, the tokenizer or the model's config.json is wrong.
    """
    training = config.training
    spec = spec_from_config(read_config(config.model.name, config.model.config_overrides))
    choose_layout(config.optimizer, config.model.dtype)
    is_trained = models.trainable(config.model.freeze)
    trained = sum(math.prod(shape) for name, shape in model_tensors(spec).items() if is_trained(name))
    if not trained:
        raise UserError(f"model.freeze: {list(config.model.freeze)} leaves nothing to train; name fewer tensors")
    _check_output(config, spec, trained)
    tokenizer = chat.load_tokenizer(config.model.tokenizer or config.model.name)
    dataset = loader.prepare(config.dataset, tokenizer, seed=config.seed, vocab_size=spec.vocab_size)
    if dataset.sequence_length > spec.max_position_embeddings:
        raise UserError(
            f"dataset.max_seq_len: rows of {dataset.sequence_length} tokens are longer than the model's "
            f"{spec.max_position_embeddings} positions; set dataset.max_seq_len={spec.max_position_embeddings}"
        )
    batches = loader.TrainLoader(
        dataset, training.batch_size, training.gradient_accumulation_steps, config.seed, config.dataset.shuffle
    )
    total = training.num_steps or math.ceil(training.num_train_epochs * batches.steps_per_epoch)
    make_schedule(training, total)
    return Preparation(spec, trained, dataset, batches, total)


def _check_output(config: Config, spec: ModelSpec, trained: int) -> None:
    """Refuses an output folder that the run could not write into at its end."""
    output, checkpoint = Path(config.output_dir), config.checkpoint
    parent = next(folder for folder in (output, *output.parents) if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"output_dir: '{parent}' is not a writable folder; choose another for '{output}'")
    final = spec.num_parameters * (2 if checkpoint.save_dtype == "bfloat16" else 4)
    state_size = int(trained * (4 + _optimizer_bytes(config)))
    if checkpoint.save_final:
        huggingface.check_save_folder(output / "model", final)
    if checkpoint.save_strategy != "no":
        huggingface.check_save_folder(output / "checkpoint", state_size + final * checkpoint.save_final)


def _optimizer_bytes(config: Config) -> float:
    """Bytes of optimizer state per parameter; tracing asks optax without computing anything."""
    side = 512
    tx = make_transformation(config.optimizer, 0.0, lambda step: 0.0, decay=True)
    made = jax.eval_shape(tx.init, [jax.ShapeDtypeStruct((side, side), np.float32)])
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made) if leaf.ndim) / side**2


def _state_bytes(config: Config, own_memory: bool) -> float:
    """Bytes of host memory that a trained parameter takes."""
    return state_bytes_per_parameter(
        config.model.dtype,
        own_memory=own_memory,
        optimizer_bytes=_optimizer_bytes(config),
        split=choose_layout(config.optimizer, config.model.dtype) == "split",
    )


def resumed_plan(config: Config, prepared: Preparation, mesh: Mesh, at: Position) -> Plan:
    """The plan of a run that continues: what is left to "auto" is as it was before, if that fits."""
    memory, before = config.memory, {}
    if memory.keep_intermediates == "auto":
        before["keep_intermediates"] = at.keep_layers
    if memory.resident_blocks == "auto":
        before["resident_blocks"] = at.resident_blocks
    try:
        return plan(dataclasses.replace(config, memory=dataclasses.replace(memory, **before)), prepared, mesh)
    except UserError:
        return plan(config, prepared, mesh)


def plan(config: Config, prepared: Preparation, mesh: Mesh) -> Plan:
    """Where everything waits, how micro-batches are grouped, and what that needs. See `make_plan` and `spend_room`."""
    training, seq = config.training, prepared.dataset.sequence_length
    common = dict(
        micro_batches=training.gradient_accumulation_steps,
        dtype=config.model.dtype,
        devices=mesh.size,
        own_memory=mesh.has_own_memory,
        state_bytes=_state_bytes(config, mesh.has_own_memory),
        hold_gradients=bool(training.max_grad_norm) or training.skip_nonfinite,
        device_bytes=mesh.memory_bytes(),
        host_bytes=host_memory(),
    )
    first = make_plan(
        prepared.spec, config.memory, trained=prepared.trained, batch_size=training.batch_size, seq=seq, **common
    )
    tokens = math.ceil(training.batch_size / mesh.size) * seq
    return spend_room(
        first, prepared.spec, config.memory, tokens=tokens, optimizer_bytes=_optimizer_bytes(config), **common
    )


def describe(config: Config, prepared: Preparation) -> list[str]:
    """The run in a few lines a person can check."""
    spec, data, training = prepared.spec, prepared.dataset, config.training
    stats = data.train_statistics
    frozen = spec.num_parameters - prepared.trained
    lines = [
        f"model      {spec.family}, {spec.num_parameters / 1e6:,.1f} M parameters"
        + (f" ({frozen / 1e6:,.1f} M frozen)" if frozen else "")
        + f", {len(spec.layers)} layers, {config.model.dtype}, {config.model.init} ({config.model.name})",
        f"data       {stats.samples:,} samples ({data.format}), {stats.tokens:,} tokens, "
        f"{stats.supervised_tokens / max(stats.tokens, 1):.0%} supervised, rows of {data.sequence_length}",
    ]
    if data.eval:
        held = data.eval_statistics
        lines.append(f"eval       {held.samples:,} samples, {held.tokens:,} tokens")
    for what, counts in (("changed", stats.changed), ("dropped", stats.dropped)):
        lines += [f"data       {what} {count:,}: {reason}" for reason, count in counts.items()]
    lines.append(
        f"training   {prepared.total_steps:,} steps of {training.gradient_accumulation_steps} x {training.batch_size} rows "
        f"({prepared.batches.steps_per_epoch:,} steps an epoch), {config.optimizer.type}, "
        f"{training.lr_scheduler_type} from {training.learning_rate:g}"
    )
    if config.ignored:
        lines.append(f"config     no effect here: {', '.join(config.ignored)}")
    return lines


def describe_needs(config: Config, prepared: Preparation) -> str:
    """Host memory of the run, from arithmetic alone: no device is touched."""
    each = _state_bytes(config, own_memory=config.model.device != "cpu")
    return f"memory     host {each * prepared.trained / GIB:.2f} GiB for weights and optimizer ({each:.3g} B/parameter)"


def _describe_plan(p: Plan, micro_batches: int, mesh: Mesh) -> list[str]:
    where = "in host memory" if p.offload_activations else "on the device"
    groups = "" if p.group_size == micro_batches else f", micro-batches in groups of {p.group_size}"
    return [
        f"memory     host {p.host / GIB:.2f} GiB (state {p.state / GIB:.2f}, gradients {p.gradients / GIB:.2f}), device about "
        f"{p.device / GIB:.2f} GiB of {mesh.size} x {mesh.devices[0].device_kind}",
        f"stream     block inputs {where} ({p.activations / GIB:.2f} GiB{groups}), {p.keep_layers} layers keep their "
        f"intermediates, {len(p.resident)} blocks stay on the device",
    ]


# ---------------------------------------------------------------------- the run


class Trainer:
    """One run of a configuration.

    Args:
      config: the run; see `load_config`.
      listener: receives the pipeline's events.
    """

    def __init__(self, config: Config, listener: Listener | None = None):
        self.config = config
        self._listener = listener
        self._output = Path(config.output_dir)
        wanted = config.logging.profile
        self._profile = Profile(self._output, wanted.start_step, wanted.num_steps) if wanted.enabled else None

    def _listeners(self) -> Listener | None:
        """Who listens to the pipeline, as one; None, so that nothing is recorded, if nobody does."""
        listeners = [listener for listener in (self._listener, self._profile) if listener]
        return (lambda event: [listener(event) for listener in listeners]) if listeners else None

    def fit(self) -> Summary:
        """Trains, and returns how it ended. SIGTERM and SIGINT save a checkpoint after the step in flight and return.

        Raises:
          UserError: something that the user brought does not work; nothing of the run was written.
          NonFiniteError: the gradient is not finite and the configuration says not to skip such steps.
        """
        config = self.config

        # Whatever can be refused is refused here, the cheapest first, before anything is written.
        prepared = prepare(config)
        resume = self._find_checkpoint(prepared.total_steps)
        mesh = make_mesh(config.model.device)
        if jax.process_count() > 1:
            raise UserError("training over several processes cannot save its state yet; use the devices of one process")
        at = Position(**state.read_meta(resume)) if resume else Position()
        p = resumed_plan(config, prepared, mesh, at) if resume else plan(config, prepared, mesh)
        at.keep_layers, at.resident_blocks = p.keep_layers, len(p.resident)
        model = models.load_for_training(config, mesh, p.resident)
        optimizer = HostOptimizer(model.store, config.optimizer, config.training, prepared.total_steps)
        if resume:
            state.load(resume, model.store)

        self._output.mkdir(parents=True, exist_ok=True)
        config.dump(self._output / "config.yaml")
        record = Recorder(self._listeners())
        updater = Updater(model.store, optimizer, record)
        settings = Settings(
            p.group_size,
            p.offload_activations,
            p.keep_layers,
            config.training.max_grad_norm,
            config.training.skip_nonfinite,
        )
        pipeline = Pipeline(model.store, model.run, settings, record, updater)
        with (
            MetricsLog(self._output / "metrics.jsonl", at.step if resume else None) as metrics,
            make_progress(config.logging.progress, prepared.total_steps, at.step) as progress,
            contextlib.closing(record),
            contextlib.closing(updater),
            _stop_signals() as stop,
        ):
            for line in [
                *describe(config, prepared),
                *_describe_plan(p, config.training.gradient_accumulation_steps, mesh),
            ]:
                progress.message(line)
            if resume:
                progress.message(f"resumed    from {resume.name}, step {at.step}")
            evaluator = Evaluator(config, prepared, pipeline, metrics, progress)
            loss = self._train(at, prepared, pipeline, updater, optimizer, evaluator, metrics, progress, stop)
            if self._profile:
                record.close()  # what is still to be seen belongs to the last step
                if line := self._profile.finish():
                    progress.message(line)
            interrupted, folder = at.step < prepared.total_steps, None
            if interrupted:
                progress.message(f"stopped    at step {at.step} by {stop.signal}; {self._remedy()}")
            elif config.checkpoint.save_final:
                folder = self._save_model(model, progress)
        plot_loss(self._output / "metrics.jsonl", self._output / "loss.png")
        return Summary(at.step, at.skipped_steps, loss, evaluator.last_loss, interrupted, folder)

    def _train(self, at: Position, prepared, pipeline, updater, optimizer, evaluator, metrics, progress, stop):
        """The loop. Moves `at` on, leaves no update pending; returns the loss of the last step, None if there was none."""
        config, total, loss, saved = self.config, prepared.total_steps, None, at.step
        meter = Meter(at.unrecorded)
        if at.step == 0 and config.eval.eval_on_start:
            evaluator.run(0)
        with contextlib.closing(prepared.batches.steps(at.step, total)) as steps:
            while at.step < total and not stop.signal:
                # ---- a step
                if self._profile and (line := self._profile.step_begins(at.step + 1)):
                    progress.message(line)
                meter.start()
                micro_batches = next(steps)
                meter.data_ready()
                rate = optimizer.learning_rate(at.applied_steps)
                outcome = pipeline.train_step(micro_batches)
                loss, tokens = outcome.loss, _count(micro_batches, "segment_ids")
                at.step += 1
                if self._profile:
                    self._profile.step_ends(at.step)
                at.applied_steps += outcome.applied
                at.tokens += tokens

                # ---- metrics
                meter.finish(
                    loss=loss,
                    grad_norm=outcome.grad_norm,
                    tokens=tokens,
                    supervised_tokens=_count(micro_batches, "loss_weights"),
                    seconds=outcome.seconds,
                )
                if at.step % config.logging.log_interval == 0 or at.step == total:
                    line = {"step": at.step, **meter.record(), "learning_rate": rate, "tokens": at.tokens}
                    line |= {"skipped_steps": at.skipped_steps, "host_peak_bytes": host_peak_bytes()}
                    line |= {"device_peak_bytes": pipeline.run.mesh.peak_bytes()}
                    metrics.write(line)
                    progress.step(line)
                at.unrecorded = meter.carried()

                # ---- evaluation; before the checkpoint of the same step, so that a resumed run need not repeat it
                if evaluator.is_due(at.step):
                    evaluator.run(at.step)

                # ---- checkpoint
                if self._save_is_due(at.step, prepared):
                    updater.drain()
                    self._save_state(pipeline.store, at, progress)
                    saved = at.step
        updater.drain()
        if saved != at.step and config.checkpoint.save_strategy != "no":
            self._save_state(pipeline.store, at, progress)
        return loss

    def _save_is_due(self, step: int, prepared: Preparation) -> bool:
        strategy, per_epoch = self.config.checkpoint.save_strategy, prepared.batches.steps_per_epoch
        every = {"steps": self.config.checkpoint.save_steps, "epoch": per_epoch}.get(strategy)
        return every is not None and step % every == 0

    def _save_state(self, store, at: Position, progress: Progress) -> None:
        started, folder = time.perf_counter(), self._output / f"checkpoint-{at.step}"
        state.save(folder, store, dataclasses.asdict(at))
        state.prune(self._output, self.config.checkpoint.save_total_limit)
        progress.message(f"saved      {folder.name} in {time.perf_counter() - started:.1f} s")

    def _save_model(self, model: models.Model, progress: Progress) -> Path:
        config, folder = self.config, self._output / "model"
        if config.model.tokenizer:
            model = dataclasses.replace(model, source=Path(config.model.tokenizer))
        models.save(model, folder, dtype=config.checkpoint.save_dtype, max_shard_size=config.checkpoint.max_shard_size)
        progress.message(f"saved      {folder}, for transformers")
        return folder

    def _find_checkpoint(self, total_steps: int) -> Path | None:
        """The checkpoint to continue from. What is left must lead to one history: no later checkpoint may stand there."""
        key, wanted = "training.resume_from_checkpoint", self.config.training.resume_from_checkpoint
        there = state.checkpoints(self._output)
        found = (there[-1] if there else None) if wanted == "auto" else None if wanted == "none" else Path(wanted)
        step = state.read_meta(found)["step"] if found else 0
        if step > total_steps:
            raise UserError(
                f"{key}: '{found}' is at step {step} and the run ends at {total_steps}; raise training.num_steps"
            )
        for path in there:
            if state.read_meta(path)["step"] > step:
                raise UserError(
                    f"{key}: {wanted} starts at step {step}, and '{path}' of an earlier run is there; "
                    "delete it, set auto to continue from it, or choose another output_dir"
                )
        return found

    def _remedy(self) -> str:
        if self.config.checkpoint.save_strategy == "no":
            return "nothing was saved (checkpoint.save_strategy: no)"
        if self.config.training.resume_from_checkpoint == "auto":
            return "the same command continues"
        return "training.resume_from_checkpoint=auto continues"


def _count(batches: list[Batch], field: str) -> int:
    return sum(int(np.count_nonzero(getattr(batch, field))) for batch in batches)


class Evaluator:
    """Scores the held-out samples.

    Attributes:
      last_loss: of the last evaluation, None before the first.
    """

    def __init__(
        self, config: Config, prepared: Preparation, pipeline: Pipeline, metrics: MetricsLog, progress: Progress
    ):
        self._config, self._prepared, self._pipeline = config, prepared, pipeline
        self._metrics, self._progress = metrics, progress
        self.last_loss: float | None = None

    def is_due(self, step: int) -> bool:
        """Whether to evaluate after `step`; after the last one always, if there is evaluation at all."""
        config = self._config.eval
        if config.eval_strategy == "no" and not config.eval_on_start:
            return False
        every = {"steps": config.eval_steps, "epoch": self._prepared.batches.steps_per_epoch}.get(config.eval_strategy)
        return step == self._prepared.total_steps or (every is not None and step % every == 0)

    def run(self, step: int) -> None:
        """Records the mean loss over all supervised tokens, whatever the batch size, and its perplexity."""
        config, started = self._config, time.perf_counter()
        size = config.eval.eval_batch_size or config.training.batch_size
        batches = loader.eval_batches(self._prepared.dataset, size, config.eval.max_eval_batches)
        total = weight = 0.0
        for group in _groups(batches, EVAL_GROUP):
            total += self._pipeline.losses(group)
            weight += sum(float(batch.loss_weights.sum(dtype=np.float64)) for batch in group)
        loss = total / weight
        perplexity = math.exp(loss) if loss < 700 else math.inf
        seconds = time.perf_counter() - started
        self._metrics.write({"step": step, "eval_loss": loss, "perplexity": perplexity, "eval_seconds": seconds})
        self._progress.message(
            f"eval       step {step}: loss {loss:.4f}, perplexity {perplexity:.2f} ({seconds:.1f} s)"
        )
        self.last_loss = loss


def _groups(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    group = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


class _Stop:
    """Name of the first SIGTERM or SIGINT, None before it; the second one acts at once."""

    signal: str | None = None


@contextlib.contextmanager
def _stop_signals() -> Iterator[_Stop]:
    stop, before = _Stop(), {}

    def on_signal(number, _frame):
        stop.signal = signal.Signals(number).name
        for each, handler in before.items():
            signal.signal(each, handler)

    with contextlib.suppress(ValueError):  # not the main thread: the caller keeps its handlers
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
