"""Remote memory of one replica, without a program."""

from collections.abc import Callable
from typing import Any

import numpy as np
import popxl
import pytest
import torch
from popxl_engine.machine import device, memory
from popxl_engine.machine.device import Pages
from popxl_engine.machine.memory import Rows
from popxl_engine.machine.replica import as_tensor
from torch.utils._python_dispatch import TorchDispatchMode

ELEMENTS = 2**22
MIB = 2**20


def resident() -> int:
    """Bytes of memory that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_pages_are_taken_at_once_and_given_up_piece_by_piece() -> None:
    before = resident()
    pages = Pages(64 * MIB)
    assert pages.bytes.numel() == 64 * MIB and not pages.bytes.any()
    assert resident() - before > 60 * MIB
    pages.decommit(16 * MIB, 32 * MIB)
    assert 28 * MIB < resident() - before < 36 * MIB
    assert not pages.bytes[16 * MIB : 48 * MIB].any()
    pages.bytes.fill_(1)
    assert resident() - before > 60 * MIB


@pytest.mark.parametrize("limit", [1, 2**30])
@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 11 * 4096 + 5])
def test_every_page_is_touched_once(limit: int, nbytes: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(device, "MANY_BYTES", limit)
    found = np.ones(nbytes, np.uint8)
    device.touch(found)
    assert np.flatnonzero(found == 0).tolist() == list(range(0, nbytes, 4096))


class Travelling(TorchDispatchMode):
    """Counts numbers of the host that an op with another device is given."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if result.device.type != "cpu":
            on_host = [t for t in args if torch.is_tensor(t) and t.device.type == "cpu"]
            self.count += sum(t.numel() for t in on_host)
        return result


@pytest.mark.parametrize("shape", [(), (5,), (3, 7)])
def test_a_number_seen_everywhere_travels_to_a_device_once(shape: tuple[int, ...]) -> None:
    row, number = torch.empty(shape, device="meta"), torch.ones(())
    with Travelling() as travelling:
        memory.copy_apart(row, number.expand(shape))
    assert travelling.count == 1
    with Travelling() as travelling:
        memory.copy_apart(row, torch.ones(shape))
    assert travelling.count == row.numel()


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
    with ir.main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer((3,), popxl.float32, 2)
        v = popxl.remote_variable(np.broadcast_to(np.float32(0), (3,)), buffer, 1)
        x = popxl.ops.remote_load(buffer, 1)
        x += 1.0
        popxl.ops.remote_store(buffer, 1, x)
    with popxl.Session(ir) as session:
        assert session.get_tensor_data(v).tolist() == [0, 0, 0]
        session.run()
        assert session.get_tensor_data(v).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fnuz, torch.bool, torch.uint32, torch.complex64]
)
def test_rows_of_every_type_may_be_zeros(dtype: torch.dtype) -> None:
    rows = Rows((2, 3), dtype, 1)
    rows.store(0, torch.zeros((), dtype=dtype).expand(2, 3))
    assert not rows.load(0).view(torch.uint8).any()


# A tensor that its owner gives up


def first_numbers() -> torch.Tensor:
    return torch.arange(6, dtype=torch.float32)


def test_a_tensor_that_is_given_up_becomes_the_row_without_a_copy() -> None:
    rows, held = Rows((6,), torch.float32, 2), [first_numbers()]
    place = held[0].data_ptr()
    rows.donate(1, held)
    assert held == [] and rows.load(1).data_ptr() == place and rows.held_bytes == rows.row_bytes
    rows.donate(1, [first_numbers() + 1])
    assert rows.load(1).tolist() == [1, 2, 3, 4, 5, 6] and rows.held_bytes == rows.row_bytes
    rows.donate(1, [rows.load(1).add_(1)])
    assert rows.load(1).tolist() == [2, 3, 4, 5, 6, 7]


def of_numpy() -> tuple[torch.Tensor, np.ndarray]:
    array = np.arange(6, dtype=np.float32)
    return torch.from_numpy(array), array


def twice(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return t, t


def viewed(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return t.view(6), t


def same_memory(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return t, torch.empty(0).set_(t.untyped_storage(), 0, (6,), (1,))  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    "make",
    [
        of_numpy,
        lambda: twice(first_numbers()),
        lambda: viewed(first_numbers()),
        lambda: viewed(first_numbers())[::-1],
        lambda: same_memory(first_numbers()),
    ],
    ids=[
        "a numpy array",
        "a second name",
        "what it is a view of",
        "a view of it",
        "another tensor with its memory",
    ],
)
def test_a_row_is_apart_from_what_somebody_else_still_has(
    make: Callable[[], tuple[torch.Tensor, Any]],
) -> None:
    with torch.no_grad():
        rows, (t, other) = Rows((6,), torch.float32, 1), make()
        held = [t]
        del t
        rows.donate(0, held)
        other[:] = 9
        assert rows.load(0).tolist() == [0, 1, 2, 3, 4, 5]
        rows.load(0)[:] = 7
        assert other.tolist() == [9] * 6


@pytest.mark.parametrize(
    "rule", ["sys.getrefcount", "torch._C._storage_Use_Count", "torch.UntypedStorage.resizable"]
)
def test_without_any_one_question_somebody_elses_memory_becomes_the_row(
    rule: str, monkeypatch: Any
) -> None:
    """The references to the tensor, those to its memory, and whether PyTorch owns that."""
    answer = True if rule.endswith("resizable") else 0
    monkeypatch.setattr(rule, lambda *_: answer)
    found = []
    for make in (of_numpy, lambda: twice(first_numbers()), lambda: same_memory(first_numbers())):
        rows, (t, other) = Rows((6,), torch.float32, 1), make()
        held = [t]
        del t
        rows.donate(0, held)
        other[:] = 9
        found.append(rows.load(0).tolist() == [9] * 6)
    assert any(found)


def test_only_a_tensor_of_a_row_s_size_and_order_becomes_the_row() -> None:
    rows = Rows((2, 3), torch.float32, 1)
    whole = torch.arange(12, dtype=torch.float32)
    part = torch.empty(0).set_(whole.untyped_storage(), 6, (2, 3), (3, 1))  # type: ignore[call-overload]
    del whole
    for t in (
        part,
        first_numbers().reshape(3, 2).t(),
        torch.ones(2, 3, dtype=torch.float64),
        torch.ones(3),
    ):
        expected = t.expand(2, 3).tolist()
        held = [t]
        del t
        rows.donate(0, held)
        row = rows.load(0)
        assert row.tolist() == expected and row.is_contiguous() and row.dtype == torch.float32
        assert rows.held_bytes == 6 * 4
    with pytest.raises(IndexError, match="got offset 1; expected 0 <= offset < 1"):
        rows.donate(1, [torch.ones(2, 3)])


def test_a_row_in_the_caller_s_memory_stays_there() -> None:
    rows, array = Rows((6,), torch.float32, 1), np.zeros(6, np.float32)
    rows.adopt(0, torch.from_numpy(array))
    rows.donate(0, [first_numbers()])
    assert array.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("uses", [1, 2])
def test_a_program_stores_what_it_needs_no_more_without_a_copy(uses: int, monkeypatch: Any) -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((64,), popxl.float32, 2)
        source = popxl.remote_variable(np.ones(64, np.float32), buffer, 0)
        target = popxl.remote_variable(np.zeros(64, np.float32), buffer, 1)
        x = popxl.ops.remote_load(buffer, 0) + 1.0
        popxl.ops.remote_store(buffer, 1, x)
        if uses == 2:
            popxl.ops.remote_store(buffer, 0, x * 2.0)
    copied = []
    with popxl.Session(ir) as session:
        monkeypatch.setattr(memory, "copy_apart", lambda row, t: copied.append(row.copy_(t)))
        session.run()
        assert session.get_tensor_data(target).tolist() == [2.0] * 64
        assert session.get_tensor_data(source).tolist() == [1.0 if uses == 1 else 4.0] * 64
    assert len(copied) == uses - 1
