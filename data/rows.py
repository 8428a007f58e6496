"""Rows of files, be they objects of JSON, rows of tables or of CSV files; and documents of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from popxl_gpt.data.errors import NoTextError
from popxl_gpt.data.left_out import LeftOut
from popxl_gpt.utils.errors import EndedError
from popxl_gpt.utils.texts import shown_text

Made = TypeVar("Made")
SHOWN = 20
"""Columns that a message lists."""
Rows = Iterator[tuple[str, "dict[str, Any] | ValueError"]]
"""Each row's place in its file, and its fields; or what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Documents(Generic[Made]):
    """Documents that are made of rows."""

    read: Callable[[dict[str, Any]], Made | None]
    """The document of a row; None where it is null. ValueError says what the row has instead."""
    columns: Callable[[Mapping[str, bool]], Sequence[str]]
    """The columns that are needed, of those of a file, by whether they may be text; none where it
    lacks them.
    """
    expected: str
    """What errors expect of a row, and how to get there."""
    lack: str
    """What a file has none of whose columns are others."""
    expected_columns: str
    """What errors expect of columns, and how to get there."""
    is_choice: Callable[[dict[str, Any]], bool] = lambda found: False
    """Whether a row has two documents, of which one is taken."""


def documents_of(
    path: Path, rows: Rows, documents: Documents[Made], row: str, left_out: LeftOut
) -> Iterator[Made]:
    """Yield the documents of a file's rows, but those that are null, which are counted.

    Args:
        row: what one is called.
    Raises:
        DataError: a row is damaged, and those are not left out.
    """
    nulls = choices = 0
    for place, found in rows:
        try:
            if isinstance(found, ValueError):
                raise found
            made = documents.read(found)
        except EndedError:  # which is no fault of the row
            raise
        except ValueError as error:
            left_out.record(path, place, error, f"{row} {documents.expected}")
            continue
        if made is None:
            nulls += 1
            left_out.nulls[str(path)] = max(nulls, left_out.nulls.get(str(path), 0))
            continue
        if documents.is_choice(found):
            choices += 1
            left_out.choices[str(path)] = max(choices, left_out.choices.get(str(path), 0))
        yield made


def chosen_columns(
    path: Path,
    names: Sequence[str],
    documents: Documents[Any],
    texts: Mapping[str, bool] | None = None,
    kinds: Sequence[str] = (),
) -> Sequence[str]:
    """The columns of a file that documents are made of.

    Args:
        texts: whether a column may be text; None: each may.
        kinds: what each column holds, for people.
    Raises:
        NoTextError: it lacks them, or has two of one name.
    """
    found = documents.columns(dict.fromkeys(names, True) if texts is None else texts)
    if not found:
        shown = [shown_text(name) for name in names[:SHOWN]]
        if kinds:
            shown = [f"{name} ({shown_text(kind)[1:-1]})" for name, kind in zip(shown, kinds)]
        shown += [f"{len(names) - SHOWN} more"] * (len(names) > SHOWN)
        raise NoTextError(
            f"{path}: got no {documents.lack} (columns: {', '.join(shown) or 'none'}); expected "
            f"{documents.expected_columns}."
        )
    for name in found:
        if names.count(name) > 1:
            raise NoTextError(
                f"{path}: got {names.count(name)} columns named {shown_text(name)}; expected one. "
                "Rename the others."
            )
    return found
