"""What must be the same for a run to go on from a checkpoint, and what may change.

* Refused by name: what a step is made of (`REFUSED`), for then the steps that follow would be those of another run: the
  model, the data and their order, the rows of a step, the seed, the optimizer's kind, tensors that are not trained.
* Named in the log: every other key of the sections model, training and optimizer, which acts from here on, such as
  the learning rate or the number of steps.
* Without a word: where and how it runs (memory, device, logging, evaluation, checkpoints, folders).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatrain_jax.checkpoint.manifest import KEY
from megatrain_jax.config import UserError

# By key of an identity: what to call it.
REFUSED = {
    "model": "model.name or model.config_overrides",
    "frozen": "the frozen tensors of model.name",
    "data": "the data of dataset",
    "shuffle": "dataset.shuffle",
    "rows_per_step": "training.batch_size x training.gradient_accumulation_steps",
    "seed": "seed",
    "optimizer": "optimizer.type",
}
_SECTIONS = ("model", "training", "optimizer")
_WITHOUT_A_WORD = (
    "model.name", "model.tokenizer", "model.device", "training.resume_from_checkpoint", "training.watchdog_seconds",
)  # fmt: skip


def refuse(folder: Path, saved: Mapping[str, Any], here: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
    """Raises UserError, which names what and both values, if a run may not go on from a checkpoint.

    Args:
      folder: the checkpoint.
      saved, here: identities by the keys of `REFUSED`, of the checkpoint and of the run; what the second lacks is not compared.
      changed: all keys that differ between the two configurations; see `changes`.
    """
    here = json.loads(json.dumps(here))
    for key, name in REFUSED.items():
        if key not in here or saved[key] == here[key]:
            continue
        where, before, now = _first_difference(saved[key], here[key])
        if key == "data":
            keys = [f"{name} was {a!r} and is {b!r}" for name, (a, b) in changed.items() if name.startswith("dataset.")]
            what = f"its data are not those of the run ({', '.join(keys) or 'the content of dataset.path has changed'})"
        else:
            what = f"it was written with {name}{where} {before!r}, and the run has {now!r}"
        raise UserError(
            f"{KEY}: cannot go on from '{folder}': {what}; set it back, or choose another output_dir and start from the "
            "weights that megatrain_jax.export makes of the checkpoint"
        )


def changes(saved: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys ``section.key`` that differ between two configurations (`Config.to_dict`), with both values."""
    saved, here = (dict(_leaves(json.loads(json.dumps(tree)))) for tree in (saved, here))
    return {key: (saved.get(key), here.get(key)) for key in here | saved if saved.get(key) != here.get(key)}


def describe(changed: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Lines for the log about the changes that act from here on."""
    return [
        f"changed    {key}: {before} before, {now} from here on"
        for key, (before, now) in changed.items()
        if key.partition(".")[0] in _SECTIONS and key not in _WITHOUT_A_WORD
    ]


def _leaves(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, value in tree.items():
        if isinstance(value, Mapping):
            yield from ((f"{section}.{key}", leaf) for key, leaf in value.items())
        else:
            yield section, value


def _first_difference(saved: Any, here: Any, where: str = "") -> tuple[str, Any, Any]:
    """Where in two trees of plain values the first difference is, and the values there."""
    if isinstance(saved, dict) and isinstance(here, dict):
        key = next(key for key in (*here, *saved) if saved.get(key) != here.get(key))
        return _first_difference(saved.get(key), here.get(key), f"{where}.{key}")
    if isinstance(saved, list) and isinstance(here, list) and len(saved) == len(here):
        i = next(i for i, (a, b) in enumerate(zip(saved, here)) if a != b)
        return _first_difference(saved[i], here[i], f"{where}[{i}]")
    return where and f": {where.lstrip('.')}", saved, here
