"""Kernels by op name: one torch function per op, with the op's own parameters."""

from collections.abc import Callable
from typing import Any

import torch
from popxl.opdef import OPS, OpDefinition

Kernel = Callable[..., Any]

KERNELS: dict[str, Kernel] = {}
"""The plain kernel of each op: the oracle of its alternates."""

ALTERNATES: dict[str, dict[str, Kernel]] = {}
"""device type -> op name -> faster kernel."""


OVERWRITES: dict[Kernel, str] = {}
"""Kernels that may write their result over an operand: its name."""


def kernel(
    name: str, device: str | None = None, over: str | None = None
) -> Callable[[Kernel], Kernel]:
    """Register the kernel of op ``name``, or with ``device`` a faster alternate for that device
    type.

    A kernel takes the op's parameters, tensors as torch tensors, and returns one tensor, a list or
    tuple of them, or None. It may return a view of an operand only where the op declares ``views``.
    Three kinds of op differ:

    - an op that ``writes`` changes that operand in place and returns it;
    - an op with host or remote effects gets ``replica``, the machine's handle, as first parameter;
    - a collective gets, for each tensor parameter, the list of that operand on every member of the
      group, in group order, and returns the list of every member's result.

    An alternate that has ``over``, the name of an operand, gets that operand once more as ``into``
    where it alone has its memory and nothing needs it any more: the result may be written there.
    Its rows may lie apart. Otherwise ``into`` is None.
    """

    def register(fn: Kernel) -> Kernel:
        table = KERNELS if device is None else ALTERNATES.setdefault(device, {})
        if name in table:
            raise ValueError(
                f"kernel: got a second kernel for {name!r}; expected one per op and device."
            )
        table[name] = fn
        if over is not None:
            OVERWRITES[fn] = over
        return fn

    return register


def kernel_for(definition: OpDefinition, device: str = "cpu") -> Kernel:
    """The kernel to run an op on a device; in-place and alias forms fall back to their base op's
    kernel.
    """
    name = definition.name
    found = ALTERNATES.get(device, {}).get(name) or KERNELS.get(name)
    if found is not None:
        return found
    base = definition.base
    if base is None:
        raise NotImplementedError(
            f"kernel: got op {name!r}, which has none; expected one in popxl_engine/kernels."
        )
    inner = kernel_for(base, device)
    if definition.alias:
        return inner
    position = list(definition.signature.parameters).index(definition.writes[0])

    def write(*args: Any, **kwargs: Any) -> Any:
        return args[position].copy_(inner(*args, **kwargs))

    return write


def kernel_like(name: str, like: torch.Tensor) -> Kernel:
    """The kernel of an op, for the device of a tensor."""
    return kernel_for(OPS[name], "cuda" if like.is_cuda else "cpu")
