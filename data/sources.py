"""Where documents come from: text files, JSON lines, tables (Parquet, Arrow), the standard library
of Python, a Wikipedia dump (see `wikipedia.py`).
"""

import glob
import hashlib
import io
import os
import platform
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from popxl_gpt.config.errors import unreadable
from popxl_gpt.config.plain_files import NOTHING, check_plain, real_path
from popxl_gpt.config.texts import user_path
from popxl_gpt.data.compression import EXPANDED, is_compressed, open_text
from popxl_gpt.data.errors import DataError
from popxl_gpt.data.json_lines import is_json_lines, read_json_lines
from popxl_gpt.data.tables import is_table, read_table, saved_files


@dataclass(frozen=True, kw_only=True)
class Source:
    """Documents to prepare, and what tells them from others."""

    name: str
    """For people."""
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
    damaged: dict[tuple[str, int], str] = field(default_factory=dict)
    """What reading has left out so far: file and byte, and what is wrong there."""
    is_masked: bool = False
    """Whether documents are conversations, of which only some tokens count as labels."""


def text_source(
    patterns: Sequence[str],
    *,
    documents: str = "file",
    document_bytes: int = 2**20,
    text_field: str = "text",
    skip_damaged: bool = False,
    without: Sequence[str] = (),
) -> Source:
    """Return the documents of UTF-8 text files, JSON lines and tables.

    Args:
        patterns: files, folders (all their files, but hidden ones, recursively) or globs.
        documents: what one document is: "file", "paragraph" (with the empty lines after it), "line"
            or "json" (a field of a line's JSON object). Files whose names say that they are JSON
            lines or tables are read so in any case.
        document_bytes: a document is cut at the end of the line that reaches this many characters,
            and a line of that many is cut there, so that a file of any size takes little memory.
        text_field: of the JSON objects, and the column of tables.
        skip_damaged: leave out JSON lines that cannot be read, and note them in `damaged`.
        without: as of `text_files`.
    """
    files = text_files(patterns, without)
    damaged: dict[tuple[str, int], str] = {}

    def read() -> Iterator[str]:
        for path in files:
            if is_table(path):
                for text in read_table(path, text_field):
                    yield from _files(io.StringIO(text), document_bytes)
            elif documents == "json" or is_json_lines(path):
                note = damaged if skip_damaged else None
                for text in read_json_lines(path, text_field, note):
                    yield from _files(io.StringIO(text), document_bytes)
            else:
                yield from _read_text(path, documents, document_bytes)

    identity = {
        "documents": documents,
        "document_bytes": document_bytes,
        "text_field": text_field,
        "skip_damaged": skip_damaged,
    }
    return source_of(files, "text", read, identity, damaged)


def source_of(
    files: Sequence[Path],
    kind: str,
    documents: Callable[[], Iterator[Any]],
    identity: dict[str, Any],
    damaged: dict[tuple[str, int], str],
    is_masked: bool = False,
) -> Source:
    """Return what files hold as a source.

    Args:
        kind: of the files, for people.
        identity: what shapes the documents beside the files.
        documents, damaged, is_masked: as of `Source`.
    """
    try:
        stats = [(path, check_plain(path)) for path in files]
    except OSError as error:
        raise unreadable(Path(error.filename), error) from error
    facts = [[str(real_path(path)), stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    return Source(
        name=f"{len(files)} {kind} file{'s' * (len(files) > 1)}",
        documents=documents,
        bytes=sum(stat.st_size * (EXPANDED if is_compressed(path) else 1) for path, stat in stats),
        identity={**identity, "files": _digest(facts), "count": len(files)},
        damaged=damaged,
        is_masked=is_masked,
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
    """For `os.walk`, which passes over folders that it cannot read."""
    if error.errno not in NOTHING:
        raise unreadable(Path(error.filename), error) from error


def text_files(patterns: Sequence[str], without: Sequence[str] = ()) -> list[Path]:
    """Return the files that paths, folders (without hidden ones) and globs stand for, each once.

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
    found = [path for path in files if real_path(path) not in left_out]
    if not found:
        raise DataError(
            f"text files: got {len(files)}, which are all validation files; expected others to "
            "train on. Name some."
        )
    return found


def _inside(folder: Path) -> list[Path]:
    """The files of a folder and those below it, without hidden ones."""
    saved = saved_files(folder)
    if saved is not None:
        return saved
    found: list[Path] = []
    try:
        children = [path for path in folder.iterdir() if path.name[0] != "."]
    except OSError as error:
        raise unreadable(folder, error) from error
    for path in children:
        if path.is_file():
            found.append(path)
        elif path.is_dir() and not path.is_symlink():
            found += _inside(path)
    return found


def _read_text(path: Path, documents: str, limit: int) -> Iterator[str]:
    cut = {"file": _files, "paragraph": _paragraphs, "line": _lines}[documents]
    try:
        with open_text(path) as binary, io.TextIOWrapper(binary, "utf-8-sig") as file:
            yield from cut(file, limit)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: got bytes that are not UTF-8 ({error.reason}); expected a UTF-8 text file. "
            "Convert it (iconv), or leave it out: give a glob such as 'folder/**/*.txt'."
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error


def _files(file: TextIO, limit: int) -> Iterator[str]:
    while piece := file.read(limit):
        if len(piece) == limit and not piece.endswith("\n"):
            piece += file.readline(limit)
        yield piece


def _lines(file: TextIO, limit: int) -> Iterator[str]:
    while line := file.readline(limit):
        yield line.rstrip("\n")


def _paragraphs(file: TextIO, limit: int) -> Iterator[str]:
    """Paragraphs with the empty lines that follow them: together they are the text."""
    paragraph: list[str] = []
    size, has_text, is_ended = 0, False, False
    while line := file.readline(limit):
        is_empty = not line.strip()
        if size >= limit or is_ended and not is_empty:
            yield "".join(paragraph)
            paragraph, size, has_text, is_ended = [], 0, False, False
        paragraph.append(line)
        size += len(line)
        has_text |= not is_empty
        is_ended |= is_empty and has_text
    yield "".join(paragraph)


def _digest(facts: Sequence[Any]) -> str:
    return hashlib.sha256(repr(facts).encode(errors="surrogateescape")).hexdigest()
