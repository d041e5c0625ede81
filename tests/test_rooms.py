"""Arrows between the rooms of the package are those of docs/architecture.md, and no others."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "megatrain_jax"
MAY_IMPORT = {
    "config": {"typed_yaml"},
    "typed_yaml": set(),
    "watchdog": set(),
    "signals": set(),
    "xla": set(),
    "models": {"config"},
    "host": {"xla", "config", "models.spec"},
    "stream": {"watchdog", "xla", "config", "models", "host"},
    "data": {"config", "models.spec"},
    "checkpoint": {"watchdog", "config", "models", "host"},
    "report": set(),
    "model": {"config", "models", "host", "stream", "checkpoint"},
    "preparation": {"config", "models", "host", "stream", "checkpoint", "data", "model"},
    "trainer": {
        "signals",
        "watchdog",
        "config",
        "models",
        "host",
        "stream",
        "checkpoint",
        "data",
        "report",
        "model",
        "preparation",
    },
    "train": {"signals", "config", "models", "trainer", "preparation"},
    "export": {"config", "models", "checkpoint", "model", "signals"},
    "plan": {"config", "train", "preparation", "stream"},
    "preview": {"config", "train", "data", "models", "report"},
}


def imports(file: Path) -> set[str]:
    """Modules of the package that a file imports, without the package's name."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatrain_jax"):
            module = node.module.removeprefix("megatrain_jax").removeprefix(".")
            found |= {module} if module else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
            found |= {name.removeprefix("megatrain_jax.") for name in names if name.startswith("megatrain_jax")}
    return found


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_what_its_doors_lead_to(room):
    files = list((PACKAGE / room).glob("*.py")) or [PACKAGE / f"{room}.py"]
    allowed = MAY_IMPORT[room] | {room}
    for file in files:
        for module in imports(file):
            assert {module, module.partition(".")[0]} & allowed, f"{file.name} imports {module}"


def test_every_module_is_in_a_room():
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - {"__init__"} == set(MAY_IMPORT)


def test_importing_the_package_leaves_jax_for_the_command_to_start():
    code = "import sys, megatrain_jax, megatrain_jax.train, megatrain_jax.plan; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=False).returncode == 0
