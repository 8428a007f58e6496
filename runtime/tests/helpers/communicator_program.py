"""Every collective on four replicas over groups of every shape, by each transport: messages, where
one, two or four processes have the replicas, and the collectives of torch itself, where four do.

``python communicator_program.py FILE`` of one process alone writes what the plain interpreter gives.
In each of several processes it exits with the names of results that differ from that. On CPUs
Gloo's collectives stand for NCCL's; with ``POPXL_DEVICE=cuda`` and four GPUs it is NCCL.
"""

import os
import sys

import numpy as np
import popdist
import popxl
from helpers.process_programs import Outputs, in_place
from popxl import ops
from popxl.extensions import gather, wide_all_reduce, wide_reduce_scatter
from popxl.ops.collectives import (
    replica_sharded_slice,
    replicated_all_gather,
    replicated_all_reduce,
    replicated_reduce_scatter,
    replicated_slice,
)
from popxl.transforms.autodiff import autodiff
from popxl_addons.ops.replicated_all_reduce_TP import (
    replicated_all_reduce_identical_grad_inputs,
    replicated_all_reduce_identical_inputs,
)
from popxl_engine.machine import communicator

REPLICAS = 4
ASSIGNMENTS = {
    "alone": [0, 1, 2, 3],
    "all": [0, 0, 0, 0],
    "pairs": [0, 0, 1, 1],
    "strided": [0, 1, 0, 1],
    "mirrored": [0, 1, 1, 0],
}
SHAPE = (8, 3)
REDUCTIONS = ("add", "mean", "mul", "min", "max", "square_add")
DTYPES = (
    "float16",
    "bfloat16",
    "float64",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
)
CALLS = {"reduce": 0, "gather": 0, "reduce_scatter": 0, "exchange": 0}
"""How often a communicator was asked."""


def narrow(t):
    """Numbers of 16 bits, whose sum those do not hold."""
    return ops.cast(t * 1.3, popxl.bfloat16)


COLLECTIVES = {
    **{op: lambda t, group, op=op: replicated_all_reduce(t, op, group) for op in REDUCTIONS},
    **{
        f"scatter_{op}": lambda t, group, op=op: replicated_reduce_scatter(t[:7], op, group)
        for op in REDUCTIONS
    },
    **{
        f"wide_{op}": lambda t, group, op=op: wide_all_reduce(narrow(t), op, group)
        for op in REDUCTIONS
    },
    **{
        f"wide_scatter_{op}": lambda t, group, op=op: wide_reduce_scatter(narrow(t[:7]), op, group)
        for op in REDUCTIONS
    },
    "in_place": in_place,
    "scalar": lambda t, group: replicated_all_reduce(ops.sum(t), "add", group),
    "transposed": lambda t, group: replicated_all_reduce(ops.transpose(t), "add", group),
    "gather_0": lambda t, group: replicated_all_gather(t, 0, group),
    "gather_1": lambda t, group: replicated_all_gather(t, 1, group),
    "gather_last": lambda t, group: replicated_all_gather(ops.transpose(t), -1, group),
    "gather_new": lambda t, group: replicated_all_gather(t, 0, group, "new_axis"),
    "shard": lambda t, group: replica_sharded_slice(t[:7], group),
    "shards_together": lambda t, group: replicated_all_gather(
        replica_sharded_slice(t[:7], group), group=group
    ),
    "slice": lambda t, group: replicated_slice(t, 0, group),
}
DIFFERENTIABLE = {
    "identical_inputs": lambda t, group: replicated_all_reduce_identical_inputs(t, group=group),
    "identical_grad_inputs": lambda t, group: replicated_all_reduce_identical_grad_inputs(
        t, group=group
    ),
    **{
        name: COLLECTIVES[name] for name in ("gather_0", "gather_1", "gather_new", "shard", "slice")
    },
}


def values():
    """One array for each replica; sums of four are exact in 16 bits."""
    return (np.random.default_rng(5).integers(-32, 33, (4, *SHAPE)) / 64).astype(np.float32)


def build(x, outputs):
    for group_name, assignment in ASSIGNMENTS.items():
        group = x.ir.replica_grouping_from_assignments(assignment)
        for name, fn in COLLECTIVES.items():
            outputs.store(f"{name}/{group_name}", fn(x / 3.0 if name in REDUCTIONS else x, group))
        for name, fn in DIFFERENTIABLE.items():
            graph = x.ir.create_graph(lambda t: fn(t, group), x)
            info = autodiff(graph)
            call = ops.call_with_info(graph, x)
            (dx,) = ops.call(info.graph, call.outputs[0] * 2.0, inputs_dict=info.inputs_dict(call))
            outputs.store(f"gradient/{name}/{group_name}", dx)
    for name in DTYPES:
        dtype = getattr(popxl, name)
        t = ops.cast(x if dtype.is_floating_point else (x + 1.0) * 64.0, dtype)
        for op in ("add", "max"):
            outputs.store(f"{name}/{op}", replicated_all_reduce(t, op))
            outputs.store(f"{name}/scatter_{op}", replicated_reduce_scatter(t[:7], op))
        outputs.store(f"{name}/gather", replicated_all_gather(t))
    flags = ops.greater(x, popxl.constant(-0.3))
    for op in ("and", "or"):
        outputs.store(f"bool/{op}", replicated_all_reduce(flags, op))
        outputs.store(f"bool/scatter_{op}", replicated_reduce_scatter(flags, op))


def results(backends):
    """What each collective gives this process's replicas, by name: [replicas, ...]."""
    communicator.BACKENDS = backends
    replicas = REPLICAS // popdist.getNumInstances()
    first = popdist.getInstanceIndex() * replicas
    replication = "popdist" if popdist.getNumInstances() > 1 else REPLICAS
    ir, outputs = popxl.Ir(replication=replication), Outputs()
    with ir.main_graph, popxl.in_sequence():
        into = popxl.h2d_stream(SHAPE, popxl.float32, "x")
        build(ops.host_load(into), outputs)
    own = values()[first : first + replicas]
    with popxl.Session(ir, "cpu") as session:
        found = session.run({into: own if replicas > 1 else own[0]})
    return {
        name: np.array(found[stream]).reshape(replicas, *stream.shape)
        for name, stream in outputs.streams.items()
    }


def counted(name):
    plain = getattr(communicator.Communicator, name)

    def call(*arguments, **keywords):
        CALLS[name] += 1
        return plain(*arguments, **keywords)

    return call


def differences(expected, found, is_exact):
    """Names of results that differ: floating point by more than 1e-6 where other orders of sums are
    allowed, others at all.
    """
    for name, right in expected.items():
        tolerance = (
            {"rtol": 1e-6, "atol": 1e-7}
            if right.dtype in (np.float32, np.float64) and not is_exact
            else {"rtol": 0, "atol": 0}
        )
        same = found[name].dtype == right.dtype and found[name].shape == right.shape
        if not same or not np.allclose(
            found[name].astype(np.float64), right.astype(np.float64), **tolerance
        ):
            yield name


def main(file):
    instances = popdist.getNumInstances()
    if instances == 1:
        os.environ["POPXL_INTERPRET"] = "1"
        np.savez(file, **results({}))
        return 0
    replicas = REPLICAS // instances
    own = slice(popdist.getInstanceIndex() * replicas, (popdist.getInstanceIndex() + 1) * replicas)
    with np.load(file) as whole:
        expected = {name: whole[name][own] for name in whole}
    for name in CALLS:
        setattr(communicator.Communicator, name, counted(name))
    wrong = {}
    for interpret in ("0", "1"):
        os.environ["POPXL_INTERPRET"] = interpret
        before = dict(CALLS)
        wrong[f"messages {interpret}"] = list(differences(expected, results({}), True))
        assert CALLS == before, CALLS
        if replicas == 1:
            backends = {"cpu": "gloo", "cuda": "nccl"}
            wrong[f"devices {interpret}"] = list(differences(expected, results(backends), False))
            assert all(CALLS[name] > before[name] + 20 for name in CALLS), CALLS
    wrong = gather(wrong)
    return str(wrong) if any(any(found.values()) for found in wrong) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
