"""The whole configuration: frozen dataclasses, YAML, key=value overrides."""

from __future__ import annotations

import dataclasses
import difflib
import glob
import os
import re
import types
import typing
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from megatrain_jax.typed_yaml import (
    Bounds,
    Count,
    Fraction,
    NonNegative,
    Pattern,
    Positive,
    Share,
    Size,
    convert,
    describe,
    dump,
    parse,
)


class UserError(ValueError):
    """Something the user brought is wrong. The message is one line: the thing, its value, what to do."""


Device = Annotated[str, Pattern(r"auto|cpu|cuda(:\d+)?|all", "auto, cpu, cuda, cuda:N or all")]
FileSize = Annotated[str, Pattern(r"([1-9]\d*)\s*([KMGT]?)(i?)B", "a whole number and a unit such as 5GB or 512MiB")]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    r"""Which model, and what it computes with.

    Attributes:
      name: local Hugging Face folder (config.json, safetensors, tokenizer.json).
        Aliases: model_name_or_path, base_model.
      tokenizer: folder of the tokenizer; None is `name`.
      init: "pretrained" reads the safetensors; "random" needs only config.json.
      config_overrides: replaces entries of config.json, e.g. ``{num_hidden_layers: 4}``.
      dtype: what computes and crosses the wire. The master weights are float32 either way.
      device: "auto" (the first accelerator, else the CPU), "cpu", "cuda", "cuda:N", or "all" accelerators.
      attn_implementation: attention kernel; "auto" is the fastest that fits the model and the device.
      freeze: regular expressions searched for in Hugging Face tensor names; what matches is not trained.
    """

    name: str
    tokenizer: str | None = None
    init: Literal["pretrained", "random"] = "pretrained"
    config_overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    device: Device = "auto"
    attn_implementation: Literal["auto", "cudnn", "xla"] = "auto"
    freeze: tuple[str, ...] = ()


Format = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "tokenized"]


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """One of several sources of samples.

    Attributes:
      path: file, folder or glob.
      format: how a sample is spelt; None is `DatasetConfig.format`.
      weight: how often an epoch has each sample: 2 is twice, 0.5 is every other one.
      columns, tags: as of `DatasetConfig`, for this source alone.
      split: of a folder, only the files that have this word in their name.
      num_samples: only the first this many samples; None is all.
    """

    path: str
    format: Format | None = None
    weight: Positive = 1.0
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    split: str | None = None
    num_samples: Count | None = None


@dataclasses.dataclass(frozen=True)
class DatasetConfig:
    """What is read, and how it becomes rows of tokens.

    Attributes:
      path: file, folder or glob of the training samples, or a list of them; see `SourceConfig` for what an entry may say.
      name: instead of `path`, one or more data sets of a LLaMA-Factory registry, with commas between them.
      dataset_dir: folder of that registry, dataset_info.json, and of the files that it names.
      format: how a sample is spelt; "auto" looks at the first one of each file.
      columns: which column holds which part of a sample: messages, prompt, query, response, history, system, tools, text.
      tags: what turns call their keys and roles: role_tag, content_tag, user_tag, assistant_tag, observation_tag,
        function_tag, system_tag.
      text_field: key of a plain text sample.
      query_field: key of the question in a question/answer pair.
      response_field: key of the answer in a question/answer pair.
      chat_template: None is the tokenizer's own; else the name of another one of the tokenizer's, or chatml, llama3, gemma
        or alpaca; a path that ends in .jinja; or Jinja text.
      chat_template_kwargs: settings that the template reads, e.g. ``{enable_thinking: false}``.
      system_prompt: put before conversations that have no system turn; "" is none.
      train_on: which tokens are supervised: those of every assistant turn, of the last one, of the completion, or all.
        Aliases: train_on_inputs and train_on_prompt, true for "all".
      max_seq_len: longest row, in tokens. Aliases: cutoff_len, sequence_len, max_length, max_seq_length.
      overlong: what happens to a longer sample: it is cut, left out, divided into windows, or refused. "auto" divides
        plain text and cuts the others.
      on_bad_record: a record that cannot be read or understood ends the run, or is left out and counted.
      packing: what shares a row: "none" gives every sample its own; "best_fit" puts whole samples together;
        "wrapped", for pretraining, lays them end to end and cuts where a row is full. Attention never crosses samples and
        their positions start at 0. true is "best_fit". Alias: packing_strategy, bfd for "best_fit".
      pad_to_multiple_of: rows are padded to a multiple of this many tokens.
      max_samples: only the first this many samples are read; None is all.
      num_workers: processes that tokenise what is not in the cache yet; "auto" is one a core, up to 16, and 0 does it in
        this process. The result does not depend on it.
      cache_dir: folder of the tokenised samples, which are kept for later runs; None is megatrain_jax/data in the user's
        cache folder ($XDG_CACHE_HOME or ~/.cache). Alias: tokenized_path.
      streaming: samples are read again for every epoch instead of kept, for data too large to keep; needs
        `TrainingConfig.num_steps`. A run that resumes reads again what it skips.
      buffer_size: with `streaming`, samples among which the order is drawn and rows are packed.
      shuffle: a new order every epoch, drawn from `Config.seed`.
      eval_path: file, folder or glob of the evaluation samples, or a list as `path`; None with `val_size` 0 is no evaluation.
      val_size: held out of `path` for evaluation: a fraction in [0, 1) or a whole number of samples.
    """

    path: str | tuple[SourceConfig, ...] = ()
    name: str | None = None
    dataset_dir: str | None = None
    format: Format = "auto"
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    text_field: str = "text"
    query_field: str = "query"
    response_field: str = "response"
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    system_prompt: str = ""
    train_on: Literal["assistant", "last_assistant", "completion", "all"] = "assistant"
    max_seq_len: Annotated[int, Bounds(low=2)] = 2048
    overlong: Literal["auto", "truncate", "drop", "split", "error"] = "auto"
    on_bad_record: Literal["error", "skip"] = "error"
    packing: Literal["none", "best_fit", "wrapped"] = "none"
    pad_to_multiple_of: Count = 128
    max_samples: Count | None = None
    num_workers: Literal["auto"] | Size = "auto"
    cache_dir: str | None = None
    streaming: bool = False
    buffer_size: Count = 10_000
    shuffle: bool = True
    eval_path: str | tuple[SourceConfig, ...] | None = None
    val_size: Size | Fraction = 0


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """How long, how fast, and in what steps.

    Attributes:
      batch_size: rows in a micro-batch. Aliases: per_device_train_batch_size, micro_batch_size.
      gradient_accumulation_steps: micro-batches in a step.
      num_steps: steps to train for; wins over `num_train_epochs` when not None. Alias: max_steps.
      num_train_epochs: passes over the data, may be a fraction.
      learning_rate: the peak, reached after the warmup.
      lr_scheduler_type: what the learning rate does after the warmup.
      lr_scheduler_kwargs: ``min_lr_ratio`` (the floor as a share of the peak) and ``decay_ratio`` (share of the steps
        in which "wsd" decays).
      warmup_steps: steps of linear warmup, or a fraction in (0, 1) of all steps. Alias: warmup_ratio.
      weight_decay: decoupled weight decay; None is 0.01 for adamw and lion and 0 for the others.
      max_grad_norm: gradients are scaled down to this global norm; 0 is off.
      resume_from_checkpoint: "auto" (the newest whole checkpoint in `output_dir`, else start), "none", or a path.
      deterministic: bit-reproducible on a GPU, slower.
      skip_nonfinite: a step whose gradient is not finite changes nothing and is counted.
      max_nonfinite_steps: this many such steps in a row end the run; None is no limit.
      watchdog_seconds: a single wait of a thread, for the device, an update, data or the disk, that is as long as this
        ends the run; 0 is off.
    """

    batch_size: Count = 8
    gradient_accumulation_steps: Count = 1
    num_steps: Count | None = None
    num_train_epochs: Positive = 1.0
    learning_rate: NonNegative = 1e-5
    lr_scheduler_type: Literal["constant", "linear", "cosine", "cosine_with_min_lr", "wsd", "inverse_sqrt"] = "cosine"
    lr_scheduler_kwargs: Mapping[str, Share] = dataclasses.field(default_factory=dict)
    warmup_steps: Size | Fraction = 0
    weight_decay: NonNegative | None = None
    max_grad_norm: NonNegative = 1.0
    resume_from_checkpoint: str = "auto"
    deterministic: bool = False
    skip_nonfinite: bool = True
    max_nonfinite_steps: Count | None = 10
    watchdog_seconds: NonNegative = 600.0


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The update rule. The learning rate and the weight decay are in `TrainingConfig`.

    Attributes:
      type: "adamw", "adam", "lion", "sgd", or the name of another optax factory.
      backend: "optax", or "fused" kernels (adamw, adam, lion, sgd; bfloat16; needs numba); "auto" is fused where possible.
      beta1: decay of the first moment; None is the optimizer's own default.
      beta2: decay of the second moment; None is the optimizer's own default.
      eps: added to the denominator of adam and adamw.
      momentum: of sgd.
      no_decay: tensors whose name contains one of these take no weight decay.
    """

    type: str = "adamw"
    backend: Literal["auto", "optax", "fused"] = "auto"
    beta1: Fraction | None = None
    beta2: Fraction | None = None
    eps: NonNegative = 1e-8
    momentum: Fraction = 0.9
    no_decay: tuple[str, ...] = ("norm", "bias")


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
    """What may be used, and what is kept where.

    Attributes:
      device_budget: GiB of each accelerator's memory; "auto" is what is free. A command takes no more of it than this and a
        twentieth, so that others can have the rest.
      host_budget: GiB of host memory; "auto" is what is free, within the container's limit.
      offload_activations: block inputs wait in host memory; "auto" only when they do not fit on the device.
      keep_intermediates: number of layers (the last ones) that keep what backward needs on the device and are not
        recomputed; "auto" is as many as there is room for.
      resident_blocks: number of blocks that stay on the device with their optimizer state: embedding, head, then layers
        from the first on; "auto" is as many as pay and fit.
      expert_groups: blocks that the experts of a layer stream in; "auto" is 1 unless only more make the layer fit.
      pin_memory: register the weights' pages with the driver, so that copies run at the link's speed.
      loss_tile: tokens whose logits exist at once.
    """

    device_budget: Literal["auto"] | Positive = "auto"
    host_budget: Literal["auto"] | Positive = "auto"
    offload_activations: Literal["auto"] | bool = "auto"
    keep_intermediates: Literal["auto"] | Size = "auto"
    resident_blocks: Literal["auto"] | Size = "auto"
    expert_groups: Literal["auto"] | Count = "auto"
    pin_memory: bool = True
    loss_tile: Count = 4096


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """When the evaluation samples are scored.

    Attributes:
      eval_strategy: never, every `eval_steps` steps, or after every epoch.
      eval_steps: steps between evaluations.
      eval_batch_size: rows in an evaluation batch; None is `TrainingConfig.batch_size`.
      eval_on_start: also before the first step.
      max_eval_batches: only the first this many batches; None is all.
    """

    eval_strategy: Literal["no", "steps", "epoch"] = "no"
    eval_steps: Count = 500
    eval_batch_size: Count | None = None
    eval_on_start: bool = False
    max_eval_batches: Count | None = None


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """What outlives the process.

    Attributes:
      save_strategy: every `save_steps` steps, never, or after every epoch.
      save_steps: steps between checkpoints.
      save_total_limit: newest checkpoints that are kept; None is all.
      save_final: write a Hugging Face folder at the end.
      save_dtype: of the weights in that folder.
      max_shard_size: largest safetensors file, e.g. "5GB" (10**9 bytes) or "5GiB" (2**30).
    """

    save_strategy: Literal["no", "steps", "epoch"] = "steps"
    save_steps: Count = 500
    save_total_limit: Count | None = 2
    save_final: bool = True
    save_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    max_shard_size: FileSize = "5GB"


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """A timeline of some steps: ``timeline.json`` for Perfetto and ``timeline.png``.

    Attributes:
      enabled: whether to write one.
      start_step: the first step in it, counted from 1; the very first steps also compile.
      num_steps: steps in it.
    """

    enabled: bool = False
    start_step: Count = 5
    num_steps: Count = 1


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    """What a person sees while it runs.

    Attributes:
      log_interval: steps between two records. Aliases: logging_steps, log_every_n_steps.
      progress: "rich" is a live line, "plain" one line a record; "auto" is rich on a terminal.
      profile: a timeline of some steps; see `ProfileConfig`.
    """

    log_interval: Count = 1
    progress: Literal["auto", "rich", "plain", "off"] = "auto"
    profile: ProfileConfig = ProfileConfig()


@dataclasses.dataclass(frozen=True)
class Config:
    """One run.

    Attributes:
      model, dataset, training, optimizer, memory, eval, checkpoint, logging: see the class of each section.
      output_dir: where everything is written.
      seed: of every random choice.
      ignored: keys of the YAML that have no effect here, to be named once in the log; not part of the run's identity.
    """

    model: ModelConfig
    dataset: DatasetConfig
    training: TrainingConfig = TrainingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    memory: MemoryConfig = MemoryConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    output_dir: str = "outputs/run"
    seed: Size = 42
    ignored: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The tree as plain dicts by section and key, without `ignored`."""
        tree = dataclasses.asdict(self)
        del tree["ignored"]
        return tree

    def dump(self, path: str | os.PathLike) -> None:
        """Writes a YAML file from which `load_config` makes an equal Config."""
        with open(path, "w", encoding="utf-8") as file:
            dump(self.to_dict(), file)


def load_config(path: str | os.PathLike, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file and applies overrides.

    Relative paths of models and data are looked for beside the YAML file, then in the current directory; those of
    overrides, and `output_dir`, in the current directory. The paths of the result are absolute.

    Args:
      path: a YAML file with the sections of `Config`. A LLaMA-Factory file without sections is read too as far as its
        keys are known.
      overrides: ``section.key=value``, the value as YAML would read it. Later ones win.

    Raises:
      UserError: the file or an override is not readable, has an unknown key, a value of the wrong type or out of
        range, two spellings of a key that contradict each other, or names a path that does not exist.
    """
    changed: dict[str, Any] = {}
    named: list[str] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        here = f"(in the override {override!r})"
        if not equals or key.count(".") > 1:
            raise UserError(f"{override}: expected section.key=value, a mapping as section.key={{name: value}}")
        try:
            tree = parse(text)
        except ValueError as error:
            raise UserError(f"{key}: {error} {here}") from error
        for name in reversed(key.strip().split(".")):
            tree = {name: tree}
        settings, ignored = _settings(tree, here, [os.getcwd()])
        changed |= settings
        named += ignored
    where = f"(in {os.fspath(path)})"
    folders = [os.path.dirname(os.path.abspath(path)), os.getcwd()]
    settings, ignored = _settings(_read(path), where, folders, without=changed)
    return _build(settings | changed, tuple(dict.fromkeys(ignored + named)), where)


_HINTS = typing.get_type_hints(Config, include_extras=True)
_SECTIONS = {name: cls for name, cls in _HINTS.items() if dataclasses.is_dataclass(cls)}
_TYPES = {"output_dir": _HINTS["output_dir"], "seed": _HINTS["seed"]} | {
    f"{section}.{key}": kind
    for section, cls in _SECTIONS.items()
    for key, kind in typing.get_type_hints(cls, include_extras=True).items()
}
_ALIASES = {
    "model.model_name_or_path": "model.name",
    "model.base_model": "model.name",
    "dataset.cutoff_len": "dataset.max_seq_len",
    "dataset.sequence_len": "dataset.max_seq_len",
    "dataset.max_length": "dataset.max_seq_len",
    "dataset.max_seq_length": "dataset.max_seq_len",
    "dataset.packing_strategy": "dataset.packing",
    "dataset.tokenized_path": "dataset.cache_dir",
    "dataset.train_on_inputs": "dataset.train_on",
    "dataset.train_on_prompt": "dataset.train_on",
    "training.per_device_train_batch_size": "training.batch_size",
    "training.micro_batch_size": "training.batch_size",
    "training.max_steps": "training.num_steps",
    "training.warmup_ratio": "training.warmup_steps",
    "training.seed": "seed",
    "logging.logging_steps": "logging.log_interval",
    "logging.log_every_n_steps": "logging.log_interval",
}
# Keys that a MegaTrain file carries and that have no meaning in this engine.
_WITHOUT_EFFECT = (
    "model.trust_remote_code",
    "memory.checkpoint_interval",
    "memory.num_grad_slabs",
    "logging.enable_timing",
)
_PYTORCH_ATTENTION = ("flash_attention_2", "flash_attention_3", "sdpa", "eager")
_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "half": "float16"}
_PROMPT_IS_TRAINED = {True: "all", False: "assistant"}
# Spellings of values. YAML 1.1 reads an unquoted no or off as false.
_VALUES: dict[str, dict[Any, Any]] = {
    "model.dtype": _DTYPES,
    "model.device": {"gpu": "cuda"},
    "model.attn_implementation": dict.fromkeys(_PYTORCH_ATTENTION, "auto"),
    "dataset.packing": {True: "best_fit", False: "none"},
    "dataset.packing_strategy": {"bfd": "best_fit"},
    "dataset.train_on_inputs": _PROMPT_IS_TRAINED,
    "dataset.train_on_prompt": _PROMPT_IS_TRAINED,
    "training.max_steps": {-1: None},
    "training.warmup_ratio": {0: None},
    "training.lr_scheduler_type": {
        "constant_with_warmup": "constant",
        "linear_with_warmup": "linear",
        "cosine_with_warmup": "cosine",
        "warmup_stable_decay": "wsd",
    },
    "training.resume_from_checkpoint": {True: "auto", False: "none", None: "none"},
    "optimizer.type": dict.fromkeys(
        ["deepspeed_adam", "cpu_adamw", "cpu_adam", "adamw_torch", "adamw_torch_fused", "adamw_hf"], "adamw"
    ),
    "eval.eval_strategy": {False: "no"},
    "checkpoint.save_strategy": {False: "no"},
    "checkpoint.save_dtype": _DTYPES,
    "logging.progress": {False: "off"},
}
_LR_SCHEDULER_KWARGS = ("min_lr_ratio", "decay_ratio")
_PATHS = {
    "model.name": "give a local Hugging Face folder",
    "model.tokenizer": "give a local Hugging Face folder",
    "dataset.path": "give a file, a folder or a glob",
    "dataset.eval_path": "give a file, a folder or a glob",
    "dataset.dataset_dir": "give the folder of a dataset_info.json",
    "dataset.chat_template": "give a .jinja file, a name or Jinja text",
    "training.resume_from_checkpoint": "give auto, none or a checkpoint folder",
}
# Keys that say nothing without their section.
_VAGUE = ("name", "path", "type", "format", "init")
_FLAT = {
    name.partition(".")[2]: name
    for name in (*_TYPES, *_ALIASES, *_WITHOUT_EFFECT)
    if "." in name and name.partition(".")[2] not in (*_VAGUE, *_TYPES)
}


def _read(path: str | os.PathLike) -> Any:
    try:
        with open(path, "rb") as file:
            return parse(file.read())
    except OSError as error:
        raise UserError(f"config: cannot read {os.fspath(path)!r}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"config: {error} (in {os.fspath(path)})") from error


def _leaves(tree: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Pairs of section.key and value; keys outside a section are moved into theirs."""
    if not isinstance(tree, Mapping):
        raise UserError(f"config: expected sections such as model and dataset, got {tree!r} {where}")
    for name, value in tree.items():
        if name == "dataset" and isinstance(value, str):
            yield "dataset.name", value  # as LLaMA-Factory's files say it
        elif name not in _SECTIONS:
            yield _FLAT.get(name, str(name)), value
        elif isinstance(value, Mapping):
            yield from ((f"{name}.{key}", leaf) for key, leaf in value.items())
        elif value is not None:
            raise UserError(f"{name}: expected a mapping of keys, got {value!r} {where}")


def _settings(
    tree: Any, where: str, folders: Sequence[str], without: Container[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Checked values by their canonical section.key, except those in `without`, and the keys without effect."""
    settings: dict[str, Any] = {}
    spelt: dict[str, str] = {}
    ignored = []
    for name, value in _leaves(tree, where):
        key = _ALIASES.get(name, name)
        if name in _WITHOUT_EFFECT:
            ignored.append(name)
            continue
        if key not in _TYPES:
            raise UserError(f"{name}: unknown key{_suggestion(name)} {where}")
        if key in without:
            continue
        if key == "model.attn_implementation" and value in _PYTORCH_ATTENTION:
            ignored.append(f"{name}={value}")
        if key == "model.device" and type(value) is int:
            value = f"cuda:{value}"
        if isinstance(value, str | bool | int | float | None):
            value = _VALUES.get(name, {}).get(value, value)
        if value is None and name in _ALIASES and types.NoneType not in typing.get_args(_TYPES[key]):
            continue
        value = _checked(name, key, value, where, folders)
        if key in settings and None not in (value, settings[key]) and value != settings[key]:
            raise UserError(f"{name}: {value!r} contradicts {spelt[key]}, {settings[key]!r} {where}")
        if settings.get(key) is None:
            settings[key], spelt[key] = value, name
    return settings, ignored


def _suggestion(name: str) -> str:
    section, dot, leaf = name.rpartition(".")
    if not dot:
        near = _FLAT | {key: key for key in _HINTS if key != "ignored"}
    elif leaf in _FLAT:
        near = {leaf: _FLAT[leaf]}
    else:
        near = {key.partition(".")[2]: key for key in (*_TYPES, *_ALIASES) if key.startswith(f"{section}.")}
    close = difflib.get_close_matches(leaf, near, n=1)
    return f", did you mean {near[close[0]]}?" if close else ""


def _checked(name: str, key: str, value: Any, where: str, folders: Sequence[str]) -> Any:
    """`value` as the type of `key`, paths made absolute. `name` is how the user spelt the key."""
    if key in ("model.dtype", "checkpoint.save_dtype") and value == "float16":
        raise UserError(f"{name}: float16 is refused, its range is too small for gradients: use bfloat16 {where}")
    if key in ("dataset.path", "dataset.eval_path") and isinstance(value, list):
        return tuple(_source(f"{name}[{i}]", key, item, where, folders) for i, item in enumerate(value))
    if dataclasses.is_dataclass(_TYPES[key]):
        return _nested(_TYPES[key], name, value, where)
    try:
        value = convert(_TYPES[key], value)
    except ValueError:
        raise UserError(f"{name}: expected {describe(_TYPES[key])}, got {value!r} {where}") from None
    if key == "training.lr_scheduler_kwargs" and (unknown := [k for k in value if k not in _LR_SCHEDULER_KWARGS]):
        raise UserError(f"{name}: unknown key {unknown[0]!r}, choose from {', '.join(_LR_SCHEDULER_KWARGS)} {where}")
    if key == "model.freeze":
        for pattern in value:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(f"{name}: {pattern!r} is not a regular expression: {error} {where}") from error
    if key in ("output_dir", "dataset.cache_dir") and value is not None:
        return os.path.abspath(os.path.expanduser(value))
    if key in _PATHS and value is not None:
        return _resolved(name, key, value, where, folders)
    return value


def _source(name: str, key: str, value: Any, where: str, folders: Sequence[str]) -> SourceConfig:
    """An entry of a list of sources: a path, or a mapping that has one."""
    entry = {"path": value} if isinstance(value, str) else value
    if isinstance(entry, Mapping) and "path" not in entry:
        raise UserError(f"{name}.path: missing, {_PATHS[key]} {where}")
    source = _nested(SourceConfig, name, entry, where)
    return dataclasses.replace(source, path=_resolved(f"{name}.path", key, source.path, where, folders))


def _nested(cls: type, name: str, value: Any, where: str) -> Any:
    """A mapping as the dataclass that a key of a section is."""
    kinds = typing.get_type_hints(cls, include_extras=True)
    if not isinstance(value, Mapping):
        raise UserError(f"{name}: expected a mapping of {', '.join(kinds)}, got {value!r} {where}")
    fields = {}
    for key, item in value.items():
        if key not in kinds:
            raise UserError(f"{name}: unknown key {key!r}, choose from {', '.join(kinds)} {where}")
        try:
            fields[key] = convert(kinds[key], item)
        except ValueError:
            raise UserError(f"{name}.{key}: expected {describe(kinds[key])}, got {item!r} {where}") from None
    return cls(**fields)


def _resolved(name: str, key: str, value: str, where: str, folders: Sequence[str]) -> str:
    if key == "dataset.chat_template" and ("{" in value or not value.endswith(".jinja")):
        return value
    if key == "training.resume_from_checkpoint" and value in ("auto", "none"):
        return value
    for folder in folders:
        path = os.path.abspath(os.path.join(folder, os.path.expanduser(value)))
        if os.path.exists(path) or (key.startswith("dataset.") and glob.glob(path, recursive=True)):
            return path
    raise UserError(f"{name}: no such file or folder {value!r}, {_PATHS[key]} {where}")


def _build(settings: Mapping[str, Any], ignored: tuple[str, ...], where: str) -> Config:
    if settings.get("dataset.path") and settings.get("dataset.name") is not None:
        raise UserError(f"dataset.name: {settings['dataset.name']!r} and dataset.path are both given, keep one {where}")
    for key in ("model.name", "dataset.path"):
        if not settings.get(key) and not (key == "dataset.path" and settings.get("dataset.name") is not None):
            raise UserError(f"{key}: missing, {_PATHS[key]} {where}")
    settings = {"output_dir": os.path.abspath(Config.output_dir)} | settings
    config = Config(
        **{
            section: cls(**{k.partition(".")[2]: v for k, v in settings.items() if k.startswith(f"{section}.")})
            for section, cls in _SECTIONS.items()
        },
        **{key: value for key, value in settings.items() if "." not in key},
        ignored=ignored,
    )
    data = config.dataset
    if data.eval_path is not None and data.val_size:
        raise UserError(f"dataset.val_size: {data.val_size} contradicts dataset.eval_path, give one of them {where}")
    scored = {"eval_strategy": config.eval.eval_strategy != "no", "eval_on_start": config.eval.eval_on_start}
    if data.eval_path is None and not data.val_size and any(scored.values()):
        key = max(scored, key=scored.get)
        value = getattr(config.eval, key)
        raise UserError(f"eval.{key}: {value!r} needs dataset.eval_path or dataset.val_size {where}")
    if data.streaming:
        refused = {
            "dataset.val_size": (bool(data.val_size), "give dataset.eval_path"),
            "checkpoint.save_strategy": (config.checkpoint.save_strategy == "epoch", "choose steps"),
            "eval.eval_strategy": (config.eval.eval_strategy == "epoch", "choose steps"),
            "training.num_steps": (config.training.num_steps is None, "set it"),
        }
        for key, (is_set, remedy) in refused.items():
            if is_set:
                raise UserError(f"{key}: with dataset.streaming the end of an epoch is not known; {remedy} {where}")
    return config
