"""How much memory a matrix product may use while it runs: accepted, and without effect on this
runtime.
"""

import logging
from collections.abc import Iterable

import popxl

_logger = logging.getLogger("popxl_addons")


def set_available_memory_proportion_by_ipu(ir: popxl.Ir, proportions: Iterable[float]) -> None:
    """A proportion per virtual device for every op of the program. ValueError outside 0..1. No
    effect.
    """
    _check(proportions)


def set_graph_available_memory_proportion_by_ipu(
    graph: popxl.Graph, proportions: Iterable[float]
) -> None:
    """The same for one graph and what it calls."""
    _check(proportions)


def _check(proportions: Iterable[float]) -> None:
    values = list(proportions)
    if not all(0 <= value <= 1 for value in values):
        raise ValueError(
            f"available_memory_proportion: got {values}; expected numbers from 0 to 1."
        )
    _logger.debug("available memory proportions %s have no effect on this runtime", values)
