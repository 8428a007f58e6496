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
    "Death and hang of instances", "Signals", "Suspension", "Silent corruption", "Silent corruption at rest",
    "Replicas that differ", "Numbers that are not finite", "Batches without labels", "Spikes",
    "Logging services", "Soak",
    "Plan", "Plan of the process", "Determinism", "Rows alone", "One run", "Batch system",
)  # fmt: skip


def rows() -> "list[list[str]]":
    """Promise, figure and tests of each line of the tables."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| **")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0].split("**")[1])
def test_a_promise_names_tests_that_are_there_and_a_figure(row):
    _, figure, tests = row
    named = re.findall(r"`([^`:]+)::([^`]+)`", tests)
    assert named and figure
    for path, name in named:
        functions = [
            node.name
            for node in ast.walk(ast.parse((ROOT / path).read_text()))
            if isinstance(node, ast.FunctionDef)
        ]
        assert functions.count(name) == 1, f"{path} has no {name}"


def test_every_promise_is_on_the_page_kept_or_missing():
    found = re.findall(r"^(?:\| |- )\*\*(.+?)\.\*\*", PAGE.read_text(), re.MULTILINE)
    assert sorted(found) == sorted(PROMISES)
