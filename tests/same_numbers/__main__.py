"""Trains one small model in all layouts, with budgets and kills, and tells the differences."""

import argparse
import tempfile
from pathlib import Path

import torch

from tests.same_numbers.cases import be_part, case_of
from tests.same_numbers.page import PAGE, disagreements, markdown, measured, on_page, written


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.same_numbers", description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help=f"put the tables into docs/{PAGE.name}"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.case is not None:
        be_part(case_of(given.case), given.folder)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        tables, text = measured(Path(folder)), PAGE.read_text(encoding="utf-8")
    for name, rows in tables.items():
        print(markdown(name, rows))
    if given.write:
        PAGE.write_text(written(text, tables), encoding="utf-8")
        return 0
    found = disagreements(on_page(text), tables)
    print("\n".join(found) or f"docs/{PAGE.name} says the same.")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
