"""Initial weights, drawn from numpy's global generator so that ``numpy.random.seed`` decides
them.
"""

import numpy as np


def truncated_normal(shape: tuple[int, ...], std: float = 0.02, bound: float = 2.0) -> np.ndarray:
    """Normal with mean 0, redrawn where it lies beyond ``bound`` standard deviations: float32 of
    this shape.
    """
    values = np.random.normal(size=shape)
    while (outside := np.abs(values) > bound).any():
        values[outside] = np.random.normal(size=int(outside.sum()))
    return (values * std).astype(np.float32)
