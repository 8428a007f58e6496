"""Parts of a program are neither pickled nor copied; what to save instead is said, and works."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import popxl
import popxl_addons as addons
import pytest
from popxl import ops, transforms

ONES = np.ones((2, 2), np.float32)


class Layer(addons.Module):
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        w = self.add_variable_input("w", lambda: ONES, x.dtype)
        return x @ w


def parts() -> dict[str, Any]:
    """A program's parts, each with the type that is named."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        variable, constant = popxl.variable(ONES), popxl.constant(1.0)
        into, out = popxl.h2d_stream((2, 2), popxl.float32), popxl.d2h_stream((2, 2), popxl.float32)
        x = ops.host_load(into)
        _, graph = Layer().create_graph(variable)
        named = addons.NamedTensors(w=variable)
        bound = graph.bind(addons.NamedTensors(w=variable))
        info = bound.call_with_info(x)
        ops.host_store(out, info.outputs[0])
        gradient = transforms.autodiff(ir.create_graph(lambda t: ops.tanh(t), x))
        buffer = popxl.remote_buffer((2, 2), popxl.float32)
        group = ir.replica_grouping()
    session = popxl.Session(ir)
    return {
        "Ir": ir,
        "Graph": ir.main_graph,
        "Tensor": x,
        "Variable": variable,
        "Constant": constant,
        "Session": session,
        "TaskSession": addons.TaskSession([into], [out], named, ir=ir),
        "RemoteBuffer": buffer,
        "ReplicaGrouping": group,
        "HostToDeviceStream": into,
        "DeviceToHostStream": out,
        "IrInternals": ir._pb_ir,
        "Op": ir.main_graph.ops[0],
        "Variable in a list": [1, variable],
        "Variable in NamedTensors": named,
        "Session in its native view": session._pb_session,
        "Op in the record of a call": info,
        "Graph in that of a gradient": gradient,
        "Graph in one with names": graph,
        "Graph in one with variables": bound,
    }


KINDS = (
    "Ir Graph Tensor Variable Constant Session TaskSession RemoteBuffer ReplicaGrouping "
    "HostToDeviceStream DeviceToHostStream IrInternals Op"
).split()


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return parts()


@pytest.mark.parametrize("way", [pickle.dumps, copy.deepcopy], ids=["pickle", "deepcopy"])
def test_parts_of_a_program_and_what_holds_them_say_what_to_save(
    made: dict[str, Any], way: Callable[[Any], Any]
) -> None:
    for name, part in made.items():
        with pytest.raises(TypeError) as refusal:
            way(part)
        kind = name.split()[0]
        words = (
            f"pickle or copy.deepcopy: got {kind}, a part of a program, which belongs to its "
            "process; expected data. Save the values of its variables, with "
            "session.get_tensors_data(ir.main_graph.variables) or TaskSession.save_checkpoint of "
            "popxl_addons, and build the program anew where they are loaded, with "
            "session.write_variables_data."
        )
        if name == kind:
            assert str(refusal.value) == words
        else:  # which of the parts inside comes first does not matter
            assert " a part of a program, which belongs to its process;" in str(refusal.value), name


def test_a_shallow_copy_of_a_part_is_the_part(made: dict[str, Any]) -> None:
    for kind in KINDS:
        assert copy.copy(made[kind]) is made[kind], kind
    assert copy.copy(made["Variable in a list"]) == made["Variable in a list"]


def test_specs_types_and_layers_are_data() -> None:
    spec = popxl.TensorSpec((2, 3), popxl.float16)
    for way in (lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy):
        assert way(spec) == spec and way(popxl.float16) is popxl.float16
        assert isinstance(way(Layer()), Layer)


def test_what_is_to_be_saved_goes_on_in_another_program(tmp_path: Path) -> None:
    def program() -> tuple[popxl.Session, popxl.tensor.Variable]:
        ir = popxl.Ir()
        with ir.main_graph, popxl.in_sequence():
            v = popxl.variable(ONES, name="v")
            v += 1
        return popxl.Session(ir), v

    session, _ = program()
    with session:
        session.run()
        values = session.get_tensors_data(session.ir.main_graph.variables)
    saved = pickle.dumps({v.name: value for v, value in values.items()})
    session, v = program()
    loaded = pickle.loads(saved)
    with session:
        session.write_variables_data({v: loaded[v.name] for v in session.ir.main_graph.variables})
        session.run()
    np.testing.assert_array_equal(session.get_tensor_data(v), ONES + 2)
