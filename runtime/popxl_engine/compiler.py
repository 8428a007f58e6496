"""From a program's graphs to blocks that code is generated from: the one way, for runs, plans,
profiles and the residency of rows alike.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from popxl.collection import without_collection
from popxl.ir import Ir
from popxl.op_records import Op
from popxl.transforms.fragments import FROM_HOST

from popxl_engine.checks import check_offsets
from popxl_engine.ir import Block
from popxl_engine.lowering import lower
from popxl_engine.passes import CPU, LEGALIZATION, Pass, PassManager, enabled_passes


@dataclass(frozen=True)
class Compiled:
    """A program as blocks of instructions.

    Args:
        block: what the main graph has become, with everything that it runs.
        device: where it runs.
    """

    ir: Ir
    block: Block
    device: torch.device


_kept: dict[int, dict[Any, Compiled]] = {}
"""What has been compiled inside `compiled_once`, by the program's identity."""


@contextmanager
def compiled_once(ir: Ir) -> Iterator[None]:
    """See `popxl.extensions.compiled_once`."""
    is_outermost = id(ir) not in _kept
    _kept.setdefault(id(ir), {})
    try:
        yield
    finally:
        if is_outermost:
            del _kept[id(ir)]


def compile(  # noqa: A001 - what it does; nobody needs Python's own here
    ir: Ir,
    device: torch.device = CPU,
    passes: Sequence[Pass] | None = None,
    ops: Collection[Op] | None = None,
) -> Compiled:
    """Compile a program.

    Args:
        device: where it is to run; it need not be there.
        passes: in their order; default: those that are enabled for the device.
        ops: those of the main graph that run; default: all.
    Raises:
        GraphError: a remote load or store outside its buffer, or a write to a view that memory
            cannot give.
    """
    chosen = tuple(enabled_passes(device) if passes is None else passes)
    kept, is_whole = _kept.get(id(ir)), ops is None or len(ops) == len(ir.main_graph.ops)
    if kept is None:
        return _compiled(ir, device, chosen, ops)
    key = device, chosen, None if is_whole else frozenset(ops or ())
    if key not in kept:
        kept[key] = _compiled(ir, device, chosen, ops)
    return kept[key]


def _compiled(
    ir: Ir, device: torch.device, passes: Sequence[Pass], ops: Collection[Op] | None
) -> Compiled:
    manager = PassManager(passes)
    with without_collection():
        program = lower(ir.main_graph, manager.run_on_graph, ops)
        check_offsets(program)
        return Compiled(ir, manager.run_on_program(program), device)


def ops_by_run(ir: Ir) -> tuple[frozenset[Op], frozenset[Op]]:
    """The main graph's ops that run once after an upload of the variables, before the next run; and
    those of every run.
    """
    after_upload = frozenset(op for op in ir.main_graph.ops if op.execution is FROM_HOST)
    return after_upload, frozenset(ir.main_graph.ops) - after_upload


def compile_unfused(ir: Ir) -> Compiled:
    """A program op by op, as its author wrote it: what plans count."""
    return compile(ir, passes=LEGALIZATION)
