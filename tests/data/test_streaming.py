"""A stream is its files, once an epoch, in an order that only the seed decides."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from megatrain_jax.config import UserError
from megatrain_jax.data import chat, loader, samples, streaming
from megatrain_jax.data import dataset as datasets
from megatrain_jax.data.formats import Spelling, normalise
from tests.data.test_loader import dialogue, pieces_of, same


def loader_of(config, tokenizer, seed=3, batch_size=2, micro_batches=2):
    return streaming.StreamLoader(config, tokenizer, 400, batch_size, micro_batches, seed)


def expected_of(config, tokenizer):
    dataset = datasets.prepare(config, tokenizer, seed=0, vocab_size=400)
    return [tuple(sample.token_ids) for sample in dataset.train]


@pytest.mark.parametrize("how", ["none", "best_fit", "wrapped"])
@pytest.mark.parametrize("buffer_size", [1, 5, 1000])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_epoch_is_the_files_once(section, jsonl, tokenizer, how, buffer_size, shuffle):
    config = section(jsonl(*map(dialogue, range(23))), packing=how, buffer_size=buffer_size, shuffle=shuffle)
    expected = expected_of(config, tokenizer)
    rows = loader_of(config, tokenizer)._rows()
    found, counted = [], 0
    epochs = []
    for row in rows:
        found += [tuple(sample.token_ids[start:stop]) for sample, start, stop in row]
        counted += sum(stop - start for _, start, stop in row)
        if counted == sum(map(len, expected)):
            epochs.append(found)
            found, counted = [], 0
            if len(epochs) == 2:
                break
    rows.close()
    for epoch in epochs:
        if how == "wrapped":
            assert sorted(itertools.chain(*epoch)) == sorted(itertools.chain(*expected))
        else:
            assert sorted(epoch) == sorted(expected)
            assert how != "none" or (epoch == expected) == (not shuffle or buffer_size == 1)
    assert (epochs[0] == epochs[1]) == (not shuffle or buffer_size == 1)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("how", ["none", "best_fit", "wrapped"])
def test_weights_of_turns_reach_the_batches(section, jsonl, tokenizer, how, streamed):
    """Whole, or cut: what a token weighs goes with it, whatever row it is in."""
    rows, expected, rng = [], [], np.random.default_rng(0)
    for i in range(23):
        turns = []
        for weight in rng.choice([0.0, 1.0, 0.25, 3.5], rng.integers(1, 9)).tolist():
            said = {"role": "assistant", "content": f"It is {weight}.", "weight": weight}
            turns += [{"role": "user", "content": f"What is {i}?"}, said]
        turns[-1]["weight"] = 2.0  # the end of long ones is cut off
        rows.append({"messages": turns})
    config = section(jsonl(*rows), packing=how, max_seq_len=96, pad_to_multiple_of=96, shuffle=False)
    for row in rows:
        [sample] = chat.supervise(tokenizer, normalise(row, Spelling("messages"), "x:1"))
        kept = len(sample.token_ids) if how == "wrapped" else 96
        expected += [
            pair for pair in zip(sample.token_ids[:kept].tolist(), sample.loss_weights(0, kept).tolist()) if pair[1]
        ]
    if streamed:
        batches = itertools.chain(*loader_of(config, tokenizer).steps(0, 20))
    else:
        dataset = datasets.prepare(config, tokenizer, seed=0, vocab_size=400)
        batches = loader.TrainLoader(dataset, 2, 2, seed=0, shuffle=False).steps(0, 20)
        batches = itertools.chain(*batches)
    found = [
        pair
        for batch in batches
        for targets, weights in zip(batch.targets, batch.loss_weights)
        for pair in zip(targets.tolist(), weights.tolist())
        if pair[1]
    ][: len(expected)]
    assert {weight for _, weight in expected} >= {0.25, 3.5, 1.0} and len(found) == len(expected)
    assert sorted(found) == sorted(expected) if how == "best_fit" else found == expected


def test_a_step_is_the_same_however_it_is_reached(section, jsonl, tokenizer, monkeypatch):
    config = section(jsonl(*map(dialogue, range(23))), packing="best_fit", buffer_size=7, num_workers=0)
    through = list(loader_of(config, tokenizer).steps(0, 9))
    assert len(through) == 9
    assert all({field.shape for field in batch} == {(2, 64)} for step in through for batch in step)
    for start in (0, 4, 8):
        again = list(loader_of(config, tokenizer).steps(start, 9))
        assert len(again) == 9 - start and all(same(a, b) for a, b in zip(again, through[start:], strict=True))
    monkeypatch.setattr(datasets, "_IN_THIS_PROCESS", 4)
    monkeypatch.setattr(datasets, "_CHUNK", 3)
    with_workers = section(config.path, packing="best_fit", buffer_size=7, num_workers=2)
    assert all(same(a, b) for a, b in zip(loader_of(with_workers, tokenizer).steps(0, 9), through, strict=True))
    other = list(loader_of(config, tokenizer, seed=4).steps(0, 9))
    assert not all(same(a, b) for a, b in zip(other, through, strict=True))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("data")]


@pytest.mark.parametrize("when", ["while it is read", "between two epochs"])
def test_a_file_that_changes_ends_the_stream(section, jsonl, tokenizer, when):
    """Its samples would be others, and the order of a run that resumes another."""
    config = section(jsonl(*map(dialogue, range(20))), buffer_size=2)
    rows = loader_of(config, tokenizer)._rows()
    list(itertools.islice(rows, 3 if when == "while it is read" else 20))
    with open(config.path, "a", encoding="utf-8") as file:
        file.write("\n")
    with pytest.raises(UserError, match=r"rows\.jsonl: changed while it was read; start again"):
        list(itertools.islice(rows, 40))


def test_what_is_left_out_is_counted(section, jsonl, tokenizer):
    config = section(jsonl(*map(dialogue, range(6)), {"messages": dialogue(1)["messages"][:1]}))
    stream = loader_of(config, tokenizer, batch_size=3, micro_batches=1)
    list(stream.steps(0, 1))
    assert stream.dropped == {samples.UNSUPERVISED: 1} and stream.changed == {}


def test_faults_end_the_stream(section, jsonl, tokenizer):
    file = jsonl(*map(dialogue, range(6)), '{"messages": [')
    steps = loader_of(section(file, buffer_size=1), tokenizer, batch_size=1, micro_batches=1).steps(0, 99)
    with pytest.raises(UserError, match=r"rows\.jsonl:7: not valid JSON"):
        list(steps)
    silent = section(jsonl({"messages": dialogue(1)["messages"][:1]}, name="silent.jsonl"))
    with pytest.raises(UserError, match=r"dataset\.path: nothing to train on"):
        list(loader_of(silent, tokenizer).steps(0, 1))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("data")]


def test_a_streamed_data_set_knows_its_format_and_keeps_only_what_is_held_out(section, jsonl, tokenizer):
    held_out = str(jsonl(dialogue(70), name="eval.jsonl"))
    config = section(jsonl(*map(dialogue, range(6))), streaming=True, eval_path=held_out)
    dataset = datasets.prepare(config, tokenizer, seed=0, vocab_size=400)
    assert (dataset.train, dataset.train_statistics, dataset.format) == (None, None, "messages")
    assert (len(dataset.eval), dataset.sequence_length) == (1, 64)
    (step,) = loader_of(config, tokenizer).steps(0, 1)
    found, _ = pieces_of(step)
    assert len(found) == 4
    with pytest.raises(UserError, match=r"dataset\.path: no samples in"):
        empty = section(jsonl(name="empty.jsonl"), streaming=True)
        datasets.prepare(empty, tokenizer, seed=0, vocab_size=400)


def test_samples_in_memory_are_bounded_by_the_buffer(section, jsonl, tokenizer, monkeypatch):
    read = []
    make = datasets.make_all

    def counting(*args):
        for each in make(*args):
            read.append(1)
            yield each

    monkeypatch.setattr(streaming, "make_all", counting)
    config = section(jsonl(*map(dialogue, range(200))), buffer_size=10)
    steps = loader_of(config, tokenizer, batch_size=1, micro_batches=1).steps(0, 50)
    for n, _ in enumerate(steps):
        assert len(read) <= 10 + 10 * -(-(n + 3) // 10) + 1
