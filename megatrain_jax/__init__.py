"""megatrain_jax trains language models that are larger than the accelerator: the host owns the model, the accelerator borrows one block at a time."""

from megatrain_jax.model import Model, load, save
from megatrain_jax.models.spec import Batch, Context, ModelSpec
from megatrain_jax.stream.templates import layer_step

__all__ = ["Batch", "Context", "Model", "ModelSpec", "layer_step", "load", "save"]
