"""Rotary positions: pairs of features turn by angles that grow with the position.

D head size, P positions.
"""

import numpy as np
import popxl
from popxl import Tensor

from popxl_gpt.config.schema import Model

Tables = tuple[Tensor, Tensor]
"""Sines and cosines of the angles of positions and pairs, [P, D/2] each."""


def rotary_tables(model: Model, positions: int, dtype: popxl.dtype) -> Tables:
    """Those of the positions from 0 on, as constants of the current graph.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2.
    """
    size = model.head_width
    speeds = model.rotary_base ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    angles = np.outer(np.arange(positions), speeds)
    return popxl.constant(np.sin(angles), dtype, "sin"), popxl.constant(
        np.cos(angles), dtype, "cos"
    )
