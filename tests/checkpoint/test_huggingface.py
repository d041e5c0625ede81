"""Hugging Face folders in and out. The oracles are the safetensors library and transformers."""

import collections
import json
import re
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megatrain_jax.checkpoint import finite, huggingface, stored
from megatrain_jax.checkpoint.huggingface import (
    TOKENIZER_FILES,
    check_save_folder,
    load_weights,
    parse_size,
    save_folder,
)
from megatrain_jax.config import UserError

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}


def some_tensors(dtype=np.float32, *, head: bool = True) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {EMBED: (11, 4), "model.layers.0.mlp.up_proj.weight": (6, 4), NORM: (4,)} | (
        {HEAD: (11, 4)} if head else {}
    )
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def shapes_of(tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in tensors.items()}


def load(folder, shapes, *, tied=False):
    """The tensors handed over, copied, and the report; each name must come once."""
    got: dict[str, np.ndarray] = {}

    def write(name, array):
        assert name not in got
        got[name] = np.array(array)

    return got, load_weights(folder, shapes, write, tied=tied)


def assert_same_bytes(got, expected):
    assert set(got) == set(expected)
    for name, array in expected.items():
        assert got[name].dtype == array.dtype and got[name].shape == array.shape
        assert got[name].tobytes() == array.tobytes(), name


def write_sharded(folder, tensors) -> None:
    names = list(tensors)
    files = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    (folder / huggingface.INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("tag", DTYPES)
@pytest.mark.parametrize("layout", ["one file", "sharded", "any name"])
def test_every_tensor_is_handed_over_once_as_it_is_on_file(tmp_path, tag, layout):
    tensors = some_tensors(DTYPES[tag])
    if layout == "sharded":
        write_sharded(tmp_path, tensors)
    else:
        save_file(tensors, tmp_path / ("model.safetensors" if layout == "one file" else "weights.safetensors"))
    got, report = load(tmp_path, shapes_of(tensors))
    assert_same_bytes(got, tensors)
    assert report.dtypes == (tag,) and report.unused == () and not report.head_differs
    assert report.parameters == 11 * 4 * 2 + 6 * 4 + 4
    assert len(report.files) == (2 if layout == "sharded" else 1)


def test_one_file_is_preferred_to_stray_ones(tmp_path):
    tensors = some_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    save_file({name: array + 1 for name, array in tensors.items()}, tmp_path / "old.safetensors")
    assert_same_bytes(load(tmp_path, shapes_of(tensors))[0], tensors)


def test_unused_tensors_are_listed_and_rotary_buffers_are_not(tmp_path):
    tensors = some_tensors()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32), "mtp.x": np.ones(2, np.int64)}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    got, report = load(tmp_path, shapes_of(tensors))
    assert_same_bytes(got, tensors)
    assert report.unused == ("mtp.x",) and report.notes == ("not used: mtp.x",)


def test_notes_name_many_unused_tensors_once():
    unused = tuple(f"vision.layers.{i}.{w}.weight" for i in range(12) for w in "qk")
    notes = huggingface.LoadReport((), 0, (), unused, (), head_differs=True).notes
    assert notes[:2] == ("not used: vision.layers.*.q.weight (12)", "not used: vision.layers.*.k.weight (12)")
    assert len(notes) == 3 and "lm_head.weight, which differs from the embedding" in notes[2]


@pytest.mark.parametrize("head", [None, "equal", "other values", "other dtype"])
def test_the_head_of_a_tied_model_is_ignored_and_a_different_one_reported(tmp_path, head, monkeypatch):
    monkeypatch.setattr(stored, "_CHUNK", 8)  # several pieces of two rows
    tensors = some_tensors(head=False)
    written = dict(tensors)
    if head is not None:
        written[HEAD] = tensors[EMBED].astype(np.float16 if head == "other dtype" else np.float32)
    if head == "other values":
        written[HEAD][-1, -1] += 1
    save_file(written, tmp_path / "model.safetensors")
    got, report = load(tmp_path, shapes_of(tensors), tied=True)
    assert_same_bytes(got, tensors)
    assert report.head_differs == (head in ("other values", "other dtype"))
    assert report.unused == ()


@pytest.mark.parametrize("prefix", ["", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("head", [None, HEAD, f"language_model.{HEAD}"])
def test_names_of_a_base_model_and_of_the_language_model_in_a_larger_one_fit(tmp_path, prefix, head):
    tensors = some_tensors(head=head is not None)
    on_file = {prefix + n.removeprefix("model.") if n != HEAD else head: array for n, array in tensors.items()}
    save_file(on_file | {"vision_tower.weight": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    got, report = load(tmp_path, shapes_of(tensors), tied=head is None)
    assert_same_bytes(got, tensors)
    assert report.unused == ("vision_tower.weight",)


def test_reading_holds_one_tensor_at_a_time(tmp_path):
    tensors = {f"model.layers.{i}.w": np.full((256, 1024), i, np.float32) for i in range(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    tracemalloc.start()
    load_weights(tmp_path, shapes_of(tensors), lambda name, array: None, tied=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.2 * 2**20  # one of the 1 MiB tensors, and the next while the name still holds it


def bad_folder(tmp_path, kind: str) -> None:
    tensors = some_tensors()
    file = tmp_path / "model.safetensors"
    if kind == "missing tensor":
        del tensors[NORM]
    if kind == "missing tensors":
        del tensors[NORM], tensors[EMBED]
    if kind == "no head":
        del tensors[HEAD]
    if kind == "wrong shape":
        tensors[NORM] = np.zeros(5, np.float32)
    if kind == "wrong dtype":
        tensors[NORM] = tensors[NORM].astype(np.float64)
    if kind in ("index without file", "broken index", "index without map"):
        write_sharded(tmp_path, tensors)
        if kind == "index without file":
            (tmp_path / "model-00002-of-00002.safetensors").unlink()
        else:
            (tmp_path / huggingface.INDEX_FILE).write_text("{" if kind == "broken index" else '{"weight_map": [1]}')
        return
    if kind == "twice":
        save_file(tensors, tmp_path / "a.safetensors")
        save_file(tensors, tmp_path / "b.safetensors")
        return
    if kind == "pickle":
        (tmp_path / "pytorch_model.bin").write_bytes(b"x")
        return
    if kind == "empty folder":
        return
    save_file(tensors, file)
    if kind == "longer than its header says":
        file.write_bytes(file.read_bytes() + b"\0" * 8)
    if kind == "broken header":
        file.write_bytes(file.read_bytes().replace(b'"shape"', b'"shapf"', 1))
    if kind == "not safetensors":
        file.write_bytes(b"\xff" * 64)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing tensor", r"no tensor 'model.norm.weight' in its files"),
        ("missing tensors", r"no tensor 'model.embed_tokens.weight' and 1 more in its files"),
        ("no head", r"no tensor 'lm_head.weight'.*set tie_word_embeddings: true in model.config_overrides"),
        ("wrong shape", r"model.safetensors: tensor 'model.norm.weight' has shape \[5\] where .*asks for \[4\]"),
        ("wrong dtype", r"model.safetensors: tensor 'model.norm.weight' has dtype F64; supported: BF16, F16, F32"),
        ("index without file", r"index.json: names 'model-00002-of-00002.safetensors', which is not there"),
        ("broken index", r"index.json: not an index"),
        ("index without map", r"index.json: not an index"),
        ("twice", r"b.safetensors: tensor '.*' is also in 'a.safetensors'"),
        ("pickle", r"only PyTorch pickles .*save_pretrained"),
        ("empty folder", r"no \*.safetensors in"),
        ("longer than its header says", r"model.safetensors: broken or cut short"),
        ("broken header", r"model.safetensors: broken or cut short"),
        ("not safetensors", r"model.safetensors: broken or cut short"),
    ],
)
def test_a_bad_folder_is_refused_before_anything_is_written(tmp_path, kind, message):
    bad_folder(tmp_path, kind)
    written = []
    with pytest.raises(UserError, match=message) as caught:
        load_weights(tmp_path, shapes_of(some_tensors()), lambda name, _: written.append(name), tied=False)
    assert not written and "\n" not in str(caught.value)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such folder '.*nowhere'"):
        load_weights(tmp_path / "nowhere", {}, lambda *_: None, tied=False)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    tensors = some_tensors()
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    whole = file.read_bytes()
    lengths = {0, 1, 7, 8, 9, len(whole) - 1, *np.random.default_rng(1).integers(0, len(whole), 50).tolist()}
    for length in sorted(lengths):
        file.write_bytes(whole[:length])
        with pytest.raises(UserError, match="broken or cut short"):
            load_weights(tmp_path, shapes_of(tensors), pytest.fail, tied=False)


# Damages: of the field with the header's length, of the header (names, dtypes, shapes, offsets), and of the data.


def damages(whole: bytes, count: int):
    """The class, and the file with a bit flipped there; some of each class, and all of the length field."""
    start = 8 + int.from_bytes(whole[:8], "little")
    rng = np.random.default_rng(3)
    offsets = [m.start() for m in re.finditer(rb"\d(?=[\d,]*\]\}?)", whole[:start])]  # digits of shapes and offsets
    places = {
        "length": range(8),
        "header": rng.integers(8, start, count),
        "numbers": rng.choice(offsets, min(count, len(offsets)), replace=False),
        "data": [start, len(whole) - 1, *rng.integers(start, len(whole), count)],
    }
    for where, positions in places.items():
        for position in positions:
            for bit in range(8):
                flipped = bytearray(whole)
                flipped[position] ^= 1 << bit
                yield where, bytes(flipped)


def test_a_damaged_header_is_refused_by_name_or_changes_nothing(tmp_path):
    """Without a hash: what is read is what was written, or the file or the tensor that is not there is named."""
    tensors, file, met = some_tensors(), tmp_path / "model.safetensors", collections.Counter()
    save_file(tensors, file, metadata={"format": "pt"})
    for where, content in damages(file.read_bytes(), 60):
        if where == "data":
            continue
        file.write_bytes(content)
        try:
            got, _ = load(tmp_path, shapes_of(tensors))
        except UserError as error:
            assert re.search(r"model\.safetensors: |: no tensor '", str(error)) and "\n" not in str(error)
            met[where] += 1
        else:
            assert where == "header"  # such as a letter of its metadata
            assert_same_bytes(got, tensors)
    assert met["length"] == 64 and met["numbers"] > 64 and met["header"] > 240


def test_any_damage_is_seen_by_the_hash_and_the_file_named(tmp_path):
    tensors = some_tensors()
    save(tmp_path / "out", tensors, dtype="float32", max_shard_size=200)
    assert_same_bytes(load(tmp_path / "out", shapes_of(tensors))[0], tensors)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 1
    met = collections.Counter()
    for file in shards:
        whole = file.read_bytes()
        for where, content in damages(whole, 12):
            file.write_bytes(content)
            with pytest.raises(UserError) as raised:
                load(tmp_path / "out", shapes_of(tensors))
            message = str(raised.value)
            assert f"{file.name}: " in message or "no tensor '" in message and where != "data", message
            met[where] += 1
        file.write_bytes(whole)
    assert set(met) == {"length", "header", "numbers", "data"}
    assert_same_bytes(load(tmp_path / "out", shapes_of(tensors))[0], tensors)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tag", DTYPES)
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, tag, value, monkeypatch):
    monkeypatch.setattr(finite, "_PIECE", 3)  # several pieces, the last one shorter
    tensors = some_tensors(DTYPES[tag])
    largest = np.array(3e38 if tag != "F16" else 65504, np.float32).astype(DTYPES[tag])
    tensors[EMBED][0, 0] = largest  # finite
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same_bytes(load(tmp_path, shapes_of(tensors))[0], tensors)
    for place in (0, -1):
        damaged = {name: array.copy() for name, array in tensors.items()}
        damaged[EMBED].reshape(-1)[place] = value
        save_file(damaged, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=f"model.safetensors: tensor '{EMBED}' has values that are not finite"):
            load(tmp_path, shapes_of(tensors))


# Saving.


def save(out_dir, tensors, **changes) -> None:
    save_folder(out_dir, shapes_of(tensors), tensors.__getitem__, **({"config": {"model_type": "llama"}} | changes))


def stored_tensors(folder) -> dict[str, np.ndarray]:
    return {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in load_file(file).items()}


@pytest.mark.parametrize("max_shard_size", ["5GB", "100B", 1])
def test_what_was_read_is_written_byte_for_byte(tmp_path, max_shard_size):
    tensors = some_tensors(ml_dtypes.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    got, _ = load(tmp_path, shapes_of(tensors))
    save(tmp_path / "out", got, max_shard_size=max_shard_size)
    assert_same_bytes(stored_tensors(tmp_path / "out"), tensors)
    assert_same_bytes(load(tmp_path / "out", shapes_of(tensors))[0], tensors)


def test_float32_is_rounded_to_the_nearest_bfloat16_or_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "_CHUNK", 7)
    tensors = some_tensors()
    tensors[NORM] = np.array([1 + 2**-8, 1 + 3 * 2**-8, np.inf, -3.3], np.float32)  # two ties, which go away from 0
    save(tmp_path / "half", tensors)
    half = stored_tensors(tmp_path / "half")
    assert half[NORM].astype(np.float32)[:3].tolist() == [1 + 2**-7, 1 + 2**-6, np.inf]
    for name, array in tensors.items():
        finite = array[np.isfinite(array)]
        error = np.abs(half[name].astype(np.float32)[np.isfinite(array)] - finite)
        assert np.all(error <= np.abs(finite) * 2**-8)
    save(tmp_path / "full", tensors, dtype="float32")
    assert_same_bytes(stored_tensors(tmp_path / "full"), tensors)


def test_shards_keep_to_the_size_and_the_index_names_them(tmp_path):
    tensors = {f"t{i}": np.full(size, i, np.float32) for i, size in enumerate([10, 10, 10, 50, 10])}
    save(tmp_path / "out", tensors, dtype="float32", max_shard_size=100)
    index = json.loads((tmp_path / "out" / huggingface.INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == 4 * 90
    files = [index["weight_map"][f"t{i}"] for i in range(5)]
    expected = [f"model-{i:05d}-of-00004.safetensors" for i in (1, 1, 2, 3, 4)]
    assert files == expected
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_config_and_tokenizer_are_copied_verbatim(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    text = '{"model_type":   "llama",\n\t"dtype": "bfloat16", "x": 1e-05}'
    (source / "config.json").write_text(text)
    for file in TOKENIZER_FILES:
        (source / file).write_bytes(file.encode() + b"\r\n\xff")
    (source / "README.md").write_text("not copied")
    save(tmp_path / "out", some_tensors(), config=json.loads(text), source=source)
    assert (tmp_path / "out" / "config.json").read_text() == text
    for file in TOKENIZER_FILES:
        assert (tmp_path / "out" / file).read_bytes() == (source / file).read_bytes()
    assert {entry.name for entry in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "SHA256SUMS",
        *TOKENIZER_FILES,
    }


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_config_names_the_dtype_that_the_files_hold(tmp_path, key):
    config = {"model_type": "llama", key: "bfloat16", "vocab_size": 11}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save(tmp_path / "out", some_tensors(), config=config, source=tmp_path, dtype="float32")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config | {key: "float32"}


def test_an_overridden_config_is_written_instead_of_the_original(tmp_path):
    config = {"model_type": "llama", "num_hidden_layers": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    changed = config | {"num_hidden_layers": 1}
    save(tmp_path / "out", some_tensors(), config=changed, source=tmp_path)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == changed


def test_a_saved_model_is_replaced_and_nothing_else_is_left(tmp_path):
    out = tmp_path / "a" / "b"
    save(out, some_tensors(), max_shard_size=1)
    save(out, some_tensors())
    assert {entry.name for entry in out.iterdir()} == {"config.json", "model.safetensors", "SHA256SUMS"}
    assert [entry.name for entry in out.parent.iterdir()] == ["b"]


def test_a_failure_leaves_the_old_model_and_no_half_written_one(tmp_path):
    old = some_tensors()
    save(tmp_path / "out", old, dtype="float32")

    def read(name):
        if name == NORM:
            raise RuntimeError("planted")
        return old[name] + 1

    for out in ("out", "new"):
        with pytest.raises(RuntimeError, match="planted"):
            save_folder(tmp_path / out, shapes_of(old), read, config={})
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert_same_bytes(stored_tensors(tmp_path / "out"), old)


def test_a_full_disk_is_a_user_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface.os, "fsync", full)
    with pytest.raises(UserError, match="cannot save to '.*out': .*No space left.*free space there"):
        save(tmp_path / "out", some_tensors())
    assert list(tmp_path.iterdir()) == []


def test_a_failed_swap_brings_the_old_model_back(tmp_path, monkeypatch):
    old = some_tensors()
    save(tmp_path / "out", old, dtype="float32")
    rename = huggingface.os.rename

    def fail_for_new(source, target):
        if source.name.endswith(".writing"):
            raise OSError("planted")
        rename(source, target)

    monkeypatch.setattr(huggingface.os, "rename", fail_for_new)
    with pytest.raises(UserError, match="planted"):
        save(tmp_path / "out", {name: array + 1 for name, array in old.items()})
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert_same_bytes(stored_tensors(tmp_path / "out"), old)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("x")
    cases = {
        tmp_path / "file": "it is not a folder",
        tmp_path / "file" / "below": "is not a writable folder",
        tmp_path / "thesis": "it holds 'chapter.tex', which is not of a saved model",
    }
    for out, message in cases.items():
        for attempt in (lambda out=out: check_save_folder(out), lambda out=out: save(out, some_tensors())):
            with pytest.raises(UserError, match=message):
                attempt()
    with pytest.raises(UserError, match=r"1000000000.00 GB needed, .* GB free"):
        check_save_folder(tmp_path / "out", 10**18)
    check_save_folder(tmp_path / "new" / "deep", 1)
    assert not (tmp_path / "new").exists()


def test_writing_holds_one_tensor_at_a_time(tmp_path):
    shapes = {f"t{i}": (1024, 1024) for i in range(4)}
    tracemalloc.start()
    save_folder(tmp_path / "out", shapes, lambda name: np.ones(shapes[name], np.float32), config={}, dtype="float32")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 13 * 2**20  # a 4 MiB tensor, the one before it while the name still holds it, and a piece


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("5GiB", 5 * 2**30), ("200 mb", 2 * 10**8), ("1.5KB", 1500), ("7", 7), ("7B", 7), (12, 12)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5 apples", "-1GB", "0", 0, "0.1B", "1e9", None, "5IB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UserError, match="checkpoint.max_shard_size: .* is not a size; write such as 5GB or 5GiB"):
        parse_size(text)


# Against transformers.

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "head_dim": 16},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
}


@pytest.mark.parametrize("saved", ["whole", "sharded"])
@pytest.mark.parametrize("name", MODELS)
def test_transformers_folder_to_store_to_folder(tmp_path, name, saved):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kept = {key: value for key, value in MODELS[name].items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(MODELS[name]["model_type"], **SMALL, **kept)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    source, out = tmp_path / "source", tmp_path / "out"
    model.save_pretrained(source, max_shard_size="10KB" if saved == "sharded" else "5GB")
    tied = config.tie_word_embeddings
    expected = {k: v for k, v in model.state_dict().items() if not (tied and k == HEAD)}
    shapes = shapes_of(expected)
    got, report = load(source, shapes, tied=tied)
    assert report.unused == () and (len(report.files) > 1) == (saved == "sharded")

    raw = json.loads((source / "config.json").read_text())
    save_folder(out, shapes, got.__getitem__, config=raw, source=source, max_shard_size="20KB")
    assert_same_bytes(stored_tensors(out), stored_tensors(source))
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()
    back, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert back.dtype == torch.bfloat16
    for key, value in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], value), key

    save_folder(
        out, shapes, lambda key: got[key].astype(np.float32) * 1.001, config=raw, source=source, dtype="float32"
    )
    wide = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert wide.dtype == torch.float32
    for key, value in model.state_dict().items():
        assert torch.equal(wide.state_dict()[key], value.float() * 1.001), key
