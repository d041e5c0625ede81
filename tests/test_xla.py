"""What templates and updates are compiled with."""

import jax
import pytest

from megatrain_jax.xla import GPU_OPTIONS, MULTI_GPU_OPTIONS, UPDATE_OPTIONS, template_options, update_options


def test_options_are_for_gpus_and_those_of_the_user_win(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert template_options("gpu", 1) == GPU_OPTIONS and template_options("cpu", 4) == {}
    assert template_options("gpu", 2) == GPU_OPTIONS | {"xla_gpu_enable_command_buffer": ""}
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x --xla_gpu_enable_triton_gemm=true")
    assert template_options("gpu", 1) == {k: v for k, v in GPU_OPTIONS.items() if k != "xla_gpu_enable_triton_gemm"}


def test_options_of_updates_give_way_to_those_of_the_user(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert update_options() == UPDATE_OPTIONS
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_prefer_vector_width=128")
    assert update_options() == {}


@pytest.mark.parametrize("name, value", (MULTI_GPU_OPTIONS | UPDATE_OPTIONS).items())
def test_this_jax_knows_the_option(name, value):
    """Whichever backend compiles, it refuses an option that it has not."""
    assert jax.jit(lambda x: x + 1, compiler_options={name: value})(1) == 2
    with pytest.raises(Exception, match="xla_gpu_no_such_option"):
        jax.jit(lambda x: x + 1, compiler_options={"xla_gpu_no_such_option": True})(1)
