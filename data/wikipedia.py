"""Articles of a Wikipedia XML dump (`…-pages-articles.xml.bz2`), read as a stream, as plain
text, in a time that grows as the text does, whatever it holds.
"""

import bz2
import html
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from popxl_gpt.data.sources import Source
from popxl_gpt.utils.errors import DataError, unreadable
from popxl_gpt.utils.files.plain import check_plain

COMPRESSION = 4
"""Bytes of text per byte of a bz2 dump, roughly."""
PAGE_BYTES, PAGE_ELEMENTS = 2**25, 10_000
"""Bytes of XML that a page may have, and elements, each of which takes memory; Wikipedia has none
with more than 2 MiB of text, in some twenty elements.
"""
NESTED_LINKS = 32
"""Links inside each other that are read."""

_DROPPED_TAGS = (
    "ref|math|gallery|timeline|score|syntaxhighlight|source|imagemap|graph|chem|mapframe"
)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_DROPPED = re.compile(rf"<({_DROPPED_TAGS})\b[^<>]*>", re.IGNORECASE)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_TEMPLATE = re.compile(r"\{\{|\}\}")
_TABLE = re.compile(r"^[:*# ]*\{\||^[ \t]*\|\}", re.MULTILINE)
_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_URL = re.compile(r"\[(?:https?:|ftp:)?//[^\s\]]+\s*([^\]]*)\]")
_QUOTES = re.compile(r"'{2,}")
_HEADING = re.compile(r"^(={1,6})[ \t]*(.*?)[ \t]*\1[ \t]*$", re.MULTILINE)
_BULLET = re.compile(r"^[*#:;]+[ \t]*", re.MULTILINE)
_SWITCH = re.compile(r"__[A-Z]+__")
_BLANKS = re.compile(r"[ \t]+")
_SPACES = re.compile(r"[ \t\xa0]+")
_LINES = re.compile(r"[ \t]*\n(?:[ \t]*\n)+")
_LARGE_NUMBER = re.compile(r"&#[0-9]{640,};?")
"""A character reference that no character has, and that Python may refuse to read as a number."""
_NO_ARTICLE = re.compile(
    r"\s*(?:(?:file|image|category|media|template|user|wikipedia|help|portal)\s*:|[\w-]+:\S)",
    re.IGNORECASE,
)
"""Target of a link to a file, a category or another wiki, in any language; "Alien: Covenant" is an
article.
"""


def wikipedia_source(dump: Path) -> Source:
    """Return the articles of a dump, bz2 or plain XML: title, empty line, text. Redirects and talk
    are left out.
    """
    try:
        found = check_plain(dump)
        compressed = _is_compressed(dump)
    except OSError as error:
        raise unreadable(dump, error) from error
    return Source(
        name=f"the Wikipedia dump {dump.name}",
        documents=lambda: _articles(dump, compressed),
        clean=strip_markup,
        bytes=found.st_size * (COMPRESSION if compressed else 1),
        identity={"dump": dump.name, "bytes": found.st_size, "modified": found.st_mtime_ns},
    )


def strip_markup(article: str) -> str:
    """Return the plain text of wiki markup: links as their text; no templates, tables, references,
    files or tags.
    """
    text = _sub_closed(_COMMENT, "", article, "-->")
    text = _without_dropped(text)
    text = _without_nested(text, _TEMPLATE, "{{")
    text = _without_nested(text, _TABLE, "{|")
    for _ in range(NESTED_LINKS):  # in the captions of files: from the inside out
        previous, text = text, _LINK.sub(_link_text, text)
        if previous == text:
            break
    text = _sub_closed(_URL, r"\1", text, "]")
    text = _TAG.sub("", text)
    text = html.unescape(_LARGE_NUMBER.sub("\ufffd", text))
    for pattern, replacement in (
        (_QUOTES, ""),
        (_BLANKS, " "),
        (_HEADING, r"\2"),
        (_BULLET, ""),
        (_SWITCH, ""),
        (_SPACES, " "),
    ):
        text = pattern.sub(replacement, text)
    return _LINES.sub("\n\n", text).strip()


def _sub_closed(pattern: re.Pattern[str], replacement: str, text: str, closing: str) -> str:
    """Substitute up to the last closing mark. Beyond it, each place where a pattern begins would be
    compared with all of the text that follows.
    """
    end = text.rfind(closing) + len(closing) if closing in text else 0
    return pattern.sub(replacement, text[:end]) + text[end:]


def _without_dropped(text: str) -> str:
    """Return `text` without elements that hold no text of the article; an opening tag that nobody
    closes stays.
    """
    kept: list[str] = []
    position = start = 0
    unclosed: set[str] = set()
    while (opening := _DROPPED.search(text, start)) is not None:
        name, start = opening[1], opening.end()
        if not opening[0].endswith("/>"):
            pattern = re.compile(rf"</{re.escape(name)}\s*>", re.IGNORECASE)
            is_sought = name.casefold() not in unclosed  # of each kind once
            closing = pattern.search(text, start) if is_sought else None
            if closing is None:
                unclosed.add(name.casefold())
                continue
            start = closing.end()
        kept.append(text[position : opening.start()])
        position = start
    return "".join(kept) + text[position:]


def _link_text(match: re.Match[str]) -> str:
    target, _, label = match[1].rpartition("|")
    return "" if _NO_ARTICLE.match(target or label) else label.removeprefix(":")


def _without_nested(text: str, brackets: re.Pattern[str], opening: str) -> str:
    """Return `text` without what stands between balanced brackets; an opening one that nobody
    closes stays.
    """
    kept: list[str] = []
    # Of each open bracket: where it is, and how much was kept before it.
    starts: list[tuple[int, int]] = []
    position = 0
    for match in brackets.finditer(text):
        if match[0].endswith(opening):
            starts.append((match.start(), len(kept)))
            kept.append(text[position : match.start()])
            position = match.start()
        elif starts:
            _, count = starts.pop()
            del kept[count + 1 :]
            position = match.end()
    return "".join(kept) + text[position:]


def _is_compressed(dump: Path) -> bool:
    with open(dump, "rb") as file:
        return file.read(3) == b"BZh"


def _articles(dump: Path, compressed: bool) -> Iterator[str]:
    found = 0
    try:
        with bz2.open(dump) if compressed else open(dump, "rb") as file:
            for article in _parse(_PageFile(dump, file)):
                found += 1
                yield article
    except (ElementTree.ParseError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(dump, error) from error
        raise DataError(
            f"{dump}: got damaged data after article {found} ({error}); expected a whole XML "
            "dump, plain or bz2. Download it again and compare its checksum."
        ) from error
    if not found:
        raise DataError(
            f"{dump}: got no articles; expected a dump such as "
            "enwiki-latest-pages-articles.xml.bz2. Check it."
        )


class _PageFile:
    """A dump of which no page is longer than memory holds."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path = path
        self._file = file
        self.begin_page()

    def begin_page(self) -> None:
        """Begin another page."""
        self._bytes = self._elements = 0

    def begin_element(self) -> None:
        """Begin another element of the page."""
        self._elements += 1
        if self._elements > PAGE_ELEMENTS:
            raise self._too_long(f"{PAGE_ELEMENTS} elements")

    def read(self, length: int = -1, /) -> bytes:
        """Return at most so many bytes."""
        content = self._file.read(length)
        self._bytes += len(content)
        if self._bytes > PAGE_BYTES:
            raise self._too_long(f"{PAGE_BYTES} bytes")
        return content

    def _too_long(self, most: str) -> DataError:
        return DataError(
            f"{self._path}: got a page of more than {most}; expected articles as of a dump named "
            "pages-articles, without their history. Get that."
        )


def _parse(file: _PageFile) -> Iterator[str]:
    events = ElementTree.iterparse(file, events=("start", "end"))
    _, root = next(events)
    for event, element in events:
        if event == "start":
            file.begin_element()
        if event == "end" and _name(element) == "page":
            article = _article(element)
            root.clear()  # Else the tree of the whole dump stays in memory.
            file.begin_page()
            if article:
                yield article


def _article(page: ElementTree.Element) -> str | None:
    fields = {_name(element): element.text or "" for element in page.iter()}
    if fields.get("ns", "0") != "0" or "redirect" in fields or not fields.get("text", "").strip():
        return None
    return f"{fields.get('title', '')}\n\n{fields['text']}"


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]
