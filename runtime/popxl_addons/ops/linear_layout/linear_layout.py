"""A hint how a tensor is laid out in memory."""

from popxl import Tensor, ops


def linear_layout(t: Tensor, bs: int = 1) -> Tensor:
    """``t`` itself: the layout, in blocks of ``bs`` elements, is without effect here."""
    return ops.identity(t)
