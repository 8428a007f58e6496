"""The gradient of a table whose rows are looked up, added to another gradient: its rows go there at
once.
"""

import torch

from popxl_engine.rewrites.accumulate import rows_by_index
from popxl_engine.rewrites.match import fused


def add_rows_(
    t: torch.Tensor, dy: torch.Tensor, indices: torch.Tensor, zero_OOR: bool
) -> torch.Tensor:
    """t with dy added to rows by their indices, outside as `gather` says."""
    flat, rows = rows_by_index(t, dy, indices, zero_OOR)
    return t.index_add_(0, flat, rows)


ADD = fused(add_rows_, writes=("t",))
