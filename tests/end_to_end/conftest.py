"""A whole small project on disk: model folder, tokenizer, data, configuration."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
import yaml
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from megatrain_jax import trainer
from megatrain_jax.checkpoint.huggingface import TOKENIZER_FILES
from megatrain_jax.config import Config, load_config
from megatrain_jax.models.blocks import model_tensors
from megatrain_jax.models.families import spec_from_config
from megatrain_jax.stream import transfer

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
    "torch_dtype": "float32",
}
TIMES = {"tokens_per_second", "seconds", "host_peak_bytes", "device_peak_bytes", "eval_seconds"}


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 259 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A Hugging Face folder with random float32 weights and a tokenizer."""
    folder.mkdir(parents=True)
    config = HF_CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    weights = {
        name: (rng.normal(size=shape) * 0.15).astype(np.float32) + ("norm" in name)
        for name, shape in model_tensors(spec_from_config(config)).items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


def write_data(file: Path, samples: int, seed: int = 0) -> Path:
    """Conversations of different lengths, each different from the others."""
    rng = np.random.default_rng(seed)
    word = lambda: "".join(rng.choice(list("abcdefgh"), rng.integers(1, 7)))  # noqa: E731
    rows = [{"messages": [{"role": r, "content": word()} for r in ("user", "assistant")]} for _ in range(samples)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


class Project:
    """A folder with everything that a run needs.

    Attributes:
      folder: of the configuration; outputs go to ``folder/out`` unless a run says otherwise.
      tree: the configuration, to be changed before `write`.
    """

    def __init__(self, folder: Path, model: Path):
        self.folder = folder
        self.tree: dict[str, dict] = {
            "model": {"name": str(model), "dtype": "float32", "device": "cpu"},
            "dataset": {
                "path": str(write_data(folder / "train.jsonl", 13)),
                "eval_path": str(write_data(folder / "eval.jsonl", 5, seed=1)),
                "max_seq_len": 48,
                "pad_to_multiple_of": 48,
            },
            "training": {"batch_size": 2, "num_steps": 6, "learning_rate": 1e-2, "weight_decay": 0.1},
            "checkpoint": {"save_steps": 1000, "save_dtype": "float32", "save_total_limit": None},
            "logging": {"progress": "plain"},
        }

    def write(self, name: str = "config.yaml", **sections: Mapping[str, Any]) -> Path:
        """The configuration as a file, some keys of some sections changed."""
        tree = {key: self.tree.get(key, {}) | dict(sections.get(key, {})) for key in {**self.tree, **sections}}
        (self.folder / name).write_text(yaml.safe_dump(tree))
        return self.folder / name

    def config(self, out: str = "out", **sections: Mapping[str, Any]) -> Config:
        return load_config(self.write(**sections), [f"output_dir={self.folder / out}"])

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-W", "error", "-m", "megatrain_jax.train", "--config", *arguments]

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """The command line in a process of its own."""
        return subprocess.run(
            self.command(*arguments),
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )


def records(out: Path, *, timed: bool = False) -> list[dict[str, Any]]:
    """The lines of a run's metrics, without what depends on the clock unless `timed`."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if timed or key not in TIMES} for line in lines]


def saved_weights(out: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(out / "model" / "model.safetensors")


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).exists()}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tied")


@pytest.fixture
def project(tmp_path, model_folder) -> Project:
    return Project(tmp_path, model_folder)


@contextlib.contextmanager
def compile_once(folder: Path) -> Iterator[None]:
    """What one run compiled serves the others, those in processes of their own too; it would take most of the time."""
    options = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "make_mesh", functools.cache(transfer.make_mesh))
        for name, value in options.items():
            patch.setenv(name.upper(), str(value))
            jax.config.update(name, value)
        yield
        jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="package", autouse=True)
def shared_programs(tmp_path_factory):
    with compile_once(tmp_path_factory.mktemp("compiled")):
        yield
