"""How closely results must agree, by the dtype that they were computed in."""

from typing import Any

import numpy as np
import popxl
from popxl.extensions import float8_e4m3fn, float8_e5m2

TOLERANCE: dict[popxl.dtype, tuple[float, float]] = {
    popxl.float64: (1e-11, 1e-12),
    popxl.float32: (2e-5, 2e-6),
    popxl.float16: (4e-3, 2e-3),
    popxl.bfloat16: (2.5e-2, 1.6e-2),
    popxl.float8_143: (0, 0),  # only made by one rounding, and moved
    popxl.float8_152: (0, 0),
    float8_e4m3fn: (0, 0),
    float8_e5m2: (0, 0),
}
"""(relative, absolute): some ten units in the last place of numbers around one. Other dtypes agree
exactly.
"""

FINITE_DIFFERENCES = (1e-6, 1e-7)
"""The tolerance for central differences with steps of 1e-5 in float64: their own error is 1e-9
where third derivatives are 100.
"""


def assert_close(
    actual: Any,
    expected: Any,
    dtype: popxl.dtype,
    what: str,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Arrays of one shape agree within ``dtype``'s tolerance; NaN and infinities must be in the
    same places.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, (
        f"{what}: shape {actual.shape}, expected {expected.shape}"
    )
    if not dtype.is_floating_point:
        np.testing.assert_array_equal(actual, expected, err_msg=what)
        return
    relative, absolute = TOLERANCE[dtype]
    np.testing.assert_allclose(
        actual.astype(np.float64),
        expected.astype(np.float64),
        rtol=relative if rtol is None else rtol,
        atol=absolute if atol is None else atol,
        err_msg=what,
    )
