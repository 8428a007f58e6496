"""The page of promises names tests that are there, and leaves none of the promises out."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


PAGE = ROOT / "docs" / "promises.md"
PROMISES = (
    "Kill", "Save", "Full disk", "Failing disk", "Flipped byte", "Untrusted file", "Untrusted tokenizer",
    "Whole models", "Outsiders",
    "Any layout", "Any version", "Any budget", "Bad records", "Bad tables", "Syntax is no text",
    "Bad configuration",
    "Death and hang of instances", "Signals", "Suspension", "Silent corruption at rest",
    "Replicas that differ", "Numbers that are not finite", "Batches without labels", "Spikes",
    "Logging services", "Soak",
    "Plan", "Plan of the process", "Determinism", "Rows alone", "One run", "Batch system",
)  # fmt: skip


def promises() -> "dict[str, tuple[str, list[tuple[str, str]]]]":
    """Figure and tests of each promise that is kept."""
    text = PAGE.read_text()
    figures = re.findall(r"^\| \*\*(.+?)\.\*\* .+ \| (.+) \|$", text, re.MULTILINE)
    tests = dict(re.findall(r"^- ([\w ]+): (`.+::.+`)$", text, re.MULTILINE))
    assert tests.keys() == dict(figures).keys()
    named = {name: re.findall(r"`([^`:]+)::([^`]+)`", tests[name]) for name in tests}
    return {name: (figure, named[name]) for name, figure in figures}


@pytest.mark.slow
@pytest.mark.parametrize("name", promises())
def test_a_promise_names_tests_that_are_there_and_a_figure(name):
    figure, named = promises()[name]
    assert named and figure.strip()
    for path, test in named:
        functions = [
            node.name
            for node in ast.walk(ast.parse((ROOT / path).read_text()))
            if isinstance(node, ast.FunctionDef)
        ]
        assert functions.count(test) == 1, f"{path} has no {test}"


def test_every_promise_is_on_the_page_kept_or_missing():
    found = re.findall(r"^(?:\| |- )\*\*(.+?)\.\*\*", PAGE.read_text(), re.MULTILINE)
    assert sorted(found) == sorted(PROMISES)
