"""Documents name tests that there are."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMED = sorted(
    (document.name, file, test)
    for document in (ROOT / "docs").glob("*.md")
    for file, test in re.findall(r"(tests/[\w/]+\.py)::(\w+)", document.read_text(encoding="utf-8"))
)


@pytest.mark.parametrize("document, file, test", NAMED)
def test_a_test_that_is_named_is_there(document, file, test):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_faults_are_many():
    assert sum(document == "faults.md" for document, *_ in NAMED) > 40
