"""Samples of combining what shares an index, and of gathers that go group by group."""

import numpy as np
import popxl
import torch
from popxl.errors import DTypeError, ShapeError

from .sample import Operand, Refusal, Sample

BY_PAIRS = {
    "sum": lambda old, value: old + value,
    "max": np.maximum,
    "min": np.minimum,
    "none": lambda old, value: value,
}


def reduced(
    data,
    indices,
    reduction,
    initial_values=None,
    axis=0,
    axis_size=None,
    enable_index_broadcast=True,
):
    """Element after element: the first one in a slot without an initial value is put there, the
    others combine.
    """
    axis %= data.ndim
    if indices.ndim < data.ndim:
        indices = indices.reshape([-1 if a == axis else 1 for a in range(data.ndim)])
    indices = np.broadcast_to(indices, data.shape)
    shape = list(data.shape)
    shape[axis] = axis_size or initial_values.shape[axis]
    result = np.zeros(shape, data.dtype) if initial_values is None else initial_values.copy()
    is_filled = np.full(shape, initial_values is not None)
    for position in np.ndindex(*data.shape):
        slot = (*position[:axis], indices[position], *position[axis + 1 :])
        result[slot] = (
            BY_PAIRS[reduction](result[slot], data[position]) if is_filled[slot] else data[position]
        )
        is_filled[slot] = True
    return result


def torch_reduced(data, indices, reduction, initial_values=None, axis=0, axis_size=None, **attrs):
    axis %= data.ndim
    index = indices.long()
    if index.ndim < data.ndim:
        index = index.reshape([-1 if a == axis else 1 for a in range(data.ndim)])
    shape = list(data.shape)
    shape[axis] = axis_size or initial_values.shape[axis]
    start = torch.zeros(shape, dtype=data.dtype) if initial_values is None else initial_values
    name = {"sum": "sum", "max": "amax", "min": "amin"}[reduction]
    return start.scatter_reduce(
        axis, index.expand(data.shape), data, name, include_self=initial_values is not None
    )


def grouped(data, indices, axis, group_size, initial_values=None, **attrs):
    each = initial_values if initial_values is not None else [None] * group_size
    axis = axis % data.ndim - 1
    return np.stack(
        [
            reduced(d, i, initial_values=v, axis=axis, **attrs)
            for d, i, v in zip(data, indices, each)
        ]
    )


def torch_grouped(data, indices, axis, group_size, initial_values=None, **attrs):
    each = initial_values if initial_values is not None else [None] * group_size
    axis = axis % data.ndim - 1
    pieces = [
        torch_reduced(d, i, initial_values=v, axis=axis, **attrs)
        for d, i, v in zip(data, indices, each)
    ]
    return torch.stack(pieces)


def take_in_groups(t, indices, axis=0, group_size=1, **attrs):
    if group_size in (1, None):
        return np.take(t, indices, axis)
    return np.stack([np.take(group, i, axis % t.ndim - 1) for group, i in zip(t, indices)])


def take_or_zero_in_groups(t, indices, axis, group_size, zero_OOR):
    taken = []
    for group, i in zip(t, indices):
        moved = np.moveaxis(group, axis % t.ndim - 1, 0)
        padded = np.concatenate([moved, np.zeros_like(moved[:1])])
        rows = padded[np.where((i >= 0) & (i < len(moved)), i, len(moved))]
        assert i.ndim == 1
        taken.append(np.moveaxis(rows, 0, axis % t.ndim - 1))
    return np.stack(taken)


def add_in_groups(dy, indices, shape, axis, zero_OOR):
    result = np.zeros(shape, dy.dtype)
    for g, i in np.ndenumerate(indices):
        if 0 <= i < shape[axis]:
            target = (g[0], *[slice(None)] * (axis - 1), i)
            result[target] += dy[(g[0], *[slice(None)] * (axis - 1), *g[1:])]
    return result


ROWS = np.array([2, 0, 2, 3, 0, 2], np.int32)
"""Slots 1 and 4 of five stay without an element."""
ELEMENTS = np.array([[0, 2, 1], [3, 2, 1], [0, 0, 1], [1, 2, 3]], np.uint32)
APART = Operand((6, 3), distinct=True)
GROUPS = np.array([[1, 0, 1, 3], [2, 2, 0, 1]], np.int32)
UINT = np.array([[3, 2**32 - 5], [7, 9], [8, 1]], np.uint32)
LARGE = np.array([[3, 2**64 - 5], [7, 9], [2**63, 1]], np.uint64)
INT = np.array([[3, -2], [-7, 9], [8, 1]], np.int32)


def use(reduction, size=None, axis=0, **attrs):
    return {
        "reduction": reduction,
        "axis": axis,
        **({} if size is None else {"axis_size": size}),
        **attrs,
    }


SAMPLES = [
    Sample("scatter_reduce", operands={"data": (6, 3), "indices": ROWS}, attrs=use("sum", 5), oracle=reduced,
           autograd=torch_reduced),
    Sample("scatter_reduce", operands={"data": (6,), "indices": ROWS}, attrs=use("sum", 4, -1), oracle=reduced,
           autograd=torch_reduced),
    Sample("scatter_reduce", operands={"data": Operand((3, 6, 2), layout="transposed"), "indices": ROWS},
           attrs=use("sum", 5, -2), oracle=reduced, autograd=torch_reduced),
    Sample("scatter_reduce", operands={"data": (4, 3), "indices": ELEMENTS}, attrs=use("sum", 4,
           enable_index_broadcast=False), oracle=reduced, autograd=torch_reduced),
    Sample("scatter_reduce", operands={"data": (4, 3), "indices": ELEMENTS}, attrs=use("sum", 6, 1), oracle=reduced,
           autograd=torch_reduced),
    Sample("scatter_reduce", operands={"data": (4, 3), "indices": ELEMENTS[:, :1]}, attrs=use("sum", 4),
           oracle=reduced, autograd=torch_reduced),
    Sample("scatter_reduce", operands={"data": (4, 3), "indices": ELEMENTS[:1]}, attrs=use("sum", 4), oracle=reduced,
           autograd=torch_reduced),
    Sample("scatter_reduce", operands={"data": (6, 3), "indices": ROWS, "initial_values": (5, 3)}, attrs=use("sum"),
           oracle=reduced, autograd=torch_reduced),
    Sample("scatter_reduce", operands={"data": APART, "indices": ROWS}, attrs=use("max", 5), oracle=reduced,
           autograd=torch_reduced),
    Sample("scatter_reduce", operands={"data": APART, "indices": ROWS}, attrs=use("min", 5), oracle=reduced,
           autograd=torch_reduced),
    Sample("scatter_reduce", operands={"data": APART, "indices": ROWS, "initial_values": Operand((5, 3), low=-1.0,
           distinct=True)}, attrs=use("max", 5), oracle=reduced, autograd=torch_reduced),
    Sample("scatter_reduce", operands={"data": APART, "indices": ROWS, "initial_values": Operand((5, 3), low=-2.7,
           distinct=True)}, attrs=use("min"), oracle=reduced, autograd=torch_reduced),
    Sample("scatter_reduce", operands={"data": (6, 3), "indices": ROWS}, attrs=use("none", 5), oracle=reduced),
    Sample("scatter_reduce", operands={"data": (6, 3), "indices": ROWS, "initial_values": (5, 3)}, attrs=use("none"),
           oracle=reduced),
    Sample("scatter_reduce", operands={"data": (4, 3), "indices": ELEMENTS, "initial_values": (4, 7)},
           attrs=use("none", 7, 1), oracle=reduced),
    Sample("scatter_reduce", operands={"data": UINT, "indices": ROWS[:3]}, attrs=use("sum", 3), oracle=reduced),
    Sample("scatter_reduce", operands={"data": UINT, "indices": ROWS[:3]}, attrs=use("max", 3), oracle=reduced),
    Sample("scatter_reduce", operands={"data": LARGE, "indices": ROWS[:3]}, attrs=use("max", 3), oracle=reduced),
    Sample("scatter_reduce", operands={"data": UINT, "indices": ROWS[:3], "initial_values": UINT},
           attrs=use("none"), oracle=reduced),
    Sample("scatter_reduce", operands={"data": INT, "indices": ROWS[:3]}, attrs=use("min", 4), oracle=reduced),
    Sample("scatter_reduce", operands={"data": (6, 3), "indices": ROWS}, attrs=use("sum", 5, group_size=1),
           build=popxl.ops.grouped_scatter_reduce,
           oracle=lambda data, indices, group_size, **attrs: reduced(data, indices, **attrs)),
    Sample("scatter_reduce", operands={"data": (2, 4, 3), "indices": GROUPS}, attrs=use("sum", 4, 1, group_size=2),
           build=popxl.ops.grouped_scatter_reduce, oracle=grouped, autograd=torch_grouped),
    Sample("scatter_reduce", operands={"data": (2, 4), "indices": GROUPS}, attrs=use("sum", 5, -1, group_size=2),
           build=popxl.ops.grouped_scatter_reduce, oracle=grouped, autograd=torch_grouped),
    Sample("scatter_reduce", operands={"data": Operand((2, 3, 4), distinct=True), "indices": GROUPS,
           "initial_values": Operand((2, 3, 5), distinct=True, low=-1.5)}, attrs=use("max", 5, 2, group_size=2),
           build=popxl.ops.grouped_scatter_reduce, oracle=grouped, autograd=torch_grouped),
    Sample("scatter_reduce", operands={"data": (2, 4, 3), "indices": GROUPS[:, :, None]}, attrs=use("none", 4, 1,
           group_size=2), build=popxl.ops.grouped_scatter_reduce, oracle=grouped),
    Sample("groupedgather", operands=((3, 5, 2), np.array([[0, 4], [4, 4], [1, 3]], np.int32)), attrs={"axis": 1,
           "group_size": 3}, oracle=take_in_groups),
    Sample("groupedgather", operands=(Operand((2, 3, 5), layout="transposed"), np.array([[[0, 4], [1, 1]],
           [[2, 3], [0, 0]]], np.uint32)), attrs={"axis": -1, "group_size": 2}, oracle=take_in_groups),
    Sample("groupedgather", operands=((2, 3, 5), np.array([2, 0], np.int32)), attrs={"axis": 1, "group_size": 2},
           oracle=take_in_groups),
    Sample("groupedgather", operands=((0, 3, 5), np.zeros((0, 2), np.int32)), attrs={"axis": 1, "group_size": 0},
           oracle=lambda t, indices, **attrs: np.zeros((0, 2, 5), t.dtype)),
    Sample("groupedgather", operands=((2, 3, 4), np.array([[-1, 2, 4], [3, 0, 9]], np.int32)), attrs={"axis": 2,
           "group_size": 2, "zero_OOR": True}, oracle=take_or_zero_in_groups),
    Sample("groupedgather", operands=(np.stack([UINT, UINT + 9]), np.array([[2, 0], [1, 1]], np.int32)),
           attrs={"axis": 1, "group_size": 2}, oracle=take_in_groups),
    Sample("groupedgather_grad", operands={"dy": (2, 3, 4), "indices": np.array([[1, 0, 1], [4, 4, 2]], np.int32)},
           attrs={"shape": (2, 5, 4), "axis": 1, "zero_OOR": False}, oracle=add_in_groups),
    Sample("groupedgather_grad", operands={"dy": (2, 4, 3), "indices": np.array([[1, 7, 1], [-1, 4, 2]], np.int32)},
           attrs={"shape": (2, 4, 5), "axis": 2, "zero_OOR": True}, oracle=add_in_groups),
]  # fmt: skip


def refuse(operands, attrs, error, says, op="scatter_reduce"):
    build = getattr(popxl.ops, op)
    return Refusal("scatter_reduce" if "scatter" in op else op, operands=operands, attrs=attrs, error=error, says=says,
                   build=build)  # fmt: skip


DATA = {"data": (6, 3), "indices": ROWS}
PAIR = {"data": (2, 4, 3), "indices": GROUPS}
GATHER = ((3, 5, 2), np.array([[0, 4], [4, 4], [1, 3]], np.int32))

REFUSALS = [
    refuse({"data": Operand((6, 3), popxl.complex64), "indices": np.zeros(6, np.int32)}, use("max", 4), DTypeError,
           "expected real numbers"),
    refuse(DATA, use("sum"), ValueError, "neither initial_values nor axis_size"),
    refuse(DATA, use("mean", 4), ValueError, "one of 'sum', 'max', 'min', 'none'"),
    refuse(DATA, use("sum", 0), ShapeError, "expected at least 1"),
    refuse(DATA, use("sum", 4, 2), ShapeError, "-2 <= axis < 2"),
    refuse(DATA, use("sum", 4, 1), ShapeError, r"shape \[3\], one for each slice, or \[6, 3\]"),
    refuse({"data": (4, 3), "indices": ELEMENTS[:1]}, use("sum", 4, enable_index_broadcast=False), ShapeError,
           r"one for each element\."),
    refuse({"data": (6, 3), "indices": (6,)}, use("sum", 4), DTypeError, "expected integers"),
    refuse({"data": Operand((6, 3), popxl.bool), "indices": ROWS}, use("sum", 4), DTypeError, "expected numbers"),
    refuse({**DATA, "initial_values": (5, 2)}, use("sum"), ShapeError, "data's shape but for axis 0"),
    refuse({**DATA, "initial_values": (5,)}, use("sum"), ShapeError, "data's shape but for axis 0"),
    refuse({**DATA, "initial_values": (5, 3)}, use("sum", 4), ShapeError, "axis_size 4"),
    refuse({**DATA, "initial_values": Operand((5, 3), popxl.int32)}, use("sum"), DTypeError, "equal dtypes"),
    refuse({"data": (6, 3)}, use("sum", 4, indices=[0] * 6), TypeError, "indices = list"),
    refuse(DATA, use("sum", 4, initial_values=0.0), TypeError, "initial_values = float"),
    refuse(PAIR, use("sum", 4, 0, group_size=2), ShapeError, "another axis than theirs", "grouped_scatter_reduce"),
    refuse(PAIR, use("sum", 4, 1, group_size=4), ShapeError, "the groups as first axis", "grouped_scatter_reduce"),
    refuse({"data": (2, 4, 3), "indices": GROUPS[0]}, use("sum", 4, 1, group_size=2), ShapeError, "as first axis",
           "grouped_scatter_reduce"),
    refuse(GATHER, {"group_size": 3}, ShapeError, "another axis than theirs", "groupedgather"),
    refuse(GATHER, {"axis": 1, "group_size": 2}, ShapeError, "the groups as first axis", "groupedgather"),
    refuse(GATHER, {"axis": 3, "group_size": 3}, ShapeError, "-3 <= axis < 3", "groupedgather"),
    refuse((GATHER[0], (3, 2)), {"axis": 1, "group_size": 3}, DTypeError, "expected integers", "groupedgather"),
]  # fmt: skip
