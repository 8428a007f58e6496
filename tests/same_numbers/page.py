"""Tables of differences, the page that has them, and whether a run agrees with the page."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tests.integration.gpt_oracle import distance
from tests.same_numbers.cases import OPTIMIZERS, ROOT, TABLES, Numbers, run

PAGE = ROOT / "docs" / "same-numbers.md"
BITWISE = "bitwise"
FAR = 8.0
"""A run's difference over the page's, at most: other CPUs add in another order."""
HEADS = {
    "layouts": "dp × tp1 × tp2",
    "budgets": "1 × 1 × 1 with",
    "kills": "continued in",
}
_PART = re.compile(r"(<!-- measured: (?P<name>\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
Row = tuple[str, ...]
Arrays = dict[str, np.ndarray]
Distance = Callable[[np.ndarray, np.ndarray], float]


def measured(folder: Path) -> "dict[str, list[Row]]":
    """The rows of each table, from runs of all cases with files in a new folder."""
    known: dict[str, dict[str, Numbers]] = {}
    tables: dict[str, list[Row]] = {table: [] for table in TABLES}
    for table, cases in TABLES.items():
        for case in cases:
            own = folder / ("killed" if case.goes_on else f"{table}-{case.name}")
            own.mkdir(exist_ok=True)
            found = run(case, own)
            expected = known.get(case.beside, found)
            cells = [
                cell
                for optimizer in OPTIMIZERS
                for cell in differences(found[optimizer], expected[optimizer])
            ]
            same = next((name for name, other in known.items() if equal(found, other)), "")
            tables[table].append((shown(case.name), *cells, shown(same)))
            if table == "layouts":
                known[case.name] = found
    return tables


def shown(name: str) -> str:
    """A case as the page names it."""
    return name.replace(" x ", " × ")


def differences(found: Numbers, expected: Numbers) -> "Iterator[str]":
    """The largest relative difference of losses, and of weights: of a matrix, by its norm."""
    losses = expected.losses[-len(found.losses) :]
    yield largest({"losses": found.losses}, {"losses": losses}, worst_loss)
    yield largest(found.weights, expected.weights, distance)


def largest(found: Arrays, expected: Arrays, distance_of: Distance) -> str:
    """The largest distance of arrays, unless all bits are the same."""
    if all(found[name].tobytes() == array.tobytes() for name, array in expected.items()):
        return BITWISE
    return f"{max(distance_of(found[name], array) for name, array in expected.items()):.0e}"


def worst_loss(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.max(np.abs(found - expected) / expected))


def equal(one: "dict[str, Numbers]", other: "dict[str, Numbers]") -> bool:
    """Whether all numbers are the same, bit for bit."""
    return all(
        set(differences(one[optimizer], other[optimizer])) == {BITWISE} for optimizer in OPTIMIZERS
    )


def markdown(table: str, rows: "list[Row]") -> str:
    """A table of the page."""
    heads = (HEADS[table], *("AdamW: losses", "weights", "Muon: losses", "weights"), "the bits of")
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def written(text: str, tables: "dict[str, list[Row]]") -> str:
    """The page with these tables."""
    return _PART.sub(lambda m: f"{m[1]}\n{markdown(m['name'], tables[m['name']])}\n{m[3]}", text)


def on_page(text: str) -> "dict[str, list[Row]]":
    """The rows of the page's tables."""
    return {
        match["name"]: [
            tuple(cell.strip() for cell in line.strip("|").split("|"))
            for line in match[0].splitlines()
            if line.startswith("|")
        ][2:]
        for match in _PART.finditer(text)
    }


def disagreements(page: "dict[str, list[Row]]", tables: "dict[str, list[Row]]") -> "list[str]":
    """Where a run contradicts the page: another row, other bits where the page says the same, or
    a difference that is much larger.
    """
    found = []
    for table, rows in tables.items():
        for said, row in zip_rows(page[table], rows):
            if not agrees(said, row):
                found.append(f"{table}: {' | '.join(row)}; the page says {' | '.join(said)}")
    return found


def zip_rows(page: "list[Row]", rows: "list[Row]") -> "Iterator[tuple[Row, Row]]":
    by_name = {row[0]: row for row in page}
    yield from ((by_name.get(row[0], ()), row) for row in rows)


def agrees(said: Row, row: Row) -> bool:
    if len(said) != len(row) or said[-1] not in ("", row[-1]):  # some CPUs have more alike
        return False
    return all(number(found) <= FAR * number(least) for found, least in zip(row[1:-1], said[1:-1]))


def number(cell: str) -> float:
    return 0.0 if cell == BITWISE else float(cell)
