"""What the PyTorch baselines share: the shapes of bench.py, a model, a loss without full logits, timing, results as JSON.

Run them with plain `python` (torchrun sets OMP_NUM_THREADS=1), on one GPU, with torch and transformers installed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import SHAPES, HostMemory

WARM_UP = 2  # steps that are not counted
LOSS_TILE = 4096  # tokens whose logits exist at once
LEARNING_RATE, CLIP, WEIGHT_DECAY, BETAS, EPS = 1e-5, 1.0, 0.01, (0.9, 0.999), 1e-8


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every baseline takes; the names are those of bench.py."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--shape", default="7b-wide", choices=SHAPES)
    found.add_argument("--layers", type=int, help="instead of the shape's own")
    found.add_argument("--batch", type=int, nargs="+", default=[32], help="rows; several run in turn on one model")
    found.add_argument("--seq", type=int, default=1024, help="tokens in a row")
    found.add_argument("--steps", type=int, default=5, help=f"timed steps, after {WARM_UP} that warm up")
    found.add_argument("--no-recompute", action="store_true", help="keep activations instead of computing them again")
    found.add_argument("--json", type=Path, help="where the result goes, besides the standard output")
    return found


def set_up(port: int) -> int:
    """One process, every core; the number of threads."""
    threads = len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    for name in ("RANK", "LOCAL_RANK"):
        os.environ.setdefault(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(port))
    torch.manual_seed(0)
    return threads


def model_config(options: argparse.Namespace):
    from transformers import Qwen2Config

    shape = {key: value for key, value in SHAPES[options.shape].items() if key not in ("model_type", "architectures")}
    if options.layers:
        shape["num_hidden_layers"] = options.layers
    config = Qwen2Config(**shape, use_cache=False, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    config._attn_implementation = "sdpa"
    return config


class _TiledCrossEntropy(torch.autograd.Function):
    """Output projection and summed cross-entropy by tiles of tokens, the gradients formed in the forward pass.

    The weight gets one gradient in all, which ZeRO-3 insists on.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets):
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, hidden.shape[0], LOSS_TILE):
            h, t = hidden[start : start + LOSS_TILE], targets[start : start + LOSS_TILE]
            logits = (h @ weight.t()).float()
            log_z = torch.logsumexp(logits, -1)
            total += (log_z - logits.gather(1, t[:, None])[:, 0]).sum()
            logits.sub_(log_z[:, None]).exp_()
            logits[torch.arange(len(t), device=t.device), t] -= 1.0
            d_logits = logits.to(h.dtype)
            d_hidden[start : start + LOSS_TILE] = d_logits @ weight
            d_weight += d_logits.t() @ h
        ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, scale):
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * scale.to(d_hidden.dtype), d_weight * scale.to(d_weight.dtype), None


class LanguageModel(torch.nn.Module):
    """Token ids to the mean next-token loss. The head stays a module call, around which weights are gathered."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        head = model.lm_head
        head.forward = lambda hidden, targets: _TiledCrossEntropy.apply(hidden, head.weight, targets)

    def forward(self, token_ids):
        hidden = self.model.model(input_ids=token_ids, use_cache=False).last_hidden_state[:, :-1]
        hidden, targets = hidden.reshape(-1, hidden.shape[-1]), token_ids[:, 1:].reshape(-1)
        return self.model.lm_head(hidden, targets) / targets.numel()


def random_batches(options: argparse.Namespace, rows: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    vocab = SHAPES[options.shape]["vocab_size"]
    while True:
        yield torch.randint(3, vocab, (rows, options.seq), generator=generator).cuda(non_blocking=True)


def measure(name: str, options: argparse.Namespace, parameters: int, step: Callable, used: HostMemory, **facts) -> None:
    """Times steps at each batch size and prints the results.

    Args:
      step: ``(token_ids, mark) -> loss`` does a whole optimizer step and calls ``mark(part)`` when a part of it ends.
    """
    results = []
    for rows in options.batch:
        torch.cuda.empty_cache()
        results.append(measure_batch(name, options, rows, parameters, step, used) | facts)
        print(json.dumps(results[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")


def measure_batch(
    name: str, options: argparse.Namespace, rows: int, parameters: int, step: Callable, used: HostMemory
) -> dict:
    """The result at one batch size, of `rows` rows; the other arguments are those of `measure`."""
    seconds, parts = [], {}
    batches = random_batches(options, rows)
    for number in range(WARM_UP + options.steps):
        if number == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        token_ids = next(batches)
        torch.cuda.synchronize()
        began = last = time.perf_counter()

        def mark(part: str) -> None:
            nonlocal last
            torch.cuda.synchronize()
            now = time.perf_counter()
            parts.setdefault(part, []).append(now - last)
            last = now

        loss = step(token_ids, mark)
        seconds.append(time.perf_counter() - began)
        print(f"step {number}: loss {loss:.4f}, {seconds[-1]:.3f} s", file=sys.stderr, flush=True)
    median = statistics.median(seconds[WARM_UP:])
    tokens = rows * options.seq
    return {
        "system": name,
        "shape": options.shape,
        "layers": options.layers or SHAPES[options.shape]["num_hidden_layers"],
        "parameters": parameters,
        "clip": CLIP,
        "tokens_per_step": tokens,
        "seconds_per_step": median,
        "seconds": {part: statistics.median(values[WARM_UP:]) for part, values in parts.items()},
        "tokens_per_second": tokens / median,
        "6NT": 6 * parameters * tokens / median / 1e12,
        "device_peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "host_used_peak_gib": used.peak / 2**30,
        "host_bytes_per_parameter": used.peak / parameters,
        "loss": loss,
        "devices": f"1 x {torch.cuda.get_device_name()}",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
    }
