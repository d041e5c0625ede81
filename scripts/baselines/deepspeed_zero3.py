"""DeepSpeed ZeRO-3 with parameters and optimizer offloaded to the host: bfloat16 weights, float32 master, CPUAdam.

    OMP_NUM_THREADS=16 python scripts/baselines/deepspeed_zero3.py --shape 7b-wide --layers 14 --batch 32

Needs deepspeed (0.19.8 was measured; `DS_BUILD_OPS=0 pip install deepspeed`), g++ and ninja, which compile CPUAdam on first use.
"""

from __future__ import annotations

import time

import deepspeed
import torch
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
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights


def main() -> None:
    options = parser(__doc__).parse_args()
    threads = set_up(29533)
    torch.cuda.set_device(0)
    with HostMemory() as used:
        deepspeed.init_distributed(dist_backend="nccl", verbose=False)
        config = model_config(options)
        settings = engine_settings(options, config)
        began = time.perf_counter()
        # transformers' own initialisation would index weights that ZeRO-3 has already emptied.
        with (
            no_init_weights(),
            deepspeed.zero.Init(
                config_dict_or_path=settings, remote_device="cpu", pin_memory=True, dtype=torch.bfloat16
            ),
        ):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for name, weight in model.named_parameters():
            with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
                if weight.dim() == 1:
                    weight.data.fill_(0.0 if name.endswith("bias") else 1.0)
                else:
                    weight.data.normal_(0, 0.02)
        if not options.no_recompute:
            # ZeRO-3 partitions weights again between forward and backward, which the other kind would notice.
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.train()
        model = LanguageModel(model)
        parameters = sum(weight.ds_numel for weight in model.parameters())
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings)
        loading = time.perf_counter() - began

        def step(token_ids, mark):
            loss = engine(token_ids)
            mark("forward")
            engine.backward(loss)
            mark("backward")
            engine.step()
            mark("optimizer")
            return loss.item()

        measure(
            "DeepSpeed ZeRO-3 offload", options, parameters, step, used,
            deepspeed=deepspeed.__version__, threads=threads, load_seconds=loading,
        )  # fmt: skip
    torch.distributed.destroy_process_group()


def engine_settings(options, config) -> dict:
    """Prefetches a whole decoder layer; everything else at DeepSpeed's defaults or what a single GPU needs."""
    width, head = config.hidden_size, config.hidden_size // config.num_attention_heads
    layer = 2 * width * head * (config.num_attention_heads + config.num_key_value_heads)
    layer += 3 * width * config.intermediate_size
    on_host = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": options.batch[0],  # read by nothing but its log
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_param": on_host,
            "offload_optimizer": on_host,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 10**9,
            "reduce_bucket_size": 5 * 10**8,
            "stage3_prefetch_bucket_size": layer,
            "stage3_param_persistence_threshold": 10**5,
            "stage3_max_live_parameters": 10**9,
            "stage3_max_reuse_distance": 10**9,
        },
    }


if __name__ == "__main__":
    main()
