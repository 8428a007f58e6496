"""What a run prints never stops it: outputs that are full, closed, gone, or that nobody reads."""

import io
import logging
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, cast

from popxl_gpt.utils.errors import reason_of
from popxl_gpt.utils.escaping import EscapedStream

PIECE = 4096
"""Bytes that a pipe which is ready takes without waiting (PIPE_BUF, pipe(7))."""
PATIENCE_SECONDS = 1.0
"""How long a reader may not read before text is left out."""
_LOG = logging.getLogger(__name__)


class Output(io.TextIOBase):
    """Writes whole lines to another stream's file. What that does not take is left out; the first
    time is told.
    """

    def __init__(self, stream: TextIO, is_told: bool):
        self._stream = stream
        self._line = ""
        self._patience = PATIENCE_SECONDS
        self._is_to_tell = is_told

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the other stream."""
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """What becomes of characters that the encoding lacks."""
        return self._stream.errors

    def fileno(self) -> int:
        """See `io.IOBase`, here and below."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream.isatty()

    def writable(self) -> bool:
        """Whether lines can be written: always."""
        return True

    def write(self, text: str) -> int:
        """Write the lines that the text ends."""
        self._line += text
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Write the rest, too."""
        text, self._line = self._line, ""
        if not text and self._stream.closed:
            return  # Python flushes what goes away, at its exit too
        content = text.encode(self.encoding, self.errors or "strict")
        try:
            self._stream.flush()  # what was written before
            while content:
                self._wait()
                content = content[os.write(self.fileno(), content[:PIECE]) :]
        except (OSError, ValueError) as error:
            self.warn(reason_of(error))

    def _wait(self) -> None:
        """Wait for a reader; after one that did not come, for none."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        if not poll.poll(1000 * self._patience):
            self._patience = 0.0
            raise BlockingIOError(None, "nobody reads it")
        self._patience = PATIENCE_SECONDS

    def warn(self, reason: str) -> None:
        """Say, once, why lines are left out."""
        if self._is_to_tell:
            self._is_to_tell = False
            _LOG.warning(
                "stdout: got '%s'; expected an output that takes lines. Training goes on, lines "
                "that it does not take are left out; metrics.jsonl has every step.",
                reason,
            )


@contextmanager
def lasting_output() -> Iterator[None]:
    """A block whose stdout and stderr never fail, and never wait for long."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _lasting(sys.stdout, True), _lasting(sys.stderr, False)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = before


def _lasting(stream: TextIO, is_told: bool) -> TextIO:
    if isinstance(stream, EscapedStream):
        return cast(TextIO, EscapedStream(_lasting(stream.stream, is_told)))
    try:
        stream.fileno()
    except OSError:  # in memory
        return stream
    output = Output(stream, is_told)
    if getattr(stream, "name", None) == os.devnull:
        output.warn("a closed one")  # see `config.errors.repair_standard_streams`
    return cast(TextIO, output)
