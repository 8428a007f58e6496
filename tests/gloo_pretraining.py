"""The training program with Gloo's collectives in place of our messages: ``gloo_pretraining.py
FLAGS`` in each of several processes that have a replica each.

Gloo stands behind the interface of GPUs. As on those, each replica reaches the others by a
`Communicator`; here it gathers what it reduces, or exchanges the parts, and adds by the runtime's
tree. So the order of additions is that of messages. The program ends with exit code 1 where a
collective between processes went another way, or Gloo was not asked.
"""

import sys
from collections import Counter

import torch
import torch.distributed as distributed
from popdist import getNumInstances
from popxl_engine.kernels.collectives import by_tree
from popxl_engine.machine import by_messages, communicator

from popxl_gpt.demo.pretraining import main

OPS = {"SUM": "add", "PRODUCT": "mul", "MIN": "min", "MAX": "max"}
"""Names of `torch.distributed.ReduceOp`, and ours."""
CALLS: "Counter[str]" = Counter()


class Gloo(communicator.Communicator):
    """The collectives of one group, whose sums have the bits of messages."""

    def gather(self, t: torch.Tensor) -> torch.Tensor:
        assert distributed.get_backend(self.group) == "gloo"
        CALLS["gather"] += 1
        return super().gather(t)

    def exchange(self, t: torch.Tensor) -> torch.Tensor:
        assert distributed.get_backend(self.group) == "gloo"
        CALLS["exchange"] += 1
        return super().exchange(t)

    def reduce(self, t: torch.Tensor, how: str) -> None:
        t.copy_(by_tree(list(self.gather(t)), OPS[how]))

    def reduce_scatter(self, t: torch.Tensor, how: str) -> torch.Tensor:
        return by_tree(list(self.exchange(t)), OPS[how])


def refuse(*arguments: object) -> None:
    """No messages carry a collective here."""
    raise AssertionError("a collective by messages")


if __name__ == "__main__":
    communicator.BACKENDS = {"cpu": "gloo"}
    communicator.Communicator = Gloo  # type: ignore[misc]
    by_messages.ByMessages.begin = refuse  # type: ignore[assignment, method-assign]
    code = main(sys.argv[1:])
    assert getNumInstances() > 1
    assert CALLS["gather"] > 10, CALLS
    sys.exit(code)
