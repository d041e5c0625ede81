"""PyTorch FSDP2 with CPU offload: float32 master, gradients and moments in pinned host memory, torch's fused AdamW.

OMP_NUM_THREADS=16 python scripts/baselines/fsdp2_offload.py --shape 7b-wide --layers 14 --batch 32
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from common import (
    BETAS,
    CLIP,
    EPS,
    LEARNING_RATE,
    WEIGHT_DECAY,
    HostMemory,
    LanguageModel,
    measure,
    model_config,
    parser,
    set_up,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights


def main() -> None:
    options = parser(__doc__).parse_args()
    threads = set_up(29544)
    torch.cuda.set_device(0)
    with HostMemory() as used:
        # Clipping reduces gradients that are in host memory, which needs a CPU backend beside NCCL.
        dist.init_process_group("cpu:gloo,cuda:nccl")
        began = time.perf_counter()
        with no_init_weights():
            inner = AutoModelForCausalLM.from_config(model_config(options), dtype=torch.float32)
        fill(inner)
        inner.train()
        if not options.no_recompute:
            inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model = LanguageModel(inner)
        weights = list(model.parameters())
        parameters = sum(weight.numel() for weight in weights)
        shard(model, inner)
        weights = list(model.parameters())
        optimizer = torch.optim.AdamW(
            weights, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
        )
        loading = time.perf_counter() - began

        def step(token_ids, mark):
            loss = model(token_ids)
            mark("forward")
            loss.backward()
            mark("backward")
            torch.nn.utils.clip_grad_norm_(weights, CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            mark("optimizer")
            return loss.item()

        measure("PyTorch FSDP2 offload", options, parameters, step, used, threads=threads, load_seconds=loading)
    dist.destroy_process_group()


def fill(model) -> None:
    """Random weights, one block of them over and over: drawing billions one by one takes a single core minutes."""
    block = torch.empty(1 << 24).normal_(0, 0.02)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            flat = weight.data.view(-1)
            if weight.dim() == 1:
                flat.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            for start in range(0, flat.numel(), block.numel()):
                part = flat[start : start + block.numel()]
                part.copy_(block[: part.numel()])


def shard(model, inner) -> None:
    """Each layer is gathered by itself, and the next one while it computes."""
    how = {
        "mesh": init_device_mesh("cuda", (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
    }
    layers = list(inner.model.layers)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=True, **how)
    fully_shard(model, reshard_after_forward=False, **how)
    for module in model.modules():  # FSDP does not manage buffers
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.cuda())
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 2])
        layer.set_modules_to_backward_prefetch(layers[max(0, i - 1) : i])


if __name__ == "__main__":
    main()
