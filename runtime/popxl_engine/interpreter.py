"""The specification: runs an IR op by op and copies always.

Every value is a cell. Alias ops (``reshape_`` and its like) make a second cell on the same storage;
in-place ops write through a cell; everything else makes new storage. The fast engine must give
these numbers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from popxl.graph import Graph
from popxl.ir import Ir
from popxl.opdef import Op, call_arguments, map_tensors
from popxl.tensor import Constant, Tensor

import popxl_engine.kernels  # noqa: F401 - registers every kernel
from popxl_engine.kernels.collectives import APART, READS, reduction
from popxl_engine.kernels.dtypes import as_signed, from_numpy, torch_dtype
from popxl_engine.kernels.registry import kernel_for
from popxl_engine.machine.arrival import Arrival
from popxl_engine.machine.lockstep import ReplicaRun
from popxl_engine.machine.rng_path import enter, of_seed
from popxl_engine.shards import Sharding, result_sharding
from popxl_engine.stochastic import Positions, rounded


class FlatArray:
    """One flat array. Joining storages (``concat_``) leaves them as parts of a larger one."""

    def __init__(self, data: torch.Tensor):
        self.data: torch.Tensor = data
        self.parent: tuple[FlatArray, int] | None = None

    def root(self) -> tuple["FlatArray", int]:
        """The array that holds the elements now, and the offset of this one in it."""
        if self.parent is None:
            return self, 0
        root, offset = self.parent[0].root()
        return root, offset + self.parent[1]


class Cell:
    """A value: positions in a storage."""

    def __init__(self, storage: FlatArray, index: torch.Tensor, sharding: Sharding | None = None):
        self.storage, self.index, self.sharding = storage, index, sharding

    @classmethod
    def new(cls, value: torch.Tensor, sharding: Sharding | None = None) -> "Cell":
        """A cell with a copy of a value as its own storage."""
        index = torch.arange(value.numel()).reshape(value.shape)
        return cls(FlatArray(value.detach().clone().reshape(-1)), index, sharding)

    def copy(self) -> "Cell":
        """The same value in storage of its own."""
        return Cell.new(self.read(), self.sharding)

    def read(self) -> torch.Tensor:
        """A copy of the value."""
        root, offset = self.storage.root()
        return as_signed(root.data)[self.index + offset].clone().view(root.data.dtype)

    def write(self, value: torch.Tensor) -> None:
        """Change the elements; every alias sees it."""
        root, offset = self.storage.root()
        as_signed(root.data)[(self.index + offset).reshape(-1)] = as_signed(value.reshape(-1))


def join(cells: Sequence[Cell]) -> list[Cell]:
    """The same cells, on one common storage."""
    roots = list(dict.fromkeys(cell.storage.root()[0] for cell in cells))
    if len(roots) > 1:
        joined, offset = FlatArray(torch.cat([r.data for r in roots])), 0
        for r in roots:
            r.parent, offset = (joined, offset), offset + r.data.numel()
    result = []
    for cell in cells:
        root, offset = cell.storage.root()
        result.append(Cell(root, cell.index + offset, cell.sharding))
    return result


def constant_tensor(constant: Constant) -> torch.Tensor:
    """A constant's value on the device."""
    value = from_numpy(np.array(constant.host_value)).to(
        torch.get_default_device(), torch_dtype(constant.dtype)
    )
    return value.reshape(constant.shape)


Env = dict[Tensor, Cell]


class Interpreter:
    """Runs graphs on one replica. Generators yield at collectives over more than one replica.

    Args:
        stochastic_rounding: round updates of 16-bit tensors stochastically.
        sharding: what `shardings` gives for the program.
        ops: those of the main graph that run; default: all.
    """

    def __init__(
        self,
        replica: Any = None,
        stochastic_rounding: bool = False,
        sharding: Mapping[Any, Sharding] | None = None,
        ops: Collection[Op] | None = None,
    ):
        self.replica, self.stochastic_rounding, self.sharding, self.ops = (
            replica,
            stochastic_rounding,
            sharding or {},
            ops,
        )
        self.rng_path = replica.rng_path if replica is not None else 0
        self._numbers: dict[Op, int] = {}
        self.positions = Positions()

    def graph(self, graph: Graph, inputs: Sequence[Cell], state: Env | None = None) -> ReplicaRun:
        """Run a graph on cells that it may write to; returns its outputs' cells."""
        env: Env = dict(state or {})
        env.update(zip(graph.inputs, inputs))
        env.update((c, Cell.new(constant_tensor(c))) for c in graph.constants)
        outer, seed = self.rng_path, graph.rounding_seed
        if seed is not None:
            outer = of_seed(env[seed].read().tolist())
        for op in graph.ops:
            if self.ops is not None and graph is graph.main_graph and op not in self.ops:
                continue
            self.rng_path = enter(outer, (self.positions.of(op),))
            try:
                yield from self.op(op, env)
            except Exception as error:
                if not getattr(error, "located", False):
                    error.located = True  # type: ignore[attr-defined]
                    error.args = (f"while executing {op.described}: {error}",)
                raise
        return [env[t] for t in graph.outputs]

    def op(self, op: Op, env: Env) -> ReplicaRun:
        """Run one op and add its results to the environment."""
        name = op.definition.name
        if name == "call":
            cells = yield from self.called(
                op, op.arguments["graph"], [env[t] for t in op.arguments["inputs"]]
            )
        elif name == "repeat":
            cells = yield from self.repeat(op, env)
        elif name == "conditional":
            taken = "then" if bool(env[op.arguments["cond"]].read()) else "else"
            inputs = [env[t] for t in op.arguments[f"{taken}_inputs"]]
            cells = yield from self.called(op, op.arguments[f"{taken}_branch"], inputs)
        elif op.definition.alias:
            cells = self.alias(op, env)
        else:
            cells = yield from self.compute(op, env)
        if not op.called() and not op.written:
            for t, cell in zip(op.outputs, cells):
                operands = [env[t].sharding for t in op.inputs]
                everyone = op.graph.ir.replica_grouping()
                cell.sharding = result_sharding(
                    op.definition, op.arguments, t.spec, operands, self.sharding, everyone
                )
        env.update(zip(op.outputs, cells))

    def called(self, op: Op, graph: Graph, inputs: Sequence[Cell]) -> ReplicaRun:
        """Run a graph that an op calls on the caller's cells: by-reference inputs are those cells,
        the others copies.

        Outputs are copies.
        """
        own = [c if op.is_by_reference(t) else c.copy() for t, c in zip(graph.inputs, inputs)]
        outputs = yield from self.graph(graph, own)
        return [c.copy() for c in outputs]

    def repeat(self, op: Op, env: Env) -> ReplicaRun:
        """Run a graph repeatedly; its outputs become its first inputs. Inputs that are not given by
        reference keep their values, even if the graph changes what they were read from.
        """
        graph, given = op.arguments["graph"], [env[t] for t in op.arguments["inputs"]]
        inputs = [c if op.is_by_reference(t) else c.copy() for t, c in zip(graph.inputs, given)]
        carried, outer = [c.copy() for c in inputs[: len(graph.outputs)]], self.rng_path
        for i in range(op.arguments["repeat_count"]):
            first = inputs[: len(carried)] if i == 0 else carried
            self.rng_path = enter(outer, (i,))
            carried = yield from self.called(op, graph, [*first, *inputs[len(carried) :]])
        return carried

    def alias(self, op: Op, env: Env) -> list[Cell]:
        """Apply a view op to positions instead of elements."""
        viewed = {t: cell for t, cell in zip(op.viewed, join([env[t] for t in op.viewed]))}
        arguments = {n: map_tensors(v, lambda t: viewed[t].index) for n, v in op.arguments.items()}
        args, kwargs = call_arguments(op.definition, arguments)
        result = kernel_for(op.definition)(*args, **kwargs)
        storage = next(iter(viewed.values())).storage
        return [Cell(storage, index.clone()) for index in as_results(result)]

    def compute(self, op: Op, env: Env) -> ReplicaRun:
        """Run an op's kernel on copies of its operands, then write back what it declares to
        write.
        """
        copies: dict[str, Any] = {
            n: map_tensors(v, lambda t: env[t].read()) for n, v in op.arguments.items()
        }
        args, kwargs = call_arguments(op.definition, copies)
        run = kernel_for(op.definition)
        if "collective" in op.definition.effects:
            result = yield from self.collective(op, run, args, kwargs)
        elif op.definition.effects & {"host", "remote", "clock"}:
            result = run(self.replica, *args, **kwargs)
        else:
            with self.rounding(op, env):
                result = run(*args, **kwargs)
        for parameter in op.definition.writes:
            written = result if "collective" in op.definition.effects else copies[parameter]
            env[op.arguments[parameter]].write(written)
        cells = [Cell.new(t) for t in as_results(result)]
        if cells and op.definition.writes:
            cells[0] = env[op.arguments[op.definition.writes[0]]]
        return cells

    def rounding(self, op: Op, env: Env) -> AbstractContextManager[None]:
        """How an op rounds what it writes."""
        target = env[op.written[0]] if op.written else None
        if target is None or not self.stochastic_rounding:
            return nullcontext()
        starts = (
            target.sharding.starts(target.index.numel()) if target.sharding is not None else None
        )
        return rounded((self.rng_path, starts[self.replica.index] if starts is not None else 0))

    def collective(self, op: Op, run: Any, args: list[Any], kwargs: dict[str, Any]) -> ReplicaRun:
        """Meet the other members of the group; alone, combine at once."""
        is_operand = [isinstance(a, torch.Tensor) for a in args]

        def combine(*operands: list[torch.Tensor]) -> list[Any]:
            lists = iter(operands)
            return run(
                *(next(lists) if tensor else a for a, tensor in zip(args, is_operand)), **kwargs
            )

        operands = tuple(a for a, tensor in zip(args, is_operand) if tensor)
        members = group_members(op, self.replica.index if self.replica is not None else 0)
        if len(members) == 1:
            return combine(*([t] for t in operands))[0]
        reads = READS.get(op.definition.name, "all")
        if self.replica is not None and reads != "own":
            self.replica.traffic.count_collective(op.definition.name, members, operands)
        where = f"{op} built at {op.where}"
        arrival = Arrival(
            op, members, operands, combine, kernel_apart(op), where, self.site_index(op), reads
        )
        arrival.reduce = reduction(op.definition.name, op.arguments.get("op"))
        result = yield arrival
        return result

    def site_index(self, op: Op) -> int:
        """An op's number among the collectives of the program, the same in every process."""
        if not self._numbers:
            ops = (
                o
                for graph in op.graph.ir.graphs
                for o in graph.ops
                if "collective" in o.definition.effects
            )
            self._numbers = {o: i for i, o in enumerate(ops)}
        return self._numbers[op]


def group_members(op: Op, replica: int) -> tuple[int, ...]:
    """Replicas that take part with ``replica`` in a collective, in group order."""
    group = op.arguments.get("group")
    if group is None:
        return tuple(range(op.graph.ir.replication_factor))
    return tuple(group.groups[group.assignment[replica]])


def groups_that_meet(ir: Ir) -> list[tuple[int, ...]]:
    """The groups of more than one replica over which collectives of a program exchange something,
    sorted.
    """
    ops = (op for graph in ir.graphs for op in graph.ops if "collective" in op.definition.effects)
    groupings = {
        op.arguments.get("group") or ir.replica_grouping()
        for op in ops
        if READS.get(op.definition.name) != "own"
    }
    return sorted(
        {
            tuple(members)
            for grouping in groupings
            for members in grouping.groups
            if len(members) > 1
        }
    )


def kernel_apart(op: Op) -> Callable[..., torch.Tensor]:
    """A collective's kernel as one member sees it: of its group, as a seat or communicator, and its
    operand.
    """
    attributes = {name: a for name, a in op.arguments.items() if not isinstance(a, Tensor)}
    return partial(APART[op.definition.name], **attributes)


def as_results(result: Any) -> tuple[torch.Tensor, ...]:
    """A kernel's results as a tuple."""
    if result is None:
        return ()
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)
