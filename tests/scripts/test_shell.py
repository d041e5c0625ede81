"""The shell scripts, run in a PATH made of stand-ins: which Python they take, and what they say when there is none."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "dirname", "head", "sort")


@pytest.fixture
def machine(tmp_path):
    """Runs a command where nothing is installed but the tools of every machine and what `add` puts there."""
    path = tmp_path / "bin"
    path.mkdir()
    for tool in TOOLS:
        (path / tool).symlink_to(shutil.which(tool))

    class Machine:
        def add(self, name: str, script: str) -> None:
            (path / name).write_text(f"#!{path}/bash\n{script}\n")
            (path / name).chmod(0o755)

        def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess:
            environment = {"PATH": str(path), "VENV": str(tmp_path / "venv"), **variables}
            return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

        def shell(self, line: str) -> str:
            return self.run("bash", "-euo", "pipefail", "-c", f". scripts/environment.sh; {line}").stdout.strip()

    return Machine()


def test_versions_are_compared_as_numbers(machine):
    for version, limit in [("3.12", "3.9"), ("3.12", "3.12"), ("4.0", "3.12")]:
        assert machine.shell(f"at_least {version} {limit} && echo yes || echo no") == "yes"
    for version, limit in [("3.9", "3.11"), ("2.7", "3.11"), ("''", "3.11")]:
        assert machine.shell(f"at_least {version} {limit} && echo yes || echo no") == "no"


def test_the_newest_python_that_runs_is_taken(machine):
    machine.add("python3", "echo 3.9")
    machine.add("python3.11", "echo 3.11")
    machine.add("python3.12", "echo 3.12")
    machine.add("python3.13", "echo 'pyenv: python3.13: command not found' >&2; exit 127")
    assert machine.shell("newest_python 3.11") == "python3.12"
    assert machine.shell("newest_python 3.11 3.11") == "python3.11"
    assert machine.shell("newest_python 3.14") == ""


def test_a_python_of_pyenv_is_found_without_being_on_the_path(machine, tmp_path):
    machine.add("python3", "echo 3.11")
    kept = tmp_path / "versions" / "3.12.1" / "bin"
    kept.mkdir(parents=True)
    (kept / "python").write_text("#!/bin/sh\necho 3.12\n")
    (kept / "python").chmod(0o755)
    machine.add("pyenv", f'[ "$1" = versions ] && echo 3.12.1 || echo {kept.parent}')
    assert machine.shell("newest_python 3.12") == str(kept / "python")


def test_the_environment_that_is_there_is_kept_while_its_python_suffices(machine, tmp_path):
    machine.add("python3", "echo 3.11")
    own = tmp_path / "venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.write_text("#!/bin/sh\necho 3.12\n")
    own.chmod(0o755)
    assert machine.shell('usual_python "$VENV" 3.11 python3') == str(own)
    own.write_text("#!/bin/sh\necho 3.10\n")
    assert machine.shell('usual_python "$VENV" 3.11 python3').endswith("/bin/python3")


@pytest.mark.parametrize("script", ["scripts/test", "scripts/quickstart"])
def test_without_a_python_the_remedy_is_one_line_and_nothing_is_made(machine, tmp_path, script):
    machine.add("python3", "echo 3.9")
    result = machine.run("bash", script)
    assert result.returncode == 2 and result.stdout == ""
    assert "3.11 or newer" in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "venv").exists()


def test_on_a_machine_with_a_gpu_the_quickstart_wants_a_python_that_jax_uses_it_from(machine, tmp_path):
    machine.add("nvidia-smi", "echo 'GPU 0: one'")
    machine.add("python3", "echo 3.11")
    result = machine.run("bash", "scripts/quickstart")
    assert result.returncode == 2 and result.stdout == ""
    assert "Python 3.12" in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "venv").exists()


def test_on_a_machine_with_a_gpu_the_quickstart_takes_the_newest_python(machine):
    machine.add("nvidia-smi", "echo 'GPU 0: one'")
    machine.add("python3", "echo 3.12")
    machine.add("python3.13", '[ "$1" = -c ] && echo 3.13')
    result = machine.run("bash", "scripts/quickstart")
    assert result.returncode == 2
    assert "with Python 3.13" in result.stdout and "python3.13; install the venv module" in result.stderr
