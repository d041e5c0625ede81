"""A checkpoint becomes the folder that the run itself would have saved, and nothing that is not what the run had."""

import json
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import megatrain_jax as mt
from megatrain_jax import export
from megatrain_jax.checkpoint import huggingface
from megatrain_jax.config import UserError
from tests.checkpoint.test_state import damages
from tests.end_to_end.conftest import ROOT, Project, compile_once, tokenizer_files, write_model


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    with compile_once(tmp_path_factory.mktemp("compiled")):
        yield


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path, write_model(tmp_path / "base", tie_word_embeddings=False))


def trained(project, **sections):
    mt.Trainer(project.config(training={"num_steps": 2}, **sections)).fit()
    return project.folder / "out"


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_is_what_the_run_saves(project, dtype):
    out = trained(project, checkpoint={"save_dtype": dtype}, model={"freeze": ["layers.0.mlp", "norm"]})
    export.export(out / "checkpoint-2", project.folder / "exported", dtype=dtype)
    assert files(project.folder / "exported") == files(out / "model")


def test_the_command_needs_no_data_and_no_base_model_and_starts_no_training(project):
    out = trained(project)
    expected = load_file(out / "model" / "model.safetensors"), tokenizer_files(project.folder / "base")
    (project.folder / "base").rename(project.folder / "gone")
    (project.folder / "train.jsonl").unlink()
    command = [sys.executable, "-W", "error", "-m", "megatrain_jax.export", str(out / "checkpoint-2"), "exported"]
    done = subprocess.run(
        [*command, "--dtype", "float32", "--max-shard-size", "30KB"],
        cwd=project.folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "saved      exported, for transformers\n")
    shards = sorted((project.folder / "exported").glob("*.safetensors"))
    assert len(shards) > 2
    index = json.loads((project.folder / "exported" / huggingface.INDEX_FILE).read_text())["weight_map"]
    found = {name: value for shard in shards for name, value in load_file(shard).items()}
    assert found.keys() == expected[0].keys() == index.keys()
    assert all(found[name].tobytes() == value.tobytes() for name, value in expected[0].items())
    assert tokenizer_files(project.folder / "exported") == expected[1]


def test_a_frozen_tensor_that_is_not_what_the_run_had_is_refused(project, capsys):
    out = trained(project, model={"freeze": ["layers.0.mlp.up_proj"]})
    weights = load_file(project.folder / "base" / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3, 4] += 1e-3
    save_file(weights, project.folder / "base" / "model.safetensors")
    assert export.main([str(out / "checkpoint-2"), str(project.folder / "exported")]) == 2
    err = capsys.readouterr().err
    assert (
        "model.layers.0.mlp.up_proj.weight', which was frozen, is not what the run had" in err and err.count("\n") == 1
    )
    assert not (project.folder / "exported").exists()


def test_frozen_tensors_of_random_weights_are_drawn_again(project):
    out = trained(project, model={"init": "random", "freeze": ["layers.1"]}, checkpoint={"save_dtype": "float32"})
    export.export(out / "checkpoint-2", project.folder / "exported", dtype="float32")
    assert files(project.folder / "exported") == files(out / "model")


def test_frozen_tensors_of_quantised_files_are_dequantised_as_the_run_had_them(project):
    file, name = project.folder / "base" / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weights = load_file(file)
    weights[f"{name}_scale_inv"] = np.full((1, 1), 0.37, np.float32)
    save_file(weights | {name: weights[name].astype(ml_dtypes.float8_e4m3fn)}, file)
    config = json.loads((project.folder / "base" / "config.json").read_text())
    (project.folder / "base" / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "fp8"}})
    )
    out = trained(project, model={"freeze": ["layers.1"]}, checkpoint={"save_dtype": "float32"})
    export.export(out / "checkpoint-2", project.folder / "exported", dtype="float32")
    assert files(project.folder / "exported") == files(out / "model")
    assert name in load_file(out / "model" / "model.safetensors")
    assert "quantization_config" not in json.loads((out / "model" / "config.json").read_text())


def test_a_damaged_checkpoint_is_not_exported(project):
    import random

    checkpoint = trained(project) / "checkpoint-2"
    chosen = random.Random(0).sample([d for d in damages(checkpoint, random.Random(1), 2)], 25)
    for file, content in chosen:
        # The optimizer's state is no part of the model: its content is not read, unless it shares a file with it.
        original = file.read_bytes()
        file.unlink() if content is None else file.write_bytes(content)
        if "int32" not in file.parts or content is None or len(content) != len(original):
            with pytest.raises(UserError, match=f"^'.*{file.name}.*; give another folder checkpoint-N$"):
                export.export(checkpoint, project.folder / "exported")
            assert not (project.folder / "exported").exists()
        file.write_bytes(original)


def test_a_file_that_is_not_read_as_it_was_written_is_refused(tmp_path, monkeypatch):
    """A disk that changes one bit between the two."""

    def flip(descriptor, *_):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        with open(path, "r+b") as file:
            file.seek(-5, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-5, os.SEEK_END)
            file.write(bytes([byte ^ 16]))

    tensors = {"a": np.ones((3, 4), np.float32), "b": np.ones((2, 2), np.float32)}
    shapes = {name: value.shape for name, value in tensors.items()}
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fadvise", flip)
        with pytest.raises(UserError, match="model.safetensors': it is not read as it was written; check the disk"):
            huggingface.save_folder(tmp_path / "out", shapes, tensors.__getitem__, config={})
    assert list(tmp_path.iterdir()) == []
