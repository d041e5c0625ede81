"""Speed of a training step on random weights and random tokens, and what the machine can do at most, as JSON.

    python scripts/bench.py --shape 7b-wide --layers 14 --batch 32 --seq 1024 --steps 6 --clip 0

Every token is a real one. `model_tflops` counts the matmuls of forward and backward once, causal attention once and no
embedding lookup: (6 * parameters in matmuls + 6 * layers * heads * head_dim * seq) * tokens / second. `hardware_tflops` adds what
is computed again: of a layer that does not keep its intermediates everything but its last projection. `6NT` counts every
parameter and no attention, as others do.

The clock runs from the end of one step to the end of a later one: when loss and norm are known, while the updates of that
step may still run. So each end has the same work outstanding, as in the middle of a long run.

`shares` are of the ceilings that `ceilings.py` measures: `device_busy` of the time, by the pipeline's events; `matmul` is
`hardware_tflops` of the matmul ceiling; `h2d` and `d2h` are the bytes of weights and gradients over the step of the link;
`update` is the bytes that the host's optimizer must move, while it is busy, of a plain loop's over the same bytes.
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
import threading
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
    "14b-wide": _QWEN2
    | dict(
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=48,
        num_attention_heads=40,
        num_key_value_heads=8,
        vocab_size=152064,
    ),
    "30b-a3b": dict(
        model_type="qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        hidden_size=2048,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        router_aux_loss_coef=0.001,
        max_position_embeddings=1 << 20,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        vocab_size=151936,
        tie_word_embeddings=False,
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
    "tiny-experts": dict(
        model_type="qwen3_moe",
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=1 << 20,
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
    parser.add_argument("--host-budget", default="auto", help="GiB of host memory that may be used")
    parser.add_argument("--backend", default="auto", help="of the optimizer: auto, fused or optax")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--no-ceilings", action="store_true", help="time the step alone")
    parser.add_argument("--timeline", type=Path, help="PNG of the last step")
    parser.add_argument("--json", type=Path, help="where the results go, besides the standard output")
    options = parser.parse_args()
    results = []
    for result in run(options):
        results.append(result)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")


def configuration(options: argparse.Namespace, folder: str):
    from megatrain_jax.config import Config, DatasetConfig, MemoryConfig, ModelConfig, OptimizerConfig, TrainingConfig

    overrides = {"num_hidden_layers": options.layers} if options.layers else {}
    return Config(
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
            host_budget=number(options.host_budget),
            keep_intermediates=number(options.keep),
            resident_blocks=number(options.resident),
        ),
    )


def run(options: argparse.Namespace):
    """One result for each `--clip`."""
    with contextlib.ExitStack() as stack:
        folder = options.shape
        if folder in SHAPES:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            Path(folder, "config.json").write_text(json.dumps(SHAPES[options.shape]))
        config = configuration(options, folder)
        from megatrain_jax.train import settle_environment

        settle_environment(config)
        import jax
        import numpy as np
        from ceilings import ceilings

        from megatrain_jax.host.optimizer import HostOptimizer
        from megatrain_jax.model import load_for_training, unpadded_batch
        from megatrain_jax.models.families import read_config, spec_from_config
        from megatrain_jax.preparation import plan as make_plan
        from megatrain_jax.report.metrics import host_peak_bytes
        from megatrain_jax.report.timeline import draw
        from megatrain_jax.stream.transfer import make_mesh

        compiling = CompileSeconds()
        mesh = make_mesh(config.model.device)
        limits = {} if options.no_ceilings else ceilings(mesh)
        used = stack.enter_context(HostMemory())
        began = time.perf_counter()
        spec = spec_from_config(read_config(folder, config.model.config_overrides))
        rows = types.SimpleNamespace(sequence_length=options.seq)
        plan = make_plan(config, types.SimpleNamespace(spec=spec, trained=spec.num_parameters, dataset=rows), mesh)
        mesh.reserve_pinned(plan.pinned)
        model = load_for_training(config, mesh, plan.resident, plan.expert_groups)
        optimizer = HostOptimizer(model.store, config.optimizer, config.training, 10_000)
        loading = time.perf_counter() - began
        rng = np.random.default_rng(0)
        shape = (options.batch, options.seq)
        batches = [unpadded_batch(rng.integers(0, spec.vocab_size, shape)) for _ in range(options.micro_batches)]
        for clip in options.clip:
            compiling.seconds = 0.0
            measured, events, marks = time_steps(model, optimizer, plan, clip, batches, options.steps)
            step = measured["seconds_per_step"]
            tokens = options.batch * options.seq * options.micro_batches
            flops, again = model_flops_per_token(spec, options.seq), recomputed_flops_per_token(spec, options.seq, plan)
            result = {
                "shape": options.shape,
                "layers": len(spec.layers),
                "parameters": spec.num_parameters,
                "keep_layers": plan.keep_layers,
                "resident_blocks": len(plan.resident),
                "expert_groups": plan.expert_groups,
                "offload_activations": plan.offload_activations,
                "optimizer": options.optimizer,
                "optimizer_layout": model.store.layout,
                "clip": clip,
                "tokens_per_step": tokens,
                **measured,
                "compile_seconds": compiling.seconds,
                "tokens_per_second": tokens / step,
                "model_tflops": flops * tokens / step / 1e12,
                "hardware_tflops": (flops + again) * tokens / step / 1e12,
                "6NT": 6 * spec.num_parameters * tokens / step / 1e12,
                "ceilings": limits,
                "load_seconds": loading,
                "device_peak_gib": (mesh.peak_bytes() or 0) / 2**30,
                "device_planned_gib": plan.device / 2**30,
                "host_peak_gib": host_peak_bytes() / 2**30,
                "host_used_peak_gib": used.peak / 2**30,
                "host_planned_gib": plan.host / 2**30,
                "host_bytes_per_parameter": used.peak / spec.num_parameters,
                "devices": f"{mesh.size} x {mesh.devices[0].device_kind}",
                "jax": jax.__version__,
                "commit": commit(),
                "date": datetime.date.today().isoformat(),
                "command": " ".join(["python", *sys.argv]),
            }
            result["shares"] = shares(result, events, marks, devices=mesh.size)
            print(json.dumps(result), flush=True)
            if options.timeline:
                draw(events, options.timeline, marks[-2:])
            yield result


def time_steps(model, optimizer, plan, clip: float, batches: list, steps: int) -> tuple[dict, list, list[float]]:
    """What `steps` steps took, the events of the pipeline, and when each step ended."""
    from megatrain_jax.stream.events import Recorder
    from megatrain_jax.stream.pipeline import Pipeline, Settings
    from megatrain_jax.stream.updater import Updater

    events: list = []
    record = Recorder(events.append)
    updater = Updater(model.store, optimizer, record)
    settings = Settings(
        plan.group_size, plan.offload_activations, plan.keep_layers, max_grad_norm=clip, skip_nonfinite=bool(clip)
    )
    pipeline = Pipeline(model.store, model.run, settings, record, updater)
    with contextlib.closing(record), contextlib.closing(updater):
        marks, seconds = [time.perf_counter()], collections.defaultdict(list)
        for n in range(2 + steps):
            outcome = pipeline.train_step(batches)
            marks.append(time.perf_counter())
            for what, value in outcome.seconds.items() if n >= 2 else ():
                seconds[what].append(value)
        updater.drain()
    warm, marks = marks[2] - marks[0], marks[2:]
    step = (marks[-1] - marks[0]) / steps
    measured = {
        "seconds_per_step": step,
        "seconds": {what: statistics.median(values) for what, values in seconds.items()},
        # What the first two steps took beyond two later ones: compilation, and the first touch of every buffer.
        "warm_up_seconds": warm - 2 * step,
        "loss": outcome.loss,
    }
    return measured, events, marks


def shares(result: dict, events: list, marks: list[float], *, devices: int) -> dict:
    from megatrain_jax.report.timeline import busy_share, spans

    limits, steps = collections.defaultdict(lambda: None, result["ceilings"]), len(marks) - 1
    inside = [event for event in events if marks[0] <= event.when < marks[-1]]
    gbps = {
        what: 1e-9 * sum(e.nbytes for e in inside if e.what == what) / (marks[-1] - marks[0]) for what in ("h2d", "d2h")
    }
    updates = [span for span in spans(events, marks[0], marks[-1]) if span.what == "update"]
    busy = sum(span.stop - span.start for span in updates)
    # What came down the link is what the optimizer reads; on the split master it moves 26 bytes for the 2 that came.
    moved = 13 * 1e-9 * sum(e.nbytes for e in inside if e.what == "d2h")
    split = result["optimizer_layout"] == "split" and result["optimizer"].startswith("adam")
    result["h2d_gbps"], result["d2h_gbps"] = gbps["h2d"], gbps["d2h"]
    result["optimizer_busy_seconds"] = busy / steps
    result["update_gbps"] = moved / busy if busy and split else None
    result["device_busy_seconds"] = busy_share(events, marks) * result["seconds_per_step"]
    of = lambda value, limit: value / limit if value is not None and limit else None  # noqa: E731
    return {
        "device_busy": busy_share(events, marks),
        "matmul": of(result["hardware_tflops"], limits["matmul_tflops"] and devices * limits["matmul_tflops"]),
        "h2d": of(gbps["h2d"], limits["h2d_gbps"] and devices * limits["h2d_gbps"]),
        "d2h": of(gbps["d2h"], limits["d2h_gbps"] and devices * limits["d2h_gbps"]),
        "update": of(result["update_gbps"], limits["update_gbps"]),
    }


def model_flops_per_token(spec, seq: int) -> int:
    """Of forward and backward: matmuls once, causal attention once, no recompute and no embedding lookup.

    Of experts, those that a token goes to.
    """
    from megatrain_jax.models.blocks import tensor_shapes

    matmuls = spec.vocab_size * spec.hidden_size
    for layer in spec.layers:
        for path, shape in tensor_shapes(layer).items():
            if len(shape) == 3 and ".experts." in path:
                matmuls += math.prod(shape) * layer.moe.top_k // layer.moe.num_experts
            elif len(shape) == 2 and not path.endswith("bias") and "norm" not in path:
                matmuls += math.prod(shape)
    return 6 * matmuls + 3 * sum(mixer_flops_per_token(layer, seq) for layer in spec.layers)


def mixer_flops_per_token(layer, seq: int) -> int:
    """Of forward, without projections: scores and their products with the values that are seen, or updates and reads of a
    matrix."""
    if layer.delta is not None:
        return 6 * layer.delta.value_heads * layer.delta.key_dim * layer.delta.value_dim
    value_dim = layer.latent.value_dim if layer.latent else layer.head_dim
    window = min(seq, layer.sliding_window or seq)
    pairs = window * seq - window**2 // 2
    return 2 * layer.num_heads * (layer.head_dim + value_dim) * pairs // seq


def recomputed_flops_per_token(spec, seq: int, plan) -> int:
    """Of the layers that keep nothing but their input: a forward without the last projection, which backward never reads."""
    layers = spec.layers[: len(spec.layers) - plan.keep_layers]
    last = lambda s: s.top_k * s.intermediate_size + s.shared_size  # noqa: E731
    inner = {layer: last(layer.moe) if layer.moe else layer.intermediate_size for layer in layers}
    weights = sum(layer.active_parameters - layer.hidden_size * inner[layer] for layer in layers)
    return 2 * weights + sum(mixer_flops_per_token(layer, seq) for layer in layers)


class CompileSeconds:
    """Seconds that jax spent tracing, lowering and compiling, or reading what was compiled before.

    Set `seconds` to 0 to start anew.
    """

    def __init__(self):
        import jax

        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._add)

    def _add(self, event: str, seconds: float, **_) -> None:
        if event.startswith("/jax/core/compile/"):
            self.seconds += seconds


class HostMemory:
    """The most memory that the machine used while this was entered, above what it used before.

    Page-locked memory of the driver counts, which a process' own peak can miss.
    """

    def __enter__(self) -> HostMemory:
        self.peak, self._before, self._ended = 0, self._now(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            self.peak = max(self.peak, self._now() - self._before)

    @staticmethod
    def _now() -> int:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = {line.split(":")[0]: int(line.split()[1]) for line in file}
        return 1024 * (fields["MemTotal"] - fields["MemAvailable"])


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
