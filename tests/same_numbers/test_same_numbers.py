"""The page of numbers says what a run of them says."""

import pytest

from tests.same_numbers.cases import LAYOUTS
from tests.same_numbers.page import PAGE, disagreements, measured, on_page


@pytest.mark.multi
def test_the_page_says_what_a_run_says(tmp_path):
    page = on_page(PAGE.read_text(encoding="utf-8"))
    tables = measured(tmp_path)
    assert disagreements(page, tables) == []
    assert {name: len(rows) for name, rows in page.items()} == {
        name: len(rows) for name, rows in tables.items()
    }
    assert len(LAYOUTS) == 18


def test_other_bits_and_larger_differences_disagree():
    row = ("2 × 1 × 1", "bitwise", "2e-07", "5e-08", "1e-06", "1 × 1 × 1")
    page = {"layouts": [row]}
    assert disagreements(page, {"layouts": [(*row[:2], "9e-07", *row[3:])]}) == []
    for other in (
        ("another", *row[1:]),
        (row[0], "1e-08", *row[2:]),
        (*row[:2], "2e-06", *row[3:]),
        (*row[:-1], ""),
        (*row[:-1], "4 × 1 × 1"),
    ):
        assert len(disagreements(page, {"layouts": [other]})) == 1
    assert disagreements({"layouts": [(*row[:-1], "")]}, page) == []
