"""A whole training run on packed rows beside one on full rows: real tokens a second, and how long steps wait for data.

    python scripts/bench_packed_run.py --json packed_run.json

Both train a 7B-wide model of 4 layers and 32,768 tokens, on random weights, through the Trainer: files, chat template,
tokenisation, cache, packing, loader, steps. "packed" reads dialogues whose lengths are drawn as exp(N(5.8, 0.9)), clipped
to [16, 4096], and packs them into rows of 4096 tokens; "full" reads dialogues that fill such a row each. Printed are
medians over the steps after the first two, which compile, the longest wait for data among them, and what the loader takes
for a step by itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench import SHAPES
from bench_packing import sample_lengths

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WARM_UP = 2
OVERHEAD = 4 + len("user\n\nassistant\n\n")  # tokens of a dialogue besides what is said: chatml, special tokens and all


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes, so that a text has a known number of tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))


def write_dialogues(file: Path, lengths) -> None:
    """Dialogues of so many tokens each, a fifth of them the question's."""
    import numpy as np

    rng = np.random.default_rng(0)
    with open(file, "w", encoding="ascii") as out:
        for length in lengths:
            said = "".join(map(chr, rng.integers(97, 123, max(int(length) - OVERHEAD, 2))))
            cut = max(len(said) // 5, 1)
            turns = [{"role": "user", "content": said[:cut]}, {"role": "assistant", "content": said[cut:]}]
            out.write(json.dumps({"messages": turns}) + "\n")


def configuration(options: argparse.Namespace, folder: Path, way: str):
    from megatrain_jax.config import (
        CheckpointConfig,
        Config,
        DatasetConfig,
        LoggingConfig,
        ModelConfig,
        TrainingConfig,
    )

    model = folder / "model"
    overrides = {"num_hidden_layers": options.layers, "vocab_size": min(32768, SHAPES[options.shape]["vocab_size"])}
    return Config(
        ModelConfig(str(model), init="random", config_overrides=overrides, dtype=options.dtype, device=options.device),
        DatasetConfig(
            str(folder / f"{way}.jsonl"),
            chat_template="chatml",
            max_seq_len=options.seq,
            packing="best_fit" if way == "packed" else "none",
            cache_dir=str(folder / "cache"),
        ),
        TrainingConfig(batch_size=options.batch, num_steps=WARM_UP + options.steps),
        checkpoint=CheckpointConfig(save_strategy="no", save_final=False),
        logging=LoggingConfig(progress="off"),
        output_dir=str(folder / way),
    )


def train(config, way: str) -> dict:
    import jax

    from megatrain_jax.data.loader import TrainLoader
    from megatrain_jax.preparation import prepare
    from megatrain_jax.trainer import Trainer

    data = prepare(config).dataset
    rows, stats = data.train_rows, data.train_statistics
    loader = TrainLoader(data, config.training.batch_size, 1, config.seed, shuffle=True)
    loader.step(0)
    began = time.perf_counter()
    for step in range(1, config.training.num_steps):
        loader.step(step)
    loading = (time.perf_counter() - began) / (config.training.num_steps - 1)
    Trainer(config).fit()
    lines = [json.loads(line) for line in Path(config.output_dir, "metrics.jsonl").read_text().splitlines()]
    steps = lines[WARM_UP:]
    waits = [1e3 * step["seconds"]["data_wait"] for step in steps]
    return {
        "way": way,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "samples": stats.samples,
        "tokens_in_a_row": data.sequence_length,
        "filled": stats.tokens / (len(rows) * data.sequence_length),
        "tokens_per_second": statistics.median(step["tokens_per_second"] for step in steps),
        "step_ms": 1e3 * statistics.median(step["seconds"]["step"] for step in steps),
        "loader_ms": 1e3 * loading,
        "data_wait_ms": {"median": statistics.median(waits), "longest": max(waits)},
        "loss": [step["loss"] for step in (lines[0], lines[-1])],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="7b-wide", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="rows in a step")
    parser.add_argument("--seq", type=int, default=4096, help="tokens in a row")
    parser.add_argument("--steps", type=int, default=10, help="timed steps, after two that compile and warm up")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="where the results go, besides the standard output")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder, rows = Path(name), options.batch * (WARM_UP + options.steps)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(SHAPES[options.shape]))
        write_tokenizer(folder / "model")
        write_dialogues(folder / "full.jsonl", [options.seq] * rows)
        lengths = sample_lengths(20 * rows).clip(max=options.seq)
        write_dialogues(folder / "packed.jsonl", lengths[: (lengths.cumsum() < rows * options.seq).sum() + 1])
        from megatrain_jax.train import settle_environment

        settle_environment(configuration(options, folder, "packed"))
        for way in ("packed", "full"):
            results.append(train(configuration(options, folder, way), way))
            print(json.dumps(results[-1]), flush=True)
    packed, full = (result["tokens_per_second"] for result in results)
    print(f"packed rows: {packed:,.0f} real tokens/s, {packed / full:.1%} of full rows")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
