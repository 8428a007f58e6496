"""What things are called, as programs written for PopXL look them up: results, graphs, titles,
representations.
"""

import importlib
from typing import Any

import numpy as np
import popxl
import popxl_addons as addons
import pytest
import torch
from helpers.interpreted import run_graph
from popxl import TensorSpec, ops
from popxl.opdef import LONGEST_NAME
from popxl.ops import collectives
from popxl.transforms import autodiff
from popxl_addons.ops.replicated_all_reduce_TP import replicated_all_reduce_identical_grad_inputs

SPEC = TensorSpec((4, 2), popxl.float32)
updates = ops.var_updates


@pytest.fixture
def ir() -> Any:
    result = popxl.Ir(replication=2)
    with result.main_graph:
        yield result


def made(name: str, dtype: popxl.dtype = popxl.float32) -> popxl.Tensor:
    return popxl.variable(np.zeros((4, 2)), dtype, name=name)


def seed() -> popxl.Tensor:
    return popxl.constant(np.zeros(2), popxl.uint32, name="seed")


# Modules


@pytest.mark.parametrize(
    "path, name",
    [
        ("matmul", "matmul"), ("nll_loss", "nll_loss"), ("call", "CallSiteInfo"), ("remote_load", "remote_load"),
        ("clamp", "clamp"), ("var_updates.accumulate_", "accumulate_"),
        ("collectives.collectives", "CollectiveOps"), ("collectives.collectives", "to_collective_op"),
        ("collectives.replicated_all_gather", "replicated_all_gather"), ("collectives.all_reduce", "all_reduce"),
    ],
)  # fmt: skip
def test_ops_are_imported_from_modules_of_their_names(path: str, name: str) -> None:
    package = f"popxl.ops.{path}".rpartition(".")[0]
    found = getattr(importlib.import_module(f"popxl.ops.{path}"), name)
    assert found is getattr(importlib.import_module(package), name)


# Results named after an operand


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda x: ops.transpose(x), "x_T"),
        (lambda x: ops.transpose_(x), "x_T"),
        (lambda x: x.T, "x_T"),
        (lambda x: x.T_, "x_T"),
        (lambda x: ops.reshape(x, (8,)), "x_reshaped"),
        (lambda x: ops.reshape_(x, (8,)), "x_reshaped"),
        (lambda x: x.flatten(), "x_reshaped"),
        (lambda x: ops.flatten_(x), "x_reshaped"),
        (lambda x: ops.cast(x, popxl.float16), "x_float16"),
        (lambda x: ops.cast(x, popxl.int32), "x_int32"),
        (lambda x: collectives.replicated_all_gather(x), "x_all_gathered"),
        (lambda x: collectives.replicated_all_reduce(x), "x_all_reduce"),
        (lambda x: collectives.replicated_all_reduce_(x), "x_all_reduce"),
        (lambda x: replicated_all_reduce_identical_grad_inputs(x), "x_all_reduce"),
        (lambda x: collectives.replicated_reduce_scatter(x), "x_reduce_scattered"),
        (lambda x: collectives.replica_sharded_slice(x), "x_sharded_slice"),
        (lambda x: collectives.replicated_slice(x), "x_replicated_slice"),
        (lambda x: ops.ipu_copy(x, 1, 0), "x_c1"),
        (lambda x: x.copy_to_ipu(3, 0), "x_c3"),
        (lambda x: ops.io_tile_copy(x), "x_iotilecopy"),
        (lambda x: updates.accumulate_(x, made("g")), "accumulate__x"),
        (lambda x: updates.accumulate_square_(x, made("g")), "accumulate_square__x"),
        (lambda x: updates.accumulate_mean_(x, made("g"), 2.0), "accumulate_mean__x"),
        (lambda x: updates.accumulate_moving_average_(x, made("g"), 0.9), "accumulate_moving_avg__x"),
        (lambda x: updates.accumulate_moving_average_square_(x, made("g"), 0.9), "accumulate_moving_avg_square__x"),
        (lambda x: updates.accumulator_scale_(x, 0.5), "accumulator_scale__x"),
        (lambda x: updates.accumulator_zero_(x), "accumulator_scale__x"),
        (
            lambda x: updates.sparse_accumulate_(x, made("g"), popxl.constant(np.zeros(4), popxl.uint32)),
            "sparse_accumulate__x",
        ),
        (lambda x: updates.copy_var_update_(x, made("g")), "updated__x"),
        (
            lambda x: updates.adam_var_update(x, made("g"), popxl.constant(1.0), popxl.constant(1.0)),
            "updated__x",
        ),
        (lambda x: ops.scaled_add_(x, made("g"), b=2.0), "scaled_add__x"),
    ],
)  # fmt: skip
def test_a_result_is_named_after_its_operand(make: Any, expected: str, ir: popxl.Ir) -> None:
    assert make(made("x")).name == expected


def test_pieces_are_numbered(ir: popxl.Ir) -> None:
    assert [t.name for t in ops.split(made("x"), 2)] == ["x_split_0", "x_split_1"]
    assert [t.name for t in ops.split(made("y"), [1, 2, 1])] == [
        "y_split_0",
        "y_split_1",
        "y_split_2",
    ]


def test_copies_on_several_devices_are_named_each_after_its_own(ir: popxl.Ir) -> None:
    results = collectives.all_reduce([made("x"), made("y")], ipus=[0, 1])
    assert [t.name for t in results] == ["x_all_reduce", "y_all_reduce"]


def test_other_results_have_the_name_of_the_op_also_in_place(ir: popxl.Ir) -> None:
    x = made("x")
    assert [ops.add(x, x).name, ops.mul(x, x).name, ops.gelu_(x).name] == ["add", "mul", "gelu"]


def test_a_name_that_is_taken_gets_a_number(ir: popxl.Ir) -> None:
    x = made("x")
    assert [x.T.name, x.T.name, x.T.name] == ["x_T", "x_T__1", "x_T__2"]


def test_every_result_can_be_found_by_its_name(ir: popxl.Ir) -> None:
    x = made("x")
    with popxl.name_scope("s"):
        results = [
            x,
            x.T,
            x.T,
            ops.cast(x.T, popxl.float16),
            *ops.split(x, 2),
            updates.accumulate_(x, x),
        ]
    assert len({t.name for t in results}) == len(results)
    assert all(ir.main_graph.get_tensor(t.id) is t for t in results)


# Scopes


def test_the_scope_comes_in_front_of_the_operands_name_once(ir: popxl.Ir) -> None:
    with popxl.name_scope("layer"):
        x = made("x")
        assert (x.name, x.T.name, x.T.T.name) == ("layer/x", "layer/x_T", "layer/x_T__1_T")
        assert updates.accumulate_(x, x).name == "layer/accumulate__x"
        with popxl.name_scope("head"):
            y = x.reshape((8,))
            assert (y.name, ops.cast(y, popxl.float16).name) == (
                "layer/head/x_reshaped",
                "layer/head/x_reshaped_float16",
            )
    accumulated = updates.accumulate_(x, x)
    assert (x.T.name, accumulated.name) == ("layer/x_T__2", "accumulate__layer/x")
    with popxl.name_scope("layer"):
        assert accumulated.T.name == "layer/accumulate__x_T"
    with popxl.name_scope("x"):
        assert made("ax/y").T.name == "x/ax/y_T"
    with popxl.name_scope("other"):
        assert x.T.name == "other/layer/x_T"


def test_a_gradient_stays_recognisable_when_it_is_reduced(ir: popxl.Ir) -> None:
    def f(x: popxl.Tensor) -> popxl.Tensor:
        with popxl.name_scope("layer"):
            return ops.mul(ops.exp(x), x)

    graph = ir.create_graph(f, SPEC)
    info = autodiff(graph, grads_required=[graph.get_tensor(f"{graph.id}/layer/exp")])
    values = {t: made(f"in{i}") for i, t in enumerate(info.graph.inputs)}
    (dx,) = ops.call(info.graph, inputs_dict=values)
    assert dx.name == "Gradient___layer/exp"
    assert collectives.replicated_reduce_scatter(dx).name == "Gradient___layer/exp_reduce_scattered"
    with popxl.name_scope("layer"):
        assert (
            collectives.replicated_reduce_scatter(dx).name
            == "layer/Gradient___exp_reduce_scattered"
        )


# Chains


def test_names_in_a_chain_of_updates_stay_short(ir: popxl.Ir) -> None:
    x, g = made("x"), made("g")
    names: list[str] = []
    for i in range(1000):
        with popxl.name_scope(f"layer{i % 7}"):
            x = updates.accumulate_(x, g)
        names.append(x.name)
    assert names[:2] == ["layer0/accumulate__x", "layer1/accumulate__layer0/accumulate__x"]
    assert max(map(len, names)) < LONGEST_NAME + 20 and len(set(names)) == 1000


def test_updates_of_one_variable_are_numbered(ir: popxl.Ir) -> None:
    x, g = made("x"), made("g")
    assert [updates.accumulate_(x, g).name for _ in range(3)] == [
        "accumulate__x",
        "accumulate__x__1",
        "accumulate__x__2",
    ]


def test_a_given_name_is_kept_however_long(ir: popxl.Ir) -> None:
    name = "n" * (LONGEST_NAME + 1)
    assert (made(name).name, ops.init((2,), popxl.float32, name).name) == (name, f"{name}__1")
    assert ir.main_graph.get_tensor(name).T.name == "transpose"


# What no op made


def test_unnamed_variables_constants_and_inputs_are_called_t(ir: popxl.Ir) -> None:
    assert popxl.variable(1.0).name == "t"
    assert popxl.constant(1.0).name == "t__1"
    buffer = popxl.remote_buffer((), popxl.float32)
    assert popxl.remote_variable(np.zeros((), np.float32), buffer).name == "t__2"
    assert (made("x") + 1)._op.inputs[1].name == "t__3"  # type: ignore[union-attr]
    graph = ir.create_empty_graph()
    with graph, popxl.name_scope("s"):
        assert popxl.graph_input((2,), popxl.float32).name == "s/t"
        assert popxl.graph_input((2,), popxl.float32).name == "s/t__1"
    assert list(graph.inputs_by_name) == ["s/t", "s/t__1"]


# Calls


def doubled(x: popxl.Tensor) -> Any:
    with popxl.name_scope("inner"):
        y = ops.add(x, x)
    return y, x.T


def test_results_of_calls_have_the_names_of_the_graphs_outputs(ir: popxl.Ir) -> None:
    graph = ir.create_graph(doubled, SPEC)
    x = made("w")
    assert [t.name for t in ops.call(graph, x)] == ["inner/add", "x_T"]
    assert [t.name for t in ops.call(graph, x)] == ["inner/add__1", "x_T__1"]
    with popxl.name_scope("outer"):
        assert [t.name for t in ops.call(graph, x)] == ["outer/inner/add", "outer/x_T"]


def test_results_of_loops_and_branches_have_the_names_of_the_graphs_outputs(ir: popxl.Ir) -> None:
    body = ir.create_graph(lambda x: ops.exp(x), SPEC)
    other = ir.create_graph(lambda x: ops.sin(x), SPEC)
    (y,) = ops.repeat(body, 2, made("w"))
    (z,) = ops.conditional(popxl.constant(True), other, body, [y], [y])
    assert (y.name, z.name) == ("exp", "sin")


def test_results_that_autodiff_adds_to_a_call_have_the_inner_tensors_name(ir: popxl.Ir) -> None:
    graph = ir.create_graph(lambda x: ops.mul(ops.exp(x), x), SPEC)
    info = ops.call_with_info(graph, made("w"))
    gradient = autodiff(graph)
    assert [t.name for t in info.outputs] == [t.name for t in graph.outputs] == ["mul", "exp"]
    (dx,) = ops.call(gradient.graph, made("dy"), inputs_dict=gradient.inputs_dict(info))
    assert dx.name == "Gradient___x"


def test_names_do_not_grow_with_the_depth_of_calls(ir: popxl.Ir) -> None:
    graph = ir.create_graph(doubled, SPEC)
    for _ in range(20):
        graph = ir.create_graph(lambda x, inner=graph: ops.call(inner, x)[0], SPEC)
    assert ops.call(graph, made("w"))[0].name == "inner/add"


# Graphs


class Scale:
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        return x * 2.0

    class Layer(addons.Module):
        def build(self, x: popxl.Tensor) -> popxl.Tensor:
            return x * 2.0


def test_graphs_have_the_qualified_name_of_their_function(ir: popxl.Ir) -> None:
    def local(x: popxl.Tensor) -> popxl.Tensor:
        return x * 2.0

    here = "test_graphs_have_the_qualified_name_of_their_function"
    assert ir.create_graph(doubled, SPEC).name == "doubled_subgraph(0)"
    assert ir.create_graph(doubled, SPEC).name == "doubled_subgraph(1)"
    assert ir.create_graph(Scale().build, SPEC).name == "Scale.build_subgraph(0)"
    assert ir.create_graph(local, SPEC).name == f"{here}.local_subgraph(0)"
    assert ir.create_graph(lambda x: x * 2.0, SPEC).name == f"{here}.<lambda>_subgraph(0)"
    with popxl.name_scope("scope"):
        assert ir.create_graph(doubled, SPEC).name == "scope/doubled_subgraph(0)"


def test_graphs_of_modules_have_the_qualified_name_of_the_class(ir: popxl.Ir) -> None:
    class Local(popxl.Module):
        def build(self, x: popxl.Tensor) -> popxl.Tensor:
            return x * 2.0

    here = "test_graphs_of_modules_have_the_qualified_name_of_the_class"
    assert ir.create_graph(Local(), SPEC).name == f"{here}.Local_subgraph(0)"
    _, graph = Scale.Layer().create_graph(SPEC)
    assert graph.graph.name == "Scale.Layer_subgraph(0)"


# Titles


def test_the_default_title_of_a_print_has_the_tensors_name(capfd: Any) -> None:
    def f(x: popxl.Tensor) -> popxl.Tensor:
        with popxl.name_scope("layer"):
            return ops.print_tensor(ops.print_tensor(x).T, print_gradient=True)

    graph = popxl.Ir().create_graph(f, TensorSpec((2, 1), popxl.float32))
    run_graph(graph, [torch.tensor([[1.0], [2.0]])])
    title = f"print_{graph.ops[1].outputs[0].name}"
    assert capfd.readouterr().err == f"print_x: [[1.]\n [2.]]\n{title}: [[1. 2.]]\n"
    run_graph(autodiff(graph).graph, [torch.ones(1, 2)])
    assert capfd.readouterr().err == f"{title}_gradient: [[1. 1.]]\n"


# Representations


def test_tensors_show_id_dtype_and_shape(ir: popxl.Ir) -> None:
    graph = ir.create_graph(doubled, SPEC)
    assert repr(made("x", popxl.float16)) == "Variable[x popxl.dtypes.float16 (4, 2)]"
    assert repr(seed()) == "Constant[seed popxl.dtypes.uint32 (2,)]"
    assert repr(graph.inputs[0]) == "Tensor[doubled_subgraph(0)/x popxl.dtypes.float32 (4, 2)]"


def test_dtypes_show_where_they_are() -> None:
    for name in ("float32", "float16", "int8", "bool", "float8_143"):
        shown = repr(popxl.dtype.from_name(name))
        assert shown == str(popxl.dtype.from_name(name)) == f"popxl.dtypes.{name}"
        assert eval(shown) is popxl.dtype.from_name(name)


def test_groupings_show_the_number_of_replicas() -> None:
    ir = popxl.Ir(replication=8)
    shown = repr(ir.replica_grouping(stride=2, group_size=2))
    assert all(
        part in shown for part in ("ReplicaGrouping", "num_replicas=8", "stride=2", "group_size=2")
    )
    assert "num_replicas=8" in repr(ir.replica_grouping_from_assignments([0, 0, 1, 0, 1, 1, 0, 1]))


def test_gradients_show_graph_and_connections(ir: popxl.Ir) -> None:
    info = autodiff(
        ir.create_graph(lambda x, w: ops.matmul(x, w), SPEC, TensorSpec((2, 3), popxl.float32))
    )
    shown = repr(info)
    assert shown.startswith("GradGraphInfo[") and f"graph='{info.graph.name}'" in shown
    assert "expected_inputs=[FwdGrad(%matmul), Fwd(%x), Fwd(%w)]" in shown
    assert "expected_outputs=[FwdGrad(%x), FwdGrad(%w)]" in shown
