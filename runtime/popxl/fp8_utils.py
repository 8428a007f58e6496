"""8-bit floating point on the host: both formats, and conversions between their codes and numpy's
wider types.

A code is a sign bit, then exponent, then mantissa. Exponent 0 is for subnormal numbers; there is no
infinity and no negative zero: its code, 0x80, is the only NaN. Source: Noune et al. 2022,
arXiv:2206.02915.

============  ========  ========  ====  =======  ================
type          exponent  mantissa  bias  largest  smallest above 0
============  ========  ========  ====  =======  ================
float8_143    4 bits    3 bits    8     240      2**-10
float8_152    5 bits    2 bits    16    57344    2**-17
============  ========  ========  ====  =======  ================
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from popxl import dtypes

LARGEST_CODE = 0x7F
NAN_CODE = 0x80
SCALES = range(-32, 32)
"""Values of ``log2_scale`` that casts and products take."""
MOST_SCALE = 31
"""Scales that are searched for lie between this and its negative, so that the inverse is a scale,
too.
"""


@dataclass(frozen=True)
class Format:
    """One of the formats: ``exponent`` and ``mantissa`` in bits, and the exponent's bias."""

    exponent: int
    mantissa: int
    bias: int

    @property
    def largest(self) -> float:
        """The largest number."""
        return math.ldexp(2 - 2.0**-self.mantissa, 2**self.exponent - 1 - self.bias)

    @cached_property
    def numbers(self) -> np.ndarray:
        """The number of each code from 0 to 255: float64 [256]."""
        codes = np.arange(256)
        exponents = (codes & LARGEST_CODE) >> self.mantissa
        mantissas = codes & (2**self.mantissa - 1)
        mantissas[exponents > 0] += 2**self.mantissa
        sizes = np.ldexp(
            mantissas.astype(np.float64), np.maximum(exponents, 1) - self.bias - self.mantissa
        )
        numbers: np.ndarray = np.where(codes > NAN_CODE, -sizes, sizes)
        numbers[NAN_CODE] = np.nan
        return numbers

    def codes(self, x: np.ndarray, nan_on_overflow: bool) -> np.ndarray:
        """The codes of the nearest numbers, ties to the even code: float64 [a] -> uint8 [a].

        Args:
            nan_on_overflow: whether what rounds beyond the largest number becomes NaN, or else the
                largest number.
        """
        sizes = np.abs(x)
        lowest = 1 - self.bias
        exponents = np.maximum(np.where(sizes > 0, np.frexp(sizes)[1] - 1, lowest), lowest)
        # of the spacing between this binade's numbers
        steps = np.rint(np.ldexp(sizes, self.mantissa - exponents))
        codes = (exponents - lowest) * 2.0**self.mantissa + steps
        codes = np.minimum(codes, NAN_CODE if nan_on_overflow else LARGEST_CODE)  # NaN stays
        negative = (x < 0) & (codes > 0) & (codes < NAN_CODE)
        return np.asarray(np.where(np.isnan(x), NAN_CODE, codes + NAN_CODE * negative)).astype(
            np.uint8
        )


FORMATS: dict[dtypes.dtype, Format] = {
    dtypes.float8_143: Format(exponent=4, mantissa=3, bias=8),
    dtypes.float8_152: Format(exponent=5, mantissa=2, bias=16),
}
"""PopXL's own types."""
FLOAT8 = (*FORMATS, dtypes.float8_e4m3fn, dtypes.float8_e5m2)
"""All types of 8-bit floating point. Programs call ops of the last two by `popxl.extensions`."""


def _format(where: str, dtype: Any) -> Format:
    if dtype not in FORMATS:
        raise RuntimeError(
            f"{where}: got dtype {dtype}; expected popxl.float8_143 or popxl.float8_152."
        )
    return FORMATS[dtype]


def largest(dtype: dtypes.dtype | None) -> float:
    """The largest number of a float8 type. RuntimeError for another type."""
    return _format("largest", dtype).largest


def _check_scale(where: str, log2_scale: int) -> None:
    if log2_scale not in SCALES:
        raise RuntimeError(
            f"{where}: got log2_scale {log2_scale}; expected {SCALES.start} <= log2_scale < "
            f"{SCALES.stop}."
        )


def _wide(where: str, src: Any) -> np.ndarray:
    """``src`` as float64. RuntimeError unless it is an array of float16, float32 or float64."""
    if not isinstance(src, np.ndarray) or src.dtype not in (np.float16, np.float32, np.float64):
        given = src.dtype if isinstance(src, np.ndarray) else type(src).__name__
        raise RuntimeError(
            f"{where}: got src of {given}; expected an array of float16, float32 or float64."
        )
    return src.astype(np.float64)


def host_pow2scale_cast_to_fp8(
    src: np.ndarray,
    dtype: dtypes.dtype | None = None,
    log2_scale: int = 0,
    nan_on_overflow: bool = True,
) -> np.ndarray:
    """``src * 2**log2_scale``, rounded once to the nearest number of a float8 type, ties to the
    even code.

    Args:
        src: float16, float32 or float64 [a].
        dtype: float8_143 or float8_152.
        log2_scale: from -32 to 31.
        nan_on_overflow: whether what rounds beyond the type's largest number becomes NaN, or else
            that number.
    Returns:
        codes, [a] of ``dtype.as_numpy()``, a structure of one byte.
    Raises:
        RuntimeError: for other types of ``src`` and ``dtype``, or a scale out of range.
    """
    where = "host_pow2scale_cast_to_fp8"
    return scaled_to_fp8(where, src, dtype, log2_scale, nan_on_overflow)


def scaled_to_fp8(
    where: str,
    src: np.ndarray,
    dtype: dtypes.dtype | None,
    log2_scale: int,
    nan_on_overflow: bool,
) -> np.ndarray:
    """The same as `host_pow2scale_cast_to_fp8`; errors begin with ``where``."""
    form, wide = _format(where, dtype), _wide(where, src)
    _check_scale(where, log2_scale)
    assert dtype is not None
    return form.codes(np.asarray(np.ldexp(wide, log2_scale)), nan_on_overflow).view(
        dtype.as_numpy()
    )


def host_pow2scale_cast_from_fp8(
    src: np.ndarray, dtype: dtypes.dtype | None = None, log2_scale: int = 0
) -> np.ndarray:
    """The numbers that float8 codes stand for, times ``2**log2_scale``, rounded once to a wider
    type.

    Args:
        src: codes, [a] of float8_143.as_numpy() or float8_152.as_numpy().
        dtype: float16, float32 or float64.
        log2_scale: from -32 to 31.
    Returns:
        [a] of ``dtype``; what it cannot hold is an infinity.
    Raises:
        RuntimeError: for other types of ``src`` and ``dtype``, or a scale out of range.
    """
    where = "host_pow2scale_cast_from_fp8"
    form = next(
        (
            f
            for of, f in FORMATS.items()
            if isinstance(src, np.ndarray) and of.as_numpy() == src.dtype
        ),
        None,
    )
    if form is None:
        given = src.dtype if isinstance(src, np.ndarray) else type(src).__name__
        raise RuntimeError(
            f"{where}: got src of {given}; expected an array of popxl.float8_143.as_numpy() "
            "or 152's."
        )
    if dtype not in (dtypes.float16, dtypes.float32, dtypes.float64):
        raise RuntimeError(
            f"{where}: got dtype {dtype}; expected popxl.float16, float32 or float64."
        )
    _check_scale(where, log2_scale)
    with np.errstate(over="ignore"):
        return np.asarray(np.ldexp(form.numbers[src.view(np.uint8)], log2_scale)).astype(
            dtype.as_numpy()
        )


def host_fp8_mse_scale(src: np.ndarray, dtype: dtypes.dtype | None = None) -> tuple[float, int]:
    """The log2 scale with the least mean squared error of casting ``src`` to float8 with it, and
    back.

    Numbers that overflow count as the largest. Two scales come into question. At the largest scale
    at which nothing overflows, all that smaller scales represent is represented, too. At the next
    one the largest element may be clipped, to no less than a half; beyond it clipping costs more
    than what underflows can gain in an array of fewer than 2**32 elements.

    Args:
        src: float16, float32 or float64, finite.
        dtype: float8_143 or float8_152.
    Returns:
        (mean squared error, scale from -31 to 31). Of two equally good scales the smaller.
    Raises:
        RuntimeError: for other types of ``src`` and ``dtype``, or elements that are not finite.
    """
    where = "host_fp8_mse_scale"
    form, wide = _format(where, dtype), _wide(where, src)
    if not np.isfinite(wide).all():
        raise RuntimeError(f"{where}: got src with NaN or infinities; expected finite numbers.")
    fitting = _fitting_scale(float(np.abs(wide).max(initial=0)), form)
    scales = [min(max(scale, -MOST_SCALE), MOST_SCALE) for scale in (fitting, fitting + 1)]
    return min((_squared_error(wide, form, scale), scale) for scale in scales)


def _fitting_scale(amax: float, form: Format) -> int:
    """The largest scale with which ``amax`` does not overflow."""
    if amax == 0:
        return MOST_SCALE
    (size, exponent), (most, highest) = math.frexp(amax), math.frexp(form.largest)
    return highest - exponent - (size > most)


def _squared_error(x: np.ndarray, form: Format, scale: int) -> float:
    cast = np.ldexp(
        form.numbers[form.codes(np.asarray(np.ldexp(x, scale)), nan_on_overflow=False)], -scale
    )
    return float(np.square(cast - x).sum() / max(x.size, 1))


def host_fp8_mse_scale_pb(src: np.ndarray, dtype: dtypes.dtype | None = None) -> tuple[float, int]:
    """`host_fp8_mse_scale` under the name of PopXL's native implementation of it."""
    return host_fp8_mse_scale(src, dtype)
