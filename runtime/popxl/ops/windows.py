"""How windows move over the spatial axes of a tensor [n, c, ...]: what convolutions and pooling
share.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from popxl.errors import ShapeError
from popxl.tensor import Tensor

PadType = Literal["not_set", "same_upper", "same_lower", "valid"]
PAD_TYPES = ("not_set", "same_upper", "same_lower", "valid")
Numbers = Iterable[int] | None


@dataclass(frozen=True)
class Window:
    """One axis of ``size`` elements, and a window of ``kernel`` points at ``count`` places.

    Elements of the axis lie at 0, ``spacing``, 2 * ``spacing``, ...; at place i, point k of the
    window lies at ``i * stride + k * dilation - begin``. Where a point meets no element, it meets
    padding.
    """

    size: int
    kernel: int
    stride: int
    dilation: int
    begin: int
    count: int
    spacing: int = 1

    @property
    def extent(self) -> int:
        """Positions from the axis's first element to its last."""
        return self.spacing * (self.size - 1) + 1

    @property
    def span(self) -> int:
        """Positions from the window's first point to its last."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def reach(self) -> int:
        """Positions from the first window's first point to the last window's last."""
        return (self.count - 1) * self.stride + self.span

    @property
    def end(self) -> int:
        """Padding behind the last element that windows reach; negative where they leave positions
        out.
        """
        return self.reach - self.begin - self.extent

    @property
    def fewest(self) -> int:
        """Elements in the window that holds the fewest."""
        places, points = (
            np.arange(self.count) * self.stride - self.begin,
            np.arange(self.kernel) * self.dilation,
        )
        positions = places[:, None] + points
        held = (positions >= 0) & (positions < self.extent) & (positions % self.spacing == 0)
        return int(held.sum(1).min())


def spatial_sizes(name: str, t: Tensor, most: int | None = None) -> tuple[int, ...]:
    """Sizes of the axes behind samples and channels. ShapeError unless there are 1 to ``most``, all
    with elements.
    """
    if not isinstance(t, Tensor):
        raise TypeError(
            f"{name}: got t = {type(t).__name__}; expected a popxl.Tensor. Make a constant with "
            "popxl.constant(...) first."
        )
    sizes = t.shape[2:]
    if not sizes or (most is not None and len(sizes) > most):
        axes = "at least one" if most is None else f"1 to {most}"
        raise ShapeError(
            f"{name}: got t {t.spec}; expected [n, c, ...] with {axes} spatial axes. Reshape it."
        )
    if 0 in t.shape[1:]:
        raise ShapeError(
            f"{name}: got t {t.spec}; expected at least one channel, and one element on each axis."
        )
    return sizes


def per_axis(
    name: str,
    parameter: str,
    values: Numbers,
    axes: int,
    default: int = 1,
    least: int = 1,
    each: str = "spatial axis",
) -> tuple[int, ...]:
    """One whole number for each axis; None: the default for all. ShapeError for another number of
    them, or one below ``least``.
    """
    given: Any = (default,) * axes if values is None else values
    numbers = tuple(given) if isinstance(given, Iterable) else (given,)
    whole = all(isinstance(v, (int, np.integer)) and v >= least for v in numbers)
    if not whole or not isinstance(given, Iterable) or len(numbers) != axes:
        raise ShapeError(
            f"{name}: got {parameter} = {values!r}; expected a tuple of {axes}, one whole number "
            f"of at least {least} for each {each}."
        )
    return tuple(int(v) for v in numbers)


def resolve_padding(
    name: str, parameter: str, padding: Numbers, axes: int
) -> tuple[tuple[int, int], ...]:
    """(begin, end) of each axis from ``[begins..., ends...]``."""
    numbers = per_axis(
        name, parameter, padding, 2 * axes, 0, 0, "begin and then each end of the spatial axes"
    )
    return tuple(zip(numbers[:axes], numbers[axes:]))


def check_pad_type(
    name: str, parameter: str, pad_type: PadType | None, padding: Iterable[tuple[int, int]]
) -> None:
    """ValueError for an unknown pad type, ShapeError for one that contradicts explicit padding."""
    if pad_type not in PAD_TYPES:
        raise ValueError(
            f"{name}: got {parameter} = {pad_type!r}; expected one of "
            f"{', '.join(map(repr, PAD_TYPES))}."
        )
    if pad_type != "not_set" and any(map(any, padding)):
        raise ShapeError(
            f"{name}: got {parameter} = {pad_type!r} and padding {list(padding)}; expected one of "
            "them. Leave padding out, or use 'not_set'."
        )


def split_evenly(total: int, pad_type: PadType | None) -> int:
    """How much of the padding of an axis stands before it: half, the odd one behind for
    'same_upper'.
    """
    return total // 2 if pad_type == "same_upper" else total - total // 2


def slide(
    name: str,
    sizes: Iterable[int],
    kernel: Iterable[int],
    stride: Numbers,
    dilation: Numbers,
    padding: Numbers,
    pad_type: PadType | None,
    parameter: str = "pad_type",
    spacing: Numbers = None,
    ceil_mode: bool = False,
) -> tuple[Window, ...]:
    """The windows of each spatial axis.

    'same_upper' and 'same_lower' make ceil(extent / stride) places and pad what these need, 'valid'
    pads nothing. With ceil_mode a last window may reach beyond the end of the padding, if it starts
    before.

    Raises:
        ShapeError: for the wrong number of arguments, or where no window fits.
        ValueError: for an unknown pad type.
    """
    sizes, kernel = tuple(sizes), tuple(kernel)
    axes = len(sizes)
    pads = resolve_padding(name, "padding", padding, axes)
    check_pad_type(name, parameter, pad_type, pads)
    each = zip(
        sizes,
        kernel,
        per_axis(name, "stride", stride, axes),
        per_axis(name, "dilation", dilation, axes),
        per_axis(name, "in_dilations", spacing, axes),
        pads,
    )
    found = []
    for axis, (size, points, step, gap, space, (begin, end)) in enumerate(each):
        one = Window(size, points, step, gap, begin, 1, space)
        if pad_type in ("same_upper", "same_lower"):
            count = -(-one.extent // step)
            begin = split_evenly(max(0, (count - 1) * step + one.span - one.extent), pad_type)
        else:
            room = begin + one.extent + end - one.span
            count = room // step + 1
            count += (
                ceil_mode
                and pad_type != "valid"
                and room % step > 0
                and count * step < begin + one.extent
            )
        if count < 1:
            raise ShapeError(
                f"{name}: got a window of {one.span} positions for {begin} + {one.extent} + {end} "
                f"(padding, elements, padding) on spatial axis {axis}; expected a window that "
                "fits. Use a smaller kernel or dilation, or more padding."
            )
        found.append(Window(size, points, step, gap, begin, count, space))
    return tuple(found)
