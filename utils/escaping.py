"""What comes from outside is text on a terminal, never a command to it: names of files, of tensors
and of tokens, and what files hold, may have any characters.

Programs print through `escaped_streams`, so that no message needs to think of it.
"""

import re
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters but for line breaks and tabs, what ends lines elsewhere, and what changes the
direction of writing, so that a text looks like another.
"""
MOVES = re.compile("(\n|\x1b\\[A)+")
"""What tqdm moves the cursor by, in a text of its own. A line that it draws anew begins with a
carriage return.
"""
_THREAD = threading.local()


def escaped(text: str) -> str:
    """A text that commands no terminal: escapes stand for characters that do."""
    return COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """The same, on one line."""
    return escaped(text).replace("\n", "\\n")


class EscapedStream:
    """A stream whose texts are escaped; all else is another stream's, `stream`."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        """See `io.TextIOBase`, here and below."""
        if getattr(_THREAD, "is_raw", False) or MOVES.fullmatch(text):
            self.stream.write(text)
        elif text.startswith("\r"):
            self.stream.write("\r" + escaped(text[1:]))
        else:
            self.stream.write(escaped(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def escaped_streams() -> Iterator[None]:
    """A block whose stdout and stderr command no terminal."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        stream if isinstance(stream, EscapedStream) else cast(TextIO, EscapedStream(stream))
        for stream in before
    )
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def as_it_is() -> Iterator[None]:
    """A block in which this thread prints texts as they are: what goes to a file, and what another
    package colours.
    """
    before, _THREAD.is_raw = getattr(_THREAD, "is_raw", False), True
    try:
        yield
    finally:
        _THREAD.is_raw = before
