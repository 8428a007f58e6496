"""Windows of one length over a run of tokens, so that every token is a label in one of them."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Windows:
    """The places where windows begin in a run, and which of a window's labels no window before it
    has.

    A window begins `stride` tokens after the one before. The last one begins earlier where the run
    would end within it: it ends with the run. A run shorter than a window has one, which it fills
    in part.
    """

    labels: int
    """Tokens of the run that are a label, which are all but its first; at least 1."""
    length: int
    """Labels of a window."""
    stride: int
    """Labels from a window's beginning to the next one's; at most `length`."""

    @property
    def count(self) -> int:
        """Windows of the run."""
        return 1 + max(0, -(-(self.labels - self.length) // self.stride))

    def begin(self, numbers: np.ndarray) -> np.ndarray:
        """Return the first token of each window, int64 [n], counted from the run's."""
        last = max(0, self.labels - self.length)
        return np.minimum(numbers.astype(np.int64) * self.stride, last)

    def counted(self, numbers: np.ndarray) -> np.ndarray:
        """Return from where to where each window's labels are new, int64 [n, 2]: over all windows
        every label of the run is once.
        """
        end = np.full(len(numbers), min(self.length, self.labels), np.int64)
        rest = self.labels - self.length - (numbers.astype(np.int64) - 1) * self.stride
        new = np.where(numbers == 0, end, np.minimum(self.stride, rest))
        return np.stack([end - new, end], axis=1)
