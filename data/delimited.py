"""CSV and TSV files: a header that names columns, and rows of as many fields."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from popxl_gpt.data.compression import plain_suffix
from popxl_gpt.data.errors import NoTextError
from popxl_gpt.data.plain_text import open_utf8
from popxl_gpt.data.rows import Documents, Rows, chosen_columns
from popxl_gpt.utils.units import counted

DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""What is between fields, by a file's ending."""
OTHERS = (",", "\t", ";", "|")
"""What is taken where a header has the columns that are needed with it, and not otherwise."""
LONGEST = 2**27
"""Characters of a field and of a line."""


def is_delimited(path: Path) -> bool:
    """Whether a file's name says so, compressed or not."""
    return plain_suffix(path) in DELIMITERS


def delimited_rows(path: Path, documents: Documents[Any]) -> Rows:
    """Yield a file's rows, with the columns that are needed; empty lines count for nothing.

    Raises:
        NoTextError: it lacks them, or is not UTF-8.
    """
    csv.field_size_limit(LONGEST)
    delimiter = _delimiter(path, documents)
    with open_utf8(path, newline="") as file:
        yield from _rows(path, file, delimiter, documents)


def _rows(path: Path, file: TextIO, delimiter: str, documents: Documents[Any]) -> Rows:
    reader = csv.reader(_lines(file), delimiter=delimiter, strict=True)
    try:
        names = next(reader, None)
    except csv.Error as error:
        raise NoTextError(
            f"{path}: got a header that is no CSV ({error}); expected {documents.expected_columns}."
        ) from error
    if names is None:
        return
    chosen_columns(path, names, documents)
    while True:
        place = f"line {reader.line_num + 1}"
        try:
            row = next(reader, None)
        except csv.Error as error:
            yield place, ValueError(f"got what is no CSV ({error})")
            continue
        if row is None:
            return
        if len(row) == len(names):
            yield place, dict(zip(names, row))
        elif row:
            yield (
                place,
                ValueError(f"got {counted(len(row), 'field')} where the header has {len(names)}"),
            )


def _delimiter(path: Path, documents: Documents[Any]) -> str:
    """What is between the fields of a header, as its names say, or as the file's."""
    usual = DELIMITERS[plain_suffix(path)]
    for delimiter in (usual, *OTHERS):
        with open_utf8(path, newline="") as file:
            try:
                names = next(csv.reader(_lines(file), delimiter=delimiter), [])
            except csv.Error:
                continue
            if documents.columns(dict.fromkeys(names, True)):
                return delimiter
    return usual


def _lines(file: TextIO) -> Iterator[str]:
    while line := file.readline(LONGEST):
        if len(line) == LONGEST:
            raise csv.Error(f"a line longer than {LONGEST} characters")
        yield line
