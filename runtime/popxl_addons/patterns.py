"""Graph clean-up. The engine does its own, so that there is nothing left to do for a program's
request.
"""

import logging
from typing import Literal

import popxl

LEVELS = ("no_patterns", "minimal", "default", "all")
_logger = logging.getLogger("popxl_addons")


def apply_pre_alias_patterns(
    ir: popxl.Ir, level: Literal["no_patterns", "minimal", "default", "all"] = "default"
) -> None:
    """Accepted; changes nothing. ValueError for an unknown level."""
    if level not in LEVELS:
        raise ValueError(
            f"apply_pre_alias_patterns: got level {level!r}; expected one of {', '.join(LEVELS)}."
        )
    _logger.debug("apply_pre_alias_patterns(%s) has no effect on this runtime", level)
