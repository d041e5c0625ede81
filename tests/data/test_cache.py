"""A cache is whole or not there: damage, crashes, rivals, and what must make a new one."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatrain_jax.config import UserError
from megatrain_jax.data import cache
from megatrain_jax.data import dataset as datasets
from megatrain_jax.data.chat import Sample
from megatrain_jax.data.tokenizer import with_chat_template

ROOT = Path(__file__).parents[2]


def random_units(seed=0, count=17, weights=(0, 1)):
    rng = np.random.default_rng(seed)
    return [[random_sample(rng, n, weights) for n in rng.integers(1, 30, rng.integers(1, 4))] for _ in range(count)]


def random_sample(rng, n, weights):
    own = rng.choice(weights, n).astype(np.float32)
    return Sample(rng.integers(0, 1000, n).astype(np.int32), own > 0, own if set(weights) - {0, 1} else None)


def builder(units, calls=None):
    def build(writer):
        if calls is not None:
            calls.append(1)
        for unit in units:
            writer.add(unit)
        return {"said": "something"}

    return build


def assert_holds(found, units):
    expected = [sample for unit in units for sample in unit]
    assert len(found.samples) == len(expected)
    for got, sample in zip(found.samples, expected, strict=True):
        for field, other in ((got[0], sample[0]), (got[1], sample[1]), (got.loss_weights(), sample.loss_weights())):
            np.testing.assert_array_equal(field, other)
            assert field.dtype == other.dtype
    np.testing.assert_array_equal(np.diff(found.units), [len(unit) for unit in units])
    assert found.samples.lengths.tolist() == [len(sample.token_ids) for sample in expected]
    assert found.samples.supervised_tokens == sum(int(sample.supervised.sum()) for sample in expected)
    assert found.notes == {"said": "something"}


def test_what_was_put_in_comes_out_and_is_built_once(tmp_path):
    units, calls = random_units(), []
    for _ in range(3):
        assert_holds(cache.open_or_build(tmp_path / "new", "key", builder(units, calls)), units)
    assert calls == [1]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["key"]
    some = cache.open_or_build(tmp_path / "new", "key", builder(units)).samples[3:9][1:3]
    assert [len(sample.token_ids) for sample in some] == some.lengths.tolist() and len(some) == 2
    with pytest.raises(IndexError):
        some[2]


@pytest.mark.parametrize("weights", [(0, 0.25, 1), (0, 1, 1e-30, 1 / 3, 1e30)])
def test_weights_come_out_as_they_were_put_in(tmp_path, weights):
    """Also where the first and the last samples have none but 0 and 1, so that nothing is written for them."""
    units = random_units() + random_units(1, weights=weights) + random_units(2)
    found = cache.open_or_build(tmp_path, "weighted", builder(units))
    assert_holds(found, units)
    assert len(found.samples.columns["weights"]) == found.samples.lengths.sum()
    plain = cache.open_or_build(tmp_path, "plain", builder(random_units()))
    assert (tmp_path / "plain" / "weights.bin").stat().st_size == 0 == len(plain.samples.columns["weights"])


def test_every_field_of_a_sample_is_kept():
    assert set(Sample._fields) <= set(cache._COLUMNS)


@pytest.mark.parametrize("column", cache._COLUMNS)
def test_a_column_that_is_cut_is_seen(tmp_path, column):
    units, calls = random_units(weights=(0, 1, 0.5)), []
    cache.open_or_build(tmp_path, "key", builder(units, calls))
    file = tmp_path / "key" / f"{column}.bin"
    os.truncate(file, file.stat().st_size - cache._COLUMNS[column].itemsize)
    assert_holds(cache.open_or_build(tmp_path, "key", builder(units, calls)), units)
    assert len(calls) == 2


@pytest.mark.parametrize("damage", ["cut", "grown", "gone", "meta cut", "meta gone", "other lengths", "empty folder"])
def test_damage_is_seen_and_mended(tmp_path, damage):
    units, calls = random_units(), []
    cache.open_or_build(tmp_path, "key", builder(units, calls))
    tokens, meta = tmp_path / "key" / "token_ids.bin", tmp_path / "key" / "meta.json"
    if damage == "cut":
        os.truncate(tokens, tokens.stat().st_size - 1)
    elif damage == "grown":
        tokens.write_bytes(tokens.read_bytes() + b"0000")
    elif damage == "gone":
        tokens.unlink()
    elif damage == "meta cut":
        os.truncate(meta, meta.stat().st_size // 2)
    elif damage == "meta gone":
        meta.unlink()
    elif damage == "other lengths":
        lengths = tmp_path / "key" / "lengths.bin"
        lengths.write_bytes(bytes(lengths.stat().st_size))
    else:
        for file in (tmp_path / "key").iterdir():
            file.unlink()
    assert_holds(cache.open_or_build(tmp_path, "key", builder(units, calls)), units)
    assert len(calls) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def build(writer):
        writer.add(random_units()[0])
        raise UserError("rows.jsonl:2: broken")

    with pytest.raises(UserError, match=r"rows\.jsonl:2: broken"):
        cache.open_or_build(tmp_path, "key", build)
    assert not list(tmp_path.iterdir())

    def cannot_read(writer):
        raise OSError("the data is gone")

    with pytest.raises(OSError, match="the data is gone"):  # not a fault of the cache
        cache.open_or_build(tmp_path, "key", cannot_read)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"dataset\.cache_dir: cannot write in '.*file/deep' .*choose another folder"):
        cache.open_or_build(tmp_path / "file" / "deep", "key", builder(random_units()))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk(tmp_path, monkeypatch):
    begin = cache.Writer.__init__

    def on_a_full_disk(self, folder):
        begin(self, folder)
        self.close()
        self._files = {name: open("/dev/full", "wb") for name in cache._COLUMNS}

    monkeypatch.setattr(cache.Writer, "__init__", on_a_full_disk)
    with pytest.raises(UserError, match=r"dataset\.cache_dir: cannot write .*No space left"):
        cache.open_or_build(tmp_path, "key", builder(random_units()))
    assert not list(tmp_path.iterdir())


def test_a_rival_that_was_first_is_used(tmp_path):
    units = random_units()

    def build(writer):
        cache.open_or_build(tmp_path, "key", builder(units))  # another process, while this one builds
        return builder(random_units(1))(writer)

    assert_holds(cache.open_or_build(tmp_path, "key", build), units)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


CODE = """
import sys, time
from pathlib import Path
from tests.data.test_cache import builder, random_units
from megatrain_jax.data import cache

def build(writer):
    print("building", flush=True)
    sys.stdin.readline()
    return builder(random_units())(writer)

cache.open_or_build(Path(sys.argv[1]), "key", build)
"""


def start(folder):
    return subprocess.Popen(
        [sys.executable, "-c", CODE, str(folder)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_processes_that_build_at_once_and_one_that_is_killed(tmp_path):
    units = random_units()
    killed, *others = (start(tmp_path) for _ in range(3))
    for process in (killed, *others):
        assert process.stdout.readline() == "building\n"
    assert len(list(tmp_path.iterdir())) == 3
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    for process in others:  # both at the same time
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.wait(timeout=60) for process in others] == [0, 0]
    for process in others:
        process.communicate()
    assert_holds(cache.open_or_build(tmp_path, "key", builder(units)), units)
    assert len(list(tmp_path.iterdir())) == 2  # what the killed one left
    cache.open_or_build(tmp_path, "other", builder(units))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "other"]


# ---------------------------------------------------------------------- what a data set's cache follows from


def dialogue(i):
    return {"messages": [{"role": "user", "content": f"What is {i}?"}, {"role": "assistant", "content": f"It is {i}."}]}


def caches(folder):
    return {path.name for path in folder.iterdir()}


def test_what_matters_makes_a_new_cache_and_nothing_else_does(section, jsonl, tokenizer, tmp_path):
    file, folder = jsonl(*map(dialogue, range(9))), tmp_path / "caches"
    config = section(file, cache_dir=str(folder))
    datasets.prepare(config, tokenizer, seed=0, vocab_size=400)
    (first,) = caches(folder)
    times = (folder / first / "meta.json").stat().st_mtime_ns

    def made(tokenizer=tokenizer, vocab_size=400, **changes):
        before = caches(folder)
        datasets.prepare(dataclasses.replace(config, **changes), tokenizer, seed=1, vocab_size=vocab_size)
        return len(caches(folder) - before)

    same = {"packing": "best_fit", "shuffle": False, "num_workers": 0, "val_size": 2, "pad_to_multiple_of": 64}
    assert [made(**{name: value}) for name, value in same.items()] == [0] * len(same)
    other = {"packing": "wrapped", "max_seq_len": 32, "train_on": "all", "system_prompt": "Be kind.", "max_samples": 3}
    assert [made(**{name: value}) for name, value in other.items()] == [1] * len(other)
    assert made(vocab_size=401) == 1
    assert made(with_chat_template(tokenizer, tokenizer.chat_template + " ")) == 1
    content = file.read_bytes()
    file.write_bytes(content.replace(b"What is 3", b"What is 8"))
    os.utime(file, ns=(0, 0))
    assert made() == 1
    file.write_bytes(content)
    assert made() == 0
    assert made(eval_path=str(jsonl(dialogue(70), name="eval.jsonl"))) == 1
    assert (folder / first / "meta.json").stat().st_mtime_ns == times


def test_a_file_that_changes_while_it_is_read_is_refused(section, jsonl, tokenizer, tmp_path, monkeypatch):
    file = jsonl(*map(dialogue, range(9)))
    make = datasets.make_samples

    def make_and_change(*args):
        with open(file, "a", encoding="utf-8") as opened:
            opened.write("\n")
        return make(*args)

    monkeypatch.setattr(datasets, "make_samples", make_and_change)
    config = section(file, cache_dir=str(tmp_path / "caches"))
    with pytest.raises(UserError, match=r"rows\.jsonl: changed while it was read"):
        datasets.prepare(config, tokenizer, seed=0, vocab_size=400)
    assert not caches(tmp_path / "caches")


def test_a_long_tokenisation_says_how_far_it_is(section, jsonl, tokenizer, monkeypatch):
    config, said = section(jsonl(*map(dialogue, range(40, 49)))), []
    datasets.prepare(config, tokenizer, seed=0, vocab_size=400, say=said.append)
    assert not said
    monkeypatch.setattr(datasets, "_SAY_EVERY", 0)
    datasets.prepare(config, tokenizer, seed=0, vocab_size=400, say=said.append)
    assert not said  # it is in the cache
    config = dataclasses.replace(config, max_samples=3)
    dataset = datasets.prepare(config, tokenizer, seed=0, vocab_size=400, say=said.append)
    assert len(said) == 3
    assert said[2] == f"data       tokenised 3 samples, {dataset.train_statistics.tokens} tokens so far"


def test_others_may_read_it_where_the_umask_lets_them(tmp_path):
    before = os.umask(0o022)
    try:
        cache.open_or_build(tmp_path, "key", builder(random_units()))
    finally:
        os.umask(before)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o755


def test_tokens_stay_on_the_disk(section, jsonl, tokenizer, tmp_path):
    rows = [dialogue(i) for i in range(9)]
    rows[0]["messages"][1]["weight"] = 0.5
    dataset = datasets.prepare(section(jsonl(*rows)), tokenizer, seed=0, vocab_size=400)
    for field in dataset.train[4]:
        owner = field
        while isinstance(owner, np.ndarray) and not isinstance(owner, np.memmap):
            owner = owner.base
        assert isinstance(owner, np.memmap)
        assert not field.flags.writeable


@pytest.mark.exhaustive
def test_a_data_set_larger_than_what_is_held(tmp_path):
    """300 MB of tokens are built and read through with little more memory than for none."""
    code = """
import resource, sys
from pathlib import Path
import numpy as np
from megatrain_jax.data import cache, packing
from megatrain_jax.data.chat import Sample

def build(writer):
    for i in range(int(sys.argv[2])):
        writer.add([Sample(np.full(60_000, i, np.int32), np.ones(60_000, bool))])
    return {}

samples = cache.open_or_build(Path(sys.argv[1]), sys.argv[2], build).samples
rows = packing.plan_rows(samples.lengths, "wrapped", 4096)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for row in np.random.default_rng(0).permutation(len(rows))[:100]:
    packing.make_batch([rows.pieces(row, samples)], 1, 4096)
print(peak)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    few, many = (
        int(subprocess.run([sys.executable, "-c", code, str(tmp_path), count], env=environment, stdout=subprocess.PIPE,
                           check=True).stdout)
        for count in ("1", "1000")
    )  # fmt: skip
    assert sum(file.stat().st_size for file in (tmp_path / "1000").iterdir()) > 290e6
    assert (many - few) * 1024 < 40e6


def test_a_second_start_is_quick(section, jsonl, tokenizer, monkeypatch):
    config = section(jsonl(*map(dialogue, range(2000))))
    start = time.perf_counter()
    first = datasets.prepare(config, tokenizer, seed=0, vocab_size=400)
    took = time.perf_counter() - start

    def not_again(*args):
        raise AssertionError("tokenised again")

    monkeypatch.setattr(datasets, "make_samples", not_again)
    start = time.perf_counter()
    second = datasets.prepare(config, tokenizer, seed=0, vocab_size=400)
    assert time.perf_counter() - start < took
    assert (first.train_statistics, first.format) == (second.train_statistics, second.format)


def test_what_is_trained_on_is_told_apart_by_its_weights(section, jsonl, tokenizer):
    """And a data set whose weights are all 1 is the one that says nothing of them."""

    def fingerprint(*weights):
        rows = [dialogue(i) for i in range(3)]
        for row, weight in zip(rows, weights):
            row["messages"][1]["weight"] = weight
        config = section(jsonl(*rows))
        return datasets.fingerprint(config, datasets.prepare(config, tokenizer, seed=0, vocab_size=400))

    found = [fingerprint(), fingerprint(1, 1.0, 1), fingerprint(1, 0.5, 1), fingerprint(1, 0.25, 1), fingerprint(0.5)]
    assert found[0] == found[1] and len(set(found)) == 4
