"""Any IR as readable text: for people, and for snapshot tests."""

from typing import Any

import numpy as np

from popxl.dtypes import dtype
from popxl.graph import Graph
from popxl.ir import Ir
from popxl.opdef import Op, flatten
from popxl.tensor import Tensor, Variable

SMALL = 8
"""Constants of up to this many elements are printed with their values."""


def to_text(what: Ir | Graph) -> str:
    """A listing of a graph, or of every graph of an Ir, main graph first: inputs, variables,
    constants, ops, outputs.

    The same program gives the same text, in any process.

        graph 'f_subgraph(0)' (%x: float32[2, 3], %w: float32[3] by ref) -> (%add)
          %t: float32[] = 2.0
          %mul: float32[2, 3] = mul(%x, %t)
          %add: float32[2, 3] = add(%mul, %w)
    """
    if isinstance(what, Ir):
        replicas = (
            f"ir on {what.replication_factor} replica{'s' * (what.replication_factor > 1)}\n\n"
        )
        return replicas + "\n".join(to_text(graph) for graph in what.graphs)
    lines = [_header(what)]
    lines += [f"  {_declared(t)} = {_variable(t)}" for t in what.variables]
    lines += [f"  {_declared(t)} = {_array(t.host_value)}" for t in what.constants]
    lines += [f"  {_op(op)}" for op in what.ops]
    return "\n".join(lines) + "\n"


def _header(graph: Graph) -> str:
    inputs = [f"{_declared(t)}{' by ref' * (t in graph._by_ref_inputs)}" for t in graph.inputs]
    seed = graph.rounding_seed
    rounding = f", rounding from %{seed.name}" if seed is not None else ""
    outputs = ", ".join(map(_attribute, graph.outputs))
    return f"graph '{graph.name or 'main'}' ({', '.join(inputs)}) -> ({outputs}){rounding}"


def _declared(t: Tensor) -> str:
    return f"%{t.name}: {t.spec}"


def _variable(variable: Variable) -> str:
    location, shard = variable._remote, variable.shard
    if shard is not None:
        return f"variable, 1/{variable.shard_over} each in {_declared(shard)}"
    if location is None:
        return "variable"
    pieces = f", 1/{location.shard_over} each" if location.shard_over > 1 else ""
    return f"remote variable, slot {location.offset} of {location.buffer!r}{pieces}"


def _array(data: Any) -> str:
    array = np.asarray(data)
    return _nested(array) if array.size <= SMALL else "..."


def _nested(array: Any) -> str:
    return str(array) if array.ndim == 0 else f"[{', '.join(map(_nested, array))}]"


def _op(op: Op) -> str:
    results = ", ".join(map(_declared, op.outputs))
    arguments = ", ".join(_argument(name, value) for name, value in op.arguments.items())
    call = f"{op.definition.name}({arguments})"
    borrowed = [t.name for graph, _ in op.called() for t in graph.inputs if t in op._modified_here]
    call += f" with {', '.join(f'%{name}' for name in borrowed)} by ref" if borrowed else ""
    return f"{results} = {call}" if results else call


def _argument(name: str, value: Any) -> str:
    """Tensors and graphs stand for themselves; attributes are named."""
    speaks = isinstance(value, Graph) or any(True for _ in flatten((value,)))
    return _attribute(value) if speaks else f"{name}={_attribute(value)}"


def _attribute(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"%{value.name}"
    if isinstance(value, Graph):
        return f"'{value.name or 'main'}'"
    if isinstance(value, dtype):
        return value.name
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_attribute, value))}]"
    return _array(value) if isinstance(value, np.ndarray) else repr(value)
