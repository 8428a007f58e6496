"""Remote memory of one replica, without a program."""

import numpy as np
import popxl
import pytest
import torch
from popxl_engine.machine.memory import Rows
from popxl_engine.machine.replica import as_tensor

ELEMENTS = 2**22
MIB = 2**20


def resident() -> int:
    """Bytes of memory that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_rows_of_zeros_take_no_memory_until_they_are_loaded() -> None:
    rows, before = Rows((ELEMENTS,), torch.float32, 16), resident()
    zeros = as_tensor(np.broadcast_to(np.float32(0), (ELEMENTS,)))
    for index in range(16):
        rows.store(index, zeros)
    assert resident() - before < 4 * MIB
    rows.load(3)[-1] += 1
    assert rows.load(3)[-2:].tolist() == [0, 1] and not rows.load(2).any()
    rows.store(3, zeros)
    assert not rows.load(3).any()


@pytest.mark.parametrize("value", [-0.0, 1.0, float("nan")])
def test_rows_of_another_number_are_that_number(value: float) -> None:
    rows = Rows((3,), torch.float16, 2)
    rows.store(1, torch.tensor(value, dtype=torch.float16).expand(3))
    expected = torch.full((3,), value, dtype=torch.float16)
    assert rows.load(1).view(torch.int16).tolist() == expected.view(torch.int16).tolist()


def test_a_row_outside_its_buffer_is_refused_whatever_is_stored() -> None:
    for t in (torch.zeros(()).expand(3), torch.ones(3)):
        with pytest.raises(IndexError, match="got offset 2; expected 0 <= offset < 2"):
            Rows((3,), torch.float32, 2).store(2, t)


def test_a_variable_of_zeros_is_kept_and_read_back() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((3,), popxl.float32, 2)
        v = popxl.remote_variable(np.broadcast_to(np.float32(0), (3,)), buffer, 1)
        x = popxl.ops.remote_load(buffer, 1)
        x += 1.0
        popxl.ops.remote_store(buffer, 1, x)
    with popxl.Session(ir) as session:
        assert session.get_tensor_data(v).tolist() == [0, 0, 0]
        session.run()
        assert session.get_tensor_data(v).tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.bool, torch.uint32, torch.complex64])
def test_rows_of_every_type_may_be_zeros(dtype: torch.dtype) -> None:
    rows = Rows((2, 3), dtype, 1)
    rows.store(0, torch.zeros((), dtype=dtype).expand(2, 3))
    assert not rows.load(0).view(torch.uint8).any()
