"""The loop: what it records, evaluates and saves, against independent computations."""

import json
import signal
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file

import megatrain_jax as mt
from megatrain_jax import preparation, trainer
from megatrain_jax.checkpoint import state
from megatrain_jax.data import loader
from megatrain_jax.host.optimizer import make_schedule
from megatrain_jax.model import unpadded_batch
from megatrain_jax.models.families import spec_from_config
from megatrain_jax.report.meter import Meter
from megatrain_jax.stream.planner import GIB
from megatrain_jax.stream.transfer import make_mesh
from tests.end_to_end.conftest import HF_CONFIG, Project, compile_once, records, saved_weights, write_model
from tests.reference import logits_of

# Adam divides by the size of the gradient, and where that is near 0 it makes a step of its rounding.
LINEAR = {"type": "sgd"}


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    with compile_once(tmp_path_factory.mktemp("compiled")):
        yield


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path, write_model(tmp_path / "model"))


def fit(project, out="out", **sections):
    return mt.Trainer(project.config(out, **sections)).fit()


def test_a_record_says_what_was_done(project):
    sections = {"training": {"num_steps": 5, "warmup_steps": 2, "lr_scheduler_type": "linear"}}
    summary = fit(project, **sections)
    config = project.config(**sections)
    prepared = preparation.prepare(config)
    rates, tokens = make_schedule(config.training, 5), 0
    lines = records(project.folder / "out", timed=True)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for n, line in enumerate(lines):
        (batch,) = prepared.batches.step(n)
        real = int((batch.segment_ids > 0).sum())
        tokens += real
        assert line["learning_rate"] == float(rates(n)) > 0
        assert line["tokens"] == tokens
        assert line["supervised_share"] == (batch.loss_weights > 0).sum() / real
        seconds = line["seconds"]
        assert set(seconds) == {"forward", "backward", "optimizer_wait", "data_wait", "step"}
        assert min(seconds.values()) >= 0
        assert seconds["data_wait"] + seconds["forward"] + seconds["backward"] <= seconds["step"]
        assert line["tokens_per_second"] == pytest.approx(real / seconds["step"])
        assert line["skipped_steps"] == 0 and line["grad_norm"] > 0
        assert line["host_peak_bytes"] > 2**20 and line["device_peak_bytes"] is None
    assert summary == trainer.Summary(5, 0, lines[-1]["loss"], None, False, project.folder / "out" / "model")
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_the_rate_of_a_skipped_step_is_that_of_the_next(project, monkeypatch):
    whole = loader.TrainLoader.step
    poison = lambda b: [b[0]._replace(loss_weights=b[0].loss_weights * np.float32("nan"))]  # noqa: E731
    monkeypatch.setattr(loader.TrainLoader, "step", lambda self, n: (poison if n == 1 else list)(whole(self, n)))
    summary = fit(project, training={"num_steps": 4, "warmup_steps": 4})
    lines = records(project.folder / "out")
    assert [line["skipped_steps"] for line in lines] == [0, 1, 1, 1] and summary.skipped == 1
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.0025, 0.005, 0.005, 0.0075])
    assert lines[1]["loss"] is None and "loss" in lines[1]["nonfinite"]
    assert all(np.isfinite(line["loss"]) for line in (lines[0], *lines[2:]))


@pytest.mark.parametrize("rows, micro_batches", [(4, 2), (2, 4)])
def test_accumulation_equals_one_batch(project, rows, micro_batches):
    """13 samples of unequal length: the last batch of an epoch has micro-batches without a sample."""
    project.tree["optimizer"] = LINEAR
    training = {"num_steps": 4}
    fit(project, "whole", training=training | {"batch_size": 8})
    fit(project, "parts", training=training | {"batch_size": rows, "gradient_accumulation_steps": micro_batches})
    assert_same(project.folder / "whole", project.folder / "parts")


@pytest.mark.parametrize("group", [1, 2])
def test_groups_forced_by_the_budget_equal_no_groups(project, group):
    training = {"batch_size": 2, "gradient_accumulation_steps": 3, "num_steps": 3}
    project.tree["optimizer"] = LINEAR
    fit(project, "whole", training=training)
    config = project.config(training=training)
    prepared = preparation.prepare(config)
    whole = preparation.plan(config, prepared, make_mesh("cpu"))
    assert whole.group_size == 3
    memory = {"device_budget": (whole.working + whole.activations * group / 3) / GIB, "offload_activations": False}
    config = project.config(training=training, memory=memory)
    assert preparation.plan(config, prepared, make_mesh("cpu")).group_size == group
    fit(project, "parts", training=training, memory=memory)
    assert_same(project.folder / "whole", project.folder / "parts")


def assert_same(a, b):
    first, second = records(a), records(b)
    assert len(first) == len(second)
    for x, y in zip(first, second):
        assert y["loss"] == pytest.approx(x["loss"], rel=1e-6)
        assert y["grad_norm"] == pytest.approx(x["grad_norm"], rel=1e-5)
        assert {k: x[k] for k in ("step", "tokens", "supervised_share")} == {
            k: y[k] for k in ("step", "tokens", "supervised_share")
        }
    start = load_file(a.parent / "model" / "model.safetensors")
    for name, value in saved_weights(a).items():
        assert np.abs(value - start[name]).max() > 1e-4, name
        np.testing.assert_allclose(saved_weights(b)[name], value, rtol=0, atol=1e-6, err_msg=name)


def test_the_evaluation_loss_is_the_mean_over_all_supervised_tokens(project):
    """Each sample by itself, without padding, through the unstreamed model."""
    fit(project, training={"num_steps": 1})
    weights, spec = saved_weights(project.folder / "out"), spec_from_config(HF_CONFIG)
    dataset = preparation.prepare(project.config()).dataset
    total, count = 0.0, 0
    for sample in dataset.eval:
        logits = np.asarray(logits_of(spec, weights, unpadded_batch(sample.token_ids[None]))[0], np.float64)[0]
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for t in np.flatnonzero(sample.supervised):
            total -= log_p[t - 1, sample.token_ids[t]]
            count += 1
    assert count > len(dataset.eval) > 1
    for size in (1, 2, 3, 5, 8):
        sections = {"eval": {"eval_on_start": True, "eval_batch_size": size}, "training": {"num_steps": 1}}
        sections["model"] = {"name": str(project.folder / "out" / "model")}
        fit(project, f"eval-{size}", **sections)
        first = records(project.folder / f"eval-{size}")[0]
        assert first["step"] == 0
        assert first["eval_loss"] == pytest.approx(total / count, rel=1e-6)
        assert first["perplexity"] == pytest.approx(np.exp(total / count), rel=1e-5)


@pytest.mark.parametrize(
    "section, expected",
    [
        ({"eval_strategy": "steps", "eval_steps": 3}, [3, 6, 8]),
        ({"eval_strategy": "steps", "eval_steps": 4, "eval_on_start": True}, [0, 4, 8]),
        ({"eval_strategy": "epoch"}, [7, 8]),
        ({"eval_on_start": True}, [0, 8]),
        ({}, []),
    ],
)
def test_when_it_evaluates(project, section, expected):
    summary = fit(project, training={"num_steps": 8}, eval=section)
    losses = {line["step"]: line["eval_loss"] for line in records(project.folder / "out") if "eval_loss" in line}
    assert list(losses) == expected
    assert summary.eval_loss == (losses[8] if expected else None)


@pytest.mark.parametrize(
    "section, expected",
    [
        ({"save_steps": 3}, [0, 3, 6, 8]),
        ({"save_steps": 2, "save_total_limit": 2}, [6, 8]),
        ({"save_strategy": "epoch"}, [0, 7, 8]),
        ({"save_strategy": "no"}, []),
        ({"save_strategy": "no", "save_final": False}, []),
    ],
)
def test_when_it_saves(project, section, expected):
    fit(project, training={"num_steps": 8}, checkpoint=section)
    out = project.folder / "out"
    assert sorted(int(path.name.partition("-")[2]) for path in out.glob("checkpoint-*")) == expected
    assert (out / "model").exists() == section.get("save_final", True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_saved_folder_has_the_trained_weights(project, dtype):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    fit(project, training={"num_steps": 3}, checkpoint={"save_dtype": dtype})
    folder = project.folder / "out" / "model"
    ids = np.random.default_rng(0).integers(0, 259, (2, 20))
    ours = mt.load(folder, dtype="float32", device="cpu").logits(ids)
    assert np.abs(ours - mt.load(project.folder / "model", dtype="float32", device="cpu").logits(ids)).max() > 0.1
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)("hello")["input_ids"]
    assert len(tokens) == 5


@pytest.mark.parametrize("strategy, saved", [("no", []), ("steps", ["checkpoint-0", "checkpoint-2"])])
def test_an_interrupted_run_says_what_is_left_of_it(project, capsys, strategy, saved):
    main, sent = threading.main_thread().ident, []

    def listener(event):
        if event.what == "update done" and event.block == 0 and len(records(project.folder / "out")) >= 1 and not sent:
            sent.append(signal.pthread_kill(main, signal.SIGINT))  # once: a second one would end the process

    summary = mt.Trainer(project.config(checkpoint={"save_strategy": strategy}), listener).fit()
    assert summary.interrupted and summary.step < 6 and summary.model_dir is None
    out = project.folder / "out"
    assert sorted(path.name for path in out.glob("checkpoint-*")) == [
        name.replace("2", str(summary.step)) for name in saved
    ]
    last = capsys.readouterr().out.splitlines()[-1]
    remedy = {"no": "nothing was saved (checkpoint.save_strategy: no)", "steps": "the same command continues"}[strategy]
    assert last == f"stopped    at step {summary.step} by SIGINT; {remedy}"


def test_a_meter_that_is_carried_over_goes_on_where_it_was():
    steps = [
        dict(loss=x, grad_norm=2 * x, tokens=10, supervised_tokens=3, seconds={"forward": x}, router_loss=x / 2)
        for x in (0.1, 0.7, np.nan)
    ]
    whole, first = Meter(), Meter()
    for step in steps:
        whole.start(), whole.finish(**step)
    first.start(), first.finish(**steps[0])
    second = Meter(json.loads(json.dumps(first.carried())))
    for step in steps[1:]:
        second.start(), second.finish(**step)
    a, b = whole.record(), second.record()
    assert a["loss"] == b["loss"] == (0.1 + 0.7) / 2
    assert a["router_loss"] == b["router_loss"] == (0.1 + 0.7) / 4
    for key in ("grad_norm", "supervised_share"):
        np.testing.assert_equal(a[key], b[key])
    assert whole.carried() == {} and a["supervised_share"] == 0.3


def test_a_checkpoint_says_what_memory_was_spent_on(project):
    mt.Trainer(project.config(training={"num_steps": 1}, memory={"keep_intermediates": 1})).fit()
    meta = state.read_run(project.folder / "out" / "checkpoint-1")["position"]
    assert (meta["keep_layers"], meta["resident_blocks"]) == (1, 0)
