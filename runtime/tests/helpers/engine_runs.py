"""Runs of small programs by the engine, from their results to what was generated."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import popxl
from popxl import ops
from popxl.tensor import Tensor
from popxl_engine.engine import Engine
from popxl_engine.passes import enabled_passes


def engine_of(ir: popxl.Ir, interpret: bool = False) -> Engine:
    """An engine for a program on one replica, with the passes that are enabled."""
    return Engine(ir, range(1), None if interpret else enabled_passes())


def prepare(
    build: Callable[[popxl.Ir], Sequence[Tensor]], interpret: bool = False, **options: Any
) -> Engine:
    """An engine for a main graph that is ``build(ir)``, whose results go to streams."""
    ir = popxl.Ir()
    for name, value in options.items():
        setattr(ir._pb_ir.getSessionOptions(), name, value)
    with ir.main_graph:
        for t in build(ir):
            ops.host_store(popxl.d2h_stream(t.shape, t.dtype), t)
    return engine_of(ir, interpret)


def run(engine: Engine) -> dict[str, Any]:
    """Outputs and variables after a run."""
    outputs = {
        s: np.zeros((1, 1, *s.shape), s.dtype.as_numpy()) for s in engine.ir.get_all_d2h_streams()
    }
    engine.run({}, outputs)
    values: dict[str, Any] = {
        s.tensor_id: outputs[s][0, 0].tolist() for s in sorted(outputs, key=lambda s: s.tensor_id)
    }
    values.update((v.name, engine.read(v).tolist()) for v in engine.ir.main_graph.variables)
    return values


def both(build: Callable[[popxl.Ir], Sequence[Tensor]], runs: int = 2) -> list[dict[str, Any]]:
    """Values after each run, which are the interpreter's too."""
    engine, interpreter = prepare(build), prepare(build, interpret=True)
    found = [run(engine) for _ in range(runs)]
    assert found == [run(interpreter) for _ in range(runs)]
    return found


def source(engine: Engine) -> str:
    assert engine.program is not None
    return engine.program.source.text()


def ones(*shape: int) -> Tensor:
    return popxl.constant(np.ones(shape, np.float32))
