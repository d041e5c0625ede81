"""Steps whose gradient is not finite: skipped, counted, and in the end given up with what caused them."""

import errno
import re

import numpy as np
import pytest

import megatrain_jax as mt
from megatrain_jax import preparation, train
from megatrain_jax.data import loader
from megatrain_jax.models.spec import Batch
from megatrain_jax.stream.updater import NonFiniteError
from tests.end_to_end.conftest import records


@pytest.fixture
def poison(monkeypatch):
    """Makes some steps, numbered from 1, not finite; nothing else of them changes."""
    whole = loader.TrainLoader.step

    def plant(*steps):
        def poisoned(self, n):
            batches = whole(self, n)
            if n + 1 in steps:
                batches[-1] = batches[-1]._replace(loss_weights=batches[-1].loss_weights * np.float32("nan"))
            return batches

        monkeypatch.setattr(loader.TrainLoader, "step", poisoned)

    return plant


def skipped(project):
    return [line["skipped_steps"] for line in records(project.folder / "out")]


def test_so_many_in_a_row_end_the_run_and_their_batch_is_kept(project, poison):
    poison(2, 3, 4)
    config = project.config(training={"max_nonfinite_steps": 2, "gradient_accumulation_steps": 2})
    with pytest.raises(NonFiniteError) as error:
        mt.Trainer(config).fit()
    message, file = str(error.value), project.folder / "out" / "nonfinite-step-3.npz"
    assert message.startswith(
        "training.max_nonfinite_steps: the gradient of 2 steps in a row was not finite, at step 3"
    )
    assert f"its batch is in '{file}'" in message and "\n" not in message
    assert skipped(project) == [0, 1, 2]
    expected = preparation.prepare(config).batches.step(2)
    with np.load(file, allow_pickle=False) as kept:
        for field in Batch._fields:
            np.testing.assert_array_equal(kept[field], [getattr(batch, field) for batch in expected], err_msg=field)


def test_a_step_that_is_finite_begins_the_count_anew(project, poison):
    poison(2, 4, 6)
    assert mt.Trainer(project.config(training={"max_nonfinite_steps": 2})).fit().skipped == 3
    assert skipped(project) == [0, 1, 1, 2, 2, 3]


def test_the_count_outlives_the_process(project, poison):
    poison(3)
    sections = {"checkpoint": {"save_steps": 3}}
    mt.Trainer(project.config(training={"num_steps": 3, "max_nonfinite_steps": 2}, **sections)).fit()
    poison(3, 4)
    with pytest.raises(NonFiniteError, match="2 steps in a row was not finite, at step 4"):
        mt.Trainer(project.config(training={"num_steps": 6, "max_nonfinite_steps": 2}, **sections)).fit()


def test_without_a_limit_it_goes_on(project, poison):
    poison(*range(1, 7))
    summary = mt.Trainer(project.config(training={"max_nonfinite_steps": None})).fit()
    assert (summary.step, summary.skipped) == (6, 6)


@pytest.mark.parametrize("clipped", [0, 1])
def test_where_such_steps_are_not_skipped_the_first_ends_the_run_and_is_kept(project, poison, clipped):
    poison(2)
    with pytest.raises(NonFiniteError) as error:
        mt.Trainer(project.config(training={"skip_nonfinite": False, "max_grad_norm": clipped})).fit()
    assert f"its batch is in '{project.folder / 'out' / 'nonfinite-step-2.npz'}'" in str(error.value)
    with np.load(project.folder / "out" / "nonfinite-step-2.npz", allow_pickle=False) as kept:
        assert np.isnan(kept["loss_weights"]).any()


def test_the_command_says_so_in_one_line_even_on_a_full_disk(project, poison, capsys, monkeypatch):
    poison(1)

    def full(path, **arrays):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(np, "savez_compressed", full)
    config = project.write(training={"max_nonfinite_steps": 1})
    assert train.main(["--config", str(config), f"output_dir={project.folder / 'out'}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match("error: training.max_nonfinite_steps: .* its batch could not be written to .*No space left", line)
