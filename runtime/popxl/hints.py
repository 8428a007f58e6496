"""What a program asks for and this runtime keeps without acting on it: placement, and how hardware
should compute.
"""

import logging

from popxl.ir import Ir

logger = logging.getLogger("popxl")

HINTS = (
    "available_memory_proportion",
    "available_memory_proportions",
    "enable_conv_dithering",
    "partials_type",
    "partials_types",
)
"""Parameters of ops that say how the hardware should compute."""


def hints_without_effect(ir: Ir) -> list[str]:
    """Names of the hints, contexts and session options that a program uses, each once."""
    ops = [op for graph in ir.graphs for op in graph.ops]
    found = {f"{name}=" for name in HINTS for op in ops if op.arguments.get(name) is not None}
    found.update("popxl.ipu" for op in ops if op.ipu is not None)
    found.update("popxl.io_tiles" for op in ops if op.io_tiles)
    found.update(
        f"session option {name}" for name in ir._pb_ir.getSessionOptions().ignored(ir._launched)
    )
    return sorted(found)


def report_hints(ir: Ir) -> None:
    """Log them once for each session, at DEBUG."""
    if logger.isEnabledFor(logging.DEBUG) and (found := hints_without_effect(ir)):
        logger.debug("without effect on this runtime: %s", ", ".join(found))
