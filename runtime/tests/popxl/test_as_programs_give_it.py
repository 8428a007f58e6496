"""What programs of PopXL hand over in other forms than ours: lists, iterables, tensors of PyTorch,
names of systems; and tables that they walk through.
"""

from typing import Any

import numpy as np
import popxl
import popxl_addons as addons
import pytest
import torch
from popxl import ops
from popxl.testing import get_all_dtypes


def run(build: Any, *, replicas: int = 1) -> Any:
    """What a program computes."""
    ir = popxl.Ir(replicas)
    with ir.main_graph:
        t = build(ir)
        out = popxl.d2h_stream(t.shape, t.dtype)
        ops.host_store(out, t)
    with popxl.Session(ir) as session:
        return session.run()[out]


def sums(ir: popxl.Ir, shape: tuple[int, ...], count: int = 2) -> popxl.Graph:
    """A graph that weighs its inputs by their places."""
    spec = popxl.TensorSpec(shape, popxl.float32)

    def weigh(*inputs: popxl.Tensor) -> popxl.Tensor:
        total = inputs[0]
        for place, t in enumerate(inputs[1:], 2):
            total = total + t * float(place)
        return total

    return ir.create_graph(weigh, *[spec] * count)


@pytest.mark.parametrize(
    "shape, given",
    [
        ((2,), ([np.ones(2, np.float32), np.full(2, 3.0)],)),
        ((2,), ((np.ones(2), [3.0, 3.0]),)),
        ((2,), ([1.0, 1.0], [3.0, 3.0])),
        ((), ([1.0, 3.0],)),
        ((), (1.0, [3])),
        ((), ([np.float32(1), np.array(3.0)],)),
        ((), ([[1.0], [[3.0]]],)),
    ],
)
def test_lists_of_inputs_are_flattened_and_lists_of_numbers_are_arrays(
    shape: tuple[int, ...], given: Any
) -> None:
    found = run(lambda ir: ops.call(sums(ir, shape), *given)[0])
    np.testing.assert_array_equal(found, np.full(shape, 7.0))


def test_a_bound_graph_takes_positional_inputs_for_those_that_are_not_connected() -> None:
    def build(ir: popxl.Ir) -> popxl.Tensor:
        graph, one = sums(ir, (), 3), popxl.variable(1.0)
        bound = addons.BoundGraph(graph, {graph.inputs[1]: one})
        with pytest.raises(ValueError, match="got 3 inputs .*of whose 3 2 are not connected"):
            bound.call(one, one, one)
        return bound.call(popxl.constant(10.0), [popxl.constant(100.0)])[0]

    assert run(build) == 10 + 2 * 1 + 3 * 100


@pytest.mark.parametrize(
    "key", [range(1, 3), torch.tensor([1, 2]), iter([1, 2]), {1: 0, 2: 0}.keys()]
)
def test_any_iterable_of_numbers_chooses_slices(key: Any) -> None:
    data = np.arange(8, dtype=np.float32).reshape(4, 2)
    assert run(lambda ir: popxl.variable(data)[key]).tolist() == data[1:3].tolist()


@pytest.mark.parametrize("key", ["1", b"1", {1: 2}, None, 1.5])
def test_what_is_no_index_is_refused(key: Any) -> None:
    with popxl.Ir().main_graph:
        t = popxl.variable(np.ones(3, np.float32))
        with pytest.raises(TypeError, match="expected ints, slices"):
            t[key]


def test_constants_and_variables_have_the_type_of_the_data() -> None:
    with popxl.Ir().main_graph:
        for data in (torch.ones(2, dtype=torch.bfloat16), torch.ones(2), np.ones(2), [1], 1.5):
            assert popxl.constant(data).dtype is popxl.variable(data).dtype


def test_tables_of_types_have_those_of_popxl_alone() -> None:
    listed = {*get_all_dtypes(), *popxl.dtypes._NP_TO_POPXL.values()}
    for dtype in listed | {*popxl.dtypes._PT_TO_POPXL.values()}:
        assert getattr(popxl, dtype.name) is dtype
    for name in popxl.dtypes._PT_TO_POPXL:
        data = torch.ones(2).to(getattr(torch, name.removeprefix("torch.")))
        with popxl.Ir().main_graph:
            popxl.variable(data, downcast=False)


@pytest.mark.parametrize("name", ["ipu2", "IPU-POD16", "POD64", "Bow-Pod16", "ipu-m2000"])
def test_names_of_systems_are_devices(name: str) -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(1.0)
        v += 1.0
    with popxl.Session(ir, name) as session:
        session.run()
    assert session.get_tensor_data(v) == 2


@pytest.mark.parametrize("shard_over", [1, 2, 4])
def test_lamb_square_of_a_shard_is_that_of_the_whole_variable(shard_over: int) -> None:
    data = np.arange(16, dtype=np.float32).reshape(2, 8)

    def build(ir: popxl.Ir) -> popxl.Tensor:
        grouping = ir.replica_grouping(group_size=4)
        _, shard = popxl.replica_sharded_variable(
            data, replica_grouping=grouping, shard_over=shard_over
        )
        return ops.lamb_square(shard)

    found = run(build, replicas=8)
    np.testing.assert_allclose(found, np.repeat((data**2).sum(1), 4))


def test_a_sharded_buffer_takes_shards_and_the_whole_value_where_shards_are_asked_for() -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        buffer = popxl.replica_sharded_buffer((4, 2), popxl.float32)
        whole = popxl.variable(np.ones((4, 2), np.float32))
        shard = ops.collectives.replica_sharded_slice(whole)
        buffer.validate_tensor_matches_buffer(shard)
        buffer.validate_tensor_matches_buffer(shard, 2)
        buffer.validate_tensor_matches_buffer(whole, num_shards=2)
        for t, shards in ((whole, 1), (whole.T, 2), (ops.cast(whole, popxl.float16), 2)):
            with pytest.raises(ValueError, match="remote buffer 1: got"):
                buffer.validate_tensor_matches_buffer(t, shards)


@pytest.mark.parametrize(("x", "y"), [("float16", "float32"), ("float32", "float16")])
@pytest.mark.parametrize("factors", ["numbers", "tensors"])
def test_scaled_add_takes_two_widths_and_gives_each_operand_a_gradient_of_its_own(
    x: str, y: str, factors: str
) -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        operands = [
            popxl.variable(np.arange(4) - 1, getattr(popxl, x)),
            popxl.variable(np.arange(4) * 0.5, getattr(popxl, y)),
        ]
        a, b = (2.0, 0.5) if factors == "numbers" else map(popxl.constant, (2.0, 0.5))
        given = operands if factors == "numbers" else [*operands, a, b]
        graph = ir.create_graph(lambda X, Y, a=a, b=b: ops.scaled_add(X, Y, a, b), *given)
        gradient = popxl.transforms.autodiff(graph)
        site = ops.call_with_info(graph, *given)
        back = ops.call(gradient.graph, [1, 2, 3, 4], inputs_dict=gradient.inputs_dict(site))
        assert [t.dtype.name for t in site.outputs] == [x]
        assert [t.dtype for t in back] == [t.dtype for t in given]
        streams = [popxl.d2h_stream(t.shape, t.dtype) for t in (site.outputs[0], *back)]
        for stream, t in zip(streams, (site.outputs[0], *back)):
            ops.host_store(stream, t)
    with popxl.Session(ir) as session:
        found = session.run()
    expected = [[-2, 0.25, 2.5, 4.75], [2, 4, 6, 8], [0.5, 1, 1.5, 2], 10, 10]
    for stream, values in zip(streams, expected):
        np.testing.assert_array_equal(found[stream], values)
