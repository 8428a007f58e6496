"""What other systems have, by system: the test that holds it here, or why it is not here."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from popxl_gpt.config.yaml_files import read_yaml

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix(".yml")
ABSENT = {"left out.": "left out", "not yet.": "not yet"}
"""How the text of a row begins that no test holds, and what the page calls it."""
_TEST = re.compile(r"(?P<file>[\w/]+)::(?P<name>\w+)")


@dataclass(frozen=True)
class Row:
    """Something that a system has."""

    what: str
    test: str = ""
    """Path and name of the test that holds it, as pytest takes them; else it is not here."""
    absent: str = ""
    """Left out, or not yet, where no test holds it."""
    reason: str = ""


def rows() -> "dict[str, list[Row]]":
    """The rows of each system.

    Raises:
        ValueError: if a row says neither a test nor that it is absent.
    """
    return {
        system: [row_of(what, text) for what, text in found.items()]
        for system, found in read_yaml(TABLE).items()
    }


def row_of(what: str, text: str) -> Row:
    """A line of the table as a row.

    Raises:
        ValueError: if it says neither a test nor that it is absent, or no file or several have
            the test's name.
    """
    for begin, absent in ABSENT.items():
        if text.startswith(begin):
            return Row(what, absent=absent, reason=text.removeprefix(begin).strip())
    found = _TEST.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{what}: got {text!r}; expected file::name, 'left out. …' or 'not yet. …'"
        )
    folder, _, stem = found["file"].rpartition("/")
    wanted = f"{folder}/test_{stem}.py" if folder else f"test_{stem}.py"
    files = [path for path in files_of_tests() if f"/{path}".endswith(f"/{wanted}")]
    if len(files) != 1:
        raise ValueError(f"{what}: got {found['file']}; expected one file of {files or 'no file'}")
    return Row(what, f"{files[0]}::test_{found['name']}")


@cache
def files_of_tests() -> "tuple[str, ...]":
    """The files of tests, from the repository's root."""
    folders = (ROOT / "tests", ROOT / "runtime" / "tests")
    paths = (path for folder in folders for path in folder.rglob("test_*.py"))
    return tuple(sorted(str(path.relative_to(ROOT)) for path in paths))


def rows_tables() -> str:
    """The rows as Markdown, a table for each system."""
    blocks = []
    for system, found in rows().items():
        here = sum(bool(row.test) for row in found)
        lines = [
            f"## {system}",
            "",
            f"{here} of {len(found)} are here.",
            "",
            "| | here |",
            "|---|---|",
        ]
        for row in found:
            told = f"**{row.absent}**. {row.reason}".strip()
            lines.append(f"| {row.what} | {f'`{row.test}`' if row.test else told} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"
