"""Collectives of a device on a stream beside the one that computes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class SideStream:
    """A stream of a GPU; elsewhere a collective ends where it begins."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(
        self, collective: Callable[[], torch.Tensor], operands: Iterable[torch.Tensor]
    ) -> Callable[[], Any]:
        """Begin a collective once its operands are computed. Returns what waits for its result: on
        the device, not here.
        """
        if self._stream is None:
            done = collective()
            return lambda: done
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = collective()
            ended = self._stream.record_event()
        for t in operands:
            t.record_stream(self._stream)

        def end() -> torch.Tensor:
            computing = torch.cuda.current_stream()
            computing.wait_event(ended)
            result.record_stream(computing)
            return result

        return end
