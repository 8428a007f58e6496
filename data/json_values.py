"""Values of JSON, one after the other: a file of any size takes the memory of its largest value."""

import codecs
import json
from typing import IO, Any

LONGEST = 2**28
"""Characters of a value."""
BLOCK = 2**16
"""Bytes that are read at a time, at least."""
_SPACE = " \t\n\r\ufeff"
_NEAR = 12
"""Characters before the end of what is read where an error may be of a value that goes on there:
those of an escape, or of a word.
"""


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any] | ValueError:
    """An object, or what is wrong with it: of two fields of one name Python's json drops one."""
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    names = [name for name, _ in pairs]
    return ValueError(f"got two fields '{next(name for name in names if names.count(name) > 1)}'")


class TooLongError(ValueError):
    """A value that may go on, of more characters than are read."""


DECODER = json.JSONDecoder(object_pairs_hook=_object_of)


class ValueReader:
    """Reads values from a file. Texts in them have half of a surrogate pair for each byte that is
    not UTF-8.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.byte = 0
        """Place in the file, as of the last call of `next_character`."""
        self.is_one_line = True
        """Whether the last value was."""
        self.is_new_line = False
        """Whether a line ended between it and the next character."""
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text, self._at, self._told = "", 0, 0
        self._is_whole = False

    def next_character(self) -> str:
        """The next character that is no space, "" at the end; it is not taken."""
        while True:
            start = self._at
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            self.is_new_line |= "\n" in self._text[start : self._at]
            self._tell()
            if self._at < len(self._text) or self._is_whole:
                return self._text[self._at : self._at + 1]
            self._read_on()

    def take(self) -> None:
        """Take one character."""
        self._at += 1

    def value(self) -> Any:
        """The value that begins at the next character, of which it takes the text; ValueError where
        none does.
        """
        while True:
            try:
                found, end = DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                goes_on = error.msg.startswith("Unterminated string")
                goes_on |= error.pos >= len(self._text) - _NEAR
                if self._is_whole or not goes_on:
                    raise ValueError(error.msg) from error
            except RecursionError as error:
                raise ValueError("nested without end") from error
            else:
                if self._is_whole or end < len(self._text):
                    self.is_one_line = "\n" not in self._text[self._at : end]
                    self.is_new_line = False
                    self._at = end
                    return found
            if len(self._text) - self._at > LONGEST:
                raise TooLongError(f"longer than {LONGEST} characters")
            self._read_on()

    def _tell(self) -> None:
        """Count the bytes of what was taken."""
        self.byte += len(self._text[self._told : self._at].encode(errors="surrogateescape"))
        self._told = self._at

    def _read_on(self) -> None:
        """Read as much again as there is, so that a long value is tried few times."""
        self._tell()
        left = self._text[self._at :]
        content = self._file.read(max(BLOCK, len(left)))
        self._is_whole = not content
        self._text = left + self._decoder.decode(content, final=self._is_whole)
        self._at = self._told = 0
