"""The way from a line of a sample table to operands, a graph with the op in it, and the results of
its kernel.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import popxl
import torch
from helpers.interpreted import run_graph
from helpers.samples.sample import Built, Operand, Refusal, Same, Sample
from popxl import ops
from popxl.graph import Graph
from popxl.opdef import OPS, Op, OpDefinition, call_arguments, map_tensors
from popxl.ops import var_updates
from popxl.tensor import Tensor
from popxl_engine.interpreter import constant_tensor
from popxl_engine.kernels.dtypes import torch_dtype
from popxl_engine.kernels.registry import kernel_for
from popxl_engine.machine.machine import Machine

INDIRECT = frozenset({"control", "host", "remote", "clock"})
"""Effects of ops that need more than their kernel: other graphs, or the machine."""
SLOTS = 8
"""Transfers that each stream has in a sample. Slot i of an input stream holds i + 1 everywhere."""
ROOM = 0.05
"""Distance of operands from kinks, and from each other where they must be distinct."""


def grouping(ir: popxl.Ir, digits: str) -> popxl.ReplicaGrouping:
    """The grouping in which replica i is in the group of the i-th digit."""
    return ir.replica_grouping_from_assignments([int(digit) for digit in digits])


def public_function(name: str) -> Callable[..., Any]:
    """The function that users call for an op; for ops outside the API the one that declares it."""
    for module in (ops, var_updates, getattr(ops, "collectives", None)):
        found = getattr(module, name, None)
        if callable(found):
            return found
    return declaring_function(OPS[name])


@functools.cache
def declaring_function(op: OpDefinition) -> Callable[..., Any]:
    """The function that declares an op, in whichever module it is."""
    for module_name, module in sorted(sys.modules.items()):
        if module_name.startswith(("popxl.", "popxl_addons.")):
            for value in vars(module).values():
                if getattr(value, "definition", None) is op:
                    return value
    raise LookupError(
        f"op {op.name!r}: found no function that declares it in the modules imported by the tests"
    )


# Operands


def random_values(operand: Operand, dtype: popxl.dtype, rng: np.random.Generator) -> torch.Tensor:
    """Contiguous random values as the operand describes them."""
    size = int(np.prod(operand.shape, dtype=np.int64))
    if dtype is popxl.bool:
        return torch.from_numpy(rng.integers(0, 2, operand.shape).astype(bool))
    if dtype.is_int:
        values = (
            rng.integers(int(operand.low), int(operand.high), operand.shape)
            if size
            else np.zeros(operand.shape)
        )
        return torch.from_numpy(np.asarray(values).astype(dtype.as_numpy()))
    values = rng.uniform(operand.low, operand.high, size)
    if operand.distinct:
        values = operand.low + 2 * ROOM * rng.permutation(size) + rng.uniform(0, ROOM, size)
    for kink in operand.away_from:
        near = np.abs(values - kink) < 2 * ROOM
        values[near] = kink + np.where(values[near] < kink, -1, 1) * (
            2 * ROOM + np.abs(values[near] - kink)
        )
    return torch.from_numpy(values.reshape(operand.shape)).to(torch_dtype(dtype))


def positive_integers(values: np.ndarray) -> np.ndarray:
    """Small positive integers near the sizes of arbitrary numbers."""
    return np.asarray(np.minimum(np.nan_to_num(np.abs(values)), 9) // 1 + 1)


def laid_out(t: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values (for "expanded": the first along the first axis, repeated) in another memory
    layout.
    """
    if layout == "transposed":
        return t.permute(*reversed(range(t.dim()))).contiguous().permute(*reversed(range(t.dim())))
    if layout == "strided":
        wide = torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)
        wide[..., ::2] = t
        return wide[..., ::2]
    if layout == "expanded":
        return t[:1].expand(t.shape)
    assert layout == "contiguous", layout
    return t


@dataclass
class Case:
    """Operands of a sample in one dtype. ``places``: where they go, a list or a dict by name of
    indices.
    """

    sample: Sample | Refusal
    dtype: popxl.dtype
    tensors: list[torch.Tensor] = field(default_factory=list)
    dtypes: list[popxl.dtype] = field(default_factory=list)
    places: Any = None

    def arguments(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The operands as positional and named arguments, with ``values[i]`` for the i-th
        tensor.
        """

        def fill(place: Any) -> Any:
            return [fill(p) for p in place] if isinstance(place, list) else values[place]

        if isinstance(self.places, dict):
            return [], {n: fill(p) for n, p in self.places.items()}
        return [fill(p) for p in self.places], {}


def make_case(sample: Sample | Refusal, dtype: popxl.dtype | None = None) -> Case:
    """Draw the operands; the same numbers, rounded, for every dtype of one kind."""
    case = Case(sample, dtype or sample.dtype)
    # drawn from 1 to 5: no divisor is zero
    made_integers = case.dtype.is_int and not sample.dtype.is_int
    rng = np.random.default_rng(getattr(sample, "seed", 0))
    flat: list[int] = []

    def place(spec: Any) -> Any:
        if isinstance(spec, list):
            return [place(s) for s in spec]
        if isinstance(spec, Same):
            flat.append(flat[spec.index])
            return flat[-1]
        if isinstance(spec, np.ndarray):
            is_float = spec.dtype.kind == "f"
            of = case.dtype if is_float else popxl.dtype.as_dtype(spec.dtype)
            tensor = torch.from_numpy(
                positive_integers(spec) if is_float and made_integers else spec.copy()
            )
            tensor = tensor.to(torch_dtype(of)) if is_float else tensor
        else:
            operand = spec if isinstance(spec, Operand) else Operand(tuple(spec))
            operand = replace(operand, low=1, high=6) if made_integers else operand
            of = operand.dtype or case.dtype
            tensor = laid_out(random_values(operand, of, rng), operand.layout)
        case.tensors.append(tensor)
        case.dtypes.append(of)
        flat.append(len(case.tensors) - 1)
        return flat[-1]

    operands = sample.operands
    case.places = (
        {n: place(s) for n, s in operands.items()}
        if isinstance(operands, dict)
        else [place(s) for s in operands]
    )
    return case


# Graphs


@dataclass
class Program:
    """A graph whose inputs are a case's operands and whose outputs are the results of the sample's
    op.
    """

    case: Case
    graph: Graph
    op: Op
    attrs: dict[str, Any]


def build(case: Case) -> Program:
    """Add the op to a graph of its own, with graph inputs as operands."""
    sample = case.sample
    ir = popxl.Ir()
    graph = ir.create_empty_graph("sample")
    with graph:
        inputs = [
            popxl.graph_input(tuple(t.shape), of, f"operand_{i}")
            for i, (t, of) in enumerate(zip(case.tensors, case.dtypes))
        ]
        attrs = {n: v.make() if isinstance(v, Built) else v for n, v in sample.attrs.items()}
        args, kwargs = case.arguments(inputs)
        result = (sample.build or public_function(sample.op))(*args, **kwargs, **attrs)
        results = [] if result is None else [result] if isinstance(result, Tensor) else list(result)
        for t in results:
            popxl.graph_output(t)
    made = [op for op in graph.ops if op.definition.name == sample.op]
    assert made, (
        f"{sample.op}: the sample's graph does not hold the op, only "
        f"{[op.definition.name for op in graph.ops]}"
    )
    return Program(case, graph, made[-1], attrs)


def needs_machine(graph: Graph) -> bool:
    """Whether an op of the graph needs more than its kernel."""
    return any(op.definition.effects & INDIRECT for op in graph.ops)


def run(graph: Graph, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Execute the graph: kernel by kernel on these very tensors, or on a machine if an op needs
    one.

    The first slot of every output stream is appended to the results.
    """
    if needs_machine(graph):
        return run_on_machine(graph, tensors)
    env: dict[Tensor, torch.Tensor] = dict(zip(graph.inputs, tensors))
    env.update((c, constant_tensor(c)) for c in graph.constants)
    for op in graph.ops:
        results = run_kernel(op, env)
        assert len(results) == len(op.outputs), (
            f"{op}: kernel gave {len(results)} results, expected {len(op.outputs)}"
        )
        env.update(zip(op.outputs, results))
    return [env[t] for t in graph.outputs]


def run_kernel(op: Op, env: dict[Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """One op's kernel. Operands that it does not declare to write must be as before."""
    definition = op.definition
    before = {t: env[t].clone() for t in op.inputs if t not in op.written}
    in_group = (lambda t: [env[t]]) if "collective" in definition.effects else env.__getitem__
    arguments = {n: map_tensors(v, in_group) for n, v in op.arguments.items()}
    args, kwargs = call_arguments(definition, arguments)
    result = kernel_for(definition)(*args, **kwargs)
    if "collective" in definition.effects:
        (result,) = result
    for t, value in before.items():
        assert same_bits(env[t], value), (
            f"{definition.name}: the kernel changed %{t.name}, which it does not declare"
        )
    return [] if result is None else [result] if isinstance(result, torch.Tensor) else list(result)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes."""
    return a.shape == b.shape and a.dtype == b.dtype and as_bytes(a) == as_bytes(b)


def as_bytes(t: torch.Tensor) -> bytes:
    """A tensor's elements, row-major."""
    plain = t.clone(memory_format=torch.contiguous_format).flatten()
    return bytes(plain.view(torch.uint8).numpy().tobytes()) if t.numel() else b""


def run_on_machine(graph: Graph, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Execute the graph with the interpreter, on a machine of one replica with all of the program's
    streams.
    """
    replica = Machine(graph.ir.remote_buffers, range(1)).replicas[0]

    def slots(stream: Any) -> torch.Tensor:
        return torch.zeros(SLOTS, *stream.shape, dtype=torch_dtype(stream.dtype))

    inputs = {s: slots(s) for s in streams(graph, "h2d_stream")}
    for array in inputs.values():
        for i in range(SLOTS):
            array[i] = i + 1
    outputs = {s: slots(s) for s in streams(graph, "d2h_stream")}
    replica.begin(inputs, outputs)
    results = run_graph(graph, tensors, replica)
    return [*results, *(array[0] for array in outputs.values())]


def streams(graph: Graph, parameter: str) -> Iterator[Any]:
    """Streams that ops of the graph and of those it calls use."""
    for op in graph.ops:
        if parameter in op.arguments:
            yield op.arguments[parameter]
        for called, _ in op.called():
            yield from streams(called, parameter)


def to_numpy(t: torch.Tensor) -> np.ndarray:
    """The value as a numpy array, floating point as float64."""
    return np.array(t.to(torch.float64).numpy() if t.is_floating_point() else t.numpy())
