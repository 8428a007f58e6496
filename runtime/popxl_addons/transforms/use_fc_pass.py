"""Whether matrix products are planned together with their gradients: accepted, and without effect
on this runtime.
"""

import logging

import popxl

_logger = logging.getLogger("popxl_addons")


def disable_fc_pass(ir: popxl.Ir) -> None:
    """Plan every matrix product on its own. No effect."""
    _logger.debug("disable_fc_pass has no effect on this runtime")


def enable_fc_pass(ir: popxl.Ir) -> None:
    """Plan matrix products together with their gradients. No effect."""
    _logger.debug("enable_fc_pass has no effect on this runtime")
