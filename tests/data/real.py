"""Tokenizers and templates of well-known models, and conversations that try them."""

from __future__ import annotations

import importlib
import json
import os
import shutil
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


def call(city, **more):
    return {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}, **more}


def result(text, **more):
    return {"role": "tool", "content": text, **more}


CITY = "Z\u00fcrich <&>"
CONVERSATIONS = {
    "single": [user("What is the answer?"), assistant("Forty-two.")],
    "multi": [user("Hi"), assistant("Hello, how are you?"), user("Fine, you?"), assistant("Well, thank you.")],
    "system": [{"role": "system", "content": "Be brief."}, user("Hi"), assistant("Hello")],
    "tools": [user("Weather?"), assistant("", tool_calls=[call(CITY)]), result('12 C, "rain"'), assistant("It rains.")],
    "tools with ids": [
        user("Hi"),
        assistant("Hello"),
        user("Weather?"),
        assistant("", tool_calls=[call(CITY, id="abcdef012")]),
        result('12 C, "rain"', tool_call_id="abcdef012"),
        assistant("It rains."),
    ],
    "two calls": [
        user("Weather?"),
        assistant("", tool_calls=[call(CITY, id="abcdef012"), call("Bern", id="abcdef345")]),
        result("12 C", tool_call_id="abcdef012"),
        result("13 C", tool_call_id="abcdef345"),
        assistant("Much the same."),
    ],
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


def tools_of(name: str) -> list | None:
    """The functions that the assistant may call in a conversation."""
    return [WEATHER] if any("tool_calls" in turn for turn in CONVERSATIONS[name]) else None


def sentencepiece_folder(folder: Path, model: Path, **config) -> Path:
    """`folder`, with a SentencePiece model alone."""
    shutil.copy(model, folder / "tokenizer.model")
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, **config}))
    return folder


def published_template(name: str) -> str:
    """A chat template by its name, from whichever package has it."""
    cache = fetched("fetch_tokenizers", "fetch")
    files = [cache / folder / f"{name}.jinja" for folder in ("templates", "templates-llamacpp")]
    return next(file for file in files if file.is_file()).read_text(encoding="utf-8")


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
