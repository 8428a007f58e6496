"""How fast documents become tokens: a bar on a terminal, lines elsewhere."""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType

from tqdm import tqdm

from popxl_gpt.data.conversations import Conversation, text_of
from popxl_gpt.utils.units import bytes_text, counted, duration, si

REPORT_SECONDS = 10.0
"""The time between lines that say how far it is."""
DRAW_SECONDS = 0.1
"""The time between two pictures of the bar."""


def size_of(document: "str | Conversation") -> int:
    """Bytes of a document's text."""
    return len(text_of(document).encode())


class Throughput:
    """Counts what is read and made, and tells it.

    Args:
        report: takes lines.
        size: estimate of all text, bytes.
        tokens: that an earlier call has made.
    """

    def __init__(self, report: Callable[[str], None], size: int, tokens: int = 0) -> None:
        self.bytes = 0
        """Size of the text that was read, what an earlier call had read of it, too."""
        self._report, self._size, self._before = report, size, tokens
        self._start = self._told = time.monotonic()
        self._documents, self._tokens = 0, tokens
        self._bar = None
        if sys.stdout.isatty():
            tqdm.set_lock(threading.RLock())  # by itself it takes a semaphore for processes
            tqdm.monitor_interval = 0  # no thread that draws
            self._bar = tqdm(
                total=size, unit="B", unit_scale=True, file=sys.stdout, dynamic_ncols=True,
                mininterval=DRAW_SECONDS, leave=False,
            )  # fmt: skip

    def __enter__(self) -> "Throughput":
        return self

    def __exit__(
        self,
        kind: "type[BaseException] | None",
        error: "BaseException | None",
        trace: "TracebackType | None",
    ) -> None:
        """Take the bar away, and tell the whole where it went well."""
        if self._bar is not None:
            self._bar.close()
        if error is None:
            seconds = time.monotonic() - self._start
            self._report(f"{self._counts()} in {duration(seconds)}, {self._speed()}.")

    def counted(self, documents: "Iterable[str | Conversation]") -> "Iterator[str | Conversation]":
        """Hand documents on, and count their bytes."""
        for document in documents:
            self.bytes += size_of(document)
            yield document

    def show(self, documents: int, tokens: int) -> None:
        """Tell how much is made, if it is time to."""
        self._documents, self._tokens = documents, tokens
        now = time.monotonic()
        if now - self._told < (REPORT_SECONDS if self._bar is None else DRAW_SECONDS):
            return
        self._told = now
        if self._bar is None:
            share = min(1.0, self.bytes / max(1, self._size))
            self._report(f"{share:.0%}: {self._counts()}, {self._speed()}")
        else:
            self._bar.total = max(self._size, self.bytes)
            self._bar.set_postfix_str(self._speed(), refresh=False)
            self._bar.update(self.bytes - self._bar.n)

    def _counts(self) -> str:
        documents, tokens = (
            counted(self._documents, "document"),
            counted(self._tokens, "token"),
        )
        return f"{documents}, {bytes_text(self.bytes)}, {tokens}"

    def _speed(self) -> str:
        seconds = max(1e-9, time.monotonic() - self._start)
        return si((self._tokens - self._before) / seconds, "tokens/s")
