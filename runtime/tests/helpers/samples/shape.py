"""Samples of ops that rearrange elements."""

import numpy as np
import popxl
import torch
from popxl.errors import DTypeError, ShapeError

from .sample import Operand, Refusal, Same, Sample

TRANSPOSED = Operand((4, 6), layout="transposed")


def numpy_slice(*slices):
    """An oracle that indexes, whatever attributes the op was given."""
    return lambda t, **attrs: t[slices]


def reshaped(t, shape):
    return t.reshape(shape)


def torch_split(t, splits, axis=0):
    return torch.split(
        t, t.shape[axis] // splits if isinstance(splits, int) else list(splits), axis
    )


def padded(shape, *slices):
    """An oracle for slice_grad: zeros with dy at these slices."""

    def oracle(dy, **attrs):
        result = np.zeros(shape, dy.dtype)
        result[slices] = dy
        return result

    return oracle


UINT = np.array([[1, 2, 3], [4, 5, 6]], np.uint32)

SAMPLES = [
    # Reshape
    Sample("reshape", operands=((4, 6),), attrs={"shape": (3, 8)}, oracle=reshaped, autograd=torch.reshape),
    Sample("reshape", operands=((4, 6),), attrs={"shape": (2, -1, 3)}, oracle=reshaped),
    Sample("reshape", operands=((1, 1),), attrs={"shape": ()}, oracle=reshaped),
    Sample("reshape", operands=((),), attrs={"shape": (-1,)}, oracle=reshaped),
    Sample("reshape", operands=(TRANSPOSED,), attrs={"shape": (24,)}, oracle=reshaped),
    Sample("reshape", operands=(Operand((4, 6), layout="expanded"),), attrs={"shape": (2, 12)}, oracle=reshaped),
    Sample("reshape", operands=(UINT,), attrs={"shape": (-1, 2)}, oracle=reshaped),
    Sample("reshape", operands=((0, 3),), attrs={"shape": (2, 0)}, oracle=reshaped, autograd=torch.reshape),
    Sample("reshape", operands=((0, 3),), attrs={"shape": (-1,)}, oracle=reshaped, autograd=torch.reshape),
    Sample("reshape_", operands=((4, 6),), attrs={"shape": (-1,)}, oracle=reshaped),
    # Permute and drop axes
    Sample("transpose", operands=((2, 3, 4),), oracle=np.transpose, autograd=lambda t: t.permute(2, 1, 0)),
    Sample("transpose", operands=((2, 3, 4),), attrs={"permutation": (1, 2, 0)}, oracle=lambda t,
           permutation: t.transpose(permutation)),
    Sample("transpose", operands=((2, 3, 4),), attrs={"permutation": (-1, 0, 1)}, oracle=lambda t,
           permutation: t.transpose(2, 0, 1)),
    Sample("transpose", operands=((),), oracle=np.transpose),
    Sample("transpose_", operands=(TRANSPOSED,), oracle=np.transpose),
    Sample("squeeze", operands=((1, 3, 1),), oracle=np.squeeze, autograd=torch.squeeze),
    Sample("squeeze", operands=((1, 3, 1),), attrs={"axes": [-1]}, oracle=lambda t, axes: t.squeeze(-1)),
    Sample("squeeze", operands=((1, 1),), attrs={"axes": [0, 1]}, oracle=lambda t, axes: t.reshape(())),
    Sample("squeeze", operands=((2, 3),), oracle=np.squeeze),
    Sample("squeeze", operands=((1, 3),), attrs={"axes": []}, oracle=lambda t, axes: t),
    # Slices
    Sample("slice", operands=((4, 6),), attrs={"start": [1, 2], "stop": [3, 5]}, oracle=numpy_slice(slice(1, 3),
           slice(2, 5)),
           autograd=lambda t, start, stop: t[1:3, 2:5]),
    Sample("slice", operands=((4, 6),), attrs={"start": 1}, oracle=numpy_slice(slice(1, None))),
    Sample("slice", operands=((4, 6),), attrs={"step": [-1, None]}, oracle=numpy_slice(slice(None, None, -1))),
    Sample("slice", operands=((4, 6),), attrs={"start": [-2, None], "stop": [None, -7], "step": [-1, -2]},
           oracle=numpy_slice(slice(-2, None, -1), slice(None, -7, -2))),
    Sample("slice", operands=((2, 3, 7),), attrs={"start": [5], "stop": [0], "step": [-2], "axis": [-1]},
           oracle=numpy_slice(..., slice(5, 0, -2))),
    Sample("slice", operands=((2, 3, 7),), attrs={"start": [1, 0], "stop": [9, 1], "axis": [2, 0]},
           oracle=numpy_slice(slice(0, 1), slice(None), slice(1, 9))),
    Sample("slice", operands=(TRANSPOSED,), attrs={"step": [2, 3]}, oracle=numpy_slice(slice(None, None, 2),
           slice(None, None, 3))),
    Sample("slice", operands=(UINT,), attrs={"step": [-1], "axis": [1]}, oracle=numpy_slice(slice(None), slice(None,
           None, -1))),
    Sample("slice", operands=((4, 6),), attrs={"start": 2, "stop": 2}, oracle=numpy_slice(slice(2, 2)),
           autograd=lambda t, start, stop: t[2:2]),
    Sample("slice", operands=((4, 6),), attrs={"start": [1, 3], "stop": [3, 1], "step": [-1, None]},
           oracle=numpy_slice(slice(1, 3, -1), slice(3, 1))),
    Sample("slice_", operands=((4, 6),), attrs={"start": [1], "stop": [4], "step": [2]}, oracle=numpy_slice(slice(1, 4,
           2))),
    Sample("slice_grad", operands={"dy": (2, 3)}, attrs={"shape": (4, 6), "start": [1, 2], "stop": [3, 5],
           "step": None, "axis": None},
           oracle=padded((4, 6), slice(1, 3), slice(2, 5))),
    Sample("slice_grad", operands={"dy": (4, 2)}, attrs={"shape": (4, 5), "start": 3, "stop": 0, "step": -2, "axis": 1},
           oracle=padded((4, 5), slice(None), slice(3, 0, -2))),
    # Split and join
    Sample("split", operands=((4, 6),), attrs={"splits": 2}, oracle=lambda t, splits: np.split(t, 2),
           autograd=torch_split),
    Sample("split", operands=((4, 6),), attrs={"splits": [1, 2, 3], "axis": -1}, oracle=lambda t, splits,
           axis: np.split(t, [1, 3], 1),
           autograd=torch_split),
    Sample("split", operands=(Operand((6,), layout="strided"),), attrs={"splits": 3}, oracle=lambda t,
           splits: np.split(t, 3)),
    Sample("split", operands=((3, 4),), attrs={"splits": [0, 3]}, oracle=lambda t, splits: [t[:0], t],
           autograd=torch_split),
    Sample("split", operands=((3, 4),), attrs={"splits": 1, "axis": 1}, oracle=lambda t, splits, axis: [t]),
    Sample("concat", operands=([(2, 3), (4, 3)],), oracle=np.concatenate, autograd=torch.cat),
    Sample("concat", operands=([(2, 1, 3), (2, 2, 3), (2, 4, 3)],), attrs={"axis": -2}, oracle=np.concatenate,
           autograd=lambda ts, axis: torch.cat(ts, axis)),
    Sample("concat", operands=([(2, 3), Same(0), Same(0)],), oracle=np.concatenate, autograd=torch.cat),
    Sample("concat", operands=([TRANSPOSED, Operand((4, 6), layout="expanded")],), attrs={"axis": 1},
           oracle=np.concatenate),
    Sample("concat", operands=([(0, 3), (2, 3), (0, 3)],), oracle=np.concatenate, autograd=torch.cat),
    Sample("concat", operands=([(5,)],), oracle=np.concatenate),
    Sample("concat", operands=([UINT, UINT],), oracle=np.concatenate),
    Sample("concat_", operands=([(2, 3), (4, 3)],), oracle=np.concatenate),
    # The same elements
    Sample("identity", operands=(TRANSPOSED,), attrs={"output_name": "copy"}, oracle=lambda t, output_name: t),
    Sample("identity", operands=(UINT,), oracle=lambda t: t),
    Sample("detach", operands=((2, 3),), oracle=lambda t: t, grads=()),
    Sample("detach_", operands=((2, 3),), oracle=lambda t: t, grads=()),
]  # fmt: skip

REFUSALS = [
    Refusal("reshape", operands=((4, 6),), attrs={"shape": (-1, -1)}, error=ShapeError, says="at most one -1"),
    Refusal("reshape", operands=((4, 6),), attrs={"shape": (0, 24)}, error=ValueError, says="positive sizes"),
    Refusal("reshape", operands=((4, 6),), attrs={"shape": (-2, 12)}, error=ValueError, says="positive sizes"),
    Refusal("reshape", operands=((0, 6),), attrs={"shape": (0, -1)}, error=ValueError, says="a 0 and no -1"),
    Refusal("reshape", operands=((4, 6),), attrs={"shape": (5, 5)}, error=ShapeError, says="shape of 24 elements"),
    Refusal("reshape", operands=((4, 6),), attrs={"shape": (5, -1)}, error=ShapeError, says="shape of 24 elements"),
    Refusal("reshape_", operands=((4, 6),), attrs={"shape": (7,)}, error=ShapeError, says="shape of 24 elements"),
    Refusal("reshape", operands=((4, 6),), attrs={"shape": 24}, error=TypeError, says="list or tuple of sizes"),
    Refusal("transpose", operands=((4, 6),), attrs={"permutation": (0, 2)}, error=ValueError, says="-2 <= axis < 2"),
    Refusal("transpose", operands=((4, 6),), attrs={"permutation": (0, 0)}, error=ShapeError,
            says="each of its 2 axes once"),
    Refusal("squeeze", operands=((1, 3),), attrs={"axes": [1]}, error=ValueError, says="axes of size 1"),
    Refusal("squeeze", operands=((1, 3),), attrs={"axes": [0, -2]}, error=ValueError, says="each axis once"),
    Refusal("squeeze", operands=((1, 3),), attrs={"axes": [2]}, error=ValueError, says="-2 <= axis < 2"),
    Refusal("slice", operands=((4, 6),), attrs={"start": [1], "stop": [2, 3]}, error=ValueError,
            says="lists of one length"),
    Refusal("slice", operands=((4, 6),), attrs={"start": [1, 1], "axis": [0, -2]}, error=ShapeError,
            says="axis at most once"),
    Refusal("slice", operands=((4, 6),), attrs={"start": [1], "axis": [2]}, error=ShapeError, says="axis at most once"),
    Refusal("slice", operands=((4, 6),), attrs={"step": [0]}, error=ShapeError, says="steps other than 0"),
    Refusal("split", operands=((4, 6),), attrs={"splits": 3}, error=ValueError, says="a divisor of 4"),
    Refusal("split", operands=((4, 6),), attrs={"splits": [1, 2]}, error=ValueError, says="add up to 4"),
    Refusal("split", operands=((4, 6),), attrs={"splits": 2.0}, error=TypeError, says="a list of lengths"),
    Refusal("split", operands=((4, 6),), attrs={"splits": 2, "axis": 2}, error=ValueError, says="-2 <= axis < 2"),
    Refusal("concat", operands=([],), error=ShapeError, says="at least one"),
    Refusal("concat", operands=([(2, 3), (2, 4)],), error=ShapeError, says="equal sizes on all other axes"),
    Refusal("concat", operands=([(2, 3), Operand((2, 3), popxl.int32)],), error=DTypeError, says="equal dtypes"),
    Refusal("concat", attrs={"ts": [1.0]}, error=TypeError, says="got float in ts; expected tensors"),
    Refusal("identity", attrs={"t": 3}, error=TypeError, says="expected a popxl.Tensor"),
]  # fmt: skip
