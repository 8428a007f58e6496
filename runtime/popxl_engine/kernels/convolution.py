"""Convolutions by torch's kernels. 16-bit types accumulate in float32."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from popxl.ops.windows import Window

from popxl_engine.kernels.registry import kernel
from popxl_engine.kernels.rounding import as_float32

aten = torch.ops.aten
Windows = tuple[Window, ...]
Hint = list[Any] | None


def exactly(t: torch.Tensor) -> AbstractContextManager[None]:
    """Whole float32 products on a GPU, and the same bits in every run."""
    if not t.is_cuda:
        return nullcontext()
    return torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    )


def computed(
    rule: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    first: torch.Tensor,
    second: torch.Tensor,
) -> torch.Tensor:
    """``rule`` on both tensors, in a type that accumulates in float32: GPUs do so by themselves."""
    with exactly(first):
        if first.is_cuda:
            return rule(first, second)
        return rule(as_float32(first), as_float32(second)).to(first.dtype)


def fits_torch(window: Window) -> bool:
    """Whether torch, which pads both sides alike, makes the same places from the begin alone."""
    return (window.size + 2 * window.begin - window.span) // window.stride + 1 == window.count


def padding_apart(windows: Windows) -> list[int] | None:
    """What torch's `pad` takes, last axis first, where its convolutions cannot pad by
    themselves.
    """
    if all(map(fits_torch, windows)):
        return None
    return [amount for w in reversed(windows) for amount in (w.begin, w.end)]


def options(windows: Windows, groups: int) -> tuple[Any, ...]:
    """What torch's convolutions take after their tensors."""
    padding = [0] * len(windows) if padding_apart(windows) else [w.begin for w in windows]
    return (
        [w.stride for w in windows],
        padding,
        [w.dilation for w in windows],
        False,
        [0] * len(windows),
        groups,
    )


def padded(t: torch.Tensor, windows: Windows) -> torch.Tensor:
    """t with what windows need around it, as far as torch's convolutions do not add it."""
    apart = padding_apart(windows)
    return t if apart is None else torch.nn.functional.pad(t, apart)


def shaped(like: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Stands for an operand of which torch's gradients read the shape alone."""
    return like.new_empty(1).expand(shape)


@kernel("conv")
def conv(
    t: torch.Tensor,
    weight: torch.Tensor,
    windows: Windows,
    groups: int,
    available_memory_proportions: Hint,
    partials_types: Hint,
    enable_conv_dithering: Hint,
) -> torch.Tensor:
    """Convolve."""

    def rule(t: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return aten.convolution(padded(t, windows), weight, None, *options(windows, groups))

    return computed(rule, t, weight)


@kernel("conv_transpose")
def conv_transpose(
    t: torch.Tensor,
    weight: torch.Tensor,
    windows: Windows,
    groups: int,
    available_memory_proportions: Hint,
    partials_types: Hint,
    enable_conv_dithering: Hint,
) -> torch.Tensor:
    """Torch's gradient of the convolved tensor."""
    apart = padding_apart(windows)
    sizes = [w.reach if apart else w.size for w in windows]

    def rule(t: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        convolved = shaped(t, [t.shape[0], weight.shape[1] * groups, *sizes])
        only = [True, False, False]
        result = aten.convolution_backward(
            t, convolved, weight, None, *options(windows, groups), only
        )[0]
        return torch.nn.functional.pad(result, [-amount for amount in apart]) if apart else result

    return computed(rule, t, weight)


@kernel("conv_weight_grad")
def conv_weight_grad(
    t: torch.Tensor, dy: torch.Tensor, windows: Windows, groups: int
) -> torch.Tensor:
    """Torch's gradient of the weights."""
    shape = [dy.shape[1], t.shape[1] // groups, *(w.kernel for w in windows)]

    def rule(t: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        weight, only = shaped(t, shape), [False, True, False]
        return aten.convolution_backward(
            dy, padded(t, windows), weight, None, *options(windows, groups), only
        )[1]

    return computed(rule, t, dy)
