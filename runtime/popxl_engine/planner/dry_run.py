"""The compiled program run on tensors without memory, to see how much memory it would use.

The very source that a run executes is executed here, so that what is a view, what is dropped when,
and what kernels need on the way are those of a run. Loops run twice, for the second time starts
with what the first one leaves.
"""

import linecache
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from popxl.errors import GraphError
from popxl.ir import Ir
from popxl.op_records import OPS, Op
from popxl.remote_buffer import RemoteBuffer
from popxl.streams import Stream
from popxl.tensor import TensorSpec
from torch.utils._python_dispatch import _disable_current_modes

from popxl_engine import compiler
from popxl_engine.analysis.effects import effects_of, instrs_run
from popxl_engine.codegen import PhaseMarks, SourceGenerator
from popxl_engine.ir import Block, Instr, map_blocks
from popxl_engine.kernels.collectives import READS
from popxl_engine.kernels.dtypes import torch_dtype
from popxl_engine.kernels.registry import kernel_for
from popxl_engine.machine.lockstep import run_lockstep
from popxl_engine.machine.replica import Traffic
from popxl_engine.native import library as native
from popxl_engine.planner.live_bytes import LiveBytes, on_meta, without_compiler
from popxl_engine.planner.memoized import MemoizedKernel
from popxl_engine.planner.phases import entries
from popxl_engine.support import CollectiveSite, to_device

NOT_MEMOIZED = {"host", "remote", "collective", "clock"}
"""Effects of ops whose kernels are called with more than tensors and numbers."""
ITERATIONS_RUN = 2
"""Iterations of a loop that are run."""
MAX_INSTRS_RUN = 10_000_000
"""Instructions that are run: some minutes."""


def enter_phase(replica: Any, name: str) -> None:
    """Count what comes next for a phase."""
    replica.bytes.enter(name)


def peak_bytes(
    ir: Ir,
    borrows_rows: bool,
    together: bool,
    takes_first: Callable[[Op], bool],
    device: torch.device,
    block: Block | None = None,
) -> dict[str, int]:
    """Most bytes of device memory that are in use at a time on one replica, by phase.

    Args:
        borrows_rows: whether remote rows and stream slots take no device memory.
        together: count all replicas, as one process runs them.
        takes_first: of a conditional, whether its first branch is the one to run.
        device: whose fusions; it need not be there.
        block: of the whole program, compiled for it; default: it is compiled.
    """
    live, _ = dry_run(
        ir,
        lambda live, index: DryReplica(live, borrows_rows, index),
        together,
        takes_first,
        device,
        block,
    )
    return live.peaks


def dry_run(
    ir: Ir,
    make_replica: "Callable[[LiveBytes, int], DryReplica]",
    together: bool,
    takes_first: Callable[[Op], bool],
    device: torch.device,
    block: Block | None = None,
) -> "tuple[LiveBytes, list[DryReplica]]":
    """Run a program on dry replicas; returns the bytes that they counted, and them. Arguments as of
    `peak_bytes`.
    """
    block = compiler.compile(ir, device).block if block is None else block
    block = _shortened(block)
    if (count := instrs_run(block)) > MAX_INSTRS_RUN:
        raise GraphError(
            f"plan: got a program whose dry run runs {count} instructions, because of calls in "
            f"calls; expected at most {MAX_INSTRS_RUN}. Plan a part of it."
        )
    stochastic_rounding = bool(ir._pb_ir.getSessionOptions().enableStochasticRounding)
    generator = SourceGenerator(
        stochastic_rounding=stochastic_rounding,
        kernels=device.type,
        marks=PhaseMarks(entries(ir, block), enter_phase),
    )
    name = generator.function(block)
    with (
        without_compiler(),
        torch.device("meta"),
        native.elsewhere(device),
        LiveBytes() as live,
    ):
        replicas = [
            make_replica(live, index) for index in range(ir.replication_factor if together else 1)
        ]
        names = _dry_names(generator, live, together, takes_first)
        states = [_state(block) for _ in replicas]
        filename = f"<dry run of popxl program {ir.id}>"
        try:
            main = generator.source.load(filename, names)[name]
            mains = [partial(main, replica, *state) for replica, state in zip(replicas, states)]
            _run(mains, effects_of(block).synchronizes, together)
        except (NotImplementedError, RuntimeError) as error:
            raise _located(error, generator, filename) from error
        finally:
            del linecache.cache[filename]
    return live, replicas


def empty(spec: TensorSpec) -> torch.Tensor:
    """A tensor of that shape and type on the current device."""
    return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))


def _state(block: Block) -> list[Any]:
    """Variables of a replica."""
    state: list[Any] = []
    for t, value in block.state.items():
        array = np.zeros(t.shape, t.dtype.as_numpy())
        state.append(array if value.host else empty(t.spec))
    return state


class DryReplica:
    """Stands in for a replica: transfers give tensors of the right shape."""

    def __init__(self, live: LiveBytes, borrows_rows: bool, index: int):
        self.bytes, self.borrows, self.index = live, borrows_rows, index
        self.rng_path = 0
        self.traffic = Traffic()

    def _received(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if not self.borrows:
            return torch.empty(shape, dtype=dtype)
        row = on_meta_uncounted(shape, dtype)
        self.bytes.add(row, counts=False)
        return row

    def host_load(self, stream: Stream) -> torch.Tensor:
        """A slot of an input stream."""
        return self._received(stream.shape, torch_dtype(stream.dtype))

    def host_store(self, stream: Stream, t: torch.Tensor) -> None:
        """Nothing."""

    def begin_lap(self, label: str) -> None:
        """Nothing."""

    def remote_load(self, buffer: RemoteBuffer, offset: int) -> torch.Tensor:
        """A row."""
        return self._received(buffer.tensor_shape, torch_dtype(buffer.tensor_dtype))

    def remote_store(self, buffer: RemoteBuffer, offset: int, held: list[torch.Tensor]) -> None:
        """Drop the program's reference to the tensor in the list."""
        held.clear()


def on_meta_uncounted(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that a mode around does not see."""
    with _disable_current_modes():
        return torch.empty(shape, dtype=dtype, device="meta")


class DryCollective:
    """Stands in for a `CollectiveSite`: nobody else comes."""

    def __init__(self, site: CollectiveSite):
        self.site = site

    def arrive(
        self, replica: DryReplica, operands: Sequence[torch.Tensor], combine: Any
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """What the collective gives: memory of its own, or for slices a view of the operand."""
        op = self.site.op
        if READS.get(op.definition.name) == "own":
            (spec,) = (t.spec for t in op.outputs)
            return operands[0].reshape(-1)[: spec.nelms].view(spec.shape)
        results = tuple(empty(t.spec) for t in op.outputs)
        return results[0] if len(results) == 1 else results

    donate = begin = arrive


def _run(mains: Sequence[Callable[..., Any]], are_generators: bool, together: bool) -> None:
    if not are_generators:
        for main in mains:
            main()
    elif together:
        run_lockstep({replica: main() for replica, main in enumerate(mains)})
    else:
        _run_alone(mains[0]())


def _run_alone(running: Any) -> None:
    value = None
    while True:
        try:
            value = running.send(value)
        except StopIteration:
            return


def _dry_names(
    generator: SourceGenerator, live: LiveBytes, together: bool, takes_first: Callable[[Op], bool]
) -> dict[str, Any]:
    """The names that the source refers to, with what has memory or waits for others replaced."""
    printing = {
        kernel_for(definition) for definition in OPS.values() if "print" in definition.effects
    }
    transfers = {
        kernel_for(definition) for definition in OPS.values() if definition.effects & NOT_MEMOIZED
    }
    names: dict[str, Any] = {}
    for name, value in generator.source.names.items():
        if isinstance(value, torch.Tensor):
            names[name] = on_meta(value)
        elif isinstance(value, CollectiveSite):
            names[name] = value if together else DryCollective(value)
        elif callable(value) and value in printing:
            names[name] = _unprinted
        elif name.startswith("k_") and value not in transfers:
            names[name] = MemoizedKernel(value, live)
        else:
            names[name] = _to_meta if value is to_device else value
    names["bool"] = _Truth(generator.source.instrs, takes_first)
    return names


def _unprinted(t: torch.Tensor, *options: Any, **more: Any) -> torch.Tensor:
    return t


def _to_meta(value: np.ndarray) -> torch.Tensor:
    return on_meta(torch.from_numpy(np.array(value)))


class _Truth:
    """What branches ask: a value on the host as it is; else the branch that costs more."""

    def __init__(self, instrs: dict[int, Instr], takes_first: Callable[[Op], bool]):
        self.instrs, self.takes_first = instrs, takes_first

    def __call__(self, condition: Any) -> bool:
        if not isinstance(condition, torch.Tensor):
            return bool(condition)
        op = self.instrs[sys._getframe(1).f_lineno].source
        assert op is not None
        return self.takes_first(op)


def _shortened(program: Block) -> Block:
    """A program whose loops run twice at most."""

    def shorter(instr: Instr) -> Instr:
        if instr.kind != "repeat" or instr.arguments["repeat_count"] <= ITERATIONS_RUN:
            return instr
        return replace(instr, arguments={**instr.arguments, "repeat_count": ITERATIONS_RUN})

    return map_blocks(program, lambda block: block.with_instrs(map(shorter, block.instrs)))


def _located(error: Exception, generator: SourceGenerator, filename: str) -> Exception:
    found = generator.source.instr_of(error, filename)
    op = found.source if found is not None else None
    where = "the program" if op is None else op.described
    return GraphError(f"plan: while dry-running {where}: {error}")
