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
from megatrain_jax.host.optimizer import HostOptimizer, make_schedule, needs_whole_tensors
from megatrain_jax.models.families import read_config, spec_from_config
from megatrain_jax.models.spec import Batch, ModelSpec
from megatrain_jax.report.metrics import MetricsLog, host_peak_bytes
from megatrain_jax.report.plot import plot_loss
from megatrain_jax.report.progress import Progress, make_progress
from megatrain_jax.stream.events import Listener, Recorder
from megatrain_jax.stream.pipeline import Pipeline, Settings, StepOutcome
from megatrain_jax.stream.planner import GIB, Plan, host_memory, make_plan, state_bytes_per_parameter
from megatrain_jax.stream.transfer import Mesh, make_mesh
from megatrain_jax.stream.updater import Updater

EVAL_GROUP = 4  # evaluation batches that go through a block together
_MOMENTS = {"sgd": 1, "lion": 1}


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What a run is, before anything of the model is allocated.

    Attributes:
      spec: the model.
      dataset: tokenised samples.
      batches: the stream of training steps.
      total_steps: of the run.
    """

    spec: ModelSpec
    dataset: loader.DataSet
    batches: loader.TrainLoader
    total_steps: int


@dataclasses.dataclass(frozen=True)
class Summary:
    """How a run ended.

    Attributes:
      step: steps done, of which `skipped` changed nothing.
      loss: of the last step of this process, None if it did none.
      eval_loss: of the last evaluation, None if there was none.
      interrupted: whether a signal ended it; it then continues from its checkpoint.
      model_dir: the Hugging Face folder, None if none was written.
    """

    step: int
    skipped: int
    loss: float | None
    eval_loss: float | None
    interrupted: bool
    model_dir: Path | None


def prepare(config: Config) -> Preparation:
    """Reads everything but the weights, and refuses what cannot work.

    Raises:
      UserError: something in the configuration, the data, the tokenizer or the model's config.json is wrong.
    """
    spec = spec_from_config(read_config(config.model.name, config.model.config_overrides))
    needs_whole_tensors(config.optimizer)
    tokenizer = chat.load_tokenizer(config.model.tokenizer or config.model.name)
    dataset = loader.prepare(config.dataset, tokenizer, seed=config.seed, vocab_size=spec.vocab_size)
    if dataset.sequence_length > spec.max_position_embeddings:
        raise UserError(
            f"dataset.max_seq_len: rows of {dataset.sequence_length} tokens are longer than the model's "
            f"{spec.max_position_embeddings} positions; set dataset.max_seq_len={spec.max_position_embeddings}"
        )
    training = config.training
    batches = loader.TrainLoader(
        dataset, training.batch_size, training.gradient_accumulation_steps, config.seed, config.dataset.shuffle
    )
    total = training.num_steps or math.ceil(training.num_train_epochs * batches.steps_per_epoch)
    make_schedule(training, total)
    _check_output(config, spec)
    return Preparation(spec, dataset, batches, total)


def plan(config: Config, prepared: Preparation, mesh: Mesh) -> Plan:
    """Where block inputs wait, how micro-batches are grouped, and what that needs. See `make_plan`."""
    training = config.training
    return make_plan(
        prepared.spec,
        config.memory,
        batch_size=training.batch_size,
        seq=prepared.dataset.sequence_length,
        micro_batches=training.gradient_accumulation_steps,
        dtype=config.model.dtype,
        devices=mesh.size,
        own_memory=mesh.has_own_memory,
        moments=_MOMENTS.get(config.optimizer.type, 2),
        hold_gradients=bool(training.max_grad_norm) or training.skip_nonfinite,
        device_bytes=mesh.memory_bytes(),
        host_bytes=host_memory(),
    )


def describe(config: Config, prepared: Preparation) -> list[str]:
    """The run in a few lines a person can check."""
    spec, data, training = prepared.spec, prepared.dataset, config.training
    stats = data.train_statistics
    lines = [
        f"model      {spec.family}, {spec.num_parameters / 1e6:,.1f} M parameters, {len(spec.layers)} layers, "
        f"{config.model.dtype}, {config.model.init} ({config.model.name})",
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
    own_memory = config.model.device != "cpu"
    moments = _MOMENTS.get(config.optimizer.type, 2)
    each = state_bytes_per_parameter(config.model.dtype, own_memory=own_memory, moments=moments)
    return f"memory     host {each * prepared.spec.num_parameters / GIB:.2f} GiB for weights and optimizer ({each} B/parameter)"


def describe_plan(p: Plan, micro_batches: int, mesh: Mesh) -> str:
    where = "in host memory" if p.offload_activations else "on the device"
    groups = "" if p.group_size == micro_batches else f", micro-batches in groups of {p.group_size}"
    return (
        f"memory     host {p.host / GIB:.2f} GiB (state {p.state / GIB:.2f}, gradients {p.gradients / GIB:.2f}), device about "
        f"{p.device / GIB:.2f} GiB, block inputs {where} ({p.activations / GIB:.2f} GiB{groups}); "
        f"{mesh.size} x {mesh.devices[0].device_kind}"
    )


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

    def fit(self) -> Summary:
        """Trains, and returns how it ended. SIGTERM and SIGINT save a checkpoint after the step in flight and return.

        Raises:
          UserError: something that the user brought does not work; nothing of the run was written.
          NonFiniteError: the gradient is not finite and the configuration says not to skip such steps.
        """
        config = self.config
        prepared = prepare(config)
        mesh = make_mesh(config.model.device)
        if jax.process_count() > 1:
            raise UserError("training over several processes cannot save its state yet; use the devices of one process")
        p = plan(config, prepared, mesh)
        resume = self._find_checkpoint()
        model = models.load_for_training(config, mesh)
        optimizer = HostOptimizer(model.store, config.optimizer, config.training, prepared.total_steps)
        if not model.store.num_trainable:
            raise UserError(f"model.freeze: {list(config.model.freeze)} leaves nothing to train")
        done = {"step": 0, "applied_steps": 0, "tokens": 0}
        if resume:
            done = state.load(resume, model.store)
        self._output.mkdir(parents=True, exist_ok=True)
        config.dump(self._output / "config.yaml")
        with (
            MetricsLog(self._output / "metrics.jsonl", done["step"] if resume else None) as metrics,
            make_progress(config.logging.progress, prepared.total_steps, done["step"]) as progress,
            _stop_signals() as stop,
        ):
            for line in [*describe(config, prepared), describe_plan(p, config.training.gradient_accumulation_steps, mesh)]:
                progress.message(line)
            if resume:
                progress.message(f"resumed    from {resume.name}, step {done['step']}")
            return self._run(model, optimizer, prepared, p, done, metrics, progress, stop)

    def _run(self, model, optimizer, prepared, p: Plan, done, metrics, progress, stop: _Stop) -> Summary:
        config, training = self.config, self.config.training
        record = Recorder(self._listener)
        updater = Updater(model.store, optimizer, record)
        settings = Settings(p.group_size, p.offload_activations, training.max_grad_norm, training.skip_nonfinite)
        pipeline = Pipeline(model.store, model.run, settings, record, updater)
        evaluator = Evaluator(config, prepared.dataset, pipeline)
        meter = Meter(config.logging.log_interval)
        step, applied, tokens = done["step"], done["applied_steps"], done["tokens"]
        last_loss, saved = None, step if step else None

        def save_state() -> None:
            nonlocal saved
            updater.drain()
            folder = self._output / f"checkpoint-{step}"
            started = time.perf_counter()
            state.save(folder, model.store, {"step": step, "applied_steps": applied, "tokens": tokens})
            state.prune(self._output, config.checkpoint.save_total_limit)
            saved = step
            progress.message(f"saved      {folder.name} in {time.perf_counter() - started:.1f} s")

        with contextlib.closing(record), contextlib.closing(updater):
            if config.eval.eval_on_start and step == 0:
                evaluator.run(step, metrics, progress)
            steps = prepared.batches.steps(step, prepared.total_steps)
            with contextlib.closing(steps):
                while step < prepared.total_steps and not stop.requested:
                    meter.start()
                    micro_batches = next(steps)
                    meter.data_ready()
                    outcome = pipeline.train_step(micro_batches)
                    rate = optimizer.learning_rate(applied)
                    step, applied, last_loss = step + 1, applied + outcome.applied, outcome.loss
                    tokens += meter.add(micro_batches, outcome)
                    if step % config.logging.log_interval == 0 or step == prepared.total_steps:
                        line = meter.record(step, rate, skipped=step - applied)
                        line["tokens"] = tokens
                        line["device_peak_bytes"] = model.run.mesh.peak_bytes()
                        metrics.write(line)
                        progress.step(line)
                    if evaluator.is_due(step, prepared.batches.steps_per_epoch):
                        evaluator.run(step, metrics, progress)
                    if self._save_is_due(step, prepared) and step < prepared.total_steps:
                        save_state()
            if config.checkpoint.save_strategy != "no" and saved != step:
                save_state()
            updater.drain()
        folder = None
        if stop.requested and step < prepared.total_steps:
            progress.message(f"stopped    at step {step} by {stop.requested}; the same command continues")
        else:
            if evaluator.wanted and evaluator.last_step != step:
                evaluator.run(step, metrics, progress)
            if config.checkpoint.save_final:
                folder = self._output / "model"
                checkpoint = config.checkpoint
                models.save(model, folder, dtype=checkpoint.save_dtype, max_shard_size=checkpoint.max_shard_size)
                progress.message(f"saved      {folder}, for transformers")
        plot_loss(self._output / "metrics.jsonl", self._output / "loss.png")
        return Summary(step, step - applied, last_loss, evaluator.last_loss, bool(stop.requested), folder)

    def _save_is_due(self, step: int, prepared: Preparation) -> bool:
        every = {
            "steps": self.config.checkpoint.save_steps,
            "epoch": prepared.batches.steps_per_epoch,
        }.get(self.config.checkpoint.save_strategy)
        return every is not None and step % every == 0

    def _find_checkpoint(self) -> Path | None:
        wanted = self.config.training.resume_from_checkpoint
        if wanted == "none":
            return None
        if wanted != "auto":
            state.read_meta(Path(wanted))
            return Path(wanted)
        found = state.checkpoints(self._output)
        return found[-1] if found else None


class Evaluator:
    """Scores the held-out samples.

    Attributes:
      wanted: whether the configuration asks for evaluation.
      last_step, last_loss: of the last evaluation, None before the first.
    """

    def __init__(self, config: Config, dataset: loader.DataSet, pipeline: Pipeline):
        self._config, self._dataset, self._pipeline = config, dataset, pipeline
        self.wanted = bool(dataset.eval) and (config.eval.eval_strategy != "no" or config.eval.eval_on_start)
        self.last_step: int | None = None
        self.last_loss: float | None = None

    def is_due(self, step: int, steps_per_epoch: int) -> bool:
        every = {"steps": self._config.eval.eval_steps, "epoch": steps_per_epoch}.get(self._config.eval.eval_strategy)
        return self.wanted and every is not None and step % every == 0

    def run(self, step: int, metrics: MetricsLog, progress: Progress) -> None:
        started = time.perf_counter()
        size = self._config.eval.eval_batch_size or self._config.training.batch_size
        batches = loader.eval_batches(self._dataset, size, self._config.eval.max_eval_batches)
        total, weight = 0.0, 0.0
        for group in _groups(batches, EVAL_GROUP):
            total += self._pipeline.losses(group)
            weight += sum(float(batch.loss_weights.sum()) for batch in group)
        loss = total / weight
        perplexity = math.exp(loss) if loss < 700 else math.inf
        seconds = time.perf_counter() - started
        metrics.write({"step": step, "eval_loss": loss, "perplexity": perplexity, "eval_seconds": seconds})
        progress.message(f"eval       step {step}: loss {loss:.4f}, perplexity {perplexity:.2f} ({seconds:.1f} s)")
        self.last_step, self.last_loss = step, loss


class Meter:
    """What a step cost and learned, averaged between two records. Tokens are real ones, padding is never counted."""

    def __init__(self, log_interval: int):
        self._interval = log_interval
        self._began: float | None = None
        self._reset()

    def _reset(self) -> None:
        self._losses: list[float] = []
        self._tokens = self._supervised = 0
        self._norm = math.nan
        self._seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def start(self) -> None:
        self._began = time.perf_counter()

    def data_ready(self) -> None:
        self._count("data_wait", time.perf_counter() - self._began)

    def _count(self, what: str, seconds: float) -> None:
        self._seconds[what] = self._seconds.get(what, 0.0) + seconds

    def add(self, micro_batches: list[Batch], outcome: StepOutcome) -> int:
        """Takes in a step; returns its number of tokens."""
        for what, seconds in outcome.seconds.items():
            self._count(what, seconds)
        self._count("step", time.perf_counter() - self._began)
        tokens = sum(int(np.count_nonzero(batch.segment_ids)) for batch in micro_batches)
        self._tokens += tokens
        self._supervised += sum(int(np.count_nonzero(batch.loss_weights)) for batch in micro_batches)
        self._losses.append(outcome.loss)
        self._norm = outcome.grad_norm
        return tokens

    def record(self, step: int, learning_rate: float, *, skipped: int) -> dict[str, Any]:
        """The means since the last record: seconds a step, loss, tokens a second of step time."""
        count = len(self._losses)
        line = {
            "step": step,
            "loss": sum(self._losses) / count,
            "learning_rate": learning_rate,
            "grad_norm": self._norm,
            "tokens_per_second": self._tokens / self._seconds["step"],
            "supervised_share": self._supervised / max(self._tokens, 1),
            "skipped_steps": skipped,
            "seconds": {what: seconds / count for what, seconds in self._seconds.items()},
            "host_peak_bytes": host_peak_bytes(),
        }
        self._reset()
        return line


class _Stop:
    """Set by the first SIGTERM or SIGINT; the second one acts at once."""

    requested: str | None = None


@contextlib.contextmanager
def _stop_signals() -> Iterator[_Stop]:
    stop, before = _Stop(), {}

    def on_signal(number, _frame):
        stop.requested = signal.Signals(number).name
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


def _groups(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    group = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _check_output(config: Config, spec: ModelSpec) -> None:
    """Refuses an output folder that the run could not write at its end."""
    output = Path(config.output_dir)
    parent = next(folder for folder in (output, *output.resolve().parents) if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"output_dir: '{parent}' is not a writable folder; choose another for '{output}'")
    huggingface.parse_size(config.checkpoint.max_shard_size)
    if config.checkpoint.save_final:
        size = spec.num_parameters * (2 if config.checkpoint.save_dtype == "bfloat16" else 4)
        huggingface.check_save_folder(output / "model", size)
