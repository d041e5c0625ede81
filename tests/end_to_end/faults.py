"""Breaks a run on purpose: a call that fails, or never returns, once the first checkpoint is there."""

from __future__ import annotations

import ast
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Every place at which a thread of a run waits for another, for the device or for the disk, and the copies themselves.
POINTS = {
    "stream.transfer:Mesh.put_batch": "main",
    "stream.transfer:Mesh.put_weights": "main",
    "stream.transfer:Mesh.gradients_to_host": "main",
    "stream.transfer:Mesh.scalar": "main",
    "stream.activations:Activations.put": "main",
    "stream.activations:Activations.take": "main",
    "stream.pipeline:_RunAhead.admit": "main",
    "stream.events:Recorder.time_of": "main",
    "stream.updater:Updater.submit": "main",
    "stream.updater:Updater.wait": "main",
    "stream.updater:Updater.drain": "main",
    "stream.updater:Updater._next": "optimizer",
    "stream.transfer:HostGradients.wait": "optimizer",
    "stream.transfer:HostGradients.rows": "optimizer",
    "host.optimizer:HostOptimizer.update": "optimizer",
    "data.loader:TrainLoader.step": "loader",
    "report.metrics:MetricsLog.write": "main",
    "checkpoint.state:save": "saver",
    "checkpoint.saver:Saver.start": "main",
    "checkpoint.saver:Saver.result": "main",
    "checkpoint.tensors:Writer._land": "saver",
    "checkpoint.manifest:sync_folder": "saver",
    "host.holds:Holds.wait": "optimizer",
    "checkpoint.huggingface:save_folder": "main",
}


PACKAGE = Path(importlib.import_module("megatrain_jax").__file__).parent


def wait_sites() -> dict[str, int]:
    """Every place where a thread says what it waits for, as "module:function", and its line."""
    found: dict[str, int] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "waiting":
                    name = f"{module}:{function.name}"
                    found[f"{name}-{node.lineno - function.lineno}" if name in found else name] = node.lineno
    return found


class Injected(Exception):
    """What a broken call raises."""


class Fault:
    """Replaces a function of the package.

    Attributes:
      fired: time (`time.monotonic`) of the call that was broken, None before.
      thread: name of the thread that made it.
    """

    def __init__(self, point: str, armed: Callable[[], bool], act: Callable[[], Any]):
        module, _, path = point.partition(":")
        owner, _, name = path.rpartition(".")
        home = importlib.import_module(f"megatrain_jax.{module}")
        self._home, self._name = (getattr(home, owner) if owner else home), name
        self._whole, self._armed, self._act = getattr(self._home, name), armed, act
        self.fired: float | None = None
        self.thread = ""

    def __enter__(self) -> Fault:
        def broken(*args, **kwargs):
            if self.fired is None and self._armed():
                self.fired, self.thread = time.monotonic(), threading.current_thread().name
                self._act()
            return self._whole(*args, **kwargs)

        setattr(self._home, self._name, broken)
        return self

    def __exit__(self, *exception: object) -> None:
        setattr(self._home, self._name, self._whole)


def fail() -> None:
    raise Injected("broken on purpose")


def hang() -> None:
    threading.Event().wait()


def main(point: str, act: str, config: str, out: str) -> int:
    """The command, broken; in a process of its own."""
    from megatrain_jax import train

    def tell_and_act():
        os.write(1, b"\nfired\n")  # past the buffer, so that it stays in one piece among the run's own lines
        {"fail": fail, "hang": hang}[act]()

    with Fault(point, lambda: any(Path(out).glob("checkpoint-*/manifest.json")), tell_and_act):
        return train.main(["--config", config, f"output_dir={out}"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
