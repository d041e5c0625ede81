"""The whole configuration: frozen dataclasses, YAML, key=value overrides."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal


class UserError(ValueError):
    """Something the user brought is wrong. The message is one line: the thing, its value, what to do."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The numbers a key accepts: from `low` to `high`, both allowed unless `low_open` or `high_open` says so."""

    low: float = 0
    high: float = float("inf")
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, x: float) -> bool:
        above = x > self.low if self.low_open else x >= self.low
        return above and (x < self.high if self.high_open else x <= self.high)

    def __str__(self) -> str:
        text = f"{'>' if self.low_open else '>='} {self.low}"
        return text if self.high == float("inf") else f"{text} and {'<' if self.high_open else '<='} {self.high}"


Count = Annotated[int, Bounds(low=1)]
Size = Annotated[int, Bounds()]
NonNegative = Annotated[float, Bounds()]
Positive = Annotated[float, Bounds(low_open=True)]
Share = Annotated[float, Bounds(high=1)]
Fraction = Annotated[float, Bounds(high=1, high_open=True)]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    r"""Which model, and what it computes with.

    Attributes:
      name: local Hugging Face folder (config.json, safetensors, tokenizer.json). Aliases: model_name_or_path, base_model.
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
    device: str = "auto"
    attn_implementation: Literal["auto", "cudnn", "xla"] = "auto"
    freeze: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class DatasetConfig:
    """What is read, and how it becomes rows of tokens.

    Attributes:
      path: file, folder or glob of the training samples.
      format: how a sample is spelt; "auto" looks at the first one.
      text_field: key of a plain text sample.
      query_field: key of the question in a question/answer pair.
      response_field: key of the answer in a question/answer pair.
      chat_template: None is the tokenizer's own; else a path of a Jinja file, or Jinja text.
      system_prompt: put before conversations that have no system turn; "" is none.
      train_on: which tokens are supervised: those of every assistant turn, of the last one, of the completion, or all.
      max_seq_len: longest row, in tokens. Aliases: cutoff_len, sequence_len, max_length, max_seq_length.
      overlong: what happens to a longer sample.
      pad_to_multiple_of: rows are padded to a multiple of this many tokens.
      max_samples: only the first this many samples are read; None is all.
      shuffle: a new order every epoch, drawn from `Config.seed`.
      eval_path: file, folder or glob of the evaluation samples; None with `val_size` 0 is no evaluation.
      val_size: held out of `path` for evaluation: a fraction in [0, 1) or a whole number of samples.
    """

    path: str
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text"] = "auto"
    text_field: str = "text"
    query_field: str = "query"
    response_field: str = "response"
    chat_template: str | None = None
    system_prompt: str = ""
    train_on: Literal["assistant", "last_assistant", "completion", "all"] = "assistant"
    max_seq_len: Annotated[int, Bounds(low=2)] = 2048
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    pad_to_multiple_of: Count = 128
    max_samples: Count | None = None
    shuffle: bool = True
    eval_path: str | None = None
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


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The update rule. The learning rate and the weight decay are in `TrainingConfig`.

    Attributes:
      type: "adamw", "adam", "lion", "sgd", or the name of another optax factory.
      beta1: decay of the first moment; None is the optimizer's own default.
      beta2: decay of the second moment; None is the optimizer's own default.
      eps: added to the denominator of adam and adamw.
      momentum: of sgd.
      no_decay: tensors whose name contains one of these take no weight decay.
    """

    type: str = "adamw"
    beta1: Fraction | None = None
    beta2: Fraction | None = None
    eps: NonNegative = 1e-8
    momentum: Fraction = 0.9
    no_decay: tuple[str, ...] = ("norm", "bias")


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
    """What may be used, and what is kept where.

    Attributes:
      device_budget: GiB of each accelerator's memory; "auto" is what is free.
      host_budget: GiB of host memory; "auto" is what is free, within the container's limit.
      offload_activations: block inputs wait in host memory; "auto" only when they do not fit on the device.
      pin_memory: register the weights' pages with the driver, so that copies run at the link's speed.
      loss_tile: tokens whose logits exist at once.
    """

    device_budget: Literal["auto"] | Positive = "auto"
    host_budget: Literal["auto"] | Positive = "auto"
    offload_activations: Literal["auto"] | bool = "auto"
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
    max_shard_size: str = "5GB"

    @property
    def max_shard_bytes(self) -> int:
        """`max_shard_size` in bytes. Raises UserError if it is not a number and a unit."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", self.max_shard_size, re.IGNORECASE)
        size = match and int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))
        if not size:
            raise UserError(f"checkpoint.max_shard_size: expected a size such as '5GB', got {self.max_shard_size!r}")
        return size


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    """What a person sees while it runs.

    Attributes:
      log_interval: steps between two records. Aliases: logging_steps, log_every_n_steps.
      progress: "rich" is a live line, "plain" one line a record; "auto" is rich on a terminal.
    """

    log_interval: Count = 1
    progress: Literal["auto", "rich", "plain", "off"] = "auto"


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
