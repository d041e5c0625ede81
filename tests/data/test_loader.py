"""Order, counts and splits: nothing lost, nothing twice, any step reachable."""

from __future__ import annotations

import dataclasses
import itertools
import threading

import numpy as np
import pytest

from megatrain_jax.config import UserError
from megatrain_jax.data import dataset as datasets
from megatrain_jax.data import files, loader, samples


def dialogue(i):
    return {"messages": [{"role": "user", "content": f"What is {i}?"}, {"role": "assistant", "content": f"It is {i}."}]}


def prepared(section, jsonl, tokenizer, rows=23, **changes):
    config = section(jsonl(*map(dialogue, range(rows))), **changes)
    return datasets.prepare(config, tokenizer, seed=3, vocab_size=400)


def rows_of(batches):
    """The tokens and supervised targets of every row that is not padding."""
    found = []
    for batch in batches:
        for ids, targets, weights, _, segments in zip(*batch, strict=True):
            if segments.any():
                found.append((tuple(ids[segments > 0]), tuple(targets[weights > 0])))
            else:
                assert not weights.any()
    return found


def samples_of(those):
    return [(tuple(sample.token_ids), tuple(sample.token_ids[sample.supervised])) for sample in those]


def same(a, b):
    return all(np.array_equal(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize(("batch_size", "micro_batches"), [(1, 1), (4, 1), (3, 2), (5, 7), (23, 1), (2, 3)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_is_the_data_set_once(section, jsonl, tokenizer, batch_size, micro_batches, shuffle):
    dataset = prepared(section, jsonl, tokenizer)
    stream = loader.TrainLoader(dataset, batch_size, micro_batches, seed=3, shuffle=shuffle)
    per_epoch = stream.steps_per_epoch
    assert per_epoch == int(np.ceil(23 / (batch_size * micro_batches)))
    epochs = []
    for epoch in range(2):
        steps = [stream.step(n) for n in range(epoch * per_epoch, (epoch + 1) * per_epoch)]
        assert all(len(step) == micro_batches for step in steps)
        batches = [batch for step in steps for batch in step]
        assert {field.shape for batch in batches for field in batch} == {(batch_size, dataset.sequence_length)}
        epochs.append(rows_of(batches))
        assert sorted(epochs[-1]) == sorted(samples_of(dataset.train))
    assert (epochs[0] == epochs[1]) == (not shuffle)
    assert (epochs[0] == samples_of(dataset.train)) == (not shuffle)


def test_a_step_is_the_same_however_it_is_reached(section, jsonl, tokenizer):
    dataset = prepared(section, jsonl, tokenizer)

    def make(seed=3):
        return loader.TrainLoader(dataset, 2, 2, seed=seed, shuffle=True)

    through = list(make().steps(0, 20))
    assert len(through) == 20
    for n in (19, 0, 7, 6, 5, 12):
        assert same(make().step(n), through[n])
    assert all(same(a, b) for a, b in zip(make().steps(13, 20), through[13:], strict=True))
    assert not all(same(make(4).step(n), through[n]) for n in range(20))


def pieces_of(batches):
    """Tokens of every segment, and the supervised targets of all."""
    found, asked = [], []
    for batch in batches:
        for ids, targets, weights, positions, segments in zip(*batch, strict=True):
            asked += targets[weights > 0].tolist()
            for segment in range(1, segments.max(initial=0) + 1):
                found.append(tuple(ids[segments == segment]))
                assert positions[segments == segment].tolist() == list(range(len(found[-1])))
    return found, sorted(asked)


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(6, 60))]
)
@pytest.mark.parametrize("how", ["none", "best_fit", "wrapped"])
def test_an_epoch_is_the_data_set_once_however_it_is_cut_up(section, jsonl, tokenizer, seed, how):
    """Any sizes, formats, packing and interruptions; a run that is broken off continues with the very next step."""
    rng = np.random.default_rng(seed)
    rows = [dialogue("very " * int(rng.integers(0, 12)) + str(i)) for i in range(rng.integers(1, 40))]
    folder = jsonl(*rows).parent
    jsonl(
        *[{"text": "The end of it. " * int(rng.integers(1, 20))} for _ in range(rng.integers(0, 4))], name="texts.jsonl"
    )
    dataset = datasets.prepare(section(folder, packing=how), tokenizer, seed=0, vocab_size=400)
    batch_size, micro_batches = map(int, rng.integers(1, 6, 2))

    def make():
        return loader.TrainLoader(dataset, batch_size, micro_batches, seed=seed, shuffle=seed % 3 > 0)

    stream, steps, epochs = make(), [], 2
    while len(steps) < epochs * stream.steps_per_epoch:
        run = make().steps(len(steps), epochs * stream.steps_per_epoch)
        steps += itertools.islice(run, int(rng.integers(1, 5)))
        run.close()
    assert all(same(step, stream.step(n)) for n, step in enumerate(steps))
    for epoch in range(epochs):
        mine = steps[epoch * stream.steps_per_epoch : (epoch + 1) * stream.steps_per_epoch]
        found, asked = pieces_of([batch for step in mine for batch in step])
        expected = [tuple(sample.token_ids) for sample in dataset.train]
        if how == "wrapped":
            assert sorted(itertools.chain(*found)) == sorted(itertools.chain(*expected))
        else:
            assert sorted(found) == sorted(expected)
        assert asked == sorted(token for sample in dataset.train for token in sample.token_ids[sample.supervised])


def test_packing_changes_what_shares_a_row_and_nothing_else(section, jsonl, tokenizer):
    alone, packed = (prepared(section, jsonl, tokenizer, val_size=7, packing=how) for how in ("none", "best_fit"))
    assert samples_of(alone.train) == samples_of(packed.train)
    assert alone.train_statistics == packed.train_statistics
    assert len(packed.train_rows) < len(packed.train) == len(alone.train_rows)
    assert packed.sequence_length > alone.sequence_length
    found, asked = pieces_of(loader.eval_batches(packed, 2))
    assert sorted(found) == sorted(tuple(sample.token_ids) for sample in packed.eval) and asked
    assert len(list(loader.eval_batches(packed, 1))) == len(packed.eval_rows) < 7


def test_long_text_fills_rows_without_a_seam(section, tokenizer, tmp_path):
    text = "The quick brown fox jumps over the lazy dog. " * 40
    (tmp_path / "a.txt").write_text(text)
    dataset = datasets.prepare(section(tmp_path, max_seq_len=16, packing="wrapped"), tokenizer, seed=0, vocab_size=400)
    tokens = [*tokenizer.encode(text), tokenizer.eos_id]
    assert (len(dataset.train), dataset.train_statistics.tokens) == (1, len(tokens))
    assert dataset.train_statistics.changed == dataset.train_statistics.dropped == {}
    stream = loader.TrainLoader(dataset, 4, 1, seed=0, shuffle=False)
    batches = [stream.step(n)[0] for n in range(stream.steps_per_epoch)]
    assert np.concatenate([b.token_ids[b.segment_ids > 0] for b in batches]).tolist() == tokens
    assert np.concatenate([b.targets[b.loss_weights > 0] for b in batches]).tolist() == tokens[1:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_very_long_text_is_tokenised_in_pieces(section, tokenizer, tmp_path, monkeypatch, workers):
    """What opens a text comes once, what closes it too, and of every piece but the first one token is no target."""
    monkeypatch.setattr(files, "PIECE", 100)
    monkeypatch.setattr(datasets, "_AT_ONCE", 250)
    prefixed = dataclasses.replace(tokenizer, prefix=(1,))
    text = "The quick brown fox jumps over the lazy dog.\n" * 40
    (tmp_path / "a.txt").write_text(text)
    config = section(tmp_path, max_seq_len=8, num_workers=workers)
    dataset = datasets.prepare(config, prefixed, seed=0, vocab_size=400)
    pieces = [text[i : i + 90] for i in range(0, len(text), 90)]
    expected = [tokenizer.encode(piece) for piece in pieces]
    targets = [expected[0], *(ids[1:] for ids in expected[1:]), [tokenizer.eos_id]]
    assert [t for _, asked in samples_of(dataset.train) for t in asked] == list(itertools.chain(*targets))
    assert dataset.train[0].token_ids[0] == 1 and sum((sample.token_ids == 1).sum() for sample in dataset.train) == 1
    assert dataset.train_statistics.changed == {samples.WINDOWED: len(pieces)}


def test_a_piece_that_cannot_be_read_is_left_out(section, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE", 16)
    (tmp_path / "a.txt").write_bytes(b"a line of text\nnot \0 this one\nbut this one\nand not \xff\n")
    with pytest.raises(UserError, match=r"a\.txt:2: the file contains a NUL character"):
        datasets.prepare(section(tmp_path), tokenizer, seed=0, vocab_size=400)
    dataset = datasets.prepare(section(tmp_path, on_bad_record="skip"), tokenizer, seed=0, vocab_size=400)
    assert [tokenizer.decode(sample.token_ids.tolist()) for sample in dataset.train] == [
        "a line of text\n",
        "but this one\n",
    ]
    assert dataset.train_statistics.dropped == {
        "the file contains a NUL character": 1,
        "not UTF-8 text": 1,
    }


@pytest.mark.parametrize("count", [1, 2])
def test_workers_change_nothing(section, jsonl, tokenizer, tmp_path, monkeypatch, count):
    monkeypatch.setattr(datasets, "_IN_THIS_PROCESS", 4)
    monkeypatch.setattr(datasets, "_CHUNK", 3)
    file = jsonl(*map(dialogue, range(50)), {"messages": dialogue(1)["messages"][:1]})
    made = [
        datasets.prepare(
            section(file, num_workers=n, cache_dir=str(tmp_path / str(n))), tokenizer, seed=0, vocab_size=400
        )
        for n in (0, count)
    ]
    assert samples_of(made[0].train) == samples_of(made[1].train)
    assert made[0].train_statistics == made[1].train_statistics and made[0].train_statistics.dropped
    with open(file, "a", encoding="utf-8") as opened:
        opened.write('{"messages": []}\n' + "{}\n" * 20)
    with pytest.raises(UserError, match=r"rows\.jsonl:52: empty conversation"):
        datasets.prepare(section(file, num_workers=count), tokenizer, seed=0, vocab_size=400)
    config = section(jsonl(*map(dialogue, range(99))), num_workers=count, max_seq_len=4, overlong="error")
    with pytest.raises(UserError, match=r"rows\.jsonl:1: \d+ tokens, more than"):
        datasets.prepare(config, tokenizer, seed=0, vocab_size=400)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("data")]


def test_the_next_steps_are_ready_before_they_are_asked_for(section, jsonl, tokenizer):
    stream = loader.TrainLoader(prepared(section, jsonl, tokenizer), 2, 1, seed=3, shuffle=True)
    made, plain = [threading.Event() for _ in range(30)], stream.step

    def step(n):
        batches = plain(n)
        made[n].set()
        return batches

    stream.step = step
    for n, _ in enumerate(stream.steps(0, 20)):
        for ahead in range(n + 1, min(n + 3, 20)):  # while the device is busy with step n
            assert made[ahead].wait(timeout=30), f"step {ahead} is not made while step {n} runs"
        assert not made[n + 3].is_set()


def data_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("data")]


def test_steps_ahead_are_bounded_and_end_with_their_consumer(section, jsonl, tokenizer):
    stream = loader.TrainLoader(prepared(section, jsonl, tokenizer), 2, 1, seed=3, shuffle=True)
    made = []
    plain = stream.step
    stream.step = lambda n: made.append(n) or plain(n)
    for n, _ in enumerate(stream.steps(5)):
        assert len(made) <= n + 3
        if n == 40:
            break
    assert made == list(range(5, 5 + len(made)))
    assert not data_threads()
    assert list(stream.steps(4, 4)) == []
    assert not data_threads()


def test_a_fault_in_the_thread_is_raised_where_the_steps_are_used(section, jsonl, tokenizer):
    stream = loader.TrainLoader(prepared(section, jsonl, tokenizer), 2, 1, seed=3, shuffle=True)
    plain = stream.step

    def step(n):
        if n == 2:
            raise OSError("disk gone")
        return plain(n)

    stream.step = step
    seen = []
    with pytest.raises(OSError, match="disk gone"):
        seen.extend(stream.steps(0, 9))
    assert not data_threads()


def test_evaluation_goes_through_the_held_out_samples_in_order(section, jsonl, tokenizer):
    dataset = prepared(section, jsonl, tokenizer, val_size=7)
    assert len(dataset.eval) == 7
    assert rows_of(loader.eval_batches(dataset, 3)) == samples_of(dataset.eval)
    assert rows_of(loader.eval_batches(dataset, 3, max_batches=2)) == samples_of(dataset.eval[:6])
    assert len(list(loader.eval_batches(dataset, 3))) == 3


@pytest.mark.parametrize(("val_size", "expected"), [(0.25, 6), (5, 5), (0.001, 1), (0, 0)])
def test_split_is_seeded_and_divides(section, jsonl, tokenizer, val_size, expected):
    dataset = prepared(section, jsonl, tokenizer, val_size=val_size)
    everything = samples_of(prepared(section, jsonl, tokenizer).train)
    assert len(dataset.eval) == expected
    assert sorted(samples_of([*dataset.train, *dataset.eval])) == sorted(everything)
    again = prepared(section, jsonl, tokenizer, val_size=val_size)
    assert samples_of(again.eval) == samples_of(dataset.eval)
    if val_size == 5:
        config = section(jsonl(*map(dialogue, range(23))), val_size=5)
        other = datasets.prepare(config, tokenizer, seed=4, vocab_size=400)
        assert samples_of(other.eval) != samples_of(dataset.eval)


def test_turns_of_one_conversation_are_not_split_apart(section, jsonl, tokenizer, templates):
    rows = [{"messages": 2 * dialogue(i)["messages"]} for i in range(6)]
    config = section(jsonl(*rows), chat_template=templates.reasoning, val_size=2)
    dataset = datasets.prepare(config, tokenizer, seed=0, vocab_size=400)
    assert (len(dataset.train), len(dataset.eval)) == (8, 4)
    assert dataset.train_statistics.changed == {samples.SPLIT: 6}
    assert len({sample.token_ids[:12].tobytes() for sample in dataset.eval}) == 2


def test_evaluation_data_of_its_own(section, jsonl, tokenizer):
    held_out = jsonl(*map(dialogue, (100, 10**9)), name="eval.jsonl")
    config = section(jsonl(*map(dialogue, range(9))), eval_path=str(held_out), max_samples=1)
    dataset = datasets.prepare(config, tokenizer, seed=0, vocab_size=400)
    assert (len(dataset.train), len(dataset.eval)) == (1, 2)
    assert "100" in tokenizer.decode(dataset.eval[0].token_ids)
    assert rows_of(loader.eval_batches(dataset, 2)) == samples_of(dataset.eval)  # longer than those of training
    config = dataclasses.replace(config, val_size=2)
    with pytest.raises(UserError, match=r"dataset\.val_size: 2 and dataset\.eval_path are both set"):
        datasets.prepare(config, tokenizer, seed=0, vocab_size=400)
    config = dataclasses.replace(config, val_size=0, eval_path="none.jsonl")
    with pytest.raises(UserError, match=r"dataset\.eval_path: no such file"):
        datasets.prepare(config, tokenizer, seed=0, vocab_size=400)


def test_statistics_count_what_the_batches_hold(section, jsonl, tokenizer):
    dataset = prepared(section, jsonl, tokenizer, val_size=4)
    stream = loader.TrainLoader(dataset, 4, 2, seed=0, shuffle=True)
    batches = [batch for n in range(stream.steps_per_epoch) for batch in stream.step(n)]
    statistics = dataset.train_statistics
    assert statistics.samples == len(rows_of(batches)) == 19
    assert statistics.tokens == sum(int((batch.segment_ids > 0).sum()) for batch in batches)
    assert statistics.supervised_tokens == sum(float(batch.loss_weights.sum()) for batch in batches)
    assert statistics.changed == statistics.dropped == {}
    assert dataset.eval_statistics.samples == 4
    assert dataset.format == "messages"


def overlong_rows():
    short, cut, gone = dialogue(1), dialogue(2), dialogue(3)
    cut["messages"][1]["content"] = "long " * 100
    gone["messages"][0]["content"] = "long " * 100
    silent = {"messages": dialogue(4)["messages"][:1]}
    return short, cut, gone, silent


def test_overlong_samples_are_truncated_and_counted(section, jsonl, tokenizer):
    dataset = datasets.prepare(section(jsonl(*overlong_rows())), tokenizer, seed=0, vocab_size=400)
    assert [len(sample.token_ids) for sample in dataset.train] == [len(dataset.train[0].token_ids), 64]
    assert all(sample.supervised.any() for sample in dataset.train)
    assert dataset.train_statistics.changed == {samples.TRUNCATED: 1}
    assert dataset.train_statistics.dropped == {samples.CUT_AWAY: 1, samples.UNSUPERVISED: 1}
    assert dataset.sequence_length == 64


def test_overlong_samples_are_dropped_and_counted(section, jsonl, tokenizer):
    config = section(jsonl(*overlong_rows()), overlong="drop")
    dataset = datasets.prepare(config, tokenizer, seed=0, vocab_size=400)
    assert len(dataset.train) == 1
    assert dataset.train_statistics.changed == {}
    assert dataset.train_statistics.dropped == {samples.TOO_LONG: 2, samples.UNSUPERVISED: 1}
    assert dataset.sequence_length == -(-len(dataset.train[0].token_ids) // 8) * 8 < 64


def test_overlong_samples_are_refused(section, jsonl, tokenizer):
    file = jsonl(*overlong_rows())
    with pytest.raises(UserError, match=rf"{file}:2: \d+ tokens, more than dataset\.max_seq_len 64"):
        datasets.prepare(section(file, overlong="error"), tokenizer, seed=0, vocab_size=400)


@pytest.mark.parametrize("val_size", [0, 2])
def test_long_text_loses_no_target(section, tokenizer, tmp_path, val_size):
    text = "The quick brown fox jumps over the lazy dog. " * 40
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("")
    config = section(tmp_path, max_seq_len=16, val_size=val_size)
    dataset = datasets.prepare(config, tokenizer, seed=0, vocab_size=400)
    targets = [token for _, asked in samples_of([*dataset.train, *dataset.eval]) for token in asked]
    assert sorted(targets) == sorted([*tokenizer.encode(text), tokenizer.eos_id][1:])
    assert dataset.format == "text"
    assert dataset.train_statistics.changed == {samples.WINDOWED: 1}
    assert dataset.train_statistics.dropped == {samples.UNSUPERVISED: 1}


def test_formats_of_several_files(section, jsonl, tokenizer):
    folder = jsonl(dialogue(1), name="a.jsonl").parent
    jsonl({"text": "The end."}, name="b.jsonl")
    dataset = datasets.prepare(section(folder), tokenizer, seed=0, vocab_size=400)
    assert dataset.format == "messages+text"
    assert len(dataset.train) == 2


def test_data_that_nothing_can_be_learnt_from(section, jsonl, tokenizer):
    with pytest.raises(UserError, match=r"dataset\.path: no samples in "):
        datasets.prepare(section(jsonl()), tokenizer, seed=0, vocab_size=400)
    silent = section(jsonl(*[{"messages": dialogue(i)["messages"][:1]} for i in range(12)]))
    with pytest.raises(UserError, match=r"dataset\.path: no supervised tokens in any of the 12 samples found"):
        datasets.prepare(silent, tokenizer, seed=0, vocab_size=400)
    for val_size in (3, 4):
        with pytest.raises(UserError, match=rf"dataset\.val_size: {val_size} of 3 records leaves one side empty"):
            prepared(section, jsonl, tokenizer, rows=3, val_size=val_size)


def test_tokens_without_a_row_in_the_embedding(section, jsonl, tokenizer):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b c The"}]
    bare = dataclasses.replace(tokenizer, chat_template=None)
    highest = max(bare.encode("b c The"))
    assert highest > 2
    datasets.prepare(section(jsonl(*rows)), bare, seed=0, vocab_size=highest + 1)
    with pytest.raises(
        UserError, match=rf"vocabulary larger than the embedding: token id {highest} in .*rows\.jsonl:2"
    ):
        datasets.prepare(section(jsonl(*rows)), bare, seed=0, vocab_size=highest)
