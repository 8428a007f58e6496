"""The way from a program's graphs to blocks that code is generated from: the one way, for runs,
plans, profiles and the residency of rows alike.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from popxl.collection import without_collection
from popxl.ir import Ir
from popxl.op_records import Op
from popxl.transforms.fragments import FROM_HOST, TO_HOST

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
        ops: those of the main graph that run; default: all but those of a download.
    Raises:
        GraphError: a remote load or store outside its buffer, or a write to a view that memory
            cannot give.
    """
    chosen = tuple(enabled_passes(device) if passes is None else passes)
    if ops is None:
        parts = ops_by_run(ir)
        ops = parts.after_upload | parts.run
    kept, key = _kept.get(id(ir)), (device, chosen, frozenset(ops))
    if kept is None:
        return _compiled(ir, device, chosen, ops)
    if key not in kept:
        kept[key] = _compiled(ir, device, chosen, ops)
    return kept[key]


def _compiled(
    ir: Ir, device: torch.device, passes: Sequence[Pass], ops: Collection[Op]
) -> Compiled:
    manager = PassManager(passes)
    with without_collection():
        program = lower(ir.main_graph, manager.run_on_graph, ops)
        check_offsets(program)
        return Compiled(ir, manager.run_on_program(program), device)


@dataclass(frozen=True)
class Parts:
    """The main graph's ops, by when they run."""

    after_upload: frozenset[Op]
    """Ops that run once after an upload of the variables, before the next run."""
    run: frozenset[Op]
    """Ops of every run."""
    before_download: frozenset[Op]
    """Ops that run once for a download of what runs have changed, before it."""


def ops_by_run(ir: Ir) -> Parts:
    """Which ops of the main graph run when."""
    ops = frozenset(ir.main_graph.ops)
    after_upload, before_download = (
        frozenset(op for op in ops if op.execution is context) for context in (FROM_HOST, TO_HOST)
    )
    return Parts(after_upload, ops - after_upload - before_download, before_download)


def compile_unfused(ir: Ir) -> Compiled:
    """A program op by op, as its author wrote it: what plans count."""
    return compile(ir, passes=LEGALIZATION)
