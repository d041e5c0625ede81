"""A run that was interrupted ends as one that was not, bit for bit."""

import re
import shutil
import signal
import subprocess

import numpy as np
import pytest

import megatrain_jax as mt
from megatrain_jax.checkpoint import manifest, tensors
from megatrain_jax.config import UserError
from megatrain_jax.data import loader
from tests.end_to_end.conftest import ROOT, records, saved_weights, write_model
from tests.end_to_end.test_devices import finish, start

slow = pytest.mark.exhaustive


def assert_same_end(a, b, step):
    first, second = (manifest.read(out / f"checkpoint-{step}") for out in (a, b))
    assert first["files"] == second["files"]  # lengths and hashes of everything
    assert first["tensors"] and first["run"]["position"] == second["run"]["position"]
    for name, value in saved_weights(a).items():
        assert value.tobytes() == saved_weights(b)[name].tobytes(), name
    assert records(a) == records(b)


def from_checkpoint(before, step, out):
    """As a process leaves it that was killed later: the metrics are ahead of the checkpoint."""
    out.mkdir()
    shutil.copytree(before / f"checkpoint-{step}", out / f"checkpoint-{step}")
    shutil.copy(before / "metrics.jsonl", out / "metrics.jsonl")
    return out


def plant_nan(monkeypatch, step):
    whole = loader.TrainLoader.step

    def poisoned(self, n):
        batches = whole(self, n)
        if n == step:
            weights = batches[-1].loss_weights.copy()
            weights[0, np.flatnonzero(weights[0])[0]] = np.nan
            batches[-1] = batches[-1]._replace(loss_weights=weights)
        return batches

    monkeypatch.setattr(loader.TrainLoader, "step", poisoned)


@pytest.mark.parametrize(
    "tied, nan_step, save_points, changes",
    [
        # 13 samples in batches of 2 are 7 steps an epoch: the data crosses into the next one.
        (True, None, (2, 7, 8), {"training": {"num_steps": 9, "warmup_steps": 3}}),
        (
            False,
            2,
            (1, 3, 5),
            {
                "model": {"dtype": "bfloat16", "freeze": ["layers.0", "q_proj"]},
                "training": {"num_steps": 6, "gradient_accumulation_steps": 2, "lr_scheduler_type": "linear"},
                "logging": {"log_interval": 4},
                "eval": {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
            },
        ),
        pytest.param(
            True,
            1,
            (1, 2, 3),
            {
                "model": {"dtype": "bfloat16"},
                "training": {"num_steps": 4, "max_grad_norm": 0},
                "optimizer": {"type": "lion"},
                "logging": {"log_interval": 3},
            },
            marks=slow,
        ),
        pytest.param(
            False,
            3,
            (2, 4),
            {"training": {"num_steps": 5}, "optimizer": {"type": "lamb"}, "eval": {"eval_strategy": "epoch"}},
            marks=slow,
        ),
        pytest.param(
            True,
            None,
            (3, 5),
            {"model": {"freeze": ["embed"]}, "training": {"num_steps": 6}, "optimizer": {"type": "sgd"}},
            marks=slow,
        ),
    ],
)
def test_a_resumed_run_equals_one_without_a_break(project, monkeypatch, tied, nan_step, save_points, changes):
    if not tied:
        project.tree["model"]["name"] = str(write_model(project.folder / "untied", tie_word_embeddings=False))
    if nan_step is not None:
        plant_nan(monkeypatch, nan_step)
    changes = changes | {"checkpoint": {"save_steps": 1}}
    whole = project.folder / "whole"
    summary = mt.Trainer(project.config("whole", **changes)).fit()
    end = changes["training"]["num_steps"]
    assert (summary.step, summary.skipped, summary.interrupted) == (end, int(nan_step is not None), False)
    assert any("loss" in line for line in records(whole))
    for point in save_points:
        out = from_checkpoint(whole, point, project.folder / f"from-{point}")
        mt.Trainer(project.config(out.name, **changes)).fit()
        assert_same_end(whole, out, end)


def saved_state(folder):
    content, out = manifest.read(folder), {}
    for name, places in content["tensors"].items():
        for key, place in places.items():
            dtype = place["dtype"]
            out[name, key] = np.empty(place["shape"], dtype)
            array = tensors.FlatArray(folder / dtype, dtype, **content["arrays"][dtype])
            tensors.read_range(array, place["offset"], out[name, key].reshape(-1))
    return out


def assert_same_training(a, b, step):
    """Masters, moments and losses up to a step to 1e-6 of their norm; counts and everything else exactly."""
    first, second = (saved_state(out / f"checkpoint-{step}") for out in (a, b))
    assert first.keys() == second.keys() and first
    for key, expected in first.items():
        error = np.linalg.norm(np.float64(second[key]) - expected)
        assert error <= (1e-6 * np.linalg.norm(expected) if expected.dtype == np.float32 else 0), (key, error)
    lines = [[line for line in records(out) if line["step"] <= step] for out in (a, b)]
    for line, other in zip(*lines, strict=True):
        for key in ("loss", "grad_norm"):
            assert other.pop(key) == pytest.approx(line.pop(key), rel=1e-6)
        assert line == other


def test_a_run_goes_on_with_another_number_of_devices(project):
    """From one device to eight, and from those to one."""
    sections = {"checkpoint": {"save_steps": 1}}
    whole = project.folder / "whole"
    mt.Trainer(project.config(whole.name, **sections)).fit()
    eight = from_checkpoint(whole, 2, project.folder / "eight")
    assert "ran on 8" in finish([start(8, "run", project.write(**sections), eight)], 300)
    assert_same_training(whole, eight, 6)
    one = from_checkpoint(eight, 4, project.folder / "one")
    mt.Trainer(project.config(one.name, **sections)).fit()
    assert_same_training(whole, one, 6)


@pytest.mark.parametrize("there, here", [(0, 2), (2, 0)])
def test_a_run_goes_on_with_other_blocks_on_the_device(project, there, here):
    sections = {"checkpoint": {"save_steps": 1}}
    whole = project.folder / "whole"
    mt.Trainer(project.config(whole.name, memory={"resident_blocks": there}, **sections)).fit()
    out = from_checkpoint(whole, 3, project.folder / "out")
    mt.Trainer(project.config(out.name, memory={"resident_blocks": here}, **sections)).fit()
    assert_same_training(whole, out, 6)


@pytest.mark.usefixtures("optimized_xla")
@pytest.mark.parametrize("there, here", [("optax", "fused"), ("fused", "optax")])
def test_a_run_goes_on_with_another_layout_of_the_host_bit_for_bit(project, there, here):
    pytest.importorskip("numba")
    sections = {
        "model": {"dtype": "bfloat16"},
        "training": {"num_steps": 40, "lr_scheduler_type": "cosine", "warmup_steps": 5},
        "checkpoint": {"save_steps": 20},
    }
    whole = project.folder / "whole"
    mt.Trainer(project.config(whole.name, optimizer={"backend": there}, **sections)).fit()
    out = from_checkpoint(whole, 20, project.folder / "out")
    mt.Trainer(project.config(out.name, optimizer={"backend": here}, **sections)).fit()
    assert_same_end(whole, out, 40)


def test_a_finished_run_is_left_as_it_is(project):
    sections = {"training": {"num_steps": 2}, "eval": {"eval_strategy": "steps", "eval_steps": 2}}
    out = project.folder / "out"
    mt.Trainer(project.config(**sections)).fit()
    before = records(out, timed=True), saved_weights(out)
    summary = mt.Trainer(project.config(**sections)).fit()
    assert (summary.step, summary.loss, summary.model_dir) == (2, None, out / "model")
    assert records(out, timed=True) == before[0]
    assert all(np.array_equal(value, before[1][name]) for name, value in saved_weights(out).items())


def test_only_one_history_fits_into_a_folder(project):
    mt.Trainer(project.config(training={"num_steps": 2}, checkpoint={"save_steps": 1})).fit()
    out = project.folder / "out"
    with pytest.raises(UserError, match="none starts at step 0, and .*checkpoint-1' of an earlier run is there"):
        mt.Trainer(project.config(training={"resume_from_checkpoint": "none"})).fit()
    with pytest.raises(UserError, match="starts at step 1, and .*checkpoint-2' of an earlier run is there"):
        mt.Trainer(project.config(training={"resume_from_checkpoint": str(out / "checkpoint-1")})).fit()
    with pytest.raises(UserError, match="is at step 2 and the run ends at 1"):
        mt.Trainer(project.config(training={"num_steps": 1})).fit()
    assert len(records(out)) == 2
    elsewhere = {"num_steps": 3, "resume_from_checkpoint": str(out / "checkpoint-1")}
    assert mt.Trainer(project.config("other", training=elsewhere)).fit().step == 3
    assert [line["step"] for line in records(project.folder / "other")] == [2, 3]


def test_signals_save_and_the_same_command_continues(project):
    """SIGTERM, then SIGINT to the run that continues, then to the end; against one run without a break."""
    steps = 400
    config = project.write(training={"num_steps": steps})
    out = project.folder / "out"
    reached = [0]
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen(
            project.command(str(config), f"output_dir={out}"),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                lines = []
                for line in process.stdout:
                    lines.append(line)
                    if (found := re.match(r"step +(\d+)/", line)) and int(found[1]) == reached[-1] + 3:
                        process.send_signal(number)
                assert process.wait() == 0
                assert process.stderr.read() == ""
            finally:
                process.kill()
        assert re.fullmatch(rf"stopped    at step \d+ by {number.name}; the same command continues\n", lines[-1]), (
            lines[-3:]
        )
        reached.append(int(re.search(r"step (\d+)", lines[-1])[1]))
        assert reached[-2] + 3 <= reached[-1] < steps
        assert (out / f"checkpoint-{reached[-1]}" / "manifest.json").exists() and not (out / "model").exists()
    mt.Trainer(project.config(training={"num_steps": steps})).fit()
    mt.Trainer(project.config("whole", training={"num_steps": steps})).fit()
    assert_same_end(out, project.folder / "whole", steps)


@pytest.mark.parametrize("where", ["manifest.json", "float32/0", "gone"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(project, capsys, where):
    sections = {"training": {"num_steps": 4}, "checkpoint": {"save_steps": 1}}
    whole, out = project.folder / "whole", project.folder / "out"
    mt.Trainer(project.config("whole", **sections)).fit()
    shutil.copytree(whole, out)
    for number in (3, 4):
        newest = out / f"checkpoint-{number}"
        if where == "gone":
            (newest / "int32" / "0").unlink()
        else:
            data = bytearray((newest / where).read_bytes())
            data[len(data) // 2] ^= 8
            (newest / where).write_bytes(data)
    capsys.readouterr()
    mt.Trainer(project.config(**sections)).fit()
    lines = capsys.readouterr().out.splitlines()
    damaged = [line for line in lines if line.startswith("damaged")]
    pattern = (
        r"damaged    '\S*/(checkpoint-\d)' is damaged: .*(manifest.json|float32/0|int32/0).*; it is now '\1.damaged'"
    )
    named = [re.fullmatch(pattern, line).groups() for line in damaged]
    assert named == [(f"checkpoint-{n}", "int32/0" if where == "gone" else where) for n in (4, 3)]
    assert "resumed    from checkpoint-2, step 2" in lines
    assert_same_end(whole, out, 4)
    with pytest.raises(UserError, match="checkpoint-4.damaged' is damaged"):
        asked = {"num_steps": 5, "resume_from_checkpoint": str(out / "checkpoint-4.damaged")}
        mt.Trainer(project.config("other", training=asked)).fit()


def test_what_may_change_is_named_and_the_rest_is_not(project, capsys):
    mt.Trainer(project.config(training={"num_steps": 1})).fit()
    capsys.readouterr()
    changed = {"num_steps": 2, "batch_size": 1, "gradient_accumulation_steps": 2, "learning_rate": 5e-3}
    mt.Trainer(project.config(training=changed, memory={"loss_tile": 16}, logging={"log_interval": 2})).fit()
    named = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("changed")]
    keys = ("batch_size", "gradient_accumulation_steps", "num_steps", "learning_rate")
    assert sorted(named) == sorted(f"training.{key}:" for key in keys)
