"""Nothing that a model folder, a data set or a checkpoint holds is ever executed."""

import ast
import json
import shutil
from pathlib import Path

import pytest

import megatrain_jax as mt
from megatrain_jax.config import UserError, load_config
from tests.end_to_end.conftest import Project, saved_weights, write_model

PACKAGE = Path(__file__).resolve().parents[1] / "megatrain_jax"
# Modules that read Python objects, or Python, from a file.
FORBIDDEN = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "torch",
    "runpy",
    "imp",
}
# What comes through the pipe of a process that it started itself comes from nowhere else.
ALLOWED = {"data/workers.py": ["pickle"]}
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def dangers(tree):
    """What would run code, or read objects, from a file: by AST, so that no comment is mistaken for it."""
    yield from (name for name in imported(tree) if name.partition(".")[0] in FORBIDDEN)
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code"):
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                yield node.arg
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in ("eval", "exec", "compile", "__import__", "yaml.load", "yaml.unsafe_load", "yaml.full_load"):
                if not any(
                    "SafeLoader" in ast.unparse(base) or "_Loader" in ast.unparse(base) for base in node.args[1:]
                ):
                    yield name
            if name in ("jinja2.Environment", "jinja2.Template"):
                yield name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_no_module_can_read_objects_or_code(file):
    found = list(dangers(ast.parse(file.read_text(encoding="utf-8"))))
    assert found == ALLOWED.get(file.relative_to(PACKAGE).as_posix(), [])


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from torch.serialization import load",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "x(trust_remote_code=flag)",
        "eval(text)",
        "yaml.load(text, yaml.Loader)",
        "jinja2.Template(text)",
    ],
)
def test_the_search_finds_what_it_looks_for(code):
    assert list(dangers(ast.parse(code)))


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path, write_model(tmp_path / "model"))


def plant(folder, marker):
    """Everything by which a Hugging Face folder, or Python itself, brings code along."""
    code = f"open({str(marker)!r}, 'w').close()\n"
    for name in (
        "modeling_own",
        "tokenization_own",
        "configuration_own",
        "setup",
        "conftest",
        "sitecustomize",
        "__init__",
    ):
        (folder / f"{name}.py").write_text(code)
    (folder / "training_args.bin").write_bytes(b"\x80\x04cposix\nsystem\n(X\x04\x00\x00\x00truetR.")
    (folder / "pytorch_model.bin").write_bytes((folder / "training_args.bin").read_bytes())


def test_code_in_a_model_folder_a_data_folder_and_a_checkpoint_is_not_run(project):
    marker, model = project.folder / "ran", project.folder / "model"
    plant(model, marker)
    config = json.loads((model / "config.json").read_text())
    classes = {"AutoConfig": "configuration_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    (model / "config.json").write_text(json.dumps(config | {"auto_map": classes}))
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    extra = {"auto_map": {"AutoTokenizer": ["tokenization_own.Tokenizer", None]}, "trust_remote_code": True}
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer | extra))
    data = project.folder / "data"
    data.mkdir()
    shutil.copy(project.folder / "train.jsonl", data)
    plant(data, marker)
    sections = {"dataset": {"path": str(data)}, "model": {"trust_remote_code": True}}
    mt.Trainer(project.config(training={"num_steps": 1}, **sections)).fit()
    plant(project.folder / "out" / "checkpoint-1", marker)
    mt.Trainer(project.config(training={"num_steps": 2}, **sections)).fit()
    assert not marker.exists() and saved_weights(project.folder / "out")


def test_trust_remote_code_is_named_as_without_effect(project):
    config = load_config(project.write(model={"trust_remote_code": True}))
    assert config.ignored == ("model.trust_remote_code",)
    assert not hasattr(config.model, "trust_remote_code")


@pytest.mark.parametrize(
    "template",
    ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"],
)
def test_a_chat_template_has_no_way_out(project, template):
    with pytest.raises(UserError):
        mt.Trainer(project.config(dataset={"chat_template": template})).fit()
