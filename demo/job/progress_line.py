"""The line that tells a run's progress: one that changes on a terminal, a plain log elsewhere."""

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tqdm import tqdm

GAP = "  "
WIDTH = 80
"""The columns of a terminal that does not tell its own."""
ROWS = 20
"""The rows of a terminal; the line needs one, and some terminals tell that they have none."""
tqdm.set_lock(threading.RLock())  # by itself it takes a semaphore for several processes


class Piece(NamedTuple):
    """A piece of the line. Those of the highest rank are left out first where it is too long."""

    text: str
    rank: int = 0


class ProgressLine:
    """Shows a line about the step that was done."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdout.isatty()
        """Whether one line changes: each step is shown then."""
        if self.is_terminal:
            tqdm.monitor_interval = 0  # no thread that draws
            self._bar = tqdm(
                bar_format="{desc}", file=sys.stdout, ncols=WIDTH, nrows=ROWS, miniters=1
            )

    def show(self, pieces: Sequence[Piece]) -> None:
        """Show a step. A terminal gets what fits into its width, at most ten times a second."""
        if not self.is_terminal:
            print(whole(pieces), flush=True)
            return
        self._bar.ncols = self._width()
        self._bar.set_description_str(fitting(pieces, self._bar.ncols), refresh=False)
        self._bar.update()

    def close(self) -> None:
        """Leave the last line where it is."""
        if self.is_terminal:
            self._bar.refresh()
            self._bar.close()

    def _width(self) -> int:
        try:
            return os.get_terminal_size(sys.stdout.fileno()).columns or WIDTH
        except OSError:  # it is gone
            return WIDTH


@contextmanager
def line_away() -> Iterator[None]:
    """A block in which a line that is shown makes way for what is printed."""
    with tqdm.external_write_mode(sys.stdout):
        yield


def tell(text: str) -> None:
    """Show a line that stays."""
    with line_away():
        print(text, flush=True)


def whole(pieces: Sequence[Piece]) -> str:
    """All pieces as a line."""
    return GAP.join(piece.text for piece in pieces)


def fitting(pieces: Sequence[Piece], width: int) -> str:
    """The line without what does not fit into so many characters."""
    kept = list(pieces)
    while len(whole(kept)) > width and any(piece.rank for piece in kept):
        kept.remove(max(kept, key=lambda piece: piece.rank))
    return whole(kept)[:width]
