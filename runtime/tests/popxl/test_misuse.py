"""Every exception that the API documents: its type, and words that help.

Those of ops are in the sample tables, those of sessions and add-ons in their own tests.
"""

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import popxl
import popxl_addons as addons
import pytest
import torch
from popart import popart_exception
from popxl import fp8_utils, ops
from popxl.context import get_current_context, get_source_location
from popxl.errors import UndefinedValue
from popxl.ops.call import CallSiteInfo
from popxl.random_seed import two_uint32_to_uint64, uint64_to_two_uint32
from popxl.streams import Stream
from popxl.tensor import Variable
from popxl.transforms.autodiff import ExpectedConnection, GradGraphInfo, autodiff
from popxl.transforms.merge_exchange import io_tile_exchange
from popxl.typing_ import NewAliasAnnotation
from popxl.utils import to_numpy


@dataclass(frozen=True)
class Misuse:
    """What a program must not do, and what it is told."""

    name: str
    error: type[BaseException]
    says: str
    """Regular expression, matched anywhere in the message."""
    do: Callable[[], Any]
    """A function that is called in the main graph of a fresh program."""


def check(case: Misuse, replication: int = 1) -> None:
    program = popxl.Ir(replication)
    with program.main_graph, pytest.raises(case.error) as caught:
        case.do()
    message = str(caught.value)
    assert re.search(case.says, message), f"{case.says!r} is not in: {message}"


def spec(*shape: int, dtype: popxl.dtype = popxl.float32) -> popxl.TensorSpec:
    return popxl.TensorSpec(shape, dtype)


def ones(*shape: int, dtype: popxl.dtype = popxl.float32) -> popxl.Tensor:
    """A tensor in the current graph."""
    return ops.init(shape, dtype) + 1


def ir() -> popxl.Ir:
    return popxl.get_ir()


def graph(fn=lambda x: x + 1, *specs) -> popxl.Graph:
    return ir().create_graph(fn, *(specs or (spec(2),)))


def foreign() -> popxl.Tensor:
    """A tensor of another graph of the same program."""
    return graph().inputs[0]


def outside(do):
    """The same with no graph open."""
    held = []
    context = get_current_context()
    while context._graphs:
        held.append(context.pop_graph())
    try:
        do()
    finally:
        for g in reversed(held):
            context.push_graph(g)


def by_ref_call():
    def write(x: popxl.TensorByRef):
        ops.add_(x, x)

    return graph(write)


CONTEXT = [
    Misuse(
        "no graph open: current graph", RuntimeError, "expected to be inside", lambda: outside(popxl.get_current_graph)
    ),
    Misuse("no graph open: main graph", RuntimeError, "expected to be inside", lambda: outside(popxl.get_main_graph)),
    Misuse("no graph open: ir", RuntimeError, "expected to be inside", lambda: outside(popxl.get_ir)),
    Misuse(
        "a graph of another program",
        RuntimeError,
        "expected graphs of one Ir",
        lambda: popxl.Ir().main_graph.__enter__(),
    ),
    Misuse("an unknown hook", ValueError, "987", lambda: get_current_context().remove_op_created_hook(987)),
    Misuse("an unknown hook of a graph", ValueError, "987", lambda: graph().remove_op_created_hook(987)),
    Misuse("in_sequence of None", TypeError, "None", lambda: popxl.in_sequence(None).__enter__()),
    Misuse("a frame beyond the stack", IndexError, "10000", lambda: get_source_location(10000)),
]  # fmt: skip

GRAPHS = [
    Misuse("a graph of no function", TypeError, "expected a function or a", lambda: ir().create_graph(3)),
    Misuse(
        "a list of tensors and others",
        TypeError,
        "expected only tensors or none",
        lambda: graph(lambda x: x[0], [spec(2), 3]),
    ),
    Misuse(
        "arguments that do not fit",
        ValueError,
        r"got arguments \(TensorSpec\); expected those of <lambda>.<lambda>\(x, y\): missing .* 'y'\. Pass a tensor",
        lambda: graph(lambda x, y: x),
    ),
    Misuse("a result that is no tensor", ValueError, "expected None, a tensor or", lambda: graph(lambda x: 3)),
    Misuse("a program compared with a number", TypeError, "Ir", lambda: ir() == 3),
    Misuse("a graph compared with a number", TypeError, "Graph", lambda: graph() == 3),
    Misuse("a number in a graph", TypeError, "[Tt]ensor", lambda: 3 in graph()),
    Misuse("a graph constructed", TypeError, "create_graph", popxl.Graph),
    Misuse("replication of 0", ValueError, "got replication 0; expected", lambda: popxl.Ir(0)),
]  # fmt: skip

GROUPINGS = [
    Misuse("a stride of 0", ValueError, "expected a divisor of the", lambda: ir().replica_grouping(0)),
    Misuse("a stride above the replicas", ValueError, "expected a divisor of the", lambda: ir().replica_grouping(9)),
    Misuse("a group of 0", ValueError, "expected 1 <= group_size <=", lambda: ir().replica_grouping(1, 0)),
    Misuse(
        "a group above the replicas", ValueError, "expected 1 <= group_size <=", lambda: ir().replica_grouping(1, 5)
    ),
    Misuse(
        "a stride that does not divide", ValueError, "expected a divisor of the", lambda: ir().replica_grouping(3, 1)
    ),
    Misuse("too few assignments", ValueError, "expected one group number per", lambda: assigned(0, 1)),
    Misuse("groups of different sizes", ValueError, "expected one group number per", lambda: assigned(0, 0, 0, 1)),
    Misuse("groups out of order", ValueError, "expected one group number per", lambda: assigned(1, 1, 0, 0)),
    Misuse("a grouping constructed", RuntimeError, "replica_grouping", popxl.ReplicaGrouping),
    Misuse("the stride of no constant one", NotImplementedError, "stride", lambda: assigned(0, 1, 1, 0).stride),
    Misuse("a grouping compared with a number", TypeError, "Grouping", lambda: ir().replica_grouping() == 3),
]  # fmt: skip


def assigned(*groups: int) -> popxl.ReplicaGrouping:
    return ir().replica_grouping_from_assignments(list(groups))


TENSORS = [
    Misuse("a tensor constructed", RuntimeError, "popxl", popxl.Tensor),
    Misuse("the diagonal of a vector", ValueError, "expected a matrix", lambda: ones(3).diag()),
    Misuse("an empty value", ValueError, "expected at least one element", lambda: ones(2)._ensure_tensor([])),
    Misuse("the length of a scalar", ValueError, "scalar|shape", lambda: len(ones())),
    Misuse("a name as index", TypeError, "expected ints, slices, tuples of", lambda: ones(2)["a"]),
    Misuse("a bool as index", TypeError, "expected ints, slices, tuples of", lambda: ones(2)[True]),
    Misuse("iteration", TypeError, "Use ops.split", lambda: list(ones(2))),
    Misuse("membership", TypeError, "Use ops.equal", lambda: 1 in ones(2)),
    Misuse("the device of nothing known", UndefinedValue, "no op made and none uses", lambda: popxl.constant(1.0).ipu),
    Misuse("the tile set of nothing known", UndefinedValue, "tile", lambda: popxl.constant(1.0).tile_set),
    Misuse("a variable in another graph", ValueError, "main graph", lambda: graph(lambda x: popxl.variable(1.0))),
    Misuse("float8 data without a type", TypeError, "dtype", lambda: popxl.constant(float8_data())),
    Misuse("an unknown retrieval mode", ValueError, "one_per_group", lambda: retrieval("some").retrieval_mode),
    Misuse(
        "the output of another graph",
        ValueError,
        "expected a tensor of graph 'main'",
        lambda: popxl.graph_output(foreign()),
    ),
    Misuse("an operand of another graph", ValueError, "got .*current graph", lambda: foreign() + 1),
    Misuse("no tensor as operand", TypeError, "expected a popxl.Tensor. Make a", lambda: ops.exp(3.0)),
    Misuse("a variable copied from nowhere", TypeError, "src", lambda: popxl.variable(1.0).copy_to_ipu(1)),
]  # fmt: skip


def float8_data() -> np.ndarray:
    return fp8_utils.host_pow2scale_cast_to_fp8(np.ones(2, np.float32), popxl.float8_143)


def retrieval(mode: str) -> Variable:
    return popxl.variable(1.0, retrieval_mode=mode)


def buffer(*shape: int, entries: int = 2) -> popxl.RemoteBuffer:
    return popxl.remote_buffer(shape or (2,), popxl.float32, entries)


def entries_of(n: int):
    buffer().entries = n


REMOTE = [
    Misuse("no entries", ValueError, "expected at least 1", lambda: buffer(entries=0)),
    Misuse("entries set to 0", ValueError, "expected at least 1", lambda: entries_of(0)),
    Misuse("a part of an entry", ValueError, "got 1.9; expected at least 1, in whole", lambda: buffer(entries=1.9)),
    Misuse("a tensor of another shape", ValueError, "expected float32", lambda: ops.remote_store(buffer(), 0, ones(3))),
    Misuse("a tensor that does not match", ValueError, "expected float32",
           lambda: buffer().validate_tensor_matches_buffer(ones(3))),
    Misuse("an operand that is remote", ValueError, "remote_load",
           lambda: popxl.remote_variable(np.ones(2, np.float32), buffer(), 0) + 1),
    Misuse("more shards than replicas", ValueError, "expected a divisor of the",
           lambda: popxl.replica_sharded_buffer((4,), popxl.float32, shard_over=8)),
    Misuse("shards that do not divide", ValueError, "expected a divisor of the",
           lambda: popxl.replica_sharded_buffer((4,), popxl.float32, shard_over=3)),
    Misuse("a buffer of other shards", ValueError, "expected the buffer's meta_shape", lambda: sharded_elsewhere()),
    Misuse("a stream constructed", NotImplementedError, "stream", Stream),
    Misuse("a store of another shape", ValueError, "expected the stream's shape and",
           lambda: ops.host_store(popxl.d2h_stream((2,), popxl.float32), ones(3))),
]  # fmt: skip


def sharded_elsewhere():
    other = buffer()
    other.meta_shape = (9,)
    popxl.remote_replica_sharded_variable(np.ones(8, np.float32), other, 0)


def mapped_variable():
    with tempfile.NamedTemporaryFile() as file:
        popxl.variable(np.memmap(file.name, "float64", "w+", shape=(4,)), name="v")


TYPES = {
    "a variable": lambda of: popxl.variable(1.0, of),
    "a remote variable": lambda of: popxl.remote_variable(np.ones(2), buffer(), 0, of),
    "a constant": lambda of: popxl.constant([1.0], of),
    "an input": lambda of: popxl.graph_input((2,), of),
    "an input stream": lambda of: popxl.h2d_stream((2,), of),
    "an output stream": lambda of: popxl.d2h_stream((2,), of),
    "a remote buffer": lambda of: popxl.remote_buffer((2,), of),
    "a sharded buffer": lambda of: popxl.replica_sharded_buffer((2,), of),
    "a spec": lambda of: popxl.TensorSpec((2,), of),
    "a new tensor": lambda of: ops.init((2,), of),
    "a cast": lambda of: ops.cast(ones(2), of),
    "a product": lambda of: ops.matmul(ones(2, 2), ones(2, 2), output_type=of),
    "a draw": lambda of: ops.random_normal(ops.init((2,), popxl.uint32), (2,), dtype=of),
    "a factory": lambda of: addons.VariableFactory(lambda: np.ones(2), of, "w"),
    "an array": lambda of: to_numpy([1.0], of),
}
"""What takes an element type."""


@pytest.mark.parametrize("take", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (np.float16, "float16"),
        (np.dtype("float32"), "float32"),
        ("float16", "float16"),
        (torch.bfloat16, "bfloat16"),
        (float, "float32"),
    ],
    ids=str,
)
def test_what_stands_for_an_element_type_elsewhere_is_refused_with_the_name_of_popxls(
    take, given, meant
):
    with popxl.Ir(2).main_graph:
        with pytest.raises(TypeError, match="got .*; expected a popxl.dtype") as e:
            take(given)
        assert str(e.value).endswith(f"Pass popxl.dtypes.{meant}.")
        take(popxl.dtype.as_dtype(given))


SIZES = {
    "an input": lambda shape: popxl.graph_input(shape, popxl.float32),
    "an input stream": lambda shape: popxl.h2d_stream(shape, popxl.float32),
    "an output stream": lambda shape: popxl.d2h_stream(shape, popxl.float32),
    "a remote buffer": lambda shape: popxl.remote_buffer(shape, popxl.float32),
    "a sharded buffer": lambda shape: popxl.replica_sharded_buffer(shape, popxl.float32),
    "a spec": lambda shape: popxl.TensorSpec(shape, popxl.float32),
    "the whole of a shard": lambda shape: popxl.TensorSpec((2,), popxl.float32, shape),
    "a new tensor": lambda shape: ops.init(shape, popxl.float32),
    "a draw": lambda shape: ops.random_normal(ops.init((2,), popxl.uint32), shape),
}
"""What takes a shape."""


@pytest.mark.parametrize("take", SIZES.values(), ids=SIZES)
def test_shapes_of_other_than_whole_numbers_are_refused(take):
    with popxl.Ir(2).main_graph:
        for shape, says in (((-2,), "-2"), ((3, -1), "3, -1"), ((2.7,), "2.7")):
            with pytest.raises(ValueError, match=f"got {says}; expected at least 0, in whole"):
                take(shape)
        for shape in (("x",), (np.inf,), 2):
            with pytest.raises(TypeError, match="got .*; expected whole numbers, of a"):
                take(shape)
        take((np.int64(2), 3))
        take([0])


VALUES = [
    Misuse("a type constructed", TypeError, "dtype", popxl.dtype),
    Misuse("an unknown type", ValueError, "float33", lambda: popxl.dtype.from_name("float33")),
    Misuse("no type at all", ValueError, "expected a name, a Python", lambda: popxl.dtype.as_dtype(object())),
    Misuse("a type forgotten", ValueError, "got None; expected a name", lambda: popxl.dtype.as_dtype(None)),
    Misuse("a type without torch's", TypeError, "uint32", popxl.uint32.as_torch),
    Misuse("a negative seed", ValueError, "-1", lambda: uint64_to_two_uint32(-1)),
    Misuse("a seed that is too wide", ValueError, "expected 0 <= num <", lambda: uint64_to_two_uint32(2**64)),
    Misuse("a word that is too wide", ValueError, "expected two numbers in 0", lambda: two_uint32_to_uint64(2**32, 0)),
    Misuse("a module without build", NotImplementedError, "build", lambda: popxl.Module().build()),
    Misuse("an annotation called", NotImplementedError, "X", lambda: NewAliasAnnotation("X", popxl.Tensor)()),
    Misuse("integers as float8", TypeError, "expected float16, float32 or float64",
           lambda: to_numpy(np.ones(2, np.int32), popxl.float8_143)),
    Misuse("a scale without float8", RuntimeError, "log2_scale",
           lambda: to_numpy(np.ones(2), popxl.float32, log2_scale=1)),
    Misuse("no float8 on the host", RuntimeError, "expected popxl.float8_143 or popxl.float8_152",
           lambda: fp8_utils.host_pow2scale_cast_to_fp8(np.ones(2), popxl.float32)),
    *(Misuse(f"a ragged list as a {kind}", ValueError, f"{kind} 'v': got a list that is no array",
             lambda make=make: make([[1], [1, 2]], popxl.float32, name="v"))
      for make, kind in ((popxl.constant, "constant"), (popxl.variable, "variable"))),
    *(Misuse(f"{kind}: {says}", error, f"^{kind} 'v': got {says}",
             lambda make=make, given=given: make(**given, name="v"))
      for make, kind in ((popxl.constant, "constant"), (popxl.variable, "variable"))
      for error, says, given in (
          (TypeError, "list of objects", {"data": [object()]}),
          (TypeError, "int32 data for", {"data": np.ones(2, np.int32), "dtype": popxl.float8_143}),
          (RuntimeError, "log2_scale or", {"data": np.ones(2), "log2_scale": 1}),
          (RuntimeError, "log2_scale or", {"data": np.zeros(2, popxl.float8_143.as_numpy()),
                                           "dtype": popxl.float8_143, "log2_scale": 1}),
          (RuntimeError, "log2_scale 99", {"data": np.ones(2), "dtype": popxl.float8_143, "log2_scale": 99}))),
    Misuse("an input that does not fit", TypeError, r"number or array \(input %\w+: got object of objects",
           lambda: ops.call(graph(), [object()])),
    Misuse("float8 codes as numbers", TypeError, "expected real numbers",
           lambda: to_numpy(np.zeros(2, popxl.float8_143.as_numpy()), popxl.float32)),
    Misuse("a file in another type", ValueError, "expected a C-contiguous float16 array",
           lambda: mapped_as(popxl.float16)),
    Misuse("a file as a variable", ValueError, "^variable 'v': got a memory-mapped float64 array", mapped_variable),
    *(Misuse(f"a file of {kind}, {how}", ValueError, f"got a memory-mapped {kind} array; expected elements of 32 bits",
             lambda kind=kind, options=options: mapped_as(kind=kind, **options))
      for kind in ("int64", "uint64", "float64")
      for how, options in (("narrowed", {}), ("kept", {"downcast": False}), ("as its own", {"dtype": popxl.float64}))),
]  # fmt: skip


def mapped_as(dtype: popxl.dtype | None = None, downcast: bool = True, kind: str = "float32"):
    with tempfile.NamedTemporaryFile() as file:
        to_numpy(np.memmap(file.name, kind, "w+", shape=(4,)), dtype, downcast)


def call_of(g: popxl.Graph) -> CallSiteInfo:
    return ops.call_with_info(g, ones(2))


def branches():
    g = graph()
    return ops.conditional_with_info(popxl.constant(True), g, g, [ones(2)], [ones(2)])


CALLS = [
    Misuse("too many inputs", ValueError, "expected at most 1", lambda: ops.call(graph(), ones(2), ones(2))),
    Misuse("too few inputs", ValueError, "expected all 1 inputs. Pass", lambda: ops.call(graph())),
    Misuse("an input of another shape", popart_exception, "expected the same shape and",
           lambda: ops.call(graph(), ones(3))),
    Misuse("an input of another type", popart_exception, "expected the same shape and",
           lambda: ops.call(graph(), ones(2, dtype=popxl.float16))),
    Misuse("an input given twice", ValueError, "expected it once", lambda: given_twice()),
    Misuse("an input that is no value", TypeError, "expected a tensor, number or", lambda: ops.call(graph(), object())),
    Misuse("half a count", TypeError, "got repeat_count 2.5; expected an int", lambda: ops.repeat(graph(), 2.5, ones(2))),
    Misuse("a negative count", ValueError, "got repeat_count -1", lambda: ops.repeat(graph(), -1, ones(2))),
    Misuse("more outputs than inputs", ValueError, "expected no more outputs than",
           lambda: ops.repeat(graph(lambda x: (x + 1, x + 2)), 2, ones(2))),
    Misuse("a tensor the call does not know", ValueError, "expected an input or output",
           lambda: call_of(graph()).graph_to_parent(ones(2))),
    Misuse("an input the call does not have", ValueError, "expected an input of the",
           lambda: call_of(graph()).parent_to_graph(ones(2))),
    Misuse("a condition that is no tensor", TypeError, "got cond = bool; expected a popxl.Tensor",
           lambda: ops.conditional(True, graph(), graph(), [ones(2)], [ones(2)])),
    Misuse("branches of different outputs", ValueError, "expected the same number",
           lambda: ops.conditional(popxl.constant(True), graph(), graph(lambda x: (x, x + 1)), [ones(2)], [ones(2)])),
    Misuse("a branch by reference", NotImplementedError, "by-reference",
           lambda: ops.conditional(popxl.constant(True), by_ref_call(), by_ref_call(), [ones(2)], [ones(2)])),
    Misuse("an index no branch has", IndexError, "9", lambda: branches().graph_to_parent_input_index(9)),
    Misuse("an input no branch has", IndexError, "9", lambda: branches().parent_to_graph_input_index(9)),
    Misuse("an index of no branch", IndexError, "9", lambda: branches().is_parent_index_in_then_branch(9)),
    Misuse("an output no branch has", IndexError, "9", lambda: branches().parent_to_graph_output_index(9)),
    Misuse("a branch's input declared written", NotImplementedError, "no input by reference",
           lambda: branches().set_parent_input_modified(ones(2))),
    Misuse("code loaded into itself", ValueError, "expected a graph to be",
           lambda: ops.remote_code_load(popxl.get_current_graph(), "executable")),
    Misuse("code loaded elsewhere", NotImplementedError, "buffer", lambda: ops.remote_code_load(graph(), "buffer")),
    Misuse("code copied", NotImplementedError, "code", lambda: ops.code_copy(graph(), "buffer", "executable")),
    Misuse("no tensor where one is checked", TypeError, "expected a popxl.Tensor. Make a",
           lambda: ops.utils.check_in_graph(popxl.get_current_graph(), t=3)),
    Misuse("a foreign tensor where one is checked", ValueError, "expected a tensor of graph",
           lambda: ops.utils.check_in_graph(popxl.get_current_graph(), t=foreign())),
    Misuse("operands on two devices", ValueError, "expected one virtual device",
           lambda: ops.utils.check_tensor_ipu_and_tile_set(a=on_device(0), b=on_device(1))),
]  # fmt: skip


def on_device(n: int) -> popxl.Tensor:
    with popxl.ipu(n):
        return ones(2)


def given_twice():
    g, x = graph(), ones(2)
    ops.call(g, x, inputs_dict={g.inputs[0]: x})


def in_place(x):
    return ops.exp_(x + 1)


def inputs_dict_of_another():
    autodiff(graph()).inputs_dict(call_of(graph()))


def dependent_transfers():
    into, out = popxl.h2d_stream((2,), popxl.float32), popxl.d2h_stream((2,), popxl.float32)
    with io_tile_exchange():
        ops.host_store(out, ops.host_load(into))


TRANSFORMS = [
    Misuse("a connection constructed", TypeError, "GradGraphInfo", ExpectedConnection),
    Misuse("a gradient's record constructed", TypeError, "autodiff", GradGraphInfo),
    Misuse("the call of another graph", TypeError, "expected the CallSiteInfo of a", inputs_dict_of_another),
    Misuse("the gradient of an integer", popart_exception, "int32",
           lambda: autodiff(graph(lambda x, i: ops.gather(x, i), spec(3), spec(2, dtype=popxl.int32)))),
    Misuse("the gradient of a write", popart_exception, "in place", lambda: autodiff(graph(in_place))),
    Misuse("transfers left unmerged", RuntimeError, "need 2 exchanges", dependent_transfers),
]  # fmt: skip


class ByHand(addons.Module):
    """A layer with a gradient written by hand, which is no tensor."""

    def build(self, x):
        self.add_variable_input("w", lambda: np.ones(2, np.float32))
        return x + 1

    def build_grad(self, dy):
        self.var_grad["w"] = 3.0
        return dy


class NamedOnly(ByHand):
    def build_grad(self, *, dy):
        return dy


def module_graph(module: addons.Module = None) -> addons.GraphWithNamedArgs:
    return (module or addons.layers.Linear(2)).create_graph(spec(3, 2))[1]


def weight_of(value: np.ndarray):
    addons.WeightsDict({popxl.variable(np.ones(2, np.float32)): value})


def gradient_of_another_graph():
    forward, other = module_graph(), module_graph()
    gradient = other.autodiff(grads_required=other.args.tensors)
    dy = gradient.graph.inputs[0]
    loads = {dy: addons.RemoteHandle(addons.batch_serial_buffer(dy, 2))}
    addons.batch_serialise_fwd_and_grad(
        forward, gradient, addons.NamedTensors(), 2, loads, {}, {}, io_mode="compute"
    )


ADDONS = [
    Misuse("activations of another graph", RuntimeError, "Make the gradient by autodiff of", gradient_of_another_graph),
    Misuse("a value that is a list", ValueError, "got list for", lambda: weight_of([1.0, 1.0])),
    Misuse("a value of another type", ValueError, "expected float32", lambda: weight_of(np.ones(2, np.float64))),
    Misuse("a value of another shape", ValueError, "got float32.3.*expected",
           lambda: weight_of(np.ones(3, np.float32))),
    Misuse("a method without a name", ValueError, "expected 'auto'", lambda: module_graph().autodiff(method="best")),
    Misuse("no gradient by hand", ValueError, "with build_grad", lambda: module_graph().autodiff(method="build_grad")),
    Misuse("no gradient graph", AttributeError, "result of an autodiff", lambda: module_graph().grad_graph_info),
    Misuse("a cache and a gradient by hand", ValueError, "expected one of them", lambda: ByHand(cache=True)),
    Misuse("a gradient that is no tensor", TypeError, "got float", lambda: module_graph(ByHand()).autodiff()),
    Misuse("a gradient by hand with named parameters", TypeError, "positional",
           lambda: module_graph(NamedOnly()).autodiff()),
]  # fmt: skip


@pytest.mark.parametrize("case", CONTEXT + GRAPHS, ids=lambda case: case.name)
def test_programs_are_told_what_is_wrong_with_their_graphs(case):
    check(case)


@pytest.mark.parametrize("case", GROUPINGS, ids=lambda case: case.name)
def test_programs_are_told_what_is_wrong_with_their_groups(case):
    check(case, replication=4)


@pytest.mark.parametrize("case", TENSORS + VALUES, ids=lambda case: case.name)
def test_programs_are_told_what_is_wrong_with_their_values(case):
    check(case)


@pytest.mark.parametrize("case", REMOTE, ids=lambda case: case.name)
def test_programs_are_told_what_is_wrong_with_their_remote_memory(case):
    check(case, replication=4)


@pytest.mark.parametrize("case", CALLS + TRANSFORMS, ids=lambda case: case.name)
def test_programs_are_told_what_is_wrong_with_their_calls(case):
    check(case)


@pytest.mark.parametrize("case", ADDONS, ids=lambda case: case.name)
def test_programs_are_told_what_is_wrong_with_their_modules(case):
    check(case)
