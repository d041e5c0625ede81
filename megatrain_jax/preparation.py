"""What a run is and what it needs, before anything of its model is allocated."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megatrain_jax import model as models
from megatrain_jax.checkpoint import huggingface, state
from megatrain_jax.config import Config, UserError
from megatrain_jax.data.dataset import DataSet, Statistics, fingerprint
from megatrain_jax.data.dataset import prepare as prepare_data
from megatrain_jax.data.loader import TrainLoader
from megatrain_jax.data.streaming import StreamLoader
from megatrain_jax.data.tokenizer import load_tokenizer
from megatrain_jax.host.memory import anonymous_memory, grows, host_memory
from megatrain_jax.host.optimizer import choose_layout, make_schedule, make_transformation
from megatrain_jax.host.pages import check_locking
from megatrain_jax.models.blocks import model_tensors
from megatrain_jax.models.families import read_config, spec_from_config
from megatrain_jax.models.spec import ModelSpec
from megatrain_jax.stream.planner import GIB, Plan, make_plan, spend_room, state_bytes_per_parameter
from megatrain_jax.stream.transfer import Mesh


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
    dataset: DataSet
    batches: TrainLoader | StreamLoader
    total_steps: int


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
    _check_output(config)
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.name)
    say = None if config.logging.progress == "off" else functools.partial(print, flush=True)
    dataset = prepare_data(config.dataset, tokenizer, seed=config.seed, vocab_size=spec.vocab_size, say=say)
    if dataset.sequence_length > spec.max_position_embeddings:
        raise UserError(
            f"dataset.max_seq_len: rows of {dataset.sequence_length} tokens are longer than the model's "
            f"{spec.max_position_embeddings} positions; set dataset.max_seq_len={spec.max_position_embeddings}"
        )
    shape = training.batch_size, training.gradient_accumulation_steps
    if config.dataset.streaming:
        batches = StreamLoader(config.dataset, dataset.tokenizer, spec.vocab_size, *shape, config.seed)
        total = training.num_steps
    else:
        batches = TrainLoader(dataset, *shape, config.seed, config.dataset.shuffle)
        total = training.num_steps or math.ceil(training.num_train_epochs * batches.steps_per_epoch)
    make_schedule(training, total)
    prepared = Preparation(spec, trained, dataset, batches, total)
    _check_disk(config, prepared)
    return prepared


def _check_output(config: Config) -> None:
    """Refuses an output folder that the run could not write into."""
    output = Path(config.output_dir)
    parent = _existing(output)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"output_dir: '{parent}' is not a writable folder; choose another for '{output}'")
    if config.checkpoint.save_final:
        huggingface.check_save_folder(output / "model")


def _check_disk(config: Config, prepared: Preparation) -> None:
    """Refuses a disk that would be full before the run has ended.

    A new checkpoint is written before an old one is deleted, and the model beside the one that it replaces.
    """
    output, checkpoint = Path(config.output_dir), config.checkpoint
    per_epoch = prepared.batches.steps_per_epoch
    every = {"steps": checkpoint.save_steps, "epoch": per_epoch}.get(checkpoint.save_strategy)
    saves = 0 if every is None else 1 + math.ceil(prepared.total_steps / every)  # the first one at step 0
    at_once = saves if checkpoint.save_total_limit is None else min(saves, checkpoint.save_total_limit + 1)
    more = max(at_once - len(state.checkpoints(output)), min(at_once, 1))
    each = int(prepared.trained * (4 + _optimizer_bytes(config)))
    model = prepared.spec.num_parameters * (2 if checkpoint.save_dtype == "bfloat16" else 4) * checkpoint.save_final
    needed, free = more * each + model, shutil.disk_usage(_existing(output)).free
    if needed > free:
        raise UserError(
            f"output_dir: {more} more checkpoints of {each / 1e9:.3g} GB and a model of {model / 1e9:.3g} GB need "
            f"{needed / 1e9:.3g} GB in '{output}', and {free / 1e9:.3g} GB are free there; free space or choose another, lower "
            "checkpoint.save_total_limit, or save less often"
        )


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


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


def resumed_plan(
    config: Config, prepared: Preparation, mesh: Mesh, keep_layers: int, resident_blocks: int, expert_groups: int
) -> Plan:
    """The plan of a run that continues: what is left to "auto" is as it was before, if that fits."""
    memory = config.memory
    before = {"keep_intermediates": keep_layers, "resident_blocks": resident_blocks, "expert_groups": expert_groups}
    before = {key: value for key, value in before.items() if getattr(memory, key) == "auto"}
    try:
        return plan(dataclasses.replace(config, memory=dataclasses.replace(memory, **before)), prepared, mesh)
    except UserError:
        return plan(config, prepared, mesh)


def plan(config: Config, prepared: Preparation, mesh: Mesh) -> Plan:
    """Where everything waits, how micro-batches are grouped, and what that needs. See `make_plan` and `spend_room`."""
    training, seq = config.training, prepared.dataset.sequence_length
    if mesh.has_own_memory and config.memory.pin_memory:
        check_locking()
    free, runtime = host_memory(), mesh.runtime_bytes(0)
    common = dict(
        micro_batches=training.gradient_accumulation_steps,
        dtype=config.model.dtype,
        devices=mesh.size,
        own_memory=mesh.has_own_memory,
        state_bytes=_state_bytes(config, mesh.has_own_memory),
        hold_gradients=bool(training.max_grad_norm) or training.skip_nonfinite,
        device_bytes=mesh.memory_bytes(),
        host_bytes=None if free is None else free + min(anonymous_memory(), runtime),  # some of it is taken by now
        attention_bytes=_attention_bytes(config, prepared.spec, mesh, seq),
        beside=mesh.runtime_bytes,
    )
    try:
        first = make_plan(
            prepared.spec, config.memory, trained=prepared.trained, batch_size=training.batch_size, seq=seq, **common
        )
    except UserError as error:
        if not str(error).startswith("memory.host_budget") or not grows():
            raise
        raise UserError(
            f"{error}; memory is added to this machine as it is used: set memory.host_budget to what it may have"
        ) from None
    models.check_layout(choose_layout(config.optimizer, config.model.dtype), mesh, first.expert_groups)
    tokens = math.ceil(training.batch_size / mesh.size) * seq
    return spend_room(
        first, prepared.spec, config.memory, tokens=tokens, optimizer_bytes=_optimizer_bytes(config), **common
    )


def _attention_bytes(config: Config, spec: ModelSpec, mesh: Mesh, seq: int) -> int:
    """What attention of one layer takes that grows with the square of a row: scores in XLA, masks of packed rows in cuDNN."""
    rows = math.ceil(config.training.batch_size / mesh.size)
    if models.attention_kernel(config.model.attn_implementation, spec, mesh, config.model.dtype) == "cudnn":
        return rows * seq**2 * 2 * (config.dataset.packing != "none")
    # Scores and their softmax in float32, and the gradients of both; other layers compute theirs in tiles.
    whole = [s.num_heads for s in spec.layers if s.delta is None and s.attention_softcap is None and not s.sinks]
    return rows * seq**2 * 16 * max(whole, default=0)


def describe(config: Config, prepared: Preparation) -> list[str]:
    """The run in a few lines a person can check."""
    spec, data, training = prepared.spec, prepared.dataset, config.training
    stats = data.train_statistics
    frozen = spec.num_parameters - prepared.trained
    lines = [
        f"model      {spec.family}, {spec.num_parameters / 1e6:,.1f} M parameters"
        + (f" ({frozen / 1e6:,.1f} M frozen)" if frozen else "")
        + f", {len(spec.layers)} layers, {config.model.dtype}, {config.model.init} ({config.model.name})",
        _describe_data(data),
    ]
    lines[1:1] = [f"template   {line}" for line in spec.describe_templates()]
    if data.eval:
        held = data.eval_statistics
        lines.append(f"eval       {held.samples:,} samples, {held.tokens:,} tokens")
    if stats is not None:
        lines += describe_counts(stats)
    per_epoch = prepared.batches.steps_per_epoch
    lines.append(
        f"training   {prepared.total_steps:,} steps of {training.gradient_accumulation_steps} x {training.batch_size} rows"
        + (f" ({per_epoch:,} steps an epoch)" if per_epoch else "")
        + f", {config.optimizer.type}, "
        f"{training.lr_scheduler_type} from {training.learning_rate:g}"
    )
    if config.ignored:
        lines.append(f"config     no effect here: {', '.join(config.ignored)}")
    return lines


def _describe_data(data: DataSet) -> str:
    stats, rows = data.train_statistics, f"rows of {data.sequence_length}"
    if stats is None:
        return f"data       streamed ({data.format}), {rows}"
    if len(data.train_rows) < stats.samples:
        rows += f", {stats.tokens / (len(data.train_rows) * data.sequence_length):.1%} filled"
    supervised = stats.supervised_tokens / max(stats.tokens, 1)
    return f"data       {stats.samples:,} samples ({data.format}), {stats.tokens:,} tokens, {supervised:.0%} supervised, {rows}"


def describe_counts(stats: Statistics | StreamLoader) -> list[str]:
    """What was altered or left out, and why, a line for each reason."""
    return [
        f"data       {what} {count:,}: {reason}"
        for what, counts in (("changed", stats.changed), ("dropped", stats.dropped))
        for reason, count in counts.items()
    ]


def describe_needs(config: Config, prepared: Preparation) -> str:
    """Host memory of the run, from arithmetic alone: no device is touched."""
    each = _state_bytes(config, own_memory=config.model.device != "cpu")
    return f"memory     host {each * prepared.trained / GIB:.2f} GiB for weights and optimizer ({each:.3g} B/parameter)"


def describe_plan(config: Config, prepared: Preparation, p: Plan, mesh: Mesh) -> list[str]:
    """What the run takes, where everything waits, and which kernels compute: a slower one should not go unseen."""
    where = "in host memory" if p.offload_activations else "on the device"
    whole = p.group_size == config.training.gradient_accumulation_steps
    groups = "" if whole else f", micro-batches in groups of {p.group_size}"
    lines = [
        f"memory     host {p.host / GIB:.2f} GiB (state {p.state / GIB:.2f}, gradients {p.gradients / GIB:.2f}, "
        f"runtime {p.beside / GIB:.2f}), device about "
        f"{p.device / GIB:.2f} GiB of {mesh.size} x {mesh.devices[0].device_kind}",
        f"stream     block inputs {where} ({p.activations / GIB:.2f} GiB{groups}), {p.keep_layers} layers keep their "
        f"intermediates, {len(p.resident)} blocks stay on the device",
        f"kernels    attention: {_attention_kernels(config, prepared.spec, mesh)}; {config.optimizer.type}: "
        f"{_optimizer_kernels(config, p)}",
    ]
    if p.expert_groups > 1:
        lines.append(
            f"plan       experts of a layer stream in {p.expert_groups} groups: {p.working / GIB:.2f} GiB for work on a block, "
            f"which would be {p.in_one_block / GIB:.2f} GiB"
        )
    return lines


def _attention_kernels(config: Config, spec: ModelSpec, mesh: Mesh) -> str:
    found = models.attention_kernel(config.model.attn_implementation, spec, mesh, config.model.dtype)
    in_tiles = [s.attention_softcap is not None or s.sinks for s in spec.layers]
    kernels = [] if all(in_tiles) else [{"cudnn": "cuDNN", "xla": "XLA"}[found]]
    return ", ".join([*kernels, *(["XLA in tiles (capped scores, sinks)"] if any(in_tiles) else [])])


def _optimizer_kernels(config: Config, p: Plan) -> str:
    on_host = "fused kernels" if choose_layout(config.optimizer, config.model.dtype) == "split" else "optax"
    return f"{on_host} on the host, optax on the device" if p.resident else f"{on_host} on the host"


def identity(config: Config, prepared: Preparation) -> dict[str, Any]:
    """What a run must share with a checkpoint that it goes on from, but for frozen tensors; see `checkpoint.identity`."""
    training, model = config.training, dataclasses.asdict(prepared.spec)
    del model["expert_groups"]  # says nothing of what is computed
    return {
        "model": model,
        "data": fingerprint(config.dataset, prepared.dataset),
        "shuffle": config.dataset.shuffle,
        "rows_per_step": training.batch_size * training.gradient_accumulation_steps,
        "seed": config.seed,
        "optimizer": config.optimizer.type,
    }
