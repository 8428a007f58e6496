"""Run a program by the interpreter and by the engine; what both give, and which fused ops stand in it."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import popxl
import pytest
from helpers.tolerance import TOLERANCE, assert_close
from popxl import ops
from popxl.tensor import Tensor
from popxl_engine.engine import Engine
from popxl_engine.passes import Pass, enabled_passes

both_types = pytest.mark.parametrize("dtype", [popxl.float32, popxl.bfloat16], ids=lambda d: d.name)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).normal(size=shape).astype(np.float32)


def fused_steps(engine: Engine) -> set[str]:
    """Names of the fused kernels that a program calls."""
    assert engine.program is not None
    return set(re.findall(r"k_fused_(\w+?)_*_\d+\w*\(", engine.program.source.text()))


def observe(
    build: Callable[[popxl.Ir], Sequence[Tensor]],
    interpret: bool,
    runs: int = 1,
    passes: Sequence[Pass] = (),
) -> Any:
    """(every output and variable after some runs, the engine) of a program whose main graph is
    ``build(ir)``. ``passes``: in place of those that are enabled.
    """
    ir = popxl.Ir()
    with ir.main_graph:
        streams = []
        for t in build(ir):
            streams.append(popxl.d2h_stream(t.shape, t.dtype))
            ops.host_store(streams[-1], t)
    engine = Engine(ir, range(1), None if interpret else passes or enabled_passes())
    values: dict[str, tuple[np.ndarray, popxl.dtype]] = {}
    for run in range(runs):
        outputs = {s: np.zeros((1, 1, *s.shape), s.dtype.as_numpy()) for s in streams}
        engine.run({}, outputs)
        values.update(
            {f"output {i} of run {run}": (outputs[s], s.dtype) for i, s in enumerate(streams)}
        )
    values.update({v.name: (engine.read(v), v.dtype) for v in ir.main_graph.variables})
    return values, engine


def check(
    build: Callable[[popxl.Ir], Sequence[Tensor]],
    dtype: popxl.dtype,
    runs: int = 1,
    scale: float = 1,
) -> set[str]:
    """Compare engine and interpreter; returns the names of the fused steps."""
    expected, _ = observe(build, True, runs)
    found, engine = observe(build, False, runs)
    rtol, atol = (scale * n for n in TOLERANCE[dtype])
    for name, (value, kind) in expected.items():
        assert_close(found[name][0], value, kind, name, rtol, atol)
    return fused_steps(engine)
