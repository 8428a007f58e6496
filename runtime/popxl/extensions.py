"""What goes beyond PopXL. Applications reach it through one small module that falls back to plain PopXL."""

from popxl.dtypes import bfloat16
from popxl.printer import to_text
from popxl.session import Session
from popxl.verify import verify

__all__ = ["bfloat16", "run_count", "set_run_count", "to_text", "verify"]


def run_count(session: Session) -> int:
    """How often a session has run. Stochastic rounding draws from it: save it with the variables, to resume bitwise."""
    return session._engine.run_count


def set_run_count(session: Session, count: int) -> None:
    """Go on as a session that has run ``count`` times. ValueError for a negative count."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"set_run_count: got {count!r}; expected a count of runs, 0 or more.")
    session._engine.run_count = count
