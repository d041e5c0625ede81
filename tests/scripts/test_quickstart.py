"""The split that the quickstart scores itself on, and its prompts."""

import importlib
from pathlib import Path

import pytest

pytest.importorskip("gguf")
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def quickstart(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("quickstart")


def dialogue(*lines: str) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": line} for i, line in enumerate(lines)]


def test_no_question_is_on_both_sides_of_the_split(quickstart):
    dialogues = [dialogue(f"question {i % 40}" + "?!"[i % 2], f"answer {i}") for i in range(100)]
    dialogues += [dialogue(prompt.lower(), "so it is") for prompt in quickstart.HELD_OUT_PROMPTS]
    dialogues += [dialogue("question 1", "yes", "Question 0", "no"), []]
    learnt, evaluated = quickstart.split(dialogues)
    keys = [{quickstart._key(message["content"]) for d in side for message in d} for side in (learnt, evaluated)]
    assert keys[0].isdisjoint(keys[1])
    assert {quickstart._key(prompt) for prompt in quickstart.HELD_OUT_PROMPTS} <= keys[1]
    # Questions 0, 10, 20 and 30 are held out, which open 3, 3, 2 and 2 of the 100 dialogues.
    assert len(evaluated) == 10 + len(quickstart.HELD_OUT_PROMPTS)
    assert len(learnt) == 100 - 10
