"""Texts that users give: which are refused whatever they are for, and how one becomes a path."""

import os
import sys
import unicodedata
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from popxl_gpt.utils.errors import UserError

LONGEST_TEXT, LONGEST_PATH, LONGEST_PART = 4000, 4000, 240
"""Bytes of a text, of a path and of a name in it: what file systems take, less what programs
append.
"""
SHOWN = 60
"""Characters of a text that a message shows."""


@dataclass(frozen=True)
class IsPath:
    """A note on a text: the path of a file or folder, or a pattern; `~` and `~user` begin it as
    home folders.
    """


@dataclass(frozen=True)
class IsFreeText:
    """A note on a text: it may hold line breaks, and be of any length, as what a model is given."""


def text_problem(text: str) -> "str | None":
    """What is wrong with a text, as `got ..; expected ..`; None where nothing is."""
    problem = encoding_problem(text)
    if problem is not None:
        return problem
    size = len(text.encode("utf-8"))
    if any(unicodedata.category(character) == "Cc" for character in text[:LONGEST_TEXT]):
        return f"got {shown_text(text)} with control characters; expected text without"
    if size > LONGEST_TEXT:
        return f"got {shown_text(text)} of {size} bytes; expected at most {LONGEST_TEXT}"
    return None


def encoding_problem(text: str) -> "str | None":
    """What is wrong with a text's encoding, as of `text_problem`; None where an output takes it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return _locale_problem(text) or (
            f"got {shown_text(text)}, which is not UTF-8; expected text in UTF-8"
        )
    return None


def _locale_problem(text: str) -> "str | None":
    """What is wrong where the process takes texts in another encoding, such as that of LC_ALL=C."""
    encoding = sys.getfilesystemencoding()
    if encoding == "utf-8":
        return None
    return (
        f"got {shown_text(text)} where the locale's encoding is {encoding}; expected UTF-8 for "
        "what goes beyond it: set PYTHONUTF8=1, or LC_ALL=C.UTF-8"
    )


def path_text(text: str) -> str:
    """The path that a user's text stands for, `~` expanded.

    Raises:
        ValueError: no path can be that; says `got ..; expected ..`.
    """
    problem = text_problem(text)
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        problem = _locale_problem(text) or problem
    if problem is not None:
        raise ValueError(problem)
    try:
        path = str(Path(text).expanduser()) if text.startswith("~") else text
    except RuntimeError as error:
        user = text.partition("/")[0]
        raise ValueError(
            f"got {shown_text(text)}; expected a path, and there is no home folder {user}"
        ) from error
    longest = max(len(os.fsencode(part)) for part in path.split("/"))
    if longest > LONGEST_PART:
        raise ValueError(
            f"got {shown_text(text)} with a name of {longest} bytes; expected at most "
            f"{LONGEST_PART}"
        )
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise ValueError(
            f"got {shown_text(text)} of {len(path)} bytes; expected a path of at most "
            f"{LONGEST_PATH}"
        )
    return path


def text_of_path(path: Path) -> str:
    """The text that means a path: a `~` that begins its name is none of a user's."""
    return f"./{path}" if str(path).startswith("~") else str(path)


def user_path(where: str, text: "str | Path") -> Path:
    """A path that a user gave to a program; UserError, which begins with `where`, if none can be
    that. What is a path already is taken as it is.
    """
    try:
        return Path(path_text(text_of_path(text) if isinstance(text, Path) else text))
    except ValueError as error:
        raise UserError(f"{where}: {error}. Correct the path.") from error


def shown_text(text: str) -> str:
    """A text as messages show it: its beginning, with escapes for what is no plain character."""
    return repr(text) if len(text) <= SHOWN else f"{text[:SHOWN]!r}.."


def several(given: Any) -> "tuple[Any, ...]":
    """What a caller gives as one text or as several: one is a sequence of texts, too."""
    return (given,) if isinstance(given, (str, Path)) else tuple(given)


def did_you_mean(name: str, known: Any, *, listed: bool = False) -> str:
    """A sentence that suggests a known name close to this one; without one, the known names if
    `listed`.
    """
    if len(name) > 2 * max(map(len, known), default=0):
        return ""
    close = get_close_matches(name, list(known), n=1, cutoff=0.6) or [
        candidate
        for candidate in sorted(known)
        if name and (candidate.startswith(name) or name.startswith(candidate))
    ]
    if close:
        return f"Did you mean {close[0]!r}?"
    return (
        f"Known are {', '.join(known if isinstance(known, dict) else sorted(known))}."
        if listed
        else ""
    )
