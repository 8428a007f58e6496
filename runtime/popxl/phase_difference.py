"""A difference between the first and the second run of a phase."""

from dataclasses import dataclass

from popxl.remote_buffer import RemoteBuffer


@dataclass(frozen=True)
class PhaseDifference:
    """A tensor that a phase left, and that is another when the phase runs again from what it had
    found.
    """

    replica: int
    phase: str
    """The graph that the main graph calls or repeats, or that a loop of steps does."""
    loops: tuple[tuple[str, int], ...]
    """Loops around the phase, and the phase itself where a loop repeats it: its name, and its
    iterations before.
    """
    tensor: str
    """The phase's name for it, or that of the stream; of a row, of what is stored there."""
    row: tuple[RemoteBuffer, int] | None = None
    """The row of remote memory that it is, where it is one."""
