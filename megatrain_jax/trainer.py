"""The training loop: batch -> step -> metrics -> eval -> checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megatrain_jax import model as models
from megatrain_jax.checkpoint import huggingface, state
from megatrain_jax.checkpoint import identity as same_run
from megatrain_jax.checkpoint.lock import locked
from megatrain_jax.checkpoint.saver import Saver
from megatrain_jax.config import Config, UserError
from megatrain_jax.data import loader
from megatrain_jax.host.optimizer import HostOptimizer
from megatrain_jax.models.spec import Batch
from megatrain_jax.preparation import (
    Preparation,
    describe,
    describe_counts,
    describe_plan,
    identity,
    plan,
    prepare,
    resumed_plan,
)
from megatrain_jax.report.meter import Meter
from megatrain_jax.report.metrics import MetricsLog, host_peak_bytes, named_errors
from megatrain_jax.report.plot import plot_loss
from megatrain_jax.report.progress import Progress, make_progress
from megatrain_jax.report.timeline import Profile
from megatrain_jax.signals import stop_signals
from megatrain_jax.stream.events import Listener, Recorder
from megatrain_jax.stream.pipeline import Pipeline, Settings
from megatrain_jax.stream.transfer import make_mesh
from megatrain_jax.stream.updater import NonFiniteError, Updater
from megatrain_jax.watchdog import Watchdog, waiting

EVAL_GROUP = 4  # evaluation batches that go through a block together


@dataclasses.dataclass
class Position:
    """Where a run is; with the weights and the optimizer's state it is all that a checkpoint holds.

    Attributes:
      step: steps done. The data follows from it.
      applied_steps: those that changed the weights. The learning rate follows from it.
      skipped_in_a_row: steps that changed nothing since the last one that did.
      tokens: trained on so far, without padding.
      unrecorded: what the meter gathered since the last record.
      keep_layers, resident_blocks: what the plan spent device memory on. A run that resumes does the same as long as it
        fits, whatever memory is free then, because the last bit of a weight can depend on it.
      expert_groups: blocks that the experts of a layer streamed in; the same holds for it.
    """

    step: int = 0
    applied_steps: int = 0
    skipped_in_a_row: int = 0
    tokens: int = 0
    unrecorded: dict[str, Any] = dataclasses.field(default_factory=dict)
    keep_layers: int = 0
    resident_blocks: int = 0
    expert_groups: int = 1

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

        A wait that is as long as `training.watchdog_seconds` ends the process: nothing can interrupt it.

        Raises:
          UserError: something that the user brought does not work; nothing of the run was written.
          NonFiniteError: the gradient is not finite and the configuration says not to skip such steps, or not so many.
        """
        with locked(self._output) as held:
            return self._fit(held)

    def _fit(self, held: bool) -> Summary:
        config = self.config

        # Whatever can be refused is refused here, the cheapest first, before anything is written.
        prepared = prepare(config)
        candidates, damaged = self._find_checkpoints(prepared)
        mesh = make_mesh(config.model.device)
        if jax.process_count() > 1:
            raise UserError("training over several processes cannot save its state yet; use the devices of one process")
        if candidates:
            before = Position(**state.read_run(candidates[0])["position"])
            p = resumed_plan(config, prepared, mesh, before.keep_layers, before.resident_blocks, before.expert_groups)
        else:
            p = plan(config, prepared, mesh)
        mesh.reserve_pinned(p.pinned)
        model = models.load_for_training(config, mesh, p.resident, p.expert_groups)
        optimizer = HostOptimizer(model.store, config.optimizer, config.training, prepared.total_steps)
        self._identity = identity(config, prepared) | {"frozen": state.frozen_hashes(model.store)}
        at, notes = self._load(candidates, damaged, model.store)
        at.keep_layers, at.resident_blocks, at.expert_groups = p.keep_layers, len(p.resident), p.expert_groups

        with named_errors(self._output / "config.yaml"):
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
            MetricsLog(self._output / "metrics.jsonl", at.step if candidates else None) as metrics,
            make_progress(config.logging.progress, prepared.total_steps, at.step) as progress,
            Watchdog(config.training.watchdog_seconds, progress.message),
            contextlib.closing(record),
            updater,
            Saver(self._output, model.store, config.checkpoint.save_total_limit, self._small_files(model)) as saver,
            _failure_told(saver, progress.message),
            stop_signals(progress.message) as stop,
        ):
            for line in [
                *describe(config, prepared),
                *describe_plan(config, prepared, p, mesh),
                *(f"weights    {note}" for note in model.notes),
                *notes,
            ]:
                progress.message(line)
            if not held:
                progress.message("lock       this file system has none: see to it that no second run writes here")
            evaluator = Evaluator(config, prepared, pipeline, metrics, progress)
            loss = self._train(at, prepared, pipeline, updater, optimizer, evaluator, metrics, progress, stop, saver)
            if self._profile:
                record.close()  # what is still to be seen belongs to the last step
                if line := self._profile.finish():
                    progress.message(line)
            if config.dataset.streaming:  # known only now
                for line in describe_counts(prepared.batches):
                    progress.message(line)
            interrupted, folder = at.step < prepared.total_steps, None
            if interrupted:
                progress.message(f"stopped    at step {at.step} by {stop.signal}; {self._remedy()}")
            elif config.checkpoint.save_final:
                folder = self._save_model(model, progress)
        with named_errors(self._output / "loss.png"):
            plot_loss(self._output / "metrics.jsonl", self._output / "loss.png")
        return Summary(at.step, at.skipped_steps, loss, evaluator.last_loss, interrupted, folder)

    def _train(self, at: Position, prepared, pipeline, updater, optimizer, evaluator, metrics, progress, stop, saver):
        """The loop. Moves `at` on, leaves no update or save pending; the loss of the last step, None if there was none."""
        config, total, loss, saved = self.config, prepared.total_steps, None, at.step

        def save() -> None:
            """Starts a checkpoint of the state after the step that was just done."""
            if line := saver.result():
                progress.message(line)
            updater.drain()
            metrics.sync()
            saver.start(at.step, self._run_record(at))

        meter = Meter(at.unrecorded)
        if at.step == 0 and config.eval.eval_on_start:
            evaluator.run(0)
        first = self._output / "checkpoint-0"
        if at.step == 0 and config.checkpoint.save_strategy != "no" and not first.exists():
            save()  # what would fail after days fails now
        with contextlib.closing(prepared.batches.steps(at.step, total)) as steps:
            while at.step < total and not stop.signal:
                # ---- a step
                if self._profile and (line := self._profile.step_begins(at.step + 1)):
                    progress.message(line)
                meter.start()
                # To come to the first one, all the data before it may have to be read.
                with waiting(f"the data of step {at.step + 1}") if loss is not None else contextlib.nullcontext():
                    micro_batches = next(steps)
                meter.data_ready()
                rate = optimizer.learning_rate(at.applied_steps)
                try:
                    outcome = pipeline.train_step(micro_batches)
                except NonFiniteError as error:
                    raise NonFiniteError(f"{error}; {self._keep_batch(at.step + 1, micro_batches)}") from error
                loss, tokens = outcome.loss, _count(micro_batches, "segment_ids")
                at.step += 1
                if self._profile:
                    self._profile.step_ends(at.step)
                at.applied_steps += outcome.applied
                at.skipped_in_a_row = 0 if outcome.applied else at.skipped_in_a_row + 1
                at.tokens += tokens

                # ---- metrics
                meter.finish(
                    loss=loss,
                    grad_norm=outcome.grad_norm,
                    tokens=tokens,
                    supervised_tokens=_count(micro_batches, "loss_weights"),
                    seconds=outcome.seconds,
                    router_loss=outcome.router_loss,
                )
                if at.step % config.logging.log_interval == 0 or at.step == total:
                    line = {"step": at.step, **meter.record(), "learning_rate": rate, "tokens": at.tokens}
                    line |= {"skipped_steps": at.skipped_steps, "host_peak_bytes": host_peak_bytes()}
                    line |= {"device_peak_bytes": pipeline.run.mesh.peak_bytes()}
                    with waiting("metrics.jsonl to be written"):
                        metrics.write(line)
                    progress.step(line)
                at.unrecorded = meter.carried()
                if at.skipped_in_a_row == config.training.max_nonfinite_steps:
                    raise NonFiniteError(
                        f"training.max_nonfinite_steps: the gradient of {at.skipped_in_a_row} steps in a row was not finite, "
                        f"at step {at.step} with loss {loss:g} and norm {outcome.grad_norm:g}; "
                        f"{self._keep_batch(at.step, micro_batches)}; look at it, or lower training.learning_rate"
                    )

                # ---- evaluation; before the checkpoint of the same step, so that a resumed run need not repeat it
                if evaluator.is_due(at.step):
                    evaluator.run(at.step)

                # ---- checkpoint
                if self._save_is_due(at.step, prepared):
                    save()
                    saved = at.step
                elif not saver.is_running and (line := saver.result()):
                    progress.message(line)
        if saved != at.step and config.checkpoint.save_strategy != "no":
            save()
        updater.drain()
        if line := saver.result():
            progress.message(line)
        return loss

    def _keep_batch(self, step: int, micro_batches: list[Batch]) -> str:
        """Writes the micro-batches of a step, each field ``[micro_batches, rows, tokens]``; says where they are."""
        path = self._output / f"nonfinite-step-{step}.npz"
        try:
            np.savez_compressed(
                path, **{field: np.stack(part) for field, part in zip(Batch._fields, zip(*micro_batches))}
            )
        except OSError as error:
            return f"its batch could not be written to '{path}' ({error.strerror})"
        return f"its batch is in '{path}'"

    def _save_is_due(self, step: int, prepared: Preparation) -> bool:
        strategy, per_epoch = self.config.checkpoint.save_strategy, prepared.batches.steps_per_epoch
        every = {"steps": self.config.checkpoint.save_steps, "epoch": per_epoch}.get(strategy)
        return every is not None and step % every == 0

    def _run_record(self, at: Position) -> dict[str, Any]:
        """What a checkpoint says of the run. What is random is a function of the seed and the step."""
        record = {"position": dataclasses.asdict(at), "random_state": {"seed": self.config.seed, "step": at.step}}
        return record | {"identity": self._identity, "config": self.config.to_dict()}

    def _small_files(self, model: models.Model) -> dict[str, bytes]:
        """What `megatrain_jax.export` needs besides the weights."""
        source = Path(self.config.model.tokenizer) if self.config.model.tokenizer else model.source
        files = huggingface.small_files(model.config, source)
        return {f"{state.MODEL_FOLDER}/{name}": data for name, data in files.items()}

    def _save_model(self, model: models.Model, progress: Progress) -> Path:
        config, folder = self.config, self._output / "model"
        if config.model.tokenizer:
            model = dataclasses.replace(model, source=Path(config.model.tokenizer))
        models.save(model, folder, dtype=config.checkpoint.save_dtype, max_shard_size=config.checkpoint.max_shard_size)
        progress.message(f"saved      {folder}, for transformers")
        return folder

    def _find_checkpoints(self, prepared: Preparation) -> tuple[list[Path], dict[Path, state.DamagedError]]:
        """The checkpoint to go on from and those to take if it is damaged; and, with why, damaged ones after it.

        What is left must lead to one history: no later checkpoint may stand there.
        """
        wanted, there = self.config.training.resume_from_checkpoint, state.checkpoints(self._output)
        choice = {"auto": there[::-1], "none": []}.get(wanted, [Path(wanted)])
        found, damaged = [], {}
        for folder in choice:
            try:
                state.read_run(folder)
                found.append(folder)
            except state.DamagedError as error:
                if not found:
                    damaged[folder] = error
        if damaged and not found:
            raise next(iter(damaged.values()))
        if found:
            self._check_same_run(found[0], identity(self.config, prepared))
        step = state.read_run(found[0])["position"]["step"] if found else 0
        if step > prepared.total_steps:
            raise UserError(
                f"{state.KEY}: '{found[0]}' is at step {step} and the run ends at {prepared.total_steps}; raise "
                "training.num_steps"
            )
        for path in there:
            if state.step_of(path) > step and path not in damaged:
                raise UserError(
                    f"{state.KEY}: {wanted} starts at step {step}, and '{path}' of an earlier run is there; "
                    "delete it, set auto to continue from it, or choose another output_dir"
                )
        return found, damaged

    def _check_same_run(self, folder: Path, here: Mapping[str, Any]) -> list[str]:
        """Refuses a checkpoint of another run; lines about what has changed and may."""
        run = state.read_run(folder)
        changed = same_run.changes(run["config"], self.config.to_dict())
        same_run.refuse(folder, run["identity"], here, changed)
        return same_run.describe(changed)

    def _load(self, candidates, damaged, store) -> tuple[Position, list[str]]:
        """Loads the first checkpoint that is whole; where the run is then, and lines about it."""
        damaged = dict(damaged)
        for folder in candidates:
            try:
                run = state.load(folder, store)
                notes = self._check_same_run(folder, self._identity)
            except state.DamagedError as error:
                damaged[folder] = error
                continue
            for path, error in damaged.items():
                notes.append(f"damaged    {error.finding}; it is now '{state.set_aside(path).name}'")
            at = Position(**run["position"])
            return at, [*notes, f"resumed    from {folder.name}, step {at.step}"]
        if damaged:
            raise next(iter(damaged.values()))
        return Position(), []

    def _remedy(self) -> str:
        if self.config.checkpoint.save_strategy == "no":
            return "nothing was saved (checkpoint.save_strategy: no)"
        if self.config.training.resume_from_checkpoint == "auto":
            return "the same command continues"
        return "training.resume_from_checkpoint=auto continues"


@contextlib.contextmanager
def _failure_told(saver: Saver, tell: Callable[[str], None]) -> Iterator[None]:
    """Says why a run failed before a checkpoint is waited for. Outside of `stop_signals`: from then on any signal ends it."""
    try:
        yield
    except Exception as error:
        if saver.is_running:
            first = "the checkpoint that is being written is finished first, and a signal ends it at once"
            tell(f"failed     {error!r}; {first}")
        raise


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
