"""The engine behind a Session: the machine with the program's state, and the program that runs on it."""

import logging
import os
from typing import Any, Dict, Mapping, Optional

import numpy as np
import torch
from popxl.ir import Ir
from popxl.streams import Stream
from popxl.tensor import Variable

from popxl_engine.interpreter import Cell, Interpreter
from popxl_engine.kernels.dtypes import torch_dtype
from popxl_engine.machine.allocator import keep_freed_memory
from popxl_engine.machine.lockstep import Program, run_lockstep
from popxl_engine.machine.machine import Machine
from popxl_engine.machine.replica import Replica
from popxl_engine.program import Program

logger = logging.getLogger("popxl")

Arrays = Mapping[Stream, np.ndarray]


class Engine:
    """Runs one frozen Ir. With ``POPXL_INTERPRET=1`` the naive interpreter runs it, op by op, copying always."""

    def __init__(self, ir: Ir, replicas: range, interpret: Optional[bool] = None, **options: Any):
        keep_freed_memory()
        self.ir = ir
        self.machine = Machine(ir.remote_buffers, replicas)
        for variable in ir.main_graph.variables:
            self.machine.take_over(variable)
        if interpret is None:
            interpret = os.environ.get("POPXL_INTERPRET", "0") not in ("", "0")
        self.program = None if interpret else Program(ir, **options)

    def run(self, inputs: Arrays, outputs: Arrays) -> None:
        """Run the main graph once on every replica of this process.

        Arrays are ``[transfers, replicas in this process, *stream.shape]``; outputs are filled.
        """
        device_inputs = [self._to_device(inputs, i) for i in range(len(self.machine.replicas))]
        device_outputs = [self._outputs(outputs) for _ in self.machine.replicas]
        programs: Dict[int, Program] = {}
        for replica, ins, outs in zip(self.machine.replicas, device_inputs, device_outputs):
            replica.begin(ins, outs)
            programs[replica.index] = self._program(replica)
        with torch.no_grad():
            run_lockstep(programs)
        for position, outs in enumerate(device_outputs):
            for stream, value in outs.items():
                outputs[stream][:, position] = value.float().numpy() if value.dtype is torch.bfloat16 else value.numpy()

    @staticmethod
    def _to_device(arrays: Arrays, position: int) -> Dict[Stream, torch.Tensor]:
        return {
            stream: torch.from_numpy(np.ascontiguousarray(array[:, position])).to(torch_dtype(stream.dtype))
            for stream, array in arrays.items()
        }

    @staticmethod
    def _outputs(arrays: Arrays) -> Dict[Stream, torch.Tensor]:
        return {s: torch.empty((a.shape[0], *s.shape), dtype=torch_dtype(s.dtype)) for s, a in arrays.items()}

    def _program(self, replica: Replica) -> Program:
        return self._interpreted(replica) if self.program is None else self.program.start(replica)

    def _interpreted(self, replica: Replica) -> Program:
        """The main graph on copies of the replica's variables, which are written back at the end."""
        cells = {tensor: Cell.new(value) for tensor, value in replica.state.items()}
        yield from Interpreter(replica).graph(self.ir.main_graph, [], cells)
        for tensor, cell in cells.items():
            replica.state[tensor].copy_(cell.read())

    def read(self, variable: Variable) -> np.ndarray:
        """A variable's current value, in its host shape."""
        return self.machine.read(variable)

    def write(self, variable: Variable, data: np.ndarray) -> None:
        """Set a variable from an array of its host shape."""
        self.machine.write(variable, data)


def make_engine(ir: Ir, replicas: range, device: str) -> Engine:
    """The engine for a frozen Ir on this process's replicas."""
    return Engine(ir, replicas)


