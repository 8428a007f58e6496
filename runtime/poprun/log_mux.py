"""The stderr of the instances of a machine, put together on this process's own.

What instance 0 writes is passed on at once and word for word. The others' lines get their number
in front, and wait `HOLD_SECONDS`: what all of them write when they fail alike then appears once. Of
lines that overwrite each other, as those of progress bars, the last that waits is passed on, as a
terminal shows it.
"""

import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from types import TracebackType

HOLD_SECONDS = 5.0
TICK_SECONDS = 0.05
CHUNK = 2**16
"""Bytes; what a pipe holds. From so many on a line is passed on before its end."""


def say(text: bytes) -> None:
    """Write to stderr. Where that is full or gone the text is lost, and all goes on."""
    rest = memoryview(text)
    try:
        while rest:
            rest = rest[os.write(sys.stderr.fileno(), rest) :]
    except OSError:
        pass


class LogStream:
    """What one instance writes."""

    def __init__(self, index: int):
        self.index = index
        self.written_at: float = 0
        """When text was passed on last, on the monotonic clock; 0: never."""
        self._tail = b""
        """The end of what was passed on."""
        self.reading, self._writing = os.pipe()
        os.set_blocking(self.reading, False)
        self._partial_line = bytearray()
        """A line that has not ended yet, or may end with a line feed after its carriage return."""
        self._is_overwritten = False
        """Whether the next line takes the place of the one that waits last."""
        self._waiting: deque[tuple[float, bytes]] = deque()

    @property
    def path(self) -> str:
        """A file name to write to, valid in this process."""
        return f"/dev/fd/{self._writing}"

    @property
    def has_written(self) -> bool:
        """Whether anything was passed on."""
        return self.written_at > 0

    def read(self) -> None:
        """Take what has been written so far."""
        while True:
            try:
                text = os.read(self.reading, CHUNK)
            except BlockingIOError:
                return
            if self.index == 0:
                self._waiting.append((time.monotonic(), text))
                continue
            self._split(text)

    def _split(self, text: bytes) -> None:
        """Let the lines wait that end with this text. Its time is linear in what is written."""
        if self._partial_line.endswith(b"\r") and not text.startswith(b"\n"):
            self._end_line()
        pieces = text.splitlines(keepends=True)
        for number, piece in enumerate(pieces, start=1):
            self._partial_line += piece
            has_ended = piece.endswith(b"\n") or piece.endswith(b"\r") and number < len(pieces)
            if has_ended or len(self._partial_line) >= CHUNK:
                self._end_line()

    def _end_line(self) -> None:
        line, since = bytes(self._partial_line.rstrip(b"\r\n")), time.monotonic()
        is_overwritten, follows = self._partial_line.endswith(b"\r"), self._is_overwritten
        self._partial_line.clear()
        if is_overwritten and not line.strip():
            return  # clears a line, or goes to its beginning
        self._is_overwritten = is_overwritten
        if follows and self._waiting:
            if not line:
                return  # ends the line that waits
            since, _ = self._waiting.pop()
        self._waiting.append((since, b"[%d] %s\n" % (self.index, line)))

    def forward(self, held: float = 0.0) -> None:
        """Pass on what was written longer than ``held`` seconds ago."""
        while self._waiting and self._waiting[0][0] <= time.monotonic() - held:
            self._write(self._waiting.popleft()[1])

    def finish(self) -> None:
        """Pass on the rest."""
        self.read()
        if self._partial_line:
            self._end_line()
        self.forward()

    def repeats(self, other: "LogStream") -> bool:
        """Whether all that waits to be passed on is what another has written."""
        self.read()
        mark = len(b"[%d] " % self.index)
        return bool(self._waiting) and all(line[mark:] in other._tail for _, line in self._waiting)

    def _write(self, text: bytes) -> None:
        self.written_at, self._tail = time.monotonic(), (self._tail + text)[-CHUNK:]
        say(text)

    def close(self) -> None:
        """Forget it."""
        os.close(self.reading)
        os.close(self._writing)


class LogMux:
    """The streams of this machine's instances, which a thread reads while a ``with`` block runs."""

    def __init__(self, indices: Iterable[int]):
        self.streams: dict[int, LogStream] = {index: LogStream(index) for index in indices}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._pass_on, name="log mux", daemon=True)

    def __getitem__(self, index: int) -> LogStream:
        return self.streams[index]

    @property
    def last(self) -> LogStream | None:
        """The one whose text was passed on last; None: nobody's."""
        written = [stream for stream in self.streams.values() if stream.has_written]
        return max(written, key=lambda stream: stream.written_at, default=None)

    def __enter__(self) -> "LogMux":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        for stream in self.streams.values():
            stream.close()

    def stop(self) -> None:
        """Read and pass on no more, but what is finished by hand."""
        self._is_over.set()
        self._thread.join()

    def finish(self) -> None:
        """Pass on all that was written."""
        self.stop()
        for stream in self.streams.values():
            stream.finish()

    def _pass_on(self) -> None:
        by_pipe = {stream.reading: stream for stream in self.streams.values()}
        while not self._is_over.is_set():
            readable, _, _ = select.select(list(by_pipe), [], [], TICK_SECONDS)
            for pipe in readable:
                by_pipe[pipe].read()
            for stream in self.streams.values():
                stream.forward(HOLD_SECONDS if stream.index else 0.0)
