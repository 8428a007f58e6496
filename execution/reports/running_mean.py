"""The running mean that a run's line, report and comparison show as smoothed."""

import math

SHARE = 0.05
"""The share of the newest value in the mean, once enough have come."""
FORGETTING = 10
"""The mean is as old as an eleventh of the values so far, until `SHARE` makes it 19 values old."""


class RunningMean:
    """Exponential running mean that forgets its first values; those that are not finite are left
    out.

    The n-th value has the share max(1/20, 10 / (n + 9)). Up to the 191st, value i of n so weighs
    in proportion to i (i + 1) .. (i + 8): of thirty values the first has 2e-9 of the mean. One
    that is only corrected for its start is near the plain mean of the first values, to which each
    of them belongs for good.
    Source: Shamir and Zhang 2013, arXiv:1212.1824, polynomial-decay averaging with eta 9.
    """

    def __init__(self) -> None:
        self._mean, self._count = math.nan, 0

    def add(self, value: float) -> float:
        """Count a value. Returns the mean of all so far; nan where there is none."""
        if math.isfinite(value):
            self._count += 1
            share = max(SHARE, FORGETTING / (self._count + FORGETTING - 1))
            self._mean = value if share == 1.0 else self._mean + share * (value - self._mean)
        return self._mean
