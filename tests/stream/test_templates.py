"""What every template is compiled with."""

import jax
import pytest

from megatrain_jax.stream.templates import GPU_OPTIONS, MULTI_GPU_OPTIONS, compiler_options


def test_options_are_for_gpus_and_those_of_the_user_win(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert compiler_options("gpu", 1) == GPU_OPTIONS and compiler_options("cpu", 4) == {}
    assert compiler_options("gpu", 2) == GPU_OPTIONS | {"xla_gpu_enable_command_buffer": ""}
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x --xla_gpu_enable_triton_gemm=true")
    assert compiler_options("gpu", 1) == {k: v for k, v in GPU_OPTIONS.items() if k != "xla_gpu_enable_triton_gemm"}


@pytest.mark.parametrize("name, value", MULTI_GPU_OPTIONS.items())
def test_this_jax_knows_the_option(name, value):
    """Whichever backend compiles, it refuses an option that it has not."""
    assert jax.jit(lambda x: x + 1, compiler_options={name: value})(1) == 2
    with pytest.raises(Exception, match="xla_gpu_no_such_option"):
        jax.jit(lambda x: x + 1, compiler_options={"xla_gpu_no_such_option": True})(1)
