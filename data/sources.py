"""Sources of documents: text files, JSON, CSV, tables (Parquet, Arrow), the standard library
of Python, a Wikipedia dump (see `wikipedia.py`).
"""

import glob
import hashlib
import io
import os
import platform
import sysconfig
import time
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from popxl_gpt.data.compression import EXPANDED, is_compressed
from popxl_gpt.data.delimited import delimited_rows, is_delimited
from popxl_gpt.data.errors import NoTextError
from popxl_gpt.data.json_lines import is_json, json_rows, whole_characters
from popxl_gpt.data.left_out import LeftOut
from popxl_gpt.data.plain_text import read_text, whole
from popxl_gpt.data.rows import Documents, Made, documents_of
from popxl_gpt.data.tables import is_table, saved_files, table_rows
from popxl_gpt.utils.errors import DataError, text_of, unreadable
from popxl_gpt.utils.files.plain import NOTHING, check_plain, real_path
from popxl_gpt.utils.texts import shown_text, user_path
from popxl_gpt.utils.units import counted

LOOK_SECONDS = 10.0
"""The time for which other files are read once one is found that is no text."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Documents to prepare, and what tells them from others."""

    name: str
    """The name that people see."""
    documents: Callable[[], Iterator[Any]]
    """Starts reading from the beginning; yields documents one by one, always in the same order:
    texts, or conversations (see `conversations.py`).
    """
    bytes: int
    """Estimate of the text's size."""
    identity: dict[str, Any]
    """What a later call compares to see whether it would read the same (JSON)."""
    clean: Callable[[str], str] | None = None
    """Applied to every document, in parallel; a module's function."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """What reading has left out so far."""
    is_masked: bool = False
    """Whether documents are conversations, of which only some tokens count as labels."""


def text_source(
    patterns: Sequence[str],
    *,
    documents: str = "file",
    document_bytes: int = 2**20,
    text_field: str = "text",
    plain_text: bool = False,
    skip_damaged: bool = False,
    without: Sequence[str] = (),
) -> Source:
    """Return the documents of UTF-8 text files, JSON, CSV files and tables.

    Args:
        patterns: files, folders (all their files, but hidden ones, recursively, through links, too)
            or globs.
        documents: what one document is: "file", "paragraph" (with the empty lines after it), "line"
            or "json" (a field of a JSON object). JSON, CSV files and tables are read as such in any
            case: see `json_lines.is_json`, `delimited` and `tables`.
        document_bytes: a document is cut at the end of the line that reaches this many characters,
            and a line of that many is cut there, so that a file of any size takes little memory.
        text_field: of the JSON objects, and the column of CSV files and tables.
        plain_text: take JSON and CSV files as text, syntax and all.
        skip_damaged: leave out rows and files that cannot be read.
        without: as of `text_files`.
    """
    files = text_files(patterns, without)
    left_out = LeftOut(skip_damaged)
    wanted = _texts(text_field)

    def read(path: Path) -> Iterator[str]:
        is_of_json = False
        if not is_table(path):
            is_of_json = documents == "json" or not plain_text and is_json(path)
            if not is_of_json and (plain_text or not is_delimited(path)):
                return read_text(path, documents, document_bytes, left_out)
        texts = rows_of(path, wanted, left_out, is_of_json)
        return (piece for text in texts for piece in whole(io.StringIO(text), document_bytes))

    identity = {
        "documents": documents,
        "document_bytes": document_bytes,
        "text_field": text_field,
        "plain_text": plain_text,
        "skip_damaged": skip_damaged,
    }
    return source_of(files, "text", read, identity, left_out)


def _texts(field: str) -> Documents[str]:
    """Documents of a field."""

    def read(found: dict[str, Any]) -> str | None:
        if field not in found:
            names = ", ".join(found) or "none"
            raise ValueError(f"got no text in '{field}' (fields: {shown_text(names)})")
        if found[field] is None:
            return None
        if not isinstance(found[field], str):
            kind = type(found[field]).__name__
            raise ValueError(f"got a value of type {kind} in '{field}', which is no text")
        return whole_characters(found[field])

    return Documents(
        read=read,
        columns=lambda texts: [field] * texts.get(field, False),
        expected=(
            f"with text in '{field}'. Correct it, name another --text_field, take JSON and CSV "
            "files as they stand with --plain_text, or leave out what is damaged with "
            "--skip_damaged. Prompts with answers are for `prepare.py conversations`"
        ),
        lack=f"text in '{field}'",
        expected_columns=(
            "a column of text. Name another --text_field, take CSV files as they stand with "
            "--plain_text, or leave such files out with --skip_damaged"
        ),
    )


def rows_of(
    path: Path, documents: Documents[Made], left_out: LeftOut, is_of_json: bool
) -> Iterator[Made]:
    """Yield the documents of a file of rows: of JSON, or a table, or a CSV file."""
    if is_of_json:
        return documents_of(path, json_rows(path), documents, "a JSON object", left_out)
    read = table_rows if is_table(path) else delimited_rows
    return documents_of(path, read(path, documents), documents, "a row", left_out)


def source_of(
    files: Sequence[Path],
    kind: str,
    read: Callable[[Path], Iterator[Any]],
    identity: dict[str, Any],
    left_out: LeftOut,
    is_masked: bool = False,
) -> Source:
    """Return what files hold as a source.

    Args:
        kind: of the files, for people.
        read: gives the documents of one.
        identity: what shapes the documents beside the files.
        left_out, is_masked: as of `Source`.
    """
    try:
        stats = [(path, check_plain(path)) for path in files]
    except OSError as error:
        raise unreadable(Path(error.filename), error) from error
    facts = [[str(real_path(path)), stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    return Source(
        name=f"{len(files)} {kind} file{'s' * (len(files) > 1)}",
        documents=lambda: _of_each(files, read, left_out),
        bytes=sum(stat.st_size * (EXPANDED if is_compressed(path) else 1) for path, stat in stats),
        identity={**identity, "files": _digest(facts), "count": len(files)},
        left_out=left_out,
        is_masked=is_masked,
    )


def _of_each(
    files: Sequence[Path], read: Callable[[Path], Iterator[Made]], left_out: LeftOut
) -> Iterator[Made]:
    """Yield the documents of files, but of those that are no text where these are left out.

    Raises:
        NoTextError: of the first one, else; it says how many there are.
    """
    for number, path in enumerate(files):
        try:
            yield from read(path)
        except NoTextError as error:
            if not left_out.skips:
                others = _told_of_others(path, files[number + 1 :], read)
                raise NoTextError(f"{error}{others}") from error
            left_out.files[str(path)] = str(error)


def _told_of_others(
    path: Path, others: Sequence[Path], read: Callable[[Path], Iterator[Any]]
) -> str:
    """A sentence that says how many files are no text, where a first one is not alone."""
    found, until, unread = [path], time.monotonic() + LOOK_SECONDS, 0
    for number, other in enumerate(others):
        try:
            if any(time.monotonic() > until for _ in read(other)):
                unread = len(others) - number
                break
        except NoTextError:
            found.append(other)
        except DataError:  # of a row, or of the system
            continue
    if len(found) == 1 and not unread:
        return ""
    names = [text_of(str(each)) for each in found[:3]]
    return (
        f" It is the first of {'at least ' * bool(unread)}{counted(len(found), 'file')} without "
        f"text: {', '.join(names)}{' and others' * (len(found) > 3)}"
        f"{f' ({unread} more were not looked at)' * bool(unread)}. --skip_damaged leaves them out."
    )


def stdlib_source(folder: Path | None = None) -> Source:
    """Return the Python source files, docstrings and all, of this Python's standard library: one
    document per file.

    The order is scrambled by name, so that the first so many bytes are a fair sample. Equal files
    count once, and files that are no text in their declared encoding (a few tests are meant not to
    be) do not count.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    names = []
    for parent, folders, files in os.walk(root, onerror=_raise_unreadable):
        folders[:] = [
            name
            for name in folders
            if name not in ("site-packages", "dist-packages", "__pycache__")
        ]
        names += [
            Path(parent, name).relative_to(root).as_posix()
            for name in files
            if name.endswith(".py")
        ]
    names.sort(key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest())
    sizes = [(name, (root / name).stat().st_size) for name in names if (root / name).is_file()]
    if not sizes:
        raise DataError(
            f"{root}: got no Python source files; expected this Python's standard library. "
            "Install Python with its sources, or prepare other text: data/prepare.py text."
        )

    def read() -> Iterator[str]:
        seen = set()
        for name, _ in sizes:
            try:
                with tokenize.open(str(root / name)) as file:
                    text = file.read()
            except (SyntaxError, UnicodeDecodeError):
                continue
            except OSError as error:
                raise unreadable(root / name, error) from error
            digest = hashlib.sha256(text.encode()).digest()
            if digest not in seen:
                seen.add(digest)
                yield text

    version = f"{platform.python_implementation()} {platform.python_version()}"
    return Source(
        name=f"the standard library of {version}",
        documents=read,
        bytes=sum(size for _, size in sizes),
        identity={"python": version, "files": _digest(sorted(sizes)), "count": len(sizes)},
    )


def _raise_unreadable(error: OSError) -> None:
    """Raise an error for `os.walk`, which passes over folders that it cannot read."""
    if error.errno not in NOTHING:
        raise unreadable(Path(error.filename), error) from error


def text_files(patterns: Sequence[str], without: Sequence[str] = ()) -> list[Path]:
    """Return the files that paths, folders (without hidden ones) and globs stand for, each once, be
    it by links or by several spellings of its path.

    Of a folder that Hugging Face's `datasets` saved these are its tables.

    Args:
        without: patterns of files that do not count.
    Raises:
        DataError: if a pattern matches nothing, or nothing is left.
    """
    files: dict[Path, None] = {}
    for pattern in patterns:
        path = user_path("text files", pattern)
        if path.is_dir():
            matches = _inside(path)
        elif path.exists():
            matches = [path]
        else:
            matches = [
                Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()
            ]
        if not matches:
            raise DataError(
                f"text files: got '{pattern}', which matches no file; expected files, folders "
                "or globs. Check the path."
            )
        files.update(dict.fromkeys(sorted(matches)))
    left_out = {real_path(path) for path in text_files(without)} if without else set()
    by_place: dict[Path, Path] = {}
    for path in files:
        by_place.setdefault(real_path(path), path)  # the first of several names
    found = [path for place, path in by_place.items() if place not in left_out]
    if not found:
        raise DataError(
            f"text files: got {len(files)}, which are all validation files; expected others to "
            "train on. Name some."
        )
    return found


def _inside(top: Path) -> list[Path]:
    """The files of a folder and those below it, without hidden ones. Links to folders are followed,
    but to those above it; a folder that several ways lead to counts once, by one without a link if
    there is one.
    """
    found: list[Path] = []
    folders: list[Path] = [top]
    links: list[Path] = []
    seen = {*real_path(top).parents}
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        place = real_path(folder)
        if place in seen:
            continue
        seen.add(place)
        saved = saved_files(folder)
        if saved is not None:
            found += saved
            continue
        try:
            children = sorted(path for path in folder.iterdir() if path.name[0] != ".")
        except OSError as error:
            raise unreadable(folder, error) from error
        found += [path for path in children if path.is_file()]
        below = [path for path in children if path.is_dir()]
        folders += [path for path in below if not path.is_symlink()]
        links += [path for path in below if path.is_symlink()]
    return found


def _digest(facts: Sequence[Any]) -> str:
    return hashlib.sha256(repr(facts).encode(errors="surrogateescape")).hexdigest()
