"""Host data: from whatever the user has to numpy arrays, and tables as text."""

import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np

from popxl.dtypes import bfloat16, dtype
from popxl.errors import DTypeError
from popxl.fp8_utils import FLOAT8, FORMATS, scaled_to_fp8
from popxl.fp8_utils import host_pow2scale_cast_to_fp8 as host_pow2scale_cast_to_fp8  # exported
from popxl.spec import check_dtype

ScalarType = int | float | bool
HostTensor = np.ndarray | Iterable[ScalarType]
HostScalarTensor = ScalarType | HostTensor

downcast_np_dtypes = {
    np.dtype("int64"): np.dtype("int32"),
    np.dtype("uint64"): np.dtype("uint32"),
    np.dtype("float64"): np.dtype("float32"),
}


def as_array(x: Any, what: str) -> np.ndarray:
    """An array of what is given. ValueError, which begins with ``what``, for ragged lists."""
    if isinstance(x, np.ndarray):
        return x
    # a torch tensor; torch itself is never imported here
    if hasattr(x, "detach") and hasattr(x, "cpu"):
        x = x.detach().cpu()
        array: np.ndarray = (x.float() if str(x.dtype) == "torch.bfloat16" else x).numpy()
        return array
    try:
        return np.asarray(x)
    except ValueError as error:
        raise ValueError(
            f"{what}: got a {type(x).__name__} that is no array ({error}); expected lists of equal "
            "lengths on each axis. Pad them."
        ) from None


def to_numpy(
    x: HostScalarTensor,
    dtype: dtype | None = None,
    downcast: bool = True,
    copy: bool = True,
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> np.ndarray:
    """A C-contiguous array from a number, list, torch tensor or array.

    Numbers are rounded to the element type, or cast as numpy casts to an integer type. A warning
    tells of those that become infinite, and of those that an integer type cannot hold: fractions,
    NaN, and numbers out of its range.

    Args:
        dtype: element type of the result (float32 stands for bfloat16); None keeps x's own. For a
            float8 type x holds its codes already, or numbers of float16, float32 or float64.
        downcast: with no ``dtype``, narrow 64-bit elements to 32 bits.
        copy: False shares memory with ``x`` where nothing has to change.
        log2_scale: numbers that become float8 are multiplied by 2 to this, from -32 to 31; default:
            0.
        nan_on_overflow: whether those too large for float8 become NaN (default), or else its
            largest number.
    Raises:
        ValueError: ragged lists; a memory-mapped array that would have to be converted, or that has
            64-bit elements.
        TypeError: no real numbers; something else than codes or floating point for a float8 type.
        RuntimeError: a scale out of range, or float8 arguments without numbers that become float8.
    """
    return host_array("to_numpy", x, dtype, downcast, copy, log2_scale, nan_on_overflow)


def host_array(
    what: str,
    x: HostScalarTensor,
    dtype: dtype | None = None,
    downcast: bool = True,
    copy: bool = True,
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> np.ndarray:
    """The same as `to_numpy`; errors begin with ``what`` the data are for, in the user's words."""
    if dtype is not None:
        check_dtype(f"{what}: dtype", dtype)
    if dtype not in FORMATS and (log2_scale is not None or nan_on_overflow is not None):
        raise RuntimeError(
            f"{what}: got log2_scale or nan_on_overflow with dtype {dtype}; expected them "
            "only with float8 types."
        )
    array = as_array(x, what)
    target = array.dtype
    if dtype is not None:
        target = dtype.as_numpy()
    elif downcast:
        target = downcast_np_dtypes.get(array.dtype, array.dtype)
    if isinstance(array, np.memmap):
        if array.dtype in downcast_np_dtypes:
            raise ValueError(
                f"{what}: got a memory-mapped {array.dtype} array; expected elements of 32 bits "
                "or fewer, because it is used without copying. Convert the file, or pass "
                "np.array(x)."
            )
        if array.dtype != target or not array.flags.c_contiguous:
            raise ValueError(
                f"{what}: got a memory-mapped {array.dtype} array; expected a C-contiguous "
                f"{target} array, because it is used without copying. Convert the file, or pass "
                "np.array(x)."
            )
        return array
    if array.dtype == object:
        raise TypeError(f"{what}: got {type(x).__name__} of objects; expected numbers.")
    if dtype in FLOAT8 and array.dtype != target:
        array, copy = _to_float8(array, dtype, log2_scale, nan_on_overflow, what), False
    elif log2_scale is not None or nan_on_overflow is not None:
        raise RuntimeError(
            f"{what}: got log2_scale or nan_on_overflow with codes of {dtype}; expected "
            "them with numbers to convert."
        )
    return _cast(array, target, dtype, copy, what)


def _cast(
    array: np.ndarray, target: np.dtype, dtype: dtype | None, copy: bool, what: str
) -> np.ndarray:
    """TypeError, which begins with ``what``, for data that are no numbers; a warning of numbers
    that the type cannot hold.
    """
    _check_kind(array, target, what)
    if dtype is bfloat16 or (target.kind in "iuf" and not np.can_cast(array.dtype, target)):
        _warn_of_range(array, target, dtype or target, what)
    with np.errstate(over="ignore", invalid="ignore"):  # has been told
        result = (
            np.array(array, dtype=target, order="C", copy=True)
            if copy
            else np.asarray(array, dtype=target, order="C")
        )
    return round_to_bfloat16(result) if dtype is bfloat16 else result


def _check_kind(array: np.ndarray, target: np.dtype, what: str) -> None:
    given = array.dtype
    is_number = given.kind in "biufV" or given.kind == target.kind == "c"
    if given != target and (given.names or not is_number):
        raise DTypeError(
            f"{what}: got {given} data for {target}; expected real numbers. Convert it first."
        )


def _warn_of_range(array: np.ndarray, target: np.dtype, dtype: dtype | np.dtype, what: str) -> None:
    """A warning of numbers that are neither of the type nor rounded to one: that become infinite,
    as masks of attention may, or are cut off or wrapped around, as PopXL casts integers.
    """
    if not array.size:
        return
    lowest, highest = _limits(dtype, target)
    least, most = (array, array) if array.size == 1 else (array.min(), array.max())
    is_inside = lowest <= least.item() and most.item() <= highest  # not so with NaN
    if target.kind == "f":
        if not is_inside and (wrong := _infinite(array, target, dtype)).any():
            _warn(
                f"{what}: {_first(array, wrong)} becomes infinite as {dtype.name}, which ends at "
                f"{highest:.5g}. Write inf where that is meant."
            )
        return
    if array.dtype.kind in "iu":
        if is_inside:
            return
        fits = (array >= lowest) & (array <= highest)
    else:
        x = array.astype(np.float64, copy=False)
        fits = (x >= float(lowest)) & (x < float(highest) + 1) & (x == np.trunc(x))
        if fits.all():
            return
    with np.errstate(invalid="ignore"):
        becomes = array[~fits].flat[0].astype(target)
    _warn(
        f"{what}: got {_first(array, ~fits)} for {dtype.name}, which holds whole numbers from "
        f"{lowest} to {highest}; it becomes {becomes}. Convert the data, or choose a type that "
        "holds it."
    )


def _warn(words: str) -> None:
    warnings.warn(words, RuntimeWarning, stacklevel=2)


@cache
def _limits(dtype: dtype | np.dtype, target: np.dtype) -> tuple[Any, Any]:
    """The least and the largest number of a type."""
    if target.kind != "f":
        return int(np.iinfo(target).min), int(np.iinfo(target).max)
    highest = (2 - 2.0**-7) * 2.0**127 if dtype is bfloat16 else float(np.finfo(target).max)
    return -highest, highest


def _infinite(array: np.ndarray, target: np.dtype, dtype: dtype | np.dtype) -> np.ndarray:
    """The elements where finite numbers become infinite."""
    with np.errstate(over="ignore"):
        result = array.astype(target)
    result = round_to_bfloat16(result) if dtype is bfloat16 else result
    return np.asarray(np.isinf(result) & np.isfinite(array))


def _first(array: np.ndarray, wrong: np.ndarray) -> str:
    """The first of the wrong numbers, and its place."""
    index = tuple(np.argwhere(wrong)[0].tolist())
    return f"{array[index]}" + (f" at {list(index)}" if index else "")


def _to_float8(
    x: np.ndarray,
    dtype: dtype | None,
    log2_scale: int | None,
    nan_on_overflow: bool | None,
    what: str,
) -> np.ndarray:
    if x.dtype not in (np.float16, np.float32, np.float64):
        raise DTypeError(
            f"{what}: got {x.dtype} data for {dtype}; expected float16, float32 or float64, or "
            "the type's codes. Convert it to floating point first."
        )
    return scaled_to_fp8(what, x, dtype, log2_scale or 0, nan_on_overflow is not False)


def is_uniform(x: Any) -> bool:
    """Whether an array is one number seen everywhere (numpy.broadcast_to), which takes no
    memory.
    """
    return isinstance(x, np.ndarray) and x.size > 1 and not any(x.strides)


def to_host_value(
    what: str,
    x: HostScalarTensor,
    dtype: dtype | None = None,
    downcast: bool = True,
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> np.ndarray:
    """The same as `host_array`, but one number seen everywhere stays so: large variables of zeros
    take no host memory.
    """
    if isinstance(x, np.ndarray) and is_uniform(x):
        one = x[(0,) * x.ndim]
        value = host_array(what, one, dtype, downcast, True, log2_scale, nan_on_overflow)
        return np.broadcast_to(value, x.shape)
    return host_array(what, x, dtype, downcast, True, log2_scale, nan_on_overflow)


_AT_ONCE = 2**20
"""Numbers that are rounded at a time, which takes several times their memory."""


def round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round float32 values to the nearest bfloat16 (ties to even), still as float32; where all are
    such, x itself.
    """
    flat = np.ascontiguousarray(x, np.float32).reshape(-1)
    found = flat
    for at in range(0, flat.size, _AT_ONCE):
        part = flat[at : at + _AT_ONCE]
        bits = part.view(np.uint32)
        if not (bits & np.uint32(0xFFFF)).any():
            continue
        if found is flat:
            found = flat.copy()
        tie = (bits >> np.uint32(16)) & np.uint32(1)  # to the even of the two neighbours
        rounded = ((bits + np.uint32(0x7FFF) + tie) & np.uint32(0xFFFF0000)).view(np.float32)
        found[at : at + _AT_ONCE] = np.where(np.isfinite(part), rounded, part)
    return found.reshape(x.shape)


def table_to_string(
    rows: Sequence[Sequence[Any]], delimiter: str = " | ", header: bool = True
) -> str:
    """Align rows of cells in columns; with ``header`` a line of dashes follows the first row."""
    text = [[str(cell) for cell in row] for row in rows]
    widths = [
        max(len(row[i]) for row in text if i < len(row))
        for i in range(max(map(len, text), default=0))
    ]
    lines = [
        delimiter.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
        for row in text
    ]
    if header and lines:
        lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)
