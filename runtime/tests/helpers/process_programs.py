"""Programs on eight replicas that tests run in one process and in several: ``python
process_programs.py FILE`` in each.

No part of them knows how the replicas are split.
"""

import sys
import threading
from pathlib import Path

import numpy as np
import popdist
import popxl
import popxl_addons as addons
from popxl import ops
from popxl.extensions import gather, gather_beside, wide_all_reduce, wide_reduce_scatter
from popxl.ops.collectives import (
    replica_sharded_slice,
    replicated_all_gather,
    replicated_all_reduce,
    replicated_all_reduce_,
    replicated_reduce_scatter,
    replicated_slice,
)
from popxl.transforms.autodiff import autodiff
from popxl_addons.ops.replicated_all_reduce_TP import (
    replicated_all_reduce_identical_grad_inputs,
    replicated_all_reduce_identical_inputs,
)

REPLICAS = 8
SHAPE = (8, 3)
ASSIGNMENTS = {
    "all": [0] * 8,
    "pairs": [0, 0, 1, 1, 2, 2, 3, 3],
    "across": [0, 1, 2, 3, 0, 1, 2, 3],
    "strided": [0, 1, 0, 1, 0, 1, 0, 1],
    "mirrored": [0, 1, 1, 0, 2, 3, 3, 2],
    "scattered": [0, 0, 0, 1, 0, 1, 1, 1],
}


def in_place(t, group):
    u = t * 2.0
    replicated_all_reduce_(u, "add", group)
    return u


COLLECTIVES = {
    "sum": lambda t, group: replicated_all_reduce(t, "add", group),
    "mean": lambda t, group: replicated_all_reduce(t, "mean", group),
    "max": lambda t, group: replicated_all_reduce(t, "max", group),
    "square_add": lambda t, group: replicated_all_reduce(t, "square_add", group),
    "in_place": in_place,
    "scatter": lambda t, group: replicated_reduce_scatter(t[:7], "add", group),
    "wide_mean": lambda t, group: wide_all_reduce(ops.cast(t, popxl.bfloat16), "mean", group),
    "wide_scatter": lambda t, group: wide_reduce_scatter(
        ops.cast(t[:7], popxl.bfloat16), "mean", group
    ),
    "gather": lambda t, group: replicated_all_gather(t, 1, group),
    "shard": lambda t, group: replica_sharded_slice(t[:7], group),
    "slice": lambda t, group: replicated_slice(t, 0, group),
    "one_of_a_column": lambda t, group: replicated_all_reduce(t[2:3, 1], "add", group),
}
DIFFERENTIABLE = {
    "identical_inputs": lambda t, group: replicated_all_reduce_identical_inputs(t, group=group),
    "identical_grad_inputs": lambda t, group: replicated_all_reduce_identical_grad_inputs(
        t, group=group
    ),
    "gather": lambda t, group: replicated_all_gather(t, 1, group),
    "shard": lambda t, group: replica_sharded_slice(t[:7], group),
    "slice": lambda t, group: replicated_slice(t, 0, group),
}
GRADIENT_GROUPS = ("strided", "mirrored", "scattered")
DTYPES = (popxl.float16, popxl.bfloat16, popxl.uint32, popxl.bool)


def values(*shape):
    """One array per replica."""
    return np.random.default_rng(3).uniform(-1, 1, (REPLICAS, *shape)).astype(np.float32)


class Outputs:
    """Streams of results by name."""

    def __init__(self):
        self.streams = {}

    def store(self, name, t):
        self.streams[name] = popxl.d2h_stream(t.shape, t.dtype, name)
        ops.host_store(self.streams[name], t)


def large_reductions(ir, x, outputs):
    """Large enough to be split over processes, into uneven parts."""
    large = popxl.constant(np.linspace(-1, 1, 9001, dtype=np.float32)) * x[0, 0]
    narrow = ops.cast(
        popxl.constant(np.linspace(-1, 1, 40001, dtype=np.float32)) * x[0, 0], popxl.bfloat16
    )
    for group_name in ("all", "strided"):
        group = ir.replica_grouping_from_assignments(ASSIGNMENTS[group_name])
        for op in ("mean", "square_add"):
            outputs.store(f"large/{op}/{group_name}", replicated_all_reduce(large, op, group))
        outputs.store(f"large/wide/{group_name}", wide_all_reduce(narrow, "mean", group))
        outputs.store(f"large/wide_scatter/{group_name}", wide_reduce_scatter(narrow, "add", group))
    outputs.store("large/in_place", in_place(ops.cast(large, popxl.bfloat16), None))


def each_collective(ir, x, outputs):
    for group_name, assignment in ASSIGNMENTS.items():
        group = ir.replica_grouping_from_assignments(assignment)
        for name, fn in COLLECTIVES.items():
            outputs.store(f"{name}/{group_name}", fn(x, group))
    for dtype in DTYPES:
        positive = popxl.constant(100.0) * (x + 1.0)
        t = (
            ops.greater(x, popxl.constant(0.8))
            if dtype is popxl.bool
            else ops.cast(positive, dtype)
        )
        outputs.store(
            f"dtype/{dtype.name}", replicated_all_reduce(t, "or" if dtype is popxl.bool else "add")
        )


def gradients(ir, x, outputs):
    """Gradients of the sum of squares of a collective's result."""
    for group_name in GRADIENT_GROUPS:
        group = ir.replica_grouping_from_assignments(ASSIGNMENTS[group_name])
        for name, fn in DIFFERENTIABLE.items():
            graph = ir.create_graph(lambda t: fn(t, group), x)
            info = autodiff(graph)
            call = ops.call_with_info(graph, x)
            (dx,) = ops.call(info.graph, call.outputs[0] * 2.0, inputs_dict=info.inputs_dict(call))
            outputs.store(f"gradient/{name}/{group_name}", dx)


def two_branches(ir, x, outputs):
    """Groups over several processes that take different branches, each with its own collectives."""
    across = ir.replica_grouping_from_assignments(ASSIGNMENTS["across"])
    flag = popxl.variable(
        np.array([True, False, True, False]), popxl.bool, "flag", replica_grouping=across
    )

    def then(t):
        return replicated_all_reduce(replicated_all_reduce(t, "max", across) + t, "add", across)

    def otherwise(t):
        return replicated_all_reduce(t, "mean", across)

    spec = x.spec
    graphs = [ir.create_graph(fn, spec) for fn in (then, otherwise)]
    (y,) = ops.conditional(flag, *graphs, then_inputs=[x], else_inputs=[x])
    outputs.store("branches", y)


def make_variables(ir, x, memmap_dir):
    """Variables of every kind, changed differently by each replica."""
    pairs = ir.replica_grouping_from_assignments(ASSIGNMENTS["pairs"])
    across = ir.replica_grouping_from_assignments(ASSIGNMENTS["across"])
    mirrored = ir.replica_grouping_from_assignments(ASSIGNMENTS["mirrored"])
    zeros = np.zeros(SHAPE, np.float32)
    found = {
        "own": popxl.variable(
            values(*SHAPE), name="own", replica_grouping=ir.replica_grouping(1, 1)
        ),
        "one": popxl.variable(zeros, name="one"),
        "every": popxl.variable(zeros, name="every", retrieval_mode="all_replicas"),
        "mirrored": popxl.variable(
            np.stack([zeros] * 4), name="mirrored", replica_grouping=mirrored
        ),
        "paired": popxl.variable(np.stack([zeros] * 4), name="paired", replica_grouping=pairs),
    }
    for variable in found.values():
        ops.var_updates.accumulate_(variable, x)
    found["sharded"], shard = popxl.replica_sharded_variable(values(*SHAPE)[0], name="sharded")
    ops.var_updates.accumulate_(shard, replica_sharded_slice(x))
    buffer = popxl.replica_sharded_buffer((4, *SHAPE), popxl.float32, across)
    data = values(*SHAPE)[:4]
    found["remote"] = popxl.remote_replica_sharded_variable(
        data, buffer, 0, name="remote", replica_grouping=across
    )
    ops.remote_store(buffer, 0, ops.remote_load(buffer, 0) + replica_sharded_slice(x, across))
    factory = addons.VariableFactory(lambda: values(*SHAPE)[0], name="file")
    found["file"] = factory.create_remote_tensor(
        popxl.remote_buffer(SHAPE, popxl.float32), 0, memmap_dir=memmap_dir
    )
    return found


class Talk(threading.Thread):
    """What processes tell each other beside the program."""

    def __init__(self):
        super().__init__()
        self.told = []
        self.start()

    def run(self):
        for number in range(50):
            self.told.append(gather_beside([popdist.getInstanceIndex(), number]))

    def check(self):
        """AssertionError if something was lost, or told to others than it was meant for."""
        self.join()
        instances = range(popdist.getNumInstances())
        assert self.told == [[[i, number] for i in instances] for number in range(50)], self.told


def results(memmap_dir):
    """What all of it gives: streams as ``[replicas, *shape]``, variables as the host reads them, by
    name.
    """
    ir = popxl.Ir(replication="popdist" if popdist.isPopdistEnvSet() else REPLICAS)
    outputs = Outputs()
    with ir.main_graph, popxl.in_sequence():
        into = popxl.h2d_stream(SHAPE, popxl.float32, "x")
        x = ops.host_load(into)
        each_collective(ir, x, outputs)
        gradients(ir, x, outputs)
        large_reductions(ir, x, outputs)
        two_branches(ir, x, outputs)
        variables = make_variables(ir, x, memmap_dir)
    local = ir.instance_replication_factor
    first = popdist.getInstanceIndex() * local
    session, talk = popxl.Session(ir, "cpu"), Talk()
    with session:
        found = session.run({into: values(*SHAPE)[first : first + local]})
        read = session.get_tensors_data(variables.values())
    talk.check()
    named = {
        name: found[stream].reshape(local, *stream.shape)
        for name, stream in outputs.streams.items()
    }
    parts = gather({name: array.tolist() for name, array in named.items()})
    whole = {
        name: np.concatenate(
            [np.array(part[name], array.dtype).reshape(array.shape) for part in parts]
        )
        for name, array in named.items()
    }
    return {**whole, **{f"variable/{name}": np.array(read[v]) for name, v in variables.items()}}


if __name__ == "__main__":
    target = Path(sys.argv[1])
    given = results(str(target.parent / "files"))
    if popdist.getInstanceIndex() == 0:
        np.savez(target, **given)
