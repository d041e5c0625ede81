"""Times one layer's templates under XLA's options, one at a time; what paid is `GPU_OPTIONS` of
megatrain_jax/xla.py.

    python scripts/tune_xla.py --shape 7b-wide --batch 32 --seq 1024

Milliseconds of: a forward that keeps its intermediates and its backward ("kept"); the backward that computes the forward
again ("recomputed"). `compile_seconds` is of these three programs, without a cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from bench import SHAPES

VARIANTS = {
    "as trained with": {},
    "XLA's defaults": {"xla_gpu_enable_cublaslt": False, "xla_gpu_enable_triton_gemm": True},
    "cublaslt": {"xla_gpu_enable_cublaslt": True, "xla_gpu_enable_triton_gemm": True},
    "no triton gemm": {"xla_gpu_enable_cublaslt": False, "xla_gpu_enable_triton_gemm": False},
    # Each of these on top of what is trained with.
    "latency hiding": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "no command buffers": {"xla_gpu_enable_command_buffer": ""},
    "autotune level 0": {"xla_gpu_autotune_level": 0},
    "fusion autotuner": {"xla_gpu_experimental_enable_fusion_autotuner": True},
    "multi-output fusion": {"xla_gpu_experimental_enable_same_shape_multi_output_fusion": True},
    "triton fusions": {"xla_gpu_experimental_enable_triton_heroless_priority_fusion": True},
    "launch overlap": {"xla_gpu_enable_pdl": True},
    "cudnn gemm": {"xla_gpu_cudnn_gemm_fusion_level": 2},
    "as trained with, again": {"xla_gpu_enable_cublaslt": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="7b-wide", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", help="where the results go, besides the standard output")
    options = parser.parse_args()
    import jax

    jax.config.update("jax_enable_compilation_cache", False)
    results = []
    for name, variant in VARIANTS.items():
        try:
            results.append({"variant": name, "options": variant, **time_layer(options, variant)})
        except Exception as error:  # noqa: BLE001 - an option that this jax does not know must not end the others
            results.append({"variant": name, "options": variant, "error": str(error)[:300]})
        print(json.dumps(results[-1]), flush=True)
    if options.json:
        with open(options.json, "w", encoding="ascii") as file:
            json.dump(results, file, indent=1)


def time_layer(options: argparse.Namespace, variant: dict) -> dict:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from megatrain_jax.models.attention import AttentionOptions
    from megatrain_jax.models.blocks import tensor_shapes
    from megatrain_jax.models.families import spec_from_config
    from megatrain_jax.models.spec import Context
    from megatrain_jax.stream import templates
    from megatrain_jax.stream.transfer import make_mesh

    mesh = make_mesh(options.device)
    block = spec_from_config(SHAPES[options.shape]).layers[0]
    kernel = "cudnn" if mesh.has_own_memory else "xla"
    run = templates.Execution(mesh, np.dtype(jnp.bfloat16), AttentionOptions(kernel, segments=False), 4096)
    keys = iter(jax.random.split(jax.random.key(0), 32))
    draw = lambda shape, scale: scale * jax.random.normal(next(keys), shape, jnp.bfloat16)  # noqa: E731
    with jax.default_device(mesh.devices[0]):
        weights = {path: draw(shape, 0.02) for path, shape in tensor_shapes(block).items()}
        x, dy = (draw((options.batch, options.seq, block.hidden_size), 1.0) for _ in range(2))
        positions = jnp.broadcast_to(jnp.arange(options.seq, dtype=jnp.int32), (options.batch, options.seq))
        context, norm = Context(positions, jnp.ones_like(positions)), jnp.float32(0)
    trainable = frozenset(weights)

    def compiled(template, *args):
        nonlocal seconds
        began = time.perf_counter()
        program = template.lower(*args).compile(compiler_options=variant)
        seconds += time.perf_counter() - began
        return program

    seconds = 0.0
    forward = compiled(templates.layer_forward_keeping(block, run, trainable), weights, x, context)
    pullback = forward(weights, x, context)[2]
    backward = compiled(templates.layer_backward_kept(run, True), pullback, dy, (), None, norm)
    again = compiled(templates.layer_backward(block, run, trainable, True), weights, x, dy, (), context, None, norm)
    del pullback

    def kept(dy):
        return backward(forward(weights, x, context)[2], dy, (), None, norm)[0]

    def recomputed(dy):
        return again(weights, x, dy, (), context, None, norm)[0]

    found = {"compile_seconds": seconds}
    for name, call in (("kept_ms", kept), ("recomputed_ms", recomputed)):
        times = []
        for _ in range(8):
            began = time.perf_counter()
            dy = jax.block_until_ready(call(dy))  # the cotangent is donated
            times.append(time.perf_counter() - began)
        found[name] = 1e3 * statistics.median(times[2:])
    return found


if __name__ == "__main__":
    main()
