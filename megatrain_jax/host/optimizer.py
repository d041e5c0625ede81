"""The optimizer, one tensor at a time: optax on the CPU backend, or a fused kernel that is held equal to it.

The learning-rate schedule and the optimizer are optax's own. A transformation that is elementwise is applied to the
chunks of a tensor, which stay in cache; one that looks at a whole tensor gets it whole; one that looks at the whole
model is refused, because blocks are updated at different times.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from megatrain_jax.config import OptimizerConfig, TrainingConfig, UserError
from megatrain_jax.host.layouts import Rule, cpu_device
from megatrain_jax.host.store import HostStore, HostTensor, Layout

# optax factories whose update of an element depends on nothing but that element's own history.
ELEMENTWISE = frozenset(
    "adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad lion nadam nadamw radam rmsprop sgd sign_sgd "
    "yogi".split()
)
# optax factories that look at one tensor as a whole (its norm, its factors).
PER_TENSOR = frozenset("adafactor fromage lamb lars novograd".split())
FUSED = frozenset("adam adamw lion sgd".split())
_DECOUPLED_DECAY = frozenset("adamaxw adamw adan lamb lion nadamw".split())


def make_schedule(training: TrainingConfig, total_steps: int) -> optax.Schedule:
    """Learning rate by step, counted from 0: linear warmup to the peak, then the decay of `lr_scheduler_type`.

    * constant; linear to 0; cosine to 0 (arXiv 1608.03983); cosine_with_min_lr to ``min_lr_ratio`` of the peak;
    * wsd (arXiv 2404.06395): constant, then linear over the last ``decay_ratio`` of the steps to ``min_lr_ratio``;
    * inverse_sqrt: ``peak * sqrt(w / (w + t))`` t steps after a warmup of w (10,000 if there is none), as transformers.

    Raises:
      UserError: the warmup is longer than the run, or a schedule argument is not one of this schedule.
    """
    peak, kind, total = training.learning_rate, training.lr_scheduler_type, max(total_steps, 1)
    warmup = training.warmup_steps
    warmup = round(warmup * total) if 0 < warmup < 1 else int(warmup)
    if warmup > total:
        raise UserError(f"training.warmup_steps: {warmup} is more than the {total} steps of the run")
    known = {"cosine_with_min_lr": {"min_lr_ratio"}, "wsd": {"min_lr_ratio", "decay_ratio"}}.get(kind, set())
    if unknown := set(training.lr_scheduler_kwargs) - known:
        accepted = ", ".join(sorted(known)) or "none"
        raise UserError(f"training.lr_scheduler_kwargs: {kind} takes {accepted}, not {', '.join(sorted(unknown))}")
    floor = training.lr_scheduler_kwargs.get("min_lr_ratio", 0.1 if kind == "cosine_with_min_lr" else 0.0)
    rest = max(total - warmup, 1)
    if kind == "constant":
        decay = optax.constant_schedule(peak)
    elif kind == "linear":
        decay = optax.linear_schedule(peak, 0.0, rest)
    elif kind in ("cosine", "cosine_with_min_lr"):
        decay = optax.cosine_decay_schedule(peak, rest, alpha=floor)
    elif kind == "wsd":
        length = min(rest, max(1, round(training.lr_scheduler_kwargs.get("decay_ratio", 0.1) * total)))
        decay = optax.linear_schedule(peak, floor * peak, length, transition_begin=rest - length)
    else:
        timescale = warmup or 10_000
        decay = lambda t: peak * jnp.sqrt(timescale / (timescale + jnp.maximum(t, 0)))  # noqa: E731
    if not warmup:
        return decay
    # As in transformers the first step has a rate of 0; here it starts at one part, so that no step is wasted.
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1)), decay], [warmup])


def needs_whole_tensors(optimizer: OptimizerConfig) -> bool:
    """Whether the optimizer reads a tensor in one piece. Raises UserError for one that cannot be used here."""
    name = optimizer.type
    if name in ELEMENTWISE or name in PER_TENSOR:
        return name in PER_TENSOR
    if hasattr(optax, name) or hasattr(optax.contrib, name):
        raise UserError(
            f"optimizer.type: {name!r} is not known to update each tensor by itself, and blocks are updated at different "
            f"times; use one of {', '.join(sorted(ELEMENTWISE | PER_TENSOR))}"
        )
    raise UserError(f"optimizer.type: optax has no {name!r}; use one of {', '.join(sorted(ELEMENTWISE | PER_TENSOR))}")


def choose_layout(optimizer: OptimizerConfig, dtype: str) -> Layout:
    """How the store should keep its masters for an optimizer: "split" for the fused kernels, else for optax.

    Raises:
      UserError: the optimizer is not usable here, or the fused kernels were asked for and cannot be had.
    """
    whole = needs_whole_tensors(optimizer)
    if optimizer.type not in FUSED:
        missing = f"there is none for {optimizer.type}"
    elif dtype != "bfloat16":
        missing = "they need model.dtype: bfloat16"
    elif importlib.util.find_spec("numba") is None:
        missing = "numba is not installed (pip install 'megatrain_jax[fused]')"
    else:
        missing = ""
    if optimizer.backend == "fused" and missing:
        raise UserError(f"optimizer.backend: no fused kernels: {missing}; use auto or optax")
    if optimizer.backend != "optax" and not missing:
        return "split"
    return "whole" if whole else "chunks"


def make_transformation(
    optimizer: OptimizerConfig, weight_decay: float | None, schedule: optax.Schedule, *, decay: bool
) -> optax.GradientTransformation:
    """The optax transformation of one tensor; `decay` is False for tensors that take no weight decay.

    Weight decay is decoupled (arXiv 1711.05101) where the optax factory has it and is otherwise added to the gradient.
    """
    name = optimizer.type
    needs_whole_tensors(optimizer)
    settings, strength = _settings(optimizer), _decay_strength(optimizer, weight_decay) if decay else 0.0
    if name in _DECOUPLED_DECAY:
        return getattr(optax, name)(schedule, weight_decay=strength, **settings)
    return optax.chain(optax.add_decayed_weights(strength), getattr(optax, name)(schedule, **settings))


def _decay_strength(optimizer: OptimizerConfig, weight_decay: float | None) -> float:
    default = 0.01 if optimizer.type in ("adamw", "lion") else 0.0
    return default if weight_decay is None else weight_decay


def _settings(optimizer: OptimizerConfig) -> dict[str, float]:
    """The configured arguments that the optax factory takes; what is not configured stays at optax' default."""
    name, accepted = optimizer.type, inspect.signature(getattr(optax, optimizer.type)).parameters
    settings: Mapping[str, float | None] = {
        "b1": optimizer.beta1,
        "b2": optimizer.beta2,
        "eps": optimizer.eps if "adam" in name else None,
        "momentum": optimizer.momentum if name == "sgd" else None,
    }
    return {key: value for key, value in settings.items() if value is not None and key in accepted}


def _make_kernel(optimizer: OptimizerConfig, strength: float, schedule: optax.Schedule):
    """The fused kernel with the arguments that `make_transformation` would give optax."""
    from megatrain_jax.host import fused

    defaults = inspect.signature(getattr(optax, optimizer.type)).parameters
    given = {key: defaults[key].default for key in ("b1", "b2", "eps") if key in defaults} | _settings(optimizer)

    # Jitted, as optax is on the plain layout: op by op the last bits would be others.
    @jax.jit
    def compute(count):
        correct = lambda b: optax.tree.bias_correction(jnp.float32(1), given.get(b, 0.0), count + 1)  # noqa: E731
        return schedule(count), correct("b1"), correct("b2")

    @functools.lru_cache(maxsize=4)
    def scalars(count: int) -> list[float]:
        with jax.default_device(cpu_device()):
            return [float(x) for x in compute(count)]

    decay = "decoupled_decay" if optimizer.type in _DECOUPLED_DECAY else "added_decay"
    return fused.make_kernel(optimizer.type, scalars, **given, **{decay: strength})


def make_rule(
    optimizer: OptimizerConfig,
    weight_decay: float | None,
    schedule: optax.Schedule,
    *,
    decay: bool,
    layout: Layout,
) -> Rule:
    """The optimizer of one tensor, in the form that a layout applies. See `make_transformation`."""
    tx = make_transformation(optimizer, weight_decay, schedule, decay=decay)

    def step(params, state, grads, scale):
        grads = [g.astype(jnp.float32) * scale for g in grads]
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    strength = _decay_strength(optimizer, weight_decay) if decay else 0.0
    kernel = _make_kernel(optimizer, strength, schedule) if layout == "split" else None
    return Rule(jax.jit(tx.init), step, kernel)


@functools.lru_cache(maxsize=8)
def _rules(optimizer: OptimizerConfig, training: TrainingConfig, kwargs: tuple, total_steps: int, layout: Layout):
    """Schedule and rules of a configuration, the same objects every time, so that they are compiled once."""
    training = dataclasses.replace(training, lr_scheduler_kwargs=dict(kwargs))
    schedule = make_schedule(training, total_steps)
    rule = functools.partial(make_rule, optimizer, training.weight_decay, schedule, layout=layout)
    return schedule, rule(decay=True), rule(decay=False)


class HostOptimizer:
    """The optimizer of every trainable tensor of a store; its state lives in the store.

    Args:
      store: where the tensors are; `HostTensor.init_state` is called on each trainable one.
      optimizer, training: the configuration.
      total_steps: length of the schedule, in steps.
    """

    def __init__(self, store: HostStore, optimizer: OptimizerConfig, training: TrainingConfig, total_steps: int):
        shape = dataclasses.replace(training, lr_scheduler_kwargs=())
        kwargs = tuple(sorted(training.lr_scheduler_kwargs.items()))
        self.schedule, self._decayed, self._undecayed = _rules(optimizer, shape, kwargs, total_steps, store.layout)
        self._no_decay = tuple(optimizer.no_decay)
        for tensor in store.tensors.values():
            if tensor.trainable:
                tensor.init_state(self.rule(tensor))

    def rule(self, tensor: HostTensor) -> Rule:
        """What is done to each element of a tensor, the same object for all that are treated alike."""
        return self._undecayed if any(part in tensor.name for part in self._no_decay) else self._decayed

    def update(self, tensor: HostTensor, grads: list[np.ndarray], scale: float) -> None:
        """Applies one step to a tensor in place; `grads` as in `HostTensor.update`, multiplied by `scale` first."""
        tensor.update(self.rule(tensor), grads, np.float32(scale))

    def update_table_rows(
        self, tensor: HostTensor, grads: list[np.ndarray], scale: float, numbers: np.ndarray, *, last: bool
    ) -> None:
        """A part of `update`; see `HostTensor.update_table_rows`."""
        tensor.update_table_rows(self.rule(tensor), grads, np.float32(scale), numbers, last=last)

    def learning_rate(self, applied_steps: int) -> float:
        """Learning rate of the step that follows `applied_steps` applied ones."""
        with jax.default_device(cpu_device()):
            return float(self.schedule(applied_steps))


def clip_scale(norm: float, max_norm: float) -> float:
    """``min(1, max_norm / norm)``, as `optax.clip_by_global_norm`; 1 where `max_norm` is 0, which turns clipping off."""
    return 1.0 if not max_norm or norm <= max_norm else max_norm / norm
