"""What files that torch.save wrote hold."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


class PickledFileError(ValueError):
    """A file that torch.load does not read, or only if it may run code."""


@dataclass(frozen=True)
class PickledTensor:
    """A tensor that is still in its file."""

    type: str
    """The name that safetensors has for it: F32, F16, BF16."""
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    """Gives a copy, bfloat16 as float32."""
