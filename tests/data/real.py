"""Tokenizers and templates of well-known models, and conversations that try them."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from megatrain_jax.config import UserError

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Looks up the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where"}},
            "required": ["city"],
        },
    },
}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


CALL = assistant("", tool_calls=[{"type": "function", "function": {"name": "weather", "arguments": {"city": "Z\u00fcrich <&>"}}}])  # fmt: skip
CONVERSATIONS = {
    "single": [user("What is the answer?"), assistant("Forty-two.")],
    "multi": [user("Hi"), assistant("Hello, how are you?"), user("Fine, you?"), assistant("Well, thank you.")],
    "system": [{"role": "system", "content": "Be brief."}, user("Hi"), assistant("Hello")],
    "tools": [user("Weather?"), CALL, {"role": "tool", "content": '12 C, "rain"'}, assistant("It rains.")],
    "empty": [user(""), assistant(""), user("x"), assistant("y")],
    "unicode": [
        user("caf\u00e9 \u2603?"),
        assistant("\U0001f600 \u6f22\u5b57 \U0001f9d1\u200d\U0001f680"),
        user("e\u0301"),
        assistant("\U0001f600"),
    ],
    "blanks": [user(" \n Hi \n\n"), assistant("\n\n  spaced  \n\n"), user("\t"), assistant(" ")],
    "long": [turn for i in range(40) for turn in (user(f"Question {i}? " * 20), assistant(f"Answer {i}. " * 20))],
    "reasoning": [
        user("2+2?"),
        assistant("4", reasoning_content="Two and two."),
        user("3+3?"),
        assistant("6", reasoning_content="Three and three."),
    ],
    "open end": [user("Hi"), assistant("Hello"), user("And?")],
}


def fetched(name: str, method: str) -> Path:
    """What a script of scripts/ fetches; the test is skipped where no registry can be reached, except in CI."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        script = importlib.import_module(name)
    script.DEFAULT_CACHE.mkdir(parents=True, exist_ok=True)
    try:
        return getattr(script, method)(script.DEFAULT_CACHE)
    except UserError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the package registries are out of reach: {error}")
