"""Stand-in for the copies of a GPU that keeps account."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Copies(TorchDispatchMode):
    """Whether copies to other devices were waited for."""

    def __init__(self):
        super().__init__()
        self.waited = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        device = (kwargs or {}).get("device")
        if (
            function is torch.ops.aten._to_copy.default
            and device is not None
            and device != args[0].device
        ):
            self.waited.append(not kwargs.get("non_blocking"))
        return function(*args, **kwargs or {})
