"""The page of what other systems have names tests that are there."""

import ast

import pytest

from tests.rows import ROOT, row_of, rows

TESTED = sorted({row.test for found in rows().values() for row in found if row.test})


def test_the_tests_that_hold_what_is_here_are_there():
    missing = []
    for test in TESTED:
        path, name = test.split("::")
        nodes = ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        names = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
        missing += [test] * (names.count(name) != 1)
    assert not missing


def test_what_is_left_out_says_why():
    left_out = [row for found in rows().values() for row in found if row.absent == "left out"]
    assert left_out and all(row.reason.endswith(".") for row in left_out)


@pytest.mark.parametrize("text", ["done", "left out", "no_such::test", "memory::a_name"])
def test_a_row_that_says_nothing_that_can_be_checked_is_refused(text):
    with pytest.raises(ValueError, match="this: got .*; expected"):
        row_of("this", text)
