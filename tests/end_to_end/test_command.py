"""The command line: what it says, what it refuses, and that a refusal leaves nothing behind."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megatrain_jax import train
from megatrain_jax.config import load_config
from tests.end_to_end.conftest import ROOT, records, tokenizer_files, write_data, write_model


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The command sets variables; they go when the test has ended."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def weights_changed(project, change):
    folder = write_model(project.folder / "changed")
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return {"model": {"name": str(folder)}}


def missing_tensor(project):
    return weights_changed(project, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))


def wrong_shape(project):
    name = "model.layers.1.mlp.up_proj.weight"
    return weights_changed(project, lambda weights: weights.update({name: np.ones((48, 31), np.float32)}))


def truncated(project):
    folder = write_model(project.folder / "cut")
    os.truncate(folder / "model.safetensors", os.path.getsize(folder / "model.safetensors") - 100)
    return {"model": {"name": str(folder)}}


def unsupported(project):
    folder = write_model(project.folder / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]})
    )
    return {"model": {"name": str(folder)}}


def malformed_line(project):
    with open(project.folder / "train.jsonl", "a") as file:
        file.write('{"messages": [\n')
    return {}


def unsupervised(project):
    line = json.dumps({"messages": [{"role": "user", "content": "hello"}]})
    (project.folder / "train.jsonl").write_text(f"{line}\n")
    return {}


def small_vocabulary(project):
    return {"model": {"name": str(write_model(project.folder / "small", vocab_size=250))}}


def few_positions(project):
    return {"model": {"name": str(write_model(project.folder / "short", max_position_embeddings=32))}}


def below_a_file(project):
    (project.folder / "file").write_text("")
    return {"output_dir": str(project.folder / "file" / "out")}


def is_a_file(project):
    (project.folder / "file").write_text("")
    return {"output_dir": str(project.folder / "file")}


def change(**sections):
    return lambda project: sections


@pytest.mark.parametrize(
    "make, expected",
    [
        (
            change(model={"name": "nowhere"}),
            "model.name: no such file or folder 'nowhere', give a local Hugging Face folder",
        ),
        (change(dataset={"path": "no.jsonl"}), "dataset.path: no such file or folder 'no.jsonl'"),
        (
            change(training={"learning_rat": 1}),
            "training.learning_rat: unknown key, did you mean training.learning_rate?",
        ),
        (unsupported, "mamba"),
        (missing_tensor, "model.layers.1.mlp.up_proj.weight"),
        (wrong_shape, "model.layers.1.mlp.up_proj.weight"),
        (truncated, "model.safetensors"),
        (malformed_line, "train.jsonl:14"),
        (unsupervised, "dataset.path: no supervised tokens"),
        (small_vocabulary, "vocabulary larger than the embedding"),
        (few_positions, "dataset.max_seq_len: rows of 48 tokens are longer than the model's 32 positions"),
        (below_a_file, "is not a writable folder; choose another"),
        (is_a_file, "is not a writable folder; choose another"),
        (change(model={"device": "cuda"}), "model.device: 'cuda' was asked for and jax sees no GPU"),
        (change(optimizer={"type": "adamm"}), "optimizer.type: optax has no 'adamm'; use one of"),
        (change(optimizer={"type": "lbfgs"}), "optimizer.type: 'lbfgs' is not known to update each tensor by itself"),
        (change(model={"freeze": ["."]}), "model.freeze: ['.'] leaves nothing to train"),
        (change(model={"freeze": ["("]}), "model.freeze: '(' is not a regular expression"),
        (change(training={"warmup_steps": 7}), "training.warmup_steps: 7 is more than the 6 steps of the run"),
        (
            change(training={"resume_from_checkpoint": "."}),
            "is not a whole checkpoint: it has no manifest.json; give a folder checkpoint-N",
        ),
        (change(memory={"host_budget": 1e-6}), "memory.host_budget: "),
        (change(memory={"device_budget": 1e-6}), "memory.device_budget: a micro-batch of 2 x 48 tokens"),
        (change(checkpoint={"max_shard_size": "big"}), "checkpoint.max_shard_size"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value)[:40],
)
def test_bad_input_is_one_line_and_leaves_nothing(project, capsys, make, expected):
    sections = {"output_dir": str(project.folder / "out")} | make(project)
    output = sections.pop("output_dir")
    config = project.write(**sections)
    before = sorted(project.folder.rglob("*"))
    assert train.main(["--config", str(config), f"output_dir={output}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
    assert expected in err
    if err.split()[1].rstrip(":").split(".")[0] in sections:
        assert err.rstrip().endswith(f"(in {config})")
    assert sorted(project.folder.rglob("*")) == before


def test_a_missing_config_is_one_line_with_exit_code_2(project):
    done = project.run("nowhere.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: config: cannot read 'nowhere.yaml': No such file or directory\n"


def test_an_error_names_the_override_it_comes_from(project, capsys):
    assert train.main(["--config", str(project.write()), "model.device=cuda"]) == 2
    assert capsys.readouterr().err.endswith("(in the override 'model.device=cuda')\n")


def test_a_message_about_no_key_names_no_file():
    assert train.locate("x.jsonl:3: not JSON", "a.yaml", []) == "x.jsonl:3: not JSON"
    assert train.locate("seed: too small", "a.yaml", []) == "seed: too small (in a.yaml)"
    assert train.locate("seed: too small (in b.yaml)", "a.yaml", []) == "seed: too small (in b.yaml)"


@pytest.mark.parametrize("what", ["model", "optimizer", "freeze", "seed", "data", "batch", "base", "damage"])
def test_a_checkpoint_that_does_not_fit_is_refused_and_left(project, capsys, what):
    out, config = project.folder / "out", project.write(training={"num_steps": 1}, optimizer={"type": "lion"})
    assert train.main(["--config", str(config), f"output_dir={out}"]) == 0
    changes = {"training": {"num_steps": 2}, "optimizer": {"type": "lion"}}
    if what == "model":
        changes["model"] = {"name": str(write_model(project.folder / "wide", intermediate_size=64))}
        expected = "model.name or model.config_overrides: layers[0].intermediate_size 48, and the run has 64"
    elif what == "optimizer":
        changes["optimizer"] = {"type": "adamw"}
        expected = "optimizer.type 'lion', and the run has 'adamw'"
    elif what == "freeze":
        changes["model"] = {"freeze": ["norm"]}
        expected = "other model.freeze"
    elif what == "seed":
        changes["seed"] = 7
        expected = "it was written with seed 42, and the run has 7"
    elif what == "data":
        write_data(project.folder / "train.jsonl", 14)
        expected = "its data are not those of the run (the content of dataset.path has changed)"
    elif what == "batch":
        changes["training"]["batch_size"] = 3
        expected = "with training.batch_size x training.gradient_accumulation_steps 2, and the run has 3"
    elif what == "base":
        changes["model"] = {"config_overrides": {"rope_theta": 5e5}}
        expected = "model.name or model.config_overrides: layers[0].rope"
    else:
        for number in (0, 1):
            file = max((out / f"checkpoint-{number}").rglob("*"), key=lambda path: path.stat().st_size)
            os.truncate(file, 8)
        expected = "is damaged"
    capsys.readouterr()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    seed = [f"seed={changes.pop('seed')}"] if "seed" in changes else []
    assert train.main(["--config", str(project.write(**changes)), f"output_dir={out}", *seed]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: training.resume_from_checkpoint: ") and err.count("\n") == 1
    assert expected in err
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def in_a_process(code, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_dry_run_starts_no_backend_and_writes_nothing(project):
    config = project.write()
    before = sorted(project.folder.rglob("*"))
    done = in_a_process(
        "import sys\n"
        "from megatrain_jax import train\n"
        f"code = train.main(['--dry-run', '--config', {str(config)!r}, 'output_dir={project.folder / 'out'}'])\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, xla_bridge._backends\n"
        "sys.exit(code)\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(project.folder.rglob("*")) == before
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert list(lines) == ["model", "template", "data", "eval", "training", "memory"]
    assert "13 samples (messages)" in lines["data"] and "6 steps of 1 x 2 rows (7 steps an epoch)" in lines["training"]
    assert "(12 B/parameter)" in lines["memory"]


def test_a_dry_run_refuses_as_a_run_does(project, capsys):
    malformed_line(project)
    assert train.main(["--config", str(project.write()), "--dry-run"]) == 2
    assert "train.jsonl:14" in capsys.readouterr().err


def test_the_environment_is_settled_before_jax_and_the_users_values_win(project):
    config = project.write(model={"device": "cpu"}, training={"deterministic": True})
    code = (
        "import os, sys\n"
        "from megatrain_jax import train\n"
        "from megatrain_jax.config import load_config\n"
        f"train.settle_environment(load_config({str(config)!r}))\n"
        "assert 'jax' not in sys.modules\n"
        "print(*(os.environ[n] for n in ('JAX_PLATFORMS', 'XLA_PYTHON_CLIENT_MEM_FRACTION',"
        " 'XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB', 'XLA_FLAGS')), sep='|')\n"
    )
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"):
        os.environ.pop(name, None)
    done = in_a_process(code)
    assert (done.stdout, done.stderr) == ("cpu|0.92|4|--xla_gpu_deterministic_ops=true\n", "")
    theirs = {
        "JAX_PLATFORMS": "cuda,cpu",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5",
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "3",
        "XLA_FLAGS": "--xla_gpu_deterministic_ops=false",
    }
    done = in_a_process(code, **theirs)
    # XLA takes the last of two equal flags.
    expected = "cuda,cpu|0.5|3|--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=false\n"
    assert (done.stdout, done.stderr) == (expected, "")


@pytest.mark.parametrize("device, expected", [("all", "GROUP EAGER"), ("cuda", "None None")])
def test_several_gpus_of_a_process_launch_collectives_as_one_and_load_no_kernel_between(project, device, expected):
    config = project.write(model={"device": device})
    code = (
        "import os\n"
        "from megatrain_jax import train\n"
        "from megatrain_jax.config import load_config\n"
        f"train.settle_environment(load_config({str(config)!r}))\n"
        "print(os.environ.get('NCCL_LAUNCH_MODE'), os.environ.get('CUDA_MODULE_LOADING'))\n"
    )
    assert in_a_process(code).stdout == f"{expected}\n"
    theirs = in_a_process(code, NCCL_LAUNCH_MODE="PARALLEL", CUDA_MODULE_LOADING="LAZY")
    assert theirs.stdout == "PARALLEL LAZY\n"


def test_the_limit_of_the_pinned_pool_follows_the_model_and_the_batch(project, monkeypatch):
    config = load_config(project.write())
    assert train.pinned_pool_gib(config) == 4
    rows = 2**30 // (3 * 48 * 32 * 4)  # block inputs of 1 GiB
    large = dataclasses.replace(config, training=dataclasses.replace(config.training, batch_size=rows * 10))
    assert train.pinned_pool_gib(large) == 11
    assert train.pinned_pool_gib(large, gpus=2) == 6
    monkeypatch.setattr(train, "_gpu_bytes", lambda: (80 * 2**30,) * 2)
    assert train.pinned_pool_gib(large) == 11 and train.pinned_pool_gib(large, gpus=2) == 4
    monkeypatch.setattr(train, "_gpu_bytes", lambda: (141 * 2**30,))
    assert train.pinned_pool_gib(large) == 4  # the inputs may as well stay there
    memory = dataclasses.replace(config.memory, device_budget=50.0)
    assert train.pinned_pool_gib(dataclasses.replace(large, memory=memory)) == 11


def test_jax_takes_no_more_of_the_device_than_its_budget_and_a_little(project, monkeypatch):
    config = load_config(project.write())
    with_budget = lambda gib: dataclasses.replace(config, memory=dataclasses.replace(config.memory, device_budget=gib))  # noqa: E731
    assert train._device_fraction(with_budget(40.0)) == 0.92  # no GPU whose size is known
    monkeypatch.setattr(train, "_gpu_bytes", lambda: (100 * 2**30, 80 * 2**30))
    assert train._device_fraction(config) == train._device_fraction(with_budget(75.0)) == 0.92
    assert train._device_fraction(with_budget(40.0)) == pytest.approx(42.5 / 80, abs=1e-4)


def test_gpus_are_counted_before_jax_is_there(project, monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '1024\\n2048\\n1024\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    counted = train._gpu_bytes.__wrapped__
    assert counted() == (2**30, 2**31, 2**30)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert counted() == (2**30, 2**30)
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert counted() == ()


def test_a_run_prints_its_own_lines_and_leaves_what_it_promises(project):
    tokenizer = write_model(project.folder / "tokenizer", seed=5)
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 4321}))
    config = project.write(
        model={"tokenizer": str(tokenizer)},
        training={"num_steps": 2},
        eval={"eval_strategy": "epoch"},
        optimizer={"type": "adamw"},
    )
    out = project.folder / "out"
    done = project.run(str(config), f"output_dir={out}")
    assert (done.returncode, done.stderr) == (0, "")
    starts = [line.split()[0] for line in done.stdout.splitlines()]
    saved = [i for i, start in enumerate(starts) if start == "saved"]  # the first one while it trains
    assert len(saved) == 3
    others = [start for start in starts if start not in ("saved", "template")]
    assert others == ["model", "data", "eval", "training", "memory", "stream", "kernels", "step", "step", "eval"]
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoint-0",
        "checkpoint-2",
        "config.yaml",
        "loss.png",
        "metrics.jsonl",
        "model",
    ]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert load_config(out / "config.yaml") == load_config(config, [f"output_dir={out}"])
    assert tokenizer_files(out / "model") == tokenizer_files(tokenizer)
    again = json.loads((out / "model" / "config.json").read_text())
    assert again == json.loads((project.folder / project.tree["model"]["name"] / "config.json").read_text())
    assert [line["step"] for line in records(out)] == [1, 2, 2]


def test_a_gradient_that_is_not_finite_ends_the_run_with_exit_code_1(project, capsys):
    folder = write_model(project.folder / "broken")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][:] = 3e38  # finite, and the logits are not
    save_file(weights, folder / "model.safetensors")
    config = project.write(model={"name": str(folder)}, training={"max_grad_norm": 0, "skip_nonfinite": False})
    assert train.main(["--config", str(config), f"output_dir={project.folder / 'out'}"]) == 1
    err = capsys.readouterr().err
    assert "not finite" in err and err.count("\n") == 1


def test_data_in_a_folder_of_several_files_is_read(project, capsys):
    (project.folder / "several").mkdir()
    for seed in range(2):
        write_data(project.folder / "several" / f"{seed}.jsonl", 4, seed)
    config = project.write(dataset={"path": "several"})
    assert train.main(["--config", str(config), "--dry-run"]) == 0
    assert "8 samples" in capsys.readouterr().out
