"""Samples of collectives in a group of one. Groups of several are in test_collectives.py."""

import numpy as np
import popxl
from popxl.errors import DTypeError, GraphError, ShapeError
from popxl.ops import collectives

from .sample import Operand, Refusal, Sample


def total(ts, op, ipus):
    stacked = np.stack(ts)
    reduced = {
        "add": stacked.sum(0),
        "mean": stacked.mean(0),
        "mul": stacked.prod(0),
        "min": stacked.min(0),
        "max": stacked.max(0),
        "square_add": (stacked**2).sum(0),
    }[op]
    return [reduced] * len(ts)


def torch_total(ts, op, ipus):
    return [sum(ts[1:], ts[0]) for _ in ts]


def same(ts, op, ipus):
    return list(ts)


def gathered_shard(t, **attrs):
    """Slice to a shard and gather it again: the whole tensor."""
    return collectives.replicated_all_gather(collectives.replica_sharded_slice(t), **attrs)


def foreign_group(t):
    return collectives.replicated_all_reduce(t, group=popxl.Ir(replication=2).replica_grouping())


def gather_unsharded(t):
    return collectives.replicated_all_gather(t, output_shape="meta_shape")


TWO = {"ipus": [0, 1]}

SAMPLES = [
    *(Sample("replicated_all_reduce", operands=((2, 3),), attrs={"op": op}, oracle=lambda t, op: t)
      for op in ("add", "mean", "mul", "min", "max")),
    Sample("replicated_all_reduce", operands=((2, 3),), attrs={"op": "square_add"}, oracle=lambda t, op: t**2),
    Sample("replicated_all_reduce", operands=(np.array([True, False]),), attrs={"op": "or"}, oracle=lambda t, op: t,
           dtype=popxl.bool),
    Sample("replicated_all_reduce_", operands=((2, 3),), oracle=lambda t: t),
    Sample("replicated_all_reduce_", operands=((2, 3),), attrs={"op": "square_add"}, oracle=lambda t, op: t**2),
    Sample("replicated_reduce_scatter", operands=((2, 3),), oracle=lambda t: t.reshape(-1)),
    Sample("replicated_reduce_scatter", operands=(Operand((2, 3), layout="transposed"),),
           attrs={"op": "mean", "configure_output_for_replicated_tensor_sharding": True}, oracle=lambda t,
           **attrs: t.reshape(-1)),
    *(Sample("wide_all_reduce", operands=((2, 3),), attrs={"op": op}, oracle=lambda t, op: t) for op in ("add", "mean")),
    Sample("wide_all_reduce", operands=((2, 3),), attrs={"op": "square_add"}, oracle=lambda t, op: t**2),
    Sample("wide_reduce_scatter", operands=(Operand((2, 3), layout="transposed"),), oracle=lambda t: t.reshape(-1)),
    Sample("replica_sharded_slice", operands=((2, 3),), oracle=lambda t: t.reshape(-1)),
    Sample("replicated_slice", operands=((2, 3),), oracle=lambda t: t),
    Sample("replicated_slice", operands=((2, 0),), attrs={"axis": 1}, oracle=lambda t, axis: t),
    Sample("replicated_slice", operands=((2, 1),), attrs={"axis": -1}, oracle=lambda t, axis: t[:, 0]),
    Sample("replicated_all_gather", operands=((2, 3),), attrs={"axis": 1}, oracle=lambda t, axis: t),
    Sample("replicated_all_gather", operands=((2, 3),), attrs={"output_shape": "new_axis"}, oracle=lambda t,
           output_shape: t[None]),
    Sample("replicated_all_gather", operands=((2, 3),), build=gathered_shard, oracle=lambda t: t),
    Sample("replicated_all_gather", operands=((2, 3),), attrs={"output_shape": "concat"}, build=gathered_shard,
           oracle=lambda t, output_shape: t.reshape(-1)),
    *(Sample("all_reduce", operands=([(2, 3), (2, 3)],), attrs={**TWO, "op": op}, oracle=total,
    grads=None)  # only "add" has a rule
      for op in ("mean", "mul", "min", "max", "square_add")),
    Sample("all_reduce", operands=([(2, 3), (2, 3)],), attrs={**TWO, "op": "add"}, oracle=total, autograd=torch_total),
    Sample("all_reduce", operands=([(4,)] * 3,), attrs={"ipus": [0, 1, 2], "op": "add"}, oracle=total,
           autograd=torch_total),
    Sample("all_reduce_identical_inputs", operands=([(2, 3)],), attrs={"ipus": [0], "op": "add"}, oracle=same),
    Sample("all_reduce_identical_grad_inputs", operands=([(2, 3)],), attrs={"ipus": [0], "op": "add"}, oracle=total),
    # On several devices their gradients are not the derivatives of their values, by design: see
    # test_collectives.py.
    Sample("all_reduce_identical_inputs", operands=([(2, 3), (2, 3)],), attrs={**TWO, "op": "add"}, oracle=same,
           grads=None),
    Sample("all_reduce_identical_grad_inputs", operands=([(2, 3), (2, 3)],), attrs={**TWO, "op": "add"}, oracle=total,
           grads=None),
]  # fmt: skip

REFUSALS = [
    Refusal("replicated_all_reduce", operands=((2,),), attrs={"op": "max"}, dtype=popxl.complex64, error=DTypeError,
            says="expected real numbers"),
    Refusal("replicated_all_reduce", operands=((2,),), attrs={"op": "median"}, error=ValueError,
            says="expected one of add, mean"),
    Refusal("replicated_all_reduce", operands=((2,),), attrs={"op": "and"}, error=DTypeError, says="expected bool"),
    Refusal("replicated_all_reduce", operands=(Operand((2,), popxl.int32),), attrs={"op": "mean"}, error=DTypeError,
            says="floating point"),
    Refusal("replicated_all_reduce", operands=(Operand((2,), popxl.bool),), error=DTypeError, says="expected numbers"),
    Refusal("replicated_all_reduce", operands=((2,),), attrs={"group": 2}, error=TypeError,
            says="expected a ReplicaGrouping"),
    Refusal("replicated_all_reduce", operands=((2,),), build=foreign_group, error=GraphError, says="got a group of Ir"),
    *(Refusal(op, operands=(Operand((2,), dtype),), error=DTypeError, says="expected float16, bfloat16 or float32")
      for op in ("wide_all_reduce", "wide_reduce_scatter") for dtype in (popxl.float64, popxl.int32)),
    Refusal("wide_reduce_scatter", operands=((2,),), attrs={"op": "sum"}, error=ValueError, says="got 'sum'"),
    Refusal("replicated_slice", operands=((2,),), attrs={"axis": 1}, error=ValueError, says="-1 <= axis < 1"),
    Refusal("replicated_all_gather", operands=((2,),), attrs={"axis": None}, error=ValueError, says="expected an int"),
    Refusal("replicated_all_gather", operands=((2,),), attrs={"output_shape": "flat"}, error=ValueError,
            says="'new_axis', 'concat'"),
    Refusal("replicated_all_gather", operands=((2,),), build=gather_unsharded, error=ShapeError,
            says="expected a shard"),
    Refusal("replicated_all_gather", operands=((),), error=ShapeError, says="axis 0"),
    Refusal("all_reduce", operands=([(2,), (2,)],), error=ValueError, says=r"expected ipus=\[\.\.\]"),
    Refusal("all_reduce", operands=([(2,), (2,)],), attrs={"ipus": [0]}, error=ValueError, says="1 ipus for 2 tensors"),
    Refusal("all_reduce", operands=([(2,), (3,)],), attrs=TWO, error=ShapeError, says="equal shapes"),
    Refusal("all_reduce_identical_inputs", operands=([],), attrs={"ipus": []}, error=ShapeError, says="got no tensors"),
    Refusal("all_reduce_identical_grad_inputs", operands=([(2,), (2,)],), attrs={**TWO, "op": "sum"}, error=ValueError,
            says="got 'sum'"),
]  # fmt: skip
