"""megatrain_jax: the host owns the model, the accelerator borrows one block at a time.

The public names load what they need when they are first used, so that a command can settle the environment before jax
is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatrain_jax.config import Config, UserError, load_config
    from megatrain_jax.model import Model, load, save
    from megatrain_jax.models.spec import Batch, Context, ModelSpec
    from megatrain_jax.stream.templates import LayerStep, layer_step
    from megatrain_jax.trainer import Trainer

_HOME = {
    "Batch": "models.spec",
    "Config": "config",
    "Context": "models.spec",
    "LayerStep": "stream.templates",
    "Model": "model",
    "ModelSpec": "models.spec",
    "Trainer": "trainer",
    "UserError": "config",
    "layer_step": "stream.templates",
    "load": "model",
    "load_config": "config",
    "save": "model",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
