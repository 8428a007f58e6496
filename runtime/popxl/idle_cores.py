"""How idle the cores are that this process may use, as Linux counts it."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from popxl.host_limits import core_limit

STATISTICS = Path("/proc/stat")
LEAST = 0.1
"""Seconds that are looked at, at least: Linux counts hundredths."""
OTHERS = 0.15
"""Share of the cores that other programs take at most, where they are called idle."""


@dataclass(frozen=True)
class CoreTimes:
    """Seconds at a moment."""

    moment: float
    idle: float
    """Idle time so far of all cores that this process may use."""
    own: float
    """Processor time so far of all threads of this process."""
    cores: int

    @classmethod
    def now(cls) -> "CoreTimes | None":
        """The times of this moment; None where the system does not tell them."""
        try:
            cores = os.sched_getaffinity(0)
            lines = STATISTICS.read_text().splitlines()
            found = [line.split() for line in lines if line.startswith("cpu")]
            ticks = [
                int(idle) + int(waiting)  # for a disk
                for name, _, _, _, idle, waiting, *_ in found
                if name != "cpu" and int(name.removeprefix("cpu")) in cores
            ]
        except (AttributeError, OSError, ValueError):  # no Linux, or one that hides it
            return None
        idle = sum(ticks) / os.sysconf("SC_CLK_TCK")
        user, system, *_ = os.times()
        return cls(time.monotonic(), idle, user + system, len(cores))

    def are_others_idle(self, later: "CoreTimes") -> bool:
        """Whether other programs have left the cores alone until a later moment."""
        of_all = self.cores * (later.moment - self.moment)
        others = of_all - (later.idle - self.idle) - (later.own - self.own)
        return others <= OTHERS * of_all


BEGIN = CoreTimes.now()
"""When this module was loaded."""


def are_others_idle() -> bool:
    """Whether other programs have left the cores alone since this module was loaded, and this
    process may take all of their time; False where the system does not tell.
    """
    if BEGIN is None or core_limit() < BEGIN.cores:
        return False
    time.sleep(max(0.0, BEGIN.moment + LEAST - time.monotonic()))
    later = CoreTimes.now()
    return later is not None and BEGIN.are_others_idle(later)
