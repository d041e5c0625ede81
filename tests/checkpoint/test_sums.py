"""SHA256SUMS as the sha256sum tool writes and reads it."""

import hashlib
import subprocess
import threading

import numpy as np
import pytest

from megatrain_jax.checkpoint import sums
from megatrain_jax.checkpoint.huggingface import load_weights, save_folder
from megatrain_jax.config import UserError

TENSORS = {f"model.layers.{i}.w": np.full((8, 4), i, np.float32) for i in range(3)}
SHAPES = {name: array.shape for name, array in TENSORS.items()}


def load(folder, **options):
    return load_weights(folder, SHAPES, lambda name, array: None, tied=False, **options)


@pytest.fixture
def folder(tmp_path):
    save_folder(tmp_path / "out", SHAPES, TENSORS.__getitem__, config={}, dtype="float32", max_shard_size=128)
    return tmp_path / "out"


def sha256sum(folder, *arguments):
    return subprocess.run(["sha256sum", *arguments], cwd=folder, capture_output=True, text=True)


def test_the_tool_checks_what_was_saved(folder):
    result = sha256sum(folder, "--check", "--strict", "SHA256SUMS")
    assert result.returncode == 0 and result.stdout.count(": OK") == 3


@pytest.mark.parametrize("mode", ["--text", "--binary"])
@pytest.mark.parametrize("prefix", ["", "./"])
def test_what_the_tool_writes_is_checked(folder, mode, prefix):
    names = sorted(f"{prefix}{path.name}" for path in folder.glob("*.safetensors"))
    (folder / "SHA256SUMS").write_text(sha256sum(folder, mode, *names).stdout)
    assert load(folder).notes == ()
    text = (folder / "SHA256SUMS").read_text()
    (folder / "SHA256SUMS").write_text(text.replace(text[0], "0" if text[0] != "0" else "1", 1))
    with pytest.raises(
        UserError, match="model-00001-of-00003.safetensors: does not have the hash that SHA256SUMS says"
    ):
        load(folder)
    load(folder, verify=False)


def test_a_file_without_a_hash_is_named(folder):
    lines = (folder / "SHA256SUMS").read_text().splitlines(keepends=True)
    (folder / "SHA256SUMS").write_text(lines[0] + f"{'0' * 64}  not-here.bin\n" + lines[2])
    note = "not verified: model-00002-of-00003.safetensors, which SHA256SUMS does not name"
    assert load(folder).notes == (note,)
    (folder / "SHA256SUMS").unlink()
    assert load(folder).notes == ()


@pytest.mark.parametrize("line", ["", "x", f"{'0' * 63}  a", f"{'g' * 64}  a", f"{'0' * 64} a", "\ud800"])
def test_what_is_no_list_of_hashes_is_refused(folder, line):
    with open(folder / "SHA256SUMS", "a", encoding="utf-8", errors="surrogatepass") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match="SHA256SUMS: (line 4 is not as|cannot be read)"):
        load(folder)


def test_an_error_while_reading_ends_the_hashing(tmp_path):
    (tmp_path / "a").write_bytes(bytes(5 << 20))
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), sums.verified(tmp_path / "a", "0" * 64):
        raise KeyboardInterrupt
    assert threading.active_count() == before


def test_hash_of_several_pieces(tmp_path):
    data = bytes(range(256)) * 10_000
    (tmp_path / "a").write_bytes(data)
    assert sums.hash_file(tmp_path / "a") == hashlib.sha256(data).hexdigest()
