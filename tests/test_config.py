"""The configuration: what is written is what is read, and what is wrong is one line."""

import dataclasses
import os
import random
import re
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Literal

import pytest
import yaml

from megatrain_jax import config as config_module
from megatrain_jax.checkpoint.huggingface import parse_size
from megatrain_jax.config import Config, DatasetConfig, ModelConfig, SourceConfig, UserError, load_config
from megatrain_jax.typed_yaml import Bounds

TEXTS = ["no", "off", "null", "~", "1e-5", "1E5", "0x1f", "1:30", "2024-01-01", "", " a ", "a: b", "- a", "'", '"',
         "#", "line\nline", "tab\t", "\u00e9\u4e2d", "{x}", "%", "@", "true", "0.5", "=", "<<", "\\"]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder beside which a run works: a model, data, and another current directory."""
    (tmp_path / "there" / "model").mkdir(parents=True)
    (tmp_path / "there" / "data.jsonl").touch()
    (tmp_path / "there" / "eval.jsonl").touch()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "there"


def write(folder, tree=(), **sections):
    """A file with the two required keys and what is given."""
    tree = dict(tree) or {
        "model": {"name": "model"} | sections.pop("model", {}),
        "dataset": {"path": "data.jsonl"} | sections.pop("dataset", {}),
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree | sections))
    return path


def drawn(kind, rng):
    """A value of the annotated type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return kind(**{k: drawn(each, rng) for k, each in typing.get_type_hints(kind, include_extras=True).items()})
    if origin is Annotated and isinstance(arguments[1], Bounds):
        low, high = arguments[1].low + 1e-6, min(arguments[1].high, 1e9)
        value = 10 ** rng.uniform(-9, 9)
        value = value if low < value < high else rng.uniform(low, high - 1e-6)
        return max(int(arguments[1].low), 1, int(value)) if arguments[0] is int else value
    if origin is Annotated:
        return rng.choice(
            {"a": ["auto", "cpu", "cuda:3", "all"], "(": ["5GB", "512MiB", "100B"]}[arguments[1].regex[0]]
        )
    if origin in (typing.Union, types.UnionType, Literal):
        choice = rng.choice(arguments)
        return choice if origin is Literal else drawn(choice, rng)
    if origin is tuple:
        return tuple(re.escape(rng.choice(TEXTS)) for _ in range(rng.randrange(4)))
    if origin is Mapping and arguments[1] is typing.Any:
        return {rng.choice(TEXTS): rng.choice([*TEXTS, 1, 1e-6, True, None, {"a": [1, "1e3"]}]) for _ in range(3)}
    if origin is Mapping and arguments[1] is str:
        return {rng.choice(TEXTS): rng.choice(TEXTS) for _ in range(2)}
    if origin is Mapping:
        return {"min_lr_ratio": rng.random(), "decay_ratio": rng.choice([0, 1, 1e-7])}
    return {str: rng.choice(TEXTS), bool: rng.random() < 0.5, types.NoneType: None}[kind]


@pytest.mark.parametrize("seed", range(60))
def test_what_is_dumped_loads_back_equal(seed, folder):
    rng = random.Random(seed)
    data = str(folder / "data.jsonl")
    paths = {
        ModelConfig: {"name": str(folder / "model"), "tokenizer": rng.choice([None, str(folder)])},
        DatasetConfig: {"path": data, "chat_template": rng.choice([None, "{{ x }}", data])}
        | {"cache_dir": str(folder), "streaming": False, "name": None, "dataset_dir": str(folder)}
        | rng.choice(
            [
                {},
                {"path": (SourceConfig(data), SourceConfig(data, "text", 0.5, {"text": "no"}, num_samples=3))},
                {"path": (), "name": "a, b"},
            ]
        )
        | rng.choice([{"eval_path": data, "val_size": 0}, {"eval_path": None, "val_size": rng.choice([0.25, 7])}]),
        config_module.TrainingConfig: {"resume_from_checkpoint": rng.choice(["auto", "none", str(folder)])},
    }
    sections = {}
    for name, cls in typing.get_type_hints(Config).items():
        if dataclasses.is_dataclass(cls):
            hints = typing.get_type_hints(cls, include_extras=True)
            values = {key: drawn(kind, rng) for key, kind in hints.items()} | paths.get(cls, {})
            if cls is config_module.OptimizerConfig:
                values["type"] = rng.choice(["adamw", "lion", "sgd", "yogi"])
            sections[name] = cls(**values)
    config = Config(**sections, output_dir=str(folder / rng.choice(["out", "no", "1e5"])), seed=rng.randrange(2**40))
    config.dump(folder / "dumped.yaml")
    assert load_config(folder / "dumped.yaml") == config


def test_lists_of_sources(folder):
    listed = ["data.jsonl", {"path": "eval.jsonl", "weight": 2, "columns": {"prompt": "q"}}]
    config = load_config(write(folder, dataset={"path": listed, "eval_path": ["*.jsonl"]}))
    second = SourceConfig(str(folder / "eval.jsonl"), weight=2.0, columns={"prompt": "q"})
    assert config.dataset.path == (SourceConfig(str(folder / "data.jsonl")), second)
    assert config.dataset.eval_path == (SourceConfig(str(folder / "*.jsonl")),)
    for wrong, message in (
        ([{"weight": 2}], r"dataset\.path\[0\]\.path: missing"),
        (["data.jsonl", "none.jsonl"], r"dataset\.path\[1\]\.path: no such file or folder 'none\.jsonl'"),
        ([{"path": "data.jsonl", "weigth": 2}], r"dataset\.path\[0\]: unknown key 'weigth', choose from path, format"),
        ([{"path": "data.jsonl", "weight": 0}], r"dataset\.path\[0\]\.weight: expected a number > 0, got 0"),
        ([3], r"dataset\.path\[0\]: expected a mapping of path"),
        ([], r"dataset\.path: missing"),
    ):
        with pytest.raises(UserError, match=message):
            load_config(write(folder, dataset={"path": wrong}))


def test_a_registry_is_named_instead_of_a_path(folder):
    tree = {"model": {"name": "model"}, "dataset": {"name": "a,b", "dataset_dir": "model"}}
    assert load_config(write(folder, tree)).dataset.name == "a,b"
    flat = {"model_name_or_path": "model", "dataset": "a,b", "dataset_dir": "model"}
    assert load_config(write(folder, flat)) == load_config(write(folder, tree))
    with pytest.raises(UserError, match="dataset.name: 'a' and dataset.path are both given, keep one"):
        load_config(write(folder, dataset={"name": "a"}))


def test_only_the_required_keys_give_the_documented_defaults(folder):
    expected = Config(ModelConfig(str(folder / "model")), DatasetConfig(str(folder / "data.jsonl")))
    assert load_config(write(folder)) == dataclasses.replace(expected, output_dir=os.path.abspath("outputs/run"))


@pytest.mark.parametrize("cls", [c for c in vars(config_module).values() if dataclasses.is_dataclass(c)])
def test_every_field_is_documented(cls):
    documented = re.findall(r"^ {2,6}([\w, ]+): ", cls.__doc__, re.MULTILINE) if "Attributes:" in cls.__doc__ else None
    if documented is not None:
        names = {name.strip() for line in documented for name in line.split(",")}
        assert {field.name for field in dataclasses.fields(cls)} <= names


ALIASES = [
    ("model.dtype", "bf16", "model.dtype", "bfloat16"),
    ("model.dtype", "fp32", "model.dtype", "float32"),
    ("model.device", 2, "model.device", "cuda:2"),
    ("model.device", "gpu", "model.device", "cuda"),
    ("model.attn_implementation", "flash_attention_2", "model.attn_implementation", "auto"),
    ("model.attn_implementation", "sdpa", "model.attn_implementation", "auto"),
    ("model.attn_implementation", "eager", "model.attn_implementation", "auto"),
    ("model.freeze", "embed", "model.freeze", ["embed"]),
    ("dataset.cutoff_len", 77, "dataset.max_seq_len", 77),
    ("dataset.sequence_len", 77, "dataset.max_seq_len", 77),
    ("dataset.max_length", 77, "dataset.max_seq_len", 77),
    ("dataset.max_seq_length", 77, "dataset.max_seq_len", 77),
    ("dataset.packing", True, "dataset.packing", "best_fit"),
    ("dataset.packing", False, "dataset.packing", "none"),
    ("dataset.packing_strategy", "bfd", "dataset.packing", "best_fit"),
    ("dataset.packing_strategy", "wrapped", "dataset.packing", "wrapped"),
    ("dataset.train_on_inputs", True, "dataset.train_on", "all"),
    ("dataset.train_on_prompt", True, "dataset.train_on", "all"),
    ("dataset.train_on_inputs", False, "dataset.train_on", "assistant"),
    ("training.per_device_train_batch_size", 3, "training.batch_size", 3),
    ("training.micro_batch_size", 3, "training.batch_size", 3),
    ("training.max_steps", 9, "training.num_steps", 9),
    ("training.max_steps", -1, "training.num_steps", None),
    ("training.warmup_ratio", 0.03, "training.warmup_steps", 0.03),
    ("training.warmup_ratio", 0, "training.warmup_steps", 0),
    ("training.seed", 7, "seed", 7),
    ("training.lr_scheduler_type", "constant_with_warmup", "training.lr_scheduler_type", "constant"),
    ("training.lr_scheduler_type", "warmup_stable_decay", "training.lr_scheduler_type", "wsd"),
    ("training.resume_from_checkpoint", None, "training.resume_from_checkpoint", "none"),
    ("optimizer.type", "deepspeed_adam", "optimizer.type", "adamw"),
    ("optimizer.type", "cpu_adamw", "optimizer.type", "adamw"),
    ("optimizer.type", "adamw_torch", "optimizer.type", "adamw"),
    ("logging.logging_steps", 5, "logging.log_interval", 5),
    ("logging.log_every_n_steps", 5, "logging.log_interval", 5),
    ("eval.eval_strategy", False, "eval.eval_strategy", "no"),
    ("checkpoint.save_strategy", False, "checkpoint.save_strategy", "no"),
    ("logging.progress", False, "logging.progress", "off"),
]


def nested(key, value):
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize(("alias", "value", "key", "canonical"), ALIASES)
def test_an_alias_is_the_key_it_stands_for(alias, value, key, canonical, folder):
    by_key = load_config(
        write(folder), [f"{key}={yaml.safe_dump(canonical, default_flow_style=True)}".split("\n...")[0]]
    )
    section, leaf = alias.split(".")
    assert load_config(write(folder, **{section: {leaf: value}})) == by_key
    if leaf not in ("name", "path", "type", "format", "init"):
        assert load_config(write(folder, **{leaf: value})) == by_key  # without its section


def test_model_aliases_and_flat_files(folder):
    expected = load_config(write(folder))
    for key in ("model_name_or_path", "base_model"):
        tree = {key: "model", "dataset": {"path": "data.jsonl"}}
        assert load_config(write(folder, tree)) == expected
        assert load_config(write(folder, {"model": {key: "model"}, "dataset": {"path": "data.jsonl"}})) == expected


def test_a_megatrain_file_runs_as_it_is(folder):
    config = load_config(
        write(
            folder,
            model={
                "dtype": "bfloat16",
                "device": 0,
                "attn_implementation": "flash_attention_2",
                "trust_remote_code": True,
            },
            dataset={"max_seq_len": 1024, "num_workers": 4, "query_field": "query", "response_field": "response"},
            training={
                "batch_size": 148,
                "gradient_accumulation_steps": 1,
                "num_steps": 1000,
                "learning_rate": 2.0e-5,
                "weight_decay": 0.01,
                "max_grad_norm": 1.0,
                "seed": 42,
            },
            optimizer={"type": "deepspeed_adam", "beta1": 0.9, "beta2": 0.999, "eps": 1.0e-8},
            memory={"checkpoint_interval": 4, "num_grad_slabs": 12},
            logging={"log_interval": 1, "enable_timing": True},
        )  # fmt: skip
    )
    assert (config.model.device, config.training.batch_size, config.optimizer.type) == ("cuda:0", 148, "adamw")
    assert config.dataset.num_workers == 4
    assert set(config.ignored) == {
        "model.trust_remote_code", "model.attn_implementation=flash_attention_2",
        "memory.checkpoint_interval", "memory.num_grad_slabs", "logging.enable_timing",
    }  # fmt: skip


def test_numbers_that_yaml_1_1_takes_for_text(folder):
    path = write(folder)
    path.write_text(path.read_text() + "training: {learning_rate: 1e-5, num_steps: 1e3, weight_decay: 5E-2}\n")
    training = load_config(path).training
    assert (training.learning_rate, training.num_steps, training.weight_decay) == (1e-5, 1000, 0.05)
    assert type(training.num_steps) is int


def test_an_override_wins_and_mends(folder):
    path = write(folder, model={"name": "Qwen/Qwen3-8B"}, training={"num_steps": 10, "warmup_steps": 3})
    config = load_config(path, [f"model.name={folder}/model", "training.max_steps=5", "training.num_steps=6", "seed=1"])
    assert (config.training.num_steps, config.training.warmup_steps, config.seed) == (6, 3, 1)
    assert load_config(path, [f"base_model={folder}/model", "max_steps=null"]).training.num_steps is None


def test_relative_paths(folder):
    here = folder.parent / "here"
    path = write(folder, dataset={"eval_path": "*.jsonl"}, output_dir="out", model={"tokenizer": "other"})
    (here / "other").mkdir()
    (here / "data.jsonl").touch()
    config = load_config(os.path.relpath(path))
    assert config.dataset.path == str(folder / "data.jsonl")  # beside the file first
    assert config.dataset.eval_path == str(folder / "*.jsonl")
    assert config.model.tokenizer == str(here / "other")  # else from the current directory
    assert config.output_dir == str(here / "out")
    assert load_config(path, ["dataset.path=data.jsonl"]).dataset.path == str(here / "data.jsonl")


ERRORS = [
    ("modle.name=x", "modle: unknown key, did you mean model?"),
    ("dataset.max_seq_lenn=3", "dataset.max_seq_lenn: unknown key, did you mean dataset.max_seq_len?"),
    ("training.max_seq_len=3", "training.max_seq_len: unknown key, did you mean dataset.max_seq_len?"),
    ("ouput_dir=x", "ouput_dir: unknown key, did you mean output_dir?"),
    ("zzzz=1", "zzzz: unknown key"),
    ("model=x", "model: expected a mapping of keys, got 'x'"),
    ("model.name=nowhere", "model.name: no such file or folder 'nowhere'"),
    ("dataset.path=x.jsonl", "dataset.path: no such file or folder 'x.jsonl'"),
    ("dataset.chat_template=x.jinja", "dataset.chat_template: no such file or folder 'x.jinja'"),
    ("training.resume_from_checkpoint=x", "training.resume_from_checkpoint: no such file or folder 'x'"),
    ("model.dtype=float16", "model.dtype: float16 is refused"),
    ("model.dtype=fp16", "model.dtype: float16 is refused"),
    ("model.dtype=int8", "model.dtype: expected bfloat16 or float32, got 'int8'"),
    ("model.device=tpu", "model.device: expected auto, cpu, cuda, cuda:N or all, got 'tpu'"),
    ("model.freeze=['(']", "model.freeze: '(' is not a regular expression"),
    ("training.batch_size=0", "training.batch_size: expected a whole number >= 1, got 0"),
    ("training.batch_size=2.5", "training.batch_size: expected a whole number >= 1, got 2.5"),
    ("training.batch_size=true", "training.batch_size: expected a whole number >= 1, got True"),
    ("training.batch_size=null", "training.batch_size: expected a whole number >= 1, got None"),
    ("micro_batch_size=x", "training.micro_batch_size: expected a whole number >= 1, got 'x'"),
    ("training.learning_rate=-1e-5", "training.learning_rate: expected a number >= 0, got -1e-05"),
    ("training.learning_rate=.nan", "training.learning_rate: expected a number >= 0, got nan"),
    ("training.num_train_epochs=0", "training.num_train_epochs: expected a number > 0, got 0"),
    (
        "training.warmup_steps=1.0",
        "training.warmup_steps: expected a whole number >= 0 or a number >= 0 and < 1, got 1.0",
    ),
    ("training.warmup_ratio=-0.1", "training.warmup_ratio: expected"),
    ("training.lr_scheduler_kwargs={floor: 1}", "training.lr_scheduler_kwargs: unknown key 'floor'"),
    ("training.lr_scheduler_kwargs={min_lr_ratio: 2}", "training.lr_scheduler_kwargs: expected a mapping"),
    ("training.deterministic=1", "training.deterministic: expected true or false, got 1"),
    ("optimizer.beta2=1", "optimizer.beta2: expected a number >= 0 and < 1 or null, got 1"),
    ("optimizer.param_groups=[{lr: 1}]", "optimizer.param_groups: unknown key"),
    ("training.param_groups=[{lr: 1}]", "training.param_groups: unknown key"),
    ("optimizer.no_decay=[1]", "optimizer.no_decay: expected a list of texts, got [1]"),
    ("memory.device_budget=lots", "memory.device_budget: expected auto or a number > 0, got 'lots'"),
    ("dataset.text_field=no", "dataset.text_field: expected text, got False"),
    ("dataset.val_size=1.5", "dataset.val_size: expected a whole number >= 0 or a number >= 0 and < 1, got 1.5"),
    ("checkpoint.max_shard_size=5 elephants", "checkpoint.max_shard_size: expected a whole number and a unit"),
    ("logging.profile=true", "logging.profile: expected a mapping of enabled, start_step, num_steps, got True"),
    ("profile={start_step: 0}", "logging.profile.start_step: expected a whole number >= 1, got 0"),
    ("logging.profile={steps: 3}", "logging.profile: unknown key 'steps', choose from enabled, start_step, num_steps"),
    ("logging.profile.enabled=true", "logging.profile.enabled=true: expected section.key=value, a mapping as"),
    ("seed=-1", "seed: expected a whole number >= 0, got -1"),
    ("eval.eval_strategy=epoch", "eval.eval_strategy: 'epoch' needs dataset.eval_path or dataset.val_size"),
    ("eval.eval_on_start=true", "eval.eval_on_start: True needs dataset.eval_path or dataset.val_size"),
    ("dataset.streaming=true", "training.num_steps: with dataset.streaming the end of an epoch is not known; set it"),
    ("dataset.packing=bfd", "dataset.packing: expected none or best_fit or wrapped, got 'bfd'"),
    ("training.num_steps=[", "training.num_steps: line 1: not valid YAML"),
    ("training.num_steps", "training.num_steps: expected section.key=value"),
    ("model.config_overrides.a=1", "model.config_overrides.a=1: expected section.key=value"),
]


@pytest.mark.parametrize(("override", "message"), ERRORS)
def test_what_is_wrong_is_one_line_with_key_value_and_origin(override, message, folder):
    with pytest.raises(UserError) as error:
        load_config(write(folder), [override])
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert override in str(error.value) or "run.yaml" in str(error.value) or message.startswith(override)


def test_an_error_in_a_file_names_the_file(folder):
    path = write(folder, training={"learning_rat": 1})
    with pytest.raises(UserError, match=rf"^training.learning_rat: .* training.learning_rate\? \(in {path}\)$"):
        load_config(path)
    with pytest.raises(UserError, match=rf"^dataset.path: missing.* \(in {path}\)$"):
        load_config(write(folder, {"model": {"name": "model"}}))
    with pytest.raises(UserError, match=rf"^model.name: missing.* \(in {path}\)$"):
        load_config(write(folder, {"dataset": {"path": "data.jsonl"}}))
    with pytest.raises(UserError, match="^config: cannot read 'nowhere.yaml': No such file"):
        load_config("nowhere.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nmodel: {name: [}\n", "config: line 2: not valid YAML"),
        ("a:\n\t- 1\n", "config: line 2: not valid YAML"),
        ("seed: 1\nmodel: {name: x}\nseed: 2\n", "config: line 3: not valid YAML: seed is given twice"),
        ("- a\n", "config: expected sections such as model and dataset, got ['a']"),
        ("", "config: expected sections such as model and dataset, got None"),
        ("seed: \x00", "config: not valid YAML"),
        ("seed: 2024-99-99", "config: not valid YAML"),
        ("1: 2", "1: unknown key"),
    ],
)
def test_a_broken_file(text, message, folder):
    (folder / "broken.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        load_config(folder / "broken.yaml")
    assert str(error.value).startswith(message)
    assert str(error.value).endswith("broken.yaml)")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "key, sections",
    [
        ("dataset.val_size", {"dataset": {"val_size": 3}}),
        ("checkpoint.save_strategy", {"checkpoint": {"save_strategy": "epoch"}}),
        ("eval.eval_strategy", {"dataset": {"eval_path": "eval.jsonl"}, "eval": {"eval_strategy": "epoch"}}),
    ],
)
def test_streaming_knows_no_epochs(folder, key, sections):
    sections = {"training": {"num_steps": 3}} | sections
    path = write(folder, **sections)
    with pytest.raises(UserError, match=f"^{key}: with dataset.streaming the end of an epoch is not known; "):
        load_config(path, ["dataset.streaming=true"])


def test_spellings_that_contradict_each_other(folder):
    with pytest.raises(UserError, match="per_device_train_batch_size: 4 contradicts training.batch_size, 2 .*run.yaml"):
        load_config(write(folder, training={"batch_size": 2, "per_device_train_batch_size": 4}))
    with pytest.raises(UserError, match="contradicts"):
        load_config(write(folder, training={"warmup_steps": 10, "warmup_ratio": 0.1}))
    with pytest.raises(UserError, match="dataset.val_size: 0.1 contradicts dataset.eval_path"):
        load_config(write(folder, dataset={"val_size": 0.1, "eval_path": "eval.jsonl"}))
    agreeing = {"batch_size": 2, "micro_batch_size": 2, "num_steps": None, "max_steps": 3, "warmup_ratio": 0}
    training = load_config(write(folder, training=agreeing)).training
    assert (training.batch_size, training.num_steps) == (2, 3)


@pytest.mark.parametrize(
    ("size", "number"), [("5GB", 5 * 10**9), ("5GiB", 5 * 2**30), ("300B", 300), ("7 KB", 7000), ("2TiB", 2 * 2**40)]
)
def test_shard_size_in_bytes(size, number):
    """What the configuration accepts means the same where the files are written."""
    checkpoint = config_module._checked("checkpoint.max_shard_size", "checkpoint.max_shard_size", size, "", [])
    assert parse_size(checkpoint) == number
