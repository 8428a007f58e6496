"""Samples of reading and writing at computed positions."""

import numpy as np
import popxl
import torch
from popxl import ops
from popxl.errors import DTypeError, GraphError, ShapeError
from popxl.ops.indexing import take_along_axis

from .sample import Operand, Refusal, Same, Sample

INDICES = np.array([[0, 4, 4], [1, 0, 2]], np.int32)


def take(t, indices, axis=0, **attrs):
    return np.take(t, indices, axis)


def torch_take(t, indices, axis=0, **attrs):
    axis %= t.ndim
    taken = t.index_select(axis, indices.reshape(-1).long())
    return taken.reshape((*t.shape[:axis], *indices.shape, *t.shape[axis + 1 :]))


def take_or_zero(t, indices, axis=0, **attrs):
    padded = np.concatenate(
        [t, np.zeros((*t.shape[:axis], 1, *t.shape[axis + 1 :]), t.dtype)], axis
    )
    inside = (indices >= 0) & (indices < t.shape[axis])
    return np.take(padded, np.where(inside, indices, t.shape[axis]), axis)


def add_slices(dy, indices, shape, axis, zero_OOR):
    result = np.zeros(shape, dy.dtype)
    moved = np.moveaxis(result, axis, 0)
    slices = np.moveaxis(dy.reshape(*shape[:axis], -1, *shape[axis + 1 :]), axis, 0)
    for i, index in enumerate(indices.reshape(-1)):
        if not zero_OOR or 0 <= index < shape[axis]:
            moved[index] += slices[i]
    return result


def put(t, indices, values, axis=0):
    result = t.copy()
    for position in np.ndindex(*values.shape):
        target = list(position)
        target[axis] = indices[position]
        result[tuple(target)] = values[position]
    return result


def add_elements(dy, indices, shape, axis):
    result = np.zeros(shape, dy.dtype)
    for position in np.ndindex(*dy.shape):
        target = list(position)
        target[axis] = indices[position]
        result[tuple(target)] += dy[position]
    return result


def sorted_topk(t, k, axis, largest, sorted):
    order = np.argsort(-t if largest else t, axis=axis, kind="stable")
    positions = np.take(order, np.arange(k), axis)
    return np.take_along_axis(t, positions, axis), positions.astype(np.int32)


def same_elements(results, t, k, axis, largest, sorted):
    values, positions = results
    np.testing.assert_array_equal(np.take_along_axis(t, positions.astype(np.int64), axis), values)
    np.testing.assert_array_equal(
        np.sort(values, axis), np.sort(sorted_topk(t, k, axis, largest, sorted)[0], axis)
    )


def build_onehot(t, values, num_classes, axis):
    return ops.onehot(t, popxl.constant(num_classes, popxl.int32), values, axis)


def onehot(t, values, num_classes, axis):
    hot = np.expand_dims(t, axis)
    rank = t.ndim + 1
    shape = [1] * rank
    shape[axis] = num_classes
    return np.where(hot == np.arange(num_classes).reshape(shape), values[1], values[0])


def torch_onehot(t, values, num_classes, axis):
    hot = torch.from_numpy(onehot(t.numpy(), np.array([0, 1]), num_classes, axis))
    return torch.where(hot.bool(), values[1], values[0])


def window(index, axes, sizes, rank):
    result = [slice(None)] * rank
    for start, axis, size in zip(index, axes, sizes):
        result[axis] = slice(int(start), int(start) + size)
    return tuple(result)


def sliced(t, index, axes, sizes, no_overlap):
    return t[window(index, axes, sizes, t.ndim)]


def updated(t, index, t_update, axes, sizes, no_overlap):
    result = t.clone() if isinstance(t, torch.Tensor) else t.copy()
    result[window(index, axes, sizes, t.ndim)] = t_update
    return result


START = np.array([1, 2], np.uint32)
WINDOW = {"axes": [0, 2], "sizes": [2, 3], "no_overlap": True}
UINT = np.array([[1, 2, 3], [4, 5, 6]], np.uint32)

SAMPLES = [
    Sample("gather", operands=((5, 3), np.array([0, 4, 4], np.int32)), oracle=take, autograd=torch_take),
    Sample("gather", operands=((5, 3), INDICES), oracle=take, autograd=torch_take),
    Sample("gather", operands=((2, 5, 3), INDICES), attrs={"axis": 1}, oracle=take, autograd=torch_take),
    Sample("gather", operands=(Operand((3, 5), layout="transposed"), INDICES), attrs={"axis": -1}, oracle=take,
           autograd=torch_take),
    Sample("gather", operands=((5,), np.array(3, np.uint32)), oracle=take, autograd=torch_take),
    Sample("gather", operands=((5, 3), np.array([-1, 4, 5, 2], np.int32)), attrs={"zero_OOR": True},
           oracle=take_or_zero),
    Sample("gather", operands=((2, 5), INDICES + 2), attrs={"axis": 1, "zero_OOR": True}, oracle=take_or_zero),
    Sample("gather", operands=((0, 3), np.array([0, -1], np.int32)), attrs={"zero_OOR": True}, oracle=take_or_zero),
    Sample("gather", operands=(UINT, np.array([1, 0, 1], np.int32)), oracle=take),
    Sample("gather", operands=(UINT, np.array([3, -1, 1], np.int32)), attrs={"axis": 1, "zero_OOR": True},
           oracle=take_or_zero),
    Sample("gather_grad", operands={"dy": (3, 4), "indices": np.array([1, 0, 1], np.int32)},
           attrs={"shape": (5, 4), "axis": 0, "zero_OOR": False}, oracle=add_slices),
    Sample("gather_grad", operands={"dy": (2, 2, 3, 4), "indices": INDICES}, attrs={"shape": (2, 5, 4), "axis": 1,
           "zero_OOR": False},
           oracle=add_slices),
    Sample("gather_grad", operands={"dy": (4, 3), "indices": np.array([-1, 4, 9, 4], np.int32)},
           attrs={"shape": (5, 3), "axis": 0, "zero_OOR": True}, oracle=add_slices),
    Sample("scatter", operands=((4, 5), np.array([[0, 2, 1], [3, 0, 0]], np.int32), (2, 3)), oracle=put,
           autograd=lambda t, i, v: t.scatter(0, i.long(), v)),
    Sample("scatter", operands=((4, 5), np.array([[0], [4], [4], [2]], np.uint32), (4, 1)), attrs={"axis": -1},
           oracle=put,
           autograd=lambda t, i, v, axis: t.scatter(1, i.long(), v)),
    Sample("scatter", operands=((4, 5), np.array([[0, 2, 1], [0, 3, 1], [2, 2, 1]], np.int32), (3, 3)), oracle=put),
    Sample("scatter", operands=((3, 4), np.array([[3, 3, 0, 3], [1, 0, 1, 0]], np.int32), (2, 4)), attrs={"axis": 1},
           oracle=put),
    Sample("scatter", operands=(UINT, np.array([[0, 1, 0]], np.int32), np.array([[7, 8, 9]], np.uint32)), oracle=put),
    Sample("take_along_axis", operands=((4, 5), np.array([[0, 2, 2], [1, 1, 4], [0, 0, 0], [4, 3, 2]], np.int32)),
           attrs={"axis": 1},
           oracle=lambda t, indices, axis: np.take_along_axis(t, indices.astype(np.int64), axis),
           autograd=lambda t, i, axis: t.gather(axis, i.long())),
    Sample("add_along_axis", operands={"dy": (2, 3), "indices": np.array([[0, 2, 1], [3, 2, 0]], np.int32)},
           attrs={"shape": (4, 3), "axis": 0}, oracle=add_elements),
    Sample("topk", operands=(Operand((3, 6), distinct=True),), attrs={"k": 2, "axis": 1, "largest": True,
           "sorted": True},
           oracle=sorted_topk, autograd=lambda t, k, axis, largest, sorted: (lambda r: (r[0],
           r[1].int()))(torch.topk(t, k, axis))),
    Sample("topk", operands=(Operand((6, 3), distinct=True),), attrs={"k": 4, "axis": 0, "largest": False,
           "sorted": True},
           oracle=sorted_topk),
    Sample("topk", operands=(Operand((3, 6), distinct=True),), attrs={"k": 3, "axis": -1, "largest": True,
           "sorted": False},
           check=same_elements),
    Sample("topk", operands=(np.array([[7, 2**32 - 1, 3], [0, 5, 9]], np.uint32),), attrs={"k": 2, "axis": 1,
           "largest": False, "sorted": True}, oracle=sorted_topk),
    Sample("where", operands=(Operand((3, 4), popxl.bool), (3, 4), (3, 4)), oracle=np.where, autograd=torch.where),
    Sample("where", operands=(Operand((3, 1), popxl.bool), (4,), ()), oracle=np.where, autograd=torch.where),
    Sample("where", operands=(np.array([0, 2, 0], np.int32), (3,), Same(1)), oracle=np.where, autograd=lambda c, a,
           b: torch.where(c != 0, a, b)),
    Sample("where", operands=(np.array([True, False, True]), UINT, UINT + 9), oracle=np.where),
    Sample("onehot", operands={"t": np.array([[0, 2], [3, -1]], np.int32), "values": (2,)}, attrs={"num_classes": 4,
           "axis": -1},
           build=build_onehot, oracle=onehot, autograd=torch_onehot),
    Sample("onehot", operands={"t": np.array([1, 0, 2], np.int32), "values": (2,)}, attrs={"num_classes": 3, "axis": 0},
           build=build_onehot, oracle=onehot, autograd=torch_onehot),
    Sample("dynamic_slice", operands=((3, 4, 5), START), attrs=WINDOW, oracle=sliced, autograd=sliced),
    Sample("dynamic_slice", operands=((6,), np.array([3], np.int32)), attrs={"axes": [-1], "sizes": [3],
           "no_overlap": False}, oracle=sliced),
    Sample("dynamic_update", operands=((3, 4, 5), START, (2, 4, 3)), attrs=WINDOW, oracle=updated, autograd=updated),
    Sample("dynamic_update_", operands=((3, 4, 5), START, (2, 4, 3)), attrs=WINDOW, oracle=updated),
]  # fmt: skip

REFUSALS = [
    Refusal("topk", operands=((3,),), attrs={"k": 1, "axis": 0, "largest": True, "sorted": True}, error=DTypeError,
            dtype=popxl.complex64, says="expected real numbers"),
    Refusal("gather", operands=((5, 3), (2,)), error=DTypeError, says="expected integers"),
    Refusal("gather", operands=((0, 3), INDICES), error=ShapeError, says="which has no slices"),
    Refusal("gather", operands=((5, 3), INDICES), attrs={"axis": 2}, error=ShapeError, says="-2 <= axis < 2"),
    Refusal("scatter", operands=((4, 5), INDICES, (2, 2)), error=ShapeError, says="values of one shape"),
    Refusal("scatter", operands=((1, 2), INDICES, (2, 3)), error=ShapeError,
            says="no longer than t except on that axis"),
    Refusal("scatter", operands=((4, 5), INDICES, Operand((2, 3), popxl.int32)), error=DTypeError, says="equal dtypes"),
    Refusal("take_along_axis", operands=((4, 5), np.array([1], np.int32)), attrs={"axis": 0}, build=take_along_axis,
            error=ShapeError,
            says="of t's rank"),
    Refusal("topk", operands=((3, 4),), attrs={"k": 5, "axis": 1, "largest": True, "sorted": True}, error=ValueError,
            says="1 <= k <= 4"),
    Refusal("where", operands=(Operand((3,), popxl.bool), (3,), Operand((3,), popxl.int32)), error=DTypeError,
            says="equal dtypes"),
    Refusal("where", operands=(Operand((2,), popxl.bool), (3,), (3,)), error=ShapeError, says="shapes that broadcast"),
    Refusal("onehot", operands={"t": (3,), "values": (2,)}, attrs={"num_classes": 3, "axis": 0}, build=build_onehot,
            error=DTypeError,
            says="expected integers"),
    Refusal("onehot", operands={"t": INDICES, "values": (3,)}, attrs={"num_classes": 3, "axis": 0}, build=build_onehot,
            error=ShapeError,
            says=r"\[off, on\]"),
    Refusal("onehot", operands={"t": INDICES, "values": (2,)}, attrs={"num_classes": 3, "axis": 3}, build=build_onehot,
            error=ShapeError,
            says="-3 <= axis <= 2"),
    Refusal("onehot", operands=(INDICES, np.array(3, np.int32), (2,)), attrs={"axis": 0}, error=GraphError,
            says="expected a constant"),
    Refusal("dynamic_slice", operands=((3, 4, 5), START), attrs={**WINDOW, "sizes": [2, 6]}, error=ShapeError,
            says="no longer than it"),
    Refusal("dynamic_slice", operands=((3, 4, 5), np.array([1], np.uint32)), attrs=WINDOW, error=ShapeError,
            says="one index, one axis"),
    Refusal("dynamic_slice", operands=((3, 4, 5), (2,)), attrs=WINDOW, error=DTypeError, says="expected integers"),
    Refusal("dynamic_update", operands=((3, 4, 5), START, (2, 4, 4)), attrs=WINDOW, error=ShapeError,
            says=r"slice's shape \[2, 4, 3\]"),
    Refusal("dynamic_update_", operands=((3, 4, 5), START, Operand((2, 4, 3), popxl.int32)), attrs=WINDOW,
            error=DTypeError, says="equal dtypes"),
]  # fmt: skip
