"""Model: a spec and its store, with load, save, logits, loss_and_grads."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatrain_jax.checkpoint import huggingface
from megatrain_jax.config import Config, MemoryConfig, UserError
from megatrain_jax.host.optimizer import choose_layout
from megatrain_jax.host.store import HostStore, Layout
from megatrain_jax.models.attention import AttentionOptions
from megatrain_jax.models.blocks import model_tensors, tensor_shapes
from megatrain_jax.models.config_keys import fp8_block
from megatrain_jax.models.families import read_config, spec_from_config
from megatrain_jax.models.initial import initial_value, random_source
from megatrain_jax.models.moe import in_expert_groups
from megatrain_jax.models.names import spellings, written_pieces
from megatrain_jax.models.spec import Batch, ModelSpec, is_buffer
from megatrain_jax.stream.pipeline import Pipeline
from megatrain_jax.stream.resident import ResidentTensor
from megatrain_jax.stream.templates import Execution
from megatrain_jax.stream.transfer import HostGradients, Mesh, make_mesh

DRAWN_AT_ONCE = 4 << 30  # bytes of random weights on their way to the store, unless a single tensor has more


@dataclasses.dataclass(frozen=True)
class Model:
    """A language model in host memory, and the devices that it streams through.

    Attributes:
      spec: the architecture.
      store: the weights, in host memory.
      run: what every template shares: mesh, dtype, attention.
      config: the parsed Hugging Face config.json.
      source: folder with the config.json and the tokenizer.
      notes: what a user should know of the files that were read, such as tensors that are not used.
    """

    spec: ModelSpec
    store: HostStore
    run: Execution
    config: Mapping[str, Any]
    source: Path
    notes: tuple[str, ...] = ()

    def logits(self, token_ids: np.ndarray) -> np.ndarray:
        """Logits of the next token at every position, streamed block by block.

        Args:
          token_ids: integers ``[batch, seq]``, without padding.

        Returns:
          float32 ``[batch, seq, vocab]``, a copy.
        """
        batch = unpadded_batch(token_ids)
        self.check(batch)
        return self.run.mesh.gather(Pipeline(self.store, self.run).logits(batch))[: len(token_ids)]

    def loss_and_grads(self, *micro_batches: Batch) -> tuple[float, dict[str, np.ndarray]]:
        """Mean next-token loss over the weighted targets, and its gradient with respect to every trainable tensor.

        With a router whose ``router_aux_loss_coef`` is not 0, the auxiliary loss is part of it.

        Args:
          micro_batches: one or more batches of equal shape; together they are one batch.

        Returns:
          The loss, and float32 gradients by Hugging Face name, in the shape of the tensor. Copies.
        """
        for batch in micro_batches:
            self.check(batch)
        grads: dict[str, list[np.ndarray]] = collections.defaultdict(list)

        def sink(block: int, landing: HostGradients) -> None:
            for path, tensor in self.store.owned(block).items():
                flat = self.run.mesh.gather(landing.arrays[path]).astype(np.float32).reshape(-1)
                grads[tensor.name].append(flat[: tensor.size].reshape(tensor.shape))

        loss, _, _ = Pipeline(self.store, self.run).gradients(micro_batches, sink)
        # Of a tensor that lies in several blocks the last part comes first.
        whole = {name: parts[0] if len(parts) == 1 else np.concatenate(parts[::-1]) for name, parts in grads.items()}
        return self.run.mesh.scalar(loss), whole

    def check(self, batch: Batch) -> None:
        """Raises ValueError if a batch does not fit the model."""
        shape = np.shape(batch.token_ids)
        if len(shape) != 2 or any(np.shape(field) != shape for field in batch):
            raise ValueError(f"every field of a batch must be [batch, seq], got {[np.shape(f) for f in batch]}")
        if shape[1] > self.spec.max_position_embeddings:
            raise ValueError(
                f"{shape[1]} tokens are more than the model's {self.spec.max_position_embeddings} positions"
            )
        for name in ("token_ids", "targets"):
            ids = np.asarray(getattr(batch, name))
            if ids.size and not 0 <= ids.min() <= ids.max() < self.spec.vocab_size:
                raise ValueError(f"{name} must be in [0, {self.spec.vocab_size}), got {ids.min()} to {ids.max()}")


def unpadded_batch(token_ids: np.ndarray) -> Batch:
    """A batch of whole sequences; every token but the last of each row predicts the next one.

    Args:
      token_ids: integers ``[batch, seq]``.
    """
    ids = np.asarray(token_ids, np.int32)
    if ids.ndim != 2:
        raise ValueError(f"token_ids must be [batch, seq], got {ids.shape}")
    weights = np.ones(ids.shape, np.float32)
    weights[:, -1:] = 0
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    return Batch(ids, np.roll(ids, -1, axis=1), weights, positions, np.ones_like(ids))


def load(
    path: str | Path,
    *,
    dtype: str = "bfloat16",
    device: str = "auto",
    init: str = "pretrained",
    seed: int = 0,
    config_overrides: Mapping[str, Any] = {},
    attention: str = "auto",
    freeze: Sequence[str] = (),
    layout: Layout = "chunks",
    memory: MemoryConfig = MemoryConfig(),
    resident: Collection[int] = (),
    mesh: Mesh | None = None,
) -> Model:
    """Reads a Hugging Face folder into host memory, tensor by tensor.

    Args:
      path: folder with config.json and, unless `init` is "random", safetensors.
      dtype: "bfloat16" or "float32": what computes and crosses the link. The master weights are float32.
      device: "auto", "cpu", "cuda", "cuda:N" or "all".
      init: "pretrained", or "random" to draw weights by the config's initializer_range.
      seed: of the random weights.
      config_overrides: replaces entries of config.json.
      attention: "auto", "cudnn" or "xla".
      freeze: regular expressions searched for in tensor names; what matches is not trained.
      layout: what the optimizer wants of the store; see `choose_layout`.
      memory: `pin_memory`, `loss_tile`, and `expert_groups`, of which "auto" is 1 here.
      resident: numbers of the blocks that stay on the device, the embedding being 0.
      mesh: the devices, instead of `device`.

    Raises:
      UserError: the folder, the architecture or a tensor is not usable; nothing was allocated for the model.
    """
    if dtype not in ("bfloat16", "float32"):
        raise UserError(f"model.dtype: {dtype!r} is not supported; use bfloat16 or float32")
    config = read_config(path, config_overrides)
    spec = in_expert_groups(spec_from_config(config), 1 if memory.expert_groups == "auto" else memory.expert_groups)
    mesh = mesh or make_mesh(device)
    by_structure = {block: tensor_shapes(block) for block in set(spec.blocks)}
    shapes = [by_structure[block] for block in spec.blocks]
    check_layout(layout, mesh, spec.expert_groups)

    @functools.cache
    def make_store() -> HostStore:
        return HostStore(
            spec,
            shapes,
            wire_dtype=dtype,
            rows=mesh.rows,
            trainable=trainable(freeze),
            lock_pages=mesh.has_own_memory and memory.pin_memory,
            layout=layout,
            resident=resident,
            make_resident=functools.partial(ResidentTensor, mesh=mesh, dtype=dtype),
        )

    run = Execution(
        mesh, np.dtype(dtype), AttentionOptions(attention_kernel(attention, spec, mesh, dtype)), memory.loss_tile
    )
    if init == "random":
        store = make_store()
        initialise(store, seed)
        return Model(spec, store, run, config, Path(path))
    # Everything is checked before the first tensor is handed over, and nothing is allocated before that.
    names = model_tensors(spec)
    report = huggingface.load_weights(
        path,
        names,
        lambda name, array: make_store().tensors[name].assign(array),
        tied=spec.tie_word_embeddings,
        spellings=spellings(spec, names),
        fp8_block=fp8_block(config),
    )
    return Model(spec, make_store(), run, config, Path(path), report.notes)


def check_layout(layout: Layout, mesh: Mesh, expert_groups: int) -> None:
    """Raises UserError if an optimizer that looks at whole tensors would get parts."""
    if layout != "whole":
        return
    if mesh.size > 1:
        raise UserError(
            "optimizer.type: this one needs whole tensors, which are split over several devices; use one device"
        )
    if expert_groups > 1:
        raise UserError(
            f"optimizer.type: this one needs whole tensors, and experts stream in {expert_groups} groups; use an "
            "elementwise one such as adamw, or set memory.expert_groups: 1"
        )


def load_for_training(
    config: Config, mesh: Mesh, resident: Collection[int] = (), expert_groups: int | None = None
) -> Model:
    """The model of a configuration, on the devices of `mesh`; raises as `load`.

    Args:
      expert_groups: instead of those of the configuration.
    """
    return load(
        config.model.name,
        dtype=config.model.dtype,
        init=config.model.init,
        seed=config.seed,
        config_overrides=config.model.config_overrides,
        attention=config.model.attn_implementation,
        freeze=config.model.freeze,
        layout=choose_layout(config.optimizer, config.model.dtype),
        memory=dataclasses.replace(config.memory, expert_groups=expert_groups or config.memory.expert_groups),
        resident=resident,
        mesh=mesh,
    )


def save(model: Model, out_dir: str | Path, *, dtype: str = "bfloat16", max_shard_size: str | int = "5GB") -> None:
    """Writes a Hugging Face folder that transformers loads, tensor by tensor.

    Args:
      model: what to write.
      out_dir: the folder; one written before is replaced when the new one is whole.
      dtype: "bfloat16" or "float32", of the weights in the files.
      max_shard_size: largest file, such as "5GB" or a number of bytes.

    Raises:
      UserError: the folder cannot be written.
    """
    tensors = model.store.tensors
    read = lambda name: tensors[name].read()  # noqa: E731
    write(out_dir, model.spec, read, model.config, model.source, dtype=dtype, max_shard_size=max_shard_size)


def write(
    out_dir: str | Path,
    spec: ModelSpec,
    read: Callable[[str], np.ndarray],
    config: Mapping[str, Any],
    source: Path,
    *,
    dtype: str,
    max_shard_size: str | int,
) -> None:
    """Writes a Hugging Face folder of tensors wherever they are; `read` gives the one of a name, called once for each.

    The other arguments are those of `Model` and `save`.
    """
    pieces = written_pieces(spec, model_tensors(spec))
    # Pieces of one tensor follow one another.
    read = functools.lru_cache(maxsize=1)(read)
    huggingface.save_folder(
        out_dir,
        {key: piece.shape for key, piece in pieces.items()},
        lambda key: read(pieces[key].name)[pieces[key].where],
        # What is written is not quantised, whatever was read.
        config={key: value for key, value in config.items() if key != "quantization_config"},
        source=source,
        dtype=dtype,
        max_shard_size=max_shard_size,
    )


def initialise(store: HostStore, seed: int) -> None:
    """Sets every tensor to its `initial_value`. Reproducible by `seed`."""

    def draw(number: int, name: str) -> None:
        tensor = store.tensors[name]
        tensor.assign(initial_value(store.spec, name, tensor.shape, random_source(seed, number)))

    running: dict[concurrent.futures.Future, int] = {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for number, (name, shape) in enumerate(model_tensors(store.spec).items()):
            nbytes = 4 * math.prod(shape)
            while running and sum(running.values()) + nbytes > DRAWN_AT_ONCE:
                for done in concurrent.futures.wait(running, return_when="FIRST_COMPLETED").done:
                    del running[done]
                    done.result()
            running[pool.submit(draw, number, name)] = nbytes
        for draws in running:
            draws.result()


def trainable(freeze: Sequence[str]) -> Callable[[str], bool]:
    """Whether the tensor of a name is trained under `model.freeze`. Raises UserError for a broken pattern."""
    try:
        patterns = [re.compile(pattern) for pattern in freeze]
    except re.error as error:
        raise UserError(f"model.freeze: {error.pattern!r} is not a regular expression: {error}") from None
    return lambda name: not is_buffer(name) and not any(pattern.search(name) for pattern in patterns)


def attention_kernel(attention: str, spec: ModelSpec, mesh: Mesh, dtype: str) -> str:
    """The attention kernel of a `model.attn_implementation` setting; cuDNN's where its conditions are met."""
    largest = 256 if (mesh.compute_capability or (0, 0)) >= (9, 0) else 128
    # Latent attention pads its values to the size of its keys, or the other way round.
    sizes = {max(s.head_dim, s.latent.value_dim if s.latent else 0) for s in spec.layers}
    refused = [
        why
        for why, holds in (
            ("needs a GPU", mesh.platform == "cpu"),
            ("computes in bfloat16 only", dtype != "bfloat16"),
            (
                f"takes head sizes up to {largest} on this GPU, in multiples of 8, and the model's is {max(sizes)}",
                any(size > largest or size % 8 for size in sizes),
            ),
        )
        if holds
    ]
    if attention == "cudnn" and refused:
        raise UserError(f"model.attn_implementation: cudnn {refused[0]}; use auto or xla")
    return "xla" if attention == "xla" or refused else "cudnn"
