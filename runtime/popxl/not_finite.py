"""The search for the first number of a run that stopped being finite."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class NotFinite:
    """A tensor that is not finite, made by an op whose operands are, or loaded as it is."""

    order: int
    """Operations that its replica had done before."""
    replica: int
    phase: str
    """The graph that the main graph calls or repeats, or that a loop of steps does."""
    phase_runs: int | None
    """How often the run had gone through phases of this name before; none: not known."""
    graph: str
    """Names of the graphs it is in, outermost first, with slashes between."""
    loops: tuple[tuple[str, int], ...]
    """Loops around it, outermost first: the repeated graph, and its iterations before."""
    tensor: str
    """Its name in its graph."""
    value: str
    """What is in it: nan, inf or -inf."""
    op: str
    where: str
    """The place where the program's source makes it: file and line."""
