"""How the tensors of a model lie in safetensors files: some are stored in pieces, and some under more than one spelling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from megatrain_jax.models.spec import ModelSpec

# Of an expert on disk: gate, up and down.
_EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL_NAMES = ("w1", "w3", "w2")


class Part(NamedTuple):
    """A tensor on disk that is part of a tensor of the model, or all of it.

    Attributes:
      key: its name on disk.
      where: index into the tensor of the model; empty for all of it.
      mxfp4: the values are those of ``{key}_blocks`` and ``{key}_scales``, see `checkpoint.mxfp4`.
    """

    key: str
    where: tuple[int | slice, ...] = ()
    mxfp4: bool = False


Spelling = tuple[Part, ...]


def spellings(spec: ModelSpec, tensors: Mapping[str, tuple[int, ...]]) -> dict[str, list[Spelling]]:
    """For every tensor of a model the ways in which files hold it; the first is the one that is written.

    Experts are stacked in the model and stored one by one, as transformers does it in files, or stacked, as it does it in
    memory. Those of GPT-OSS are always stacked, and quantised in the files that were released.

    Args:
      tensors: name and shape, from `model_tensors`.
    """
    return {name: _spellings(spec.family, name, shape) for name, shape in tensors.items()}


def _spellings(family: str, name: str, shape: tuple[int, ...]) -> list[Spelling]:
    whole = (Part(name),)
    owner, _, tensor = name.rpartition(".mlp.")
    if family == "mixtral" and tensor == "gate.weight":
        return [(Part(f"{owner}.block_sparse_moe.{tensor}"),), whole]
    if tensor not in ("experts.gate_up_proj", "experts.down_proj"):
        return [whole]
    if family == "gpt_oss":
        return [whole, (Part(name, mxfp4=True),)]
    mixtral = family == "mixtral"
    prefix = f"{owner}.{'block_sparse_moe' if mixtral else 'mlp'}.experts"
    gate, up, down = _MIXTRAL_NAMES if mixtral else _EXPERT_NAMES
    apart: list[Part] = []
    for expert in range(shape[0]):
        if tensor == "experts.down_proj":
            apart.append(Part(f"{prefix}.{expert}.{down}.weight", (expert,)))
        else:
            half = shape[1] // 2
            apart.append(Part(f"{prefix}.{expert}.{gate}.weight", (expert, slice(half))))
            apart.append(Part(f"{prefix}.{expert}.{up}.weight", (expert, slice(half, None))))
    stacked = [whole, (Part(f"{prefix}.{tensor.removeprefix('experts.')}"),)] if mixtral else [whole]
    return [tuple(apart), *stacked]


class Piece(NamedTuple):
    """What a tensor on disk is: the part `where` of tensor `name` of the model, in its own `shape`."""

    name: str
    where: tuple[int | slice, ...]
    shape: tuple[int, ...]


def written_pieces(spec: ModelSpec, tensors: Mapping[str, tuple[int, ...]]) -> dict[str, Piece]:
    """The tensors that files are written with, by name on disk; those of one tensor of the model follow one another."""
    return {
        part.key: Piece(name, part.where, np.broadcast_to(np.empty(()), tensors[name])[part.where].shape)
        for name, ways in spellings(spec, tensors).items()
        for part in ways[0]
    }
