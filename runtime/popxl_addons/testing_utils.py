"""Running a module in one line, for tests."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import popxl
from popxl import ops
from popxl.tensor import Variable

from popxl_addons.graph_cache import tensors_of_call
from popxl_addons.module import Module
from popxl_addons.named_tensors import NamedTensors


def ops_of_type(ops: Iterable[Any], op_type: type[Any]) -> int:
    """How many ops are of a class."""
    return sum(isinstance(op, op_type) for op in ops)


@dataclass(frozen=True, eq=False)
class TensorInput:
    """Marks a host array among a module's arguments: it becomes a tensor."""

    data: np.ndarray
    dtype: popxl.dtype | None = None


def run_module(
    module: Module,
    *args: Any,
    weights: Callable[[NamedTensors], dict[Variable, np.ndarray]] | None = None,
    **kwargs: Any,
) -> list[np.ndarray]:
    """Build a module in a program of its own, run it once on one replica, and return its outputs.

    Args:
        weights: from the module's variables to values that replace their initial ones; or that dict
            itself.
    """
    ir = popxl.Ir()
    with ir.main_graph:

        def as_tensor(value: Any) -> Any:
            return (
                popxl.variable(value.data, value.dtype, "input")
                if isinstance(value, TensorInput)
                else value
            )

        args = tuple(as_tensor(value) for value in args)
        kwargs = {name: as_tensor(value) for name, value in kwargs.items()}
        factories, graph = module.create_graph(*args, **kwargs)
        variables = factories.init()
        outputs = graph.bind(variables).call(*tensors_of_call(module, *args, **kwargs))
        streams = [popxl.d2h_stream(t.shape, t.dtype, "output") for t in outputs]
        for stream, t in zip(streams, outputs):
            ops.host_store(stream, t)
    session = popxl.Session(ir)
    if weights is not None:
        session.write_variables_data(dict(weights(variables) if callable(weights) else weights))
    with session:
        results = session.run()
    return [results[stream] for stream in streams]
