"""Numbers of the host that an integer type cannot hold are cast as numpy casts them, and a warning
tells of it: programs of PopXL count on the cast.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import popxl
import pytest
from popxl import ops
from popxl.utils import to_numpy

CASES = [
    (popxl.int32, 1.7, "got 1.7 for int32, which holds whole numbers from -2147483648"),
    (popxl.int32, -1.7, "got -1.7 for int32"),
    (popxl.int32, np.array([2**40 + 3, 1]), r"got 1099511627779 at \[0\] .* it becomes 3"),
    (popxl.int32, [0.0, 0.5], r"got 0.5 at \[1\] for int32"),
    (popxl.uint8, 300, "got 300 for uint8, .* from 0 to 255; it becomes 44"),
    (popxl.uint32, np.array([0, -1], np.int32), "got -1 .*it becomes 4294967295"),
    (popxl.int64, np.uint64(2**63), "got 9223372036854775808 for int64"),
    (popxl.int32, np.broadcast_to(np.float32(0.5), 3), "got 0.5 .*for int32"),
]


def expected(dtype: popxl.dtype, data: Any) -> Any:
    return np.asarray(data).astype(dtype.as_numpy()).tolist()


def variable(dtype: popxl.dtype, data: Any) -> Any:
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(data, dtype, "v")
        ops.add_(v, popxl.constant(0, dtype))
    return popxl.Session(ir).get_tensor_data(v)


def constant(dtype: popxl.dtype, data: Any) -> Any:
    return run(lambda: popxl.constant(data, dtype))


def stream(dtype: popxl.dtype, data: Any) -> Any:
    ir = popxl.Ir()
    with ir.main_graph:
        into = popxl.h2d_stream(np.shape(data), dtype)
        out = popxl.d2h_stream(np.shape(data), dtype)
        ops.host_store(out, ops.host_load(into))
    with popxl.Session(ir) as session:
        return session.run({into: data})[out]


def operand(dtype: popxl.dtype, data: Any) -> Any:
    return run(lambda: popxl.constant(np.zeros(np.shape(data)), dtype) + data)


def array(dtype: popxl.dtype, data: Any) -> Any:
    return to_numpy(data, dtype)


def run(make: Callable[[], popxl.Tensor]) -> Any:
    ir = popxl.Ir()
    with ir.main_graph:
        t = make()
        out = popxl.d2h_stream(t.shape, t.dtype)
        ops.host_store(out, t)
    with popxl.Session(ir) as session:
        return session.run()[out]


@pytest.mark.parametrize("use", [variable, constant, stream, operand, array])
@pytest.mark.parametrize("dtype, data, says", CASES)
def test_numbers_that_an_integer_type_cannot_hold_are_cast_with_a_warning(
    use: Callable[..., Any], dtype: popxl.dtype, data: Any, says: str
) -> None:
    with pytest.warns(RuntimeWarning, match=says):
        found = use(dtype, data)
    assert found.tolist() == expected(dtype, data)


@pytest.mark.parametrize("dtype, number", [(popxl.int32, 1.7), (popxl.uint8, -1)])
def test_a_written_number_is_cast_with_a_warning_that_names_the_variable(
    dtype: popxl.dtype, number: Any
) -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(1, dtype, "v")
        ops.host_store(popxl.d2h_stream((), dtype), v)
    session = popxl.Session(ir)
    with pytest.warns(RuntimeWarning, match=r"^Session.write_variables_data: %v: .*got"):
        session.write_variable_data(v, number)
    assert session.get_tensor_data(v) == expected(dtype, number)


@pytest.mark.parametrize("data", [np.nan, np.inf, 1e300])
def test_what_is_no_integer_at_all_is_told_of(data: float) -> None:
    with pytest.warns(RuntimeWarning, match="got .* for int32"):
        assert to_numpy(data, popxl.int32).dtype == np.int32  # of what value, C does not say


def test_whole_numbers_that_fit_are_cast_in_silence() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert to_numpy([1.0, -(2.0**31)], popxl.int32).tolist() == [1, -(2**31)]
        assert to_numpy(np.uint64(7), popxl.uint8) == 7
