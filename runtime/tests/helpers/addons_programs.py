"""Small programs for the add-ons' tests: build in the main graph, run once, read what came out."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import popxl
from popxl import ops


def store_all(tensors: Iterable[popxl.Tensor]) -> list[popxl.DeviceToHostStream]:
    """A stream and a store for each tensor."""
    streams = []
    for t in tensors:
        streams.append(popxl.d2h_stream(t.shape, t.dtype, "result"))
        ops.host_store(streams[-1], t)
    return streams


def run_program(
    build: Callable[[popxl.Ir], Iterable[popxl.Tensor]], **options: Any
) -> list[np.ndarray]:
    """Outputs of a program whose main graph is ``build(ir)``. Options are fields of the session
    options.
    """
    ir = popxl.Ir()
    for name, value in options.items():
        setattr(ir._pb_ir.getSessionOptions(), name, value)
    with ir.main_graph, popxl.in_sequence():
        streams = store_all(build(ir))
    with popxl.Session(ir) as session:
        results = session.run()
    return [results[stream] for stream in streams]


def run_session(
    ir: popxl.Ir, inputs: Mapping[Any, Any], read: Iterable[Any] = ()
) -> tuple[Mapping[Any, np.ndarray], Mapping[Any, np.ndarray]]:
    """One run of a finished program: (outputs by stream, values by variable)."""
    with popxl.Session(ir) as session:
        results = session.run(inputs)
        return results, session.get_tensors_data(list(read))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Reproducible float32 data."""
    return np.random.default_rng(seed + sum(shape)).normal(size=shape).astype(np.float32)
