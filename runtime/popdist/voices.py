"""What instances say on stderr, on its way to this process's own.

Instance 0 is heard at once and word for word. The others' lines get their number in front, and wait
`HOLD_SECONDS`: what all of them say when they fail alike is then said once.
"""

import os
import select
import sys
import threading
import time
from collections import deque
from types import TracebackType
from typing import Deque, Dict, Iterable, Optional, Tuple, Type

HOLD_SECONDS = 5.0
TICK_SECONDS = 0.05
CHUNK = 2**16
"""Bytes; what a pipe holds."""


def say(text: bytes) -> None:
    """Write to stderr. Where that is full or gone nobody hears it, and all goes on."""
    rest = memoryview(text)
    try:
        while rest:
            rest = rest[os.write(sys.stderr.fileno(), rest) :]
    except OSError:
        pass


class Voice:
    """One instance's text."""

    def __init__(self, index: int):
        self.index = index
        self.spoke: float = 0
        """When it was heard last, on the monotonic clock; 0: never."""
        self._said = b""
        """The end of what was passed on."""
        self.reading, self._writing = os.pipe()
        os.set_blocking(self.reading, False)
        self._begun = b""
        """A line that has not ended yet."""
        self._waiting: Deque[Tuple[float, bytes]] = deque()

    @property
    def path(self) -> str:
        """A file name for what is said, valid in this process."""
        return f"/dev/fd/{self._writing}"

    @property
    def has_spoken(self) -> bool:
        """Whether anything was passed on."""
        return self.spoke > 0

    def listen(self) -> None:
        """Take what has been said so far."""
        while True:
            try:
                text = os.read(self.reading, CHUNK)
            except BlockingIOError:
                return
            if self.index == 0:
                self._waiting.append((time.monotonic(), text))
                continue
            *lines, self._begun = (self._begun + text).split(b"\n")
            self._waiting.extend(
                (time.monotonic(), b"[%d] %s\n" % (self.index, line)) for line in lines
            )

    def tell(self, held: float = 0.0) -> None:
        """Pass on what was said longer than ``held`` seconds ago."""
        while self._waiting and self._waiting[0][0] <= time.monotonic() - held:
            self._say(self._waiting.popleft()[1])

    def finish(self) -> None:
        """Pass on the rest."""
        self.listen()
        self.tell()
        if self._begun:
            self._say(b"[%d] %s\n" % (self.index, self._begun))
            self._begun = b""

    def repeats(self, other: "Voice") -> bool:
        """Whether all that waits to be passed on is what another has said."""
        self.listen()
        mark = len(b"[%d] " % self.index)
        return bool(self._waiting) and all(line[mark:] in other._said for _, line in self._waiting)

    def _say(self, text: bytes) -> None:
        self.spoke, self._said = time.monotonic(), (self._said + text)[-CHUNK:]
        say(text)

    def close(self) -> None:
        """Forget it."""
        os.close(self.reading)
        os.close(self._writing)


class Voices:
    """The instances of this machine, heard by a thread while a ``with`` block runs."""

    def __init__(self, indices: Iterable[int]):
        self.voices: Dict[int, Voice] = {index: Voice(index) for index in indices}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._pass_on, name="voices", daemon=True)

    def __getitem__(self, index: int) -> Voice:
        return self.voices[index]

    @property
    def last(self) -> Optional[Voice]:
        """Who was heard last; None: nobody was."""
        spoken = [voice for voice in self.voices.values() if voice.has_spoken]
        return max(spoken, key=lambda voice: voice.spoke, default=None)

    def __enter__(self) -> "Voices":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.pause()
        for voice in self.voices.values():
            voice.close()

    def pause(self) -> None:
        """Listen and tell no more, but to what is finished by hand."""
        self._is_over.set()
        self._thread.join()

    def finish(self) -> None:
        """Pass on all that was said."""
        self.pause()
        for voice in self.voices.values():
            voice.finish()

    def _pass_on(self) -> None:
        by_pipe = {voice.reading: voice for voice in self.voices.values()}
        while not self._is_over.is_set():
            heard, _, _ = select.select(list(by_pipe), [], [], TICK_SECONDS)
            for pipe in heard:
                by_pipe[pipe].listen()
            for voice in self.voices.values():
                voice.tell(HOLD_SECONDS if voice.index else 0.0)
