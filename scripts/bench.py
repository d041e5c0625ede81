"""Speed of a training step on random weights and random tokens, as JSON.

    python scripts/bench.py --shape 7b-wide --layers 14 --batch 32 --seq 1024 --steps 6 --clip 0

Every token is a real one. `model_tflops` counts the matmuls of forward and backward once, causal attention once and no
embedding lookup: (6 * parameters in matmuls + 6 * layers * heads * head_dim * seq) * tokens / second. `6NT` counts every
parameter and no attention, as others do.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

_QWEN2 = dict(
    model_type="qwen2",
    architectures=["Qwen2ForCausalLM"],
    max_position_embeddings=1 << 20,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=False,
)
SHAPES = {
    "7b-wide": _QWEN2
    | dict(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
    ),
    "tiny": _QWEN2
    | dict(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="7b-wide", help=f"one of {', '.join(SHAPES)}, or a Hugging Face folder")
    parser.add_argument("--layers", type=int, help="instead of the shape's own")
    parser.add_argument("--batch", type=int, default=32, help="rows in a micro-batch")
    parser.add_argument("--seq", type=int, default=1024, help="tokens in a row")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6, help="timed steps, after two that compile and warm up")
    parser.add_argument(
        "--clip",
        type=float,
        nargs="+",
        default=[1.0],
        help="max_grad_norm; 0 updates at once; several run in turn on the plan of the first",
    )
    parser.add_argument("--keep", default="auto", help="layers that keep their intermediates; auto or a number")
    parser.add_argument("--resident", default="auto", help="blocks that stay on the device; auto or a number")
    parser.add_argument("--device-budget", default="auto", help="GiB of device memory that may be used")
    parser.add_argument("--backend", default="auto", help="of the optimizer: auto, fused or optax")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--timeline", type=Path, help="PNG of the last step")
    parser.add_argument("--json", type=Path, help="where the results go, besides the standard output")
    options = parser.parse_args()
    results = list(run(options))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def run(options: argparse.Namespace):
    from megatrain_jax.config import Config, DatasetConfig, MemoryConfig, ModelConfig, OptimizerConfig, TrainingConfig
    from megatrain_jax.train import settle_environment

    with contextlib.ExitStack() as stack:
        folder = options.shape
        if folder in SHAPES:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            Path(folder, "config.json").write_text(json.dumps(SHAPES[options.shape]))
        overrides = {"num_hidden_layers": options.layers} if options.layers else {}
        config = Config(
            ModelConfig(folder, init="random", config_overrides=overrides, dtype=options.dtype, device=options.device),
            DatasetConfig("", max_seq_len=options.seq),
            TrainingConfig(
                batch_size=options.batch,
                gradient_accumulation_steps=options.micro_batches,
                max_grad_norm=options.clip[0],
                skip_nonfinite=bool(options.clip[0]),
            ),
            OptimizerConfig(options.optimizer, backend=options.backend),
            MemoryConfig(
                device_budget=number(options.device_budget),
                keep_intermediates=number(options.keep),
                resident_blocks=number(options.resident),
            ),
        )
        settle_environment(config)
        import jax
        import numpy as np

        from megatrain_jax.host.optimizer import HostOptimizer
        from megatrain_jax.model import load_for_training, unpadded_batch
        from megatrain_jax.models.families import read_config, spec_from_config
        from megatrain_jax.report.metrics import host_peak_bytes
        from megatrain_jax.report.timeline import draw
        from megatrain_jax.stream.events import Recorder
        from megatrain_jax.stream.pipeline import Pipeline, Settings
        from megatrain_jax.stream.transfer import make_mesh
        from megatrain_jax.stream.updater import Updater
        from megatrain_jax.trainer import plan as make_plan

        began = time.perf_counter()
        mesh = make_mesh(config.model.device)
        spec = spec_from_config(read_config(folder, overrides))
        rows = types.SimpleNamespace(sequence_length=options.seq)
        plan = make_plan(config, types.SimpleNamespace(spec=spec, trained=spec.num_parameters, dataset=rows), mesh)
        model = load_for_training(config, mesh, plan.resident)
        optimizer = HostOptimizer(model.store, config.optimizer, config.training, 10_000)
        print(
            f"{model.spec.num_parameters / 1e9:.3f} B parameters in {time.perf_counter() - began:.1f} s",
            file=sys.stderr,
        )
        rng = np.random.default_rng(0)
        shape = (options.batch, options.seq)
        batches = [unpadded_batch(rng.integers(0, model.spec.vocab_size, shape)) for _ in range(options.micro_batches)]
        tokens = options.batch * options.seq * options.micro_batches
        for clip in options.clip:
            events: list = []
            record = Recorder(events.append)
            updater = Updater(model.store, optimizer, record)
            settings = Settings(
                plan.group_size,
                plan.offload_activations,
                plan.keep_layers,
                max_grad_norm=clip,
                skip_nonfinite=bool(clip),
            )
            pipeline = Pipeline(model.store, model.run, settings, record, updater)
            warm = time.perf_counter()
            for _ in range(2):
                outcome = pipeline.train_step(batches)
            updater.drain()
            warm = time.perf_counter() - warm
            events.clear()
            marks, seconds = [time.perf_counter()], collections.defaultdict(list)
            for _ in range(options.steps):
                outcome = pipeline.train_step(batches)
                for what, value in outcome.seconds.items():
                    seconds[what].append(value)
                marks.append(time.perf_counter())
            updater.drain()
            jax.block_until_ready([t.on_device() for t in model.store.tensors.values() if t.resident])
            step = (time.perf_counter() - marks[0]) / options.steps
            updater.close()
            record.close()
            result = {
                "shape": options.shape,
                "layers": len(model.spec.layers),
                "keep_layers": plan.keep_layers,
                "resident_blocks": len(plan.resident),
                "optimizer_layout": model.store.layout,
                "tokens_per_step": tokens,
                "clip": clip,
                "optimizer": options.optimizer,
                "seconds_per_step": step,
                "tokens_per_second": tokens / step,
                "model_tflops": model_flops_per_token(model.spec, options.seq) * tokens / step / 1e12,
                "6NT": 6 * model.spec.num_parameters * tokens / step / 1e12,
                "seconds": {what: statistics.median(values) for what, values in seconds.items()},
                "optimizer_busy_seconds": busy(events, "update") / options.steps,
                "warm_up_seconds": warm,
                "loss": outcome.loss,
                "device_peak_gib": (mesh.peak_bytes() or 0) / 2**30,
                "host_peak_gib": host_peak_bytes() / 2**30,
                "host_bytes_per_parameter": host_peak_bytes() / model.spec.num_parameters,
                "device": mesh.devices[0].device_kind,
                "jax": jax.__version__,
                "commit": commit(),
                "date": datetime.date.today().isoformat(),
                "command": " ".join(["python", *sys.argv]),
            }
            print(json.dumps(result), flush=True)
            if options.timeline:
                draw(events, options.timeline, marks[-2:])
            yield result


def model_flops_per_token(spec, seq: int) -> int:
    """Of forward and backward: matmuls once, causal attention once, no recompute and no embedding lookup."""
    from megatrain_jax.models.blocks import model_tensors

    shapes = {name: shape for name, shape in model_tensors(spec).items() if name != "model.embed_tokens.weight"}
    matmuls = sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2)
    if spec.tie_word_embeddings:
        matmuls += spec.vocab_size * spec.hidden_size
    return 6 * matmuls + sum(6 * layer.num_heads * layer.head_dim * seq for layer in spec.layers)


def busy(events: list, what: str) -> float:
    """Seconds between each event `what` and the "`what` done" of the same block that follows it."""
    total, open_ = 0.0, {}
    for event in sorted(events, key=lambda e: e.when):
        if event.what == what:
            open_[event.block] = event.when
        elif event.what == f"{what} done" and event.block in open_:
            total += event.when - open_.pop(event.block)
    return total


def number(text: str) -> str | float:
    return text if text == "auto" else float(text) if "." in text else int(text)


def commit() -> str:
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    main()
