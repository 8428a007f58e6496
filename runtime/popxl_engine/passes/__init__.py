"""Passes over programs: each matches a pattern and puts something faster in its place, or prepares
a program for code generation. They hold no kernel: fused ops are declared in `popxl_engine.ops`.

`PASSES` lists them in the order in which they run. To add one: a file here with a function
``block -> block``, and its line in `OPTIMIZATIONS`. ``POPXL_PASSES=-name,-name`` turns some off (or
``-all`` that may be), ``POPXL_PRINT_AFTER=name`` prints the program after one, and
``POPXL_VERIFY=1`` checks it after each.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from poprun.environment import EnvironmentVariableError

from popxl_engine.ir import Block, map_blocks, to_text, verify
from popxl_engine.kernels.flash_attention import has_flash_attention
from popxl_engine.passes.accumulate import (
    fuse_accumulated_column_sum,
    fuse_accumulated_gather_grad,
    fuse_accumulated_gemm,
)
from popxl_engine.passes.adamw import fuse_adamw
from popxl_engine.passes.attention import fuse_attention
from popxl_engine.passes.dead_code import remove_dead_code
from popxl_engine.passes.drop_unused_probs import drop_unused_probs
from popxl_engine.passes.elide_copies import elide_copies
from popxl_engine.passes.elide_zero_init import elide_zero_init
from popxl_engine.passes.emulate_views import emulate_views
from popxl_engine.passes.flash_attention import flash_attention
from popxl_engine.passes.fuse_cross_entropy import fuse_cross_entropy
from popxl_engine.passes.fuse_embedding_grad import fuse_embedding_grad
from popxl_engine.passes.fuse_grad_norm import fuse_grad_norm
from popxl_engine.passes.fuse_softcap import fuse_softcap
from popxl_engine.passes.gemm import fuse_gemm_bias, fuse_masked_scores, tile_gemm
from popxl_engine.passes.hide_by_attributes import hide_by_attributes
from popxl_engine.passes.identities import drop_casts, swap_transposed_gemm
from popxl_engine.passes.narrow_logits import narrow_logits
from popxl_engine.passes.overlap_collectives import leaves_machine, leaves_process, overlapped
from popxl_engine.passes.pack_qkv_grads import pack_qkv_grads
from popxl_engine.passes.pipeline_loops import pipelined
from popxl_engine.passes.reuse_dropout import recompute_probs, reuse_dropout
from popxl_engine.passes.scalar_cse import scalar_cse
from popxl_engine.passes.separate_operands import separate_operands

CPU = torch.device("cpu")


def _anywhere(_: object) -> bool:
    return True


def _is_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


@dataclass(frozen=True)
class Pass:
    """A step from a program to another one that does the same."""

    name: str
    fn: Callable[[Block], Block]
    devices: Callable[[torch.device], bool] = _anywhere
    """The devices on which it runs."""
    per_graph: bool = False
    """Whether it works on the block of a single graph, before calls are inlined: it must do the
    same wherever the graph is called.
    """
    leaves_dead_code: bool = False
    """What it replaces may have been the only user of something."""
    is_optional: bool = True
    """Programs are right without it."""


def _in_each(fn: Callable[[Block], Block]) -> Callable[[Block], Block]:
    """A pass over programs from one over their blocks."""
    return partial(map_blocks, rewrite=fn)


OPTIMIZATIONS: tuple[Pass, ...] = (
    Pass("drop_casts", drop_casts, per_graph=True),
    Pass("swap_transposed_gemm", swap_transposed_gemm, per_graph=True),
    Pass("fuse_gemm_bias", fuse_gemm_bias, per_graph=True),
    Pass("fuse_masked_scores", fuse_masked_scores, per_graph=True),
    Pass("fuse_attention", fuse_attention, per_graph=True),
    Pass("fuse_accumulated_gemm", fuse_accumulated_gemm, per_graph=True),
    Pass("fuse_accumulated_gather_grad", fuse_accumulated_gather_grad, per_graph=True),
    Pass("fuse_accumulated_column_sum", fuse_accumulated_column_sum, per_graph=True),
    Pass("fuse_adamw", fuse_adamw, per_graph=True),
    Pass("tile_gemm", tile_gemm, per_graph=True),
    Pass("fuse_softcap", _in_each(fuse_softcap), leaves_dead_code=True),
    Pass("narrow_logits", _in_each(narrow_logits), leaves_dead_code=True),
    Pass("fuse_cross_entropy", _in_each(fuse_cross_entropy), _is_cpu, leaves_dead_code=True),
    Pass("hide_by_attributes", _in_each(hide_by_attributes), leaves_dead_code=True),
    Pass("flash_attention", flash_attention, has_flash_attention, leaves_dead_code=True),
    Pass("pack_qkv_grads", _in_each(pack_qkv_grads)),
    Pass("recompute_probs", _in_each(recompute_probs), leaves_dead_code=True),
    Pass("reuse_dropout", _in_each(reuse_dropout)),
    Pass("drop_unused_probs", _in_each(drop_unused_probs), leaves_dead_code=True),
    Pass("elide_zero_init", _in_each(elide_zero_init)),
    Pass("fuse_embedding_grad", _in_each(fuse_embedding_grad)),
    Pass("fuse_grad_norm", _in_each(fuse_grad_norm)),
    Pass("scalar_cse", _in_each(scalar_cse)),
)

LINKS, LINKS_GPU, LINKS_ALL = (
    (
        Pass("overlap_collectives", _in_each(partial(overlapped, is_split=is_split))),
        Pass("pipeline_loops", _in_each(partial(pipelined, is_split=is_split))),
    )
    for is_split in (leaves_machine, leaves_process, _anywhere)
)
"""What orders a program for links that work while processors do, before copies are decided about:
for collectives between machines, between GPUs, or all.
"""

LEGALIZATION: tuple[Pass, ...] = (
    Pass("emulate_views", emulate_views, leaves_dead_code=True, is_optional=False),
    Pass("separate_operands", _in_each(separate_operands), is_optional=False),
    Pass("elide_copies", elide_copies, is_optional=False),
)
"""What makes a program one that code can be generated for."""

PASSES: tuple[Pass, ...] = (*OPTIMIZATIONS, *LINKS, *LEGALIZATION)
PASSES_GPU: tuple[Pass, ...] = (*OPTIMIZATIONS, *LINKS_GPU, *LEGALIZATION)
PASSES_APART: tuple[Pass, ...] = (*OPTIMIZATIONS, *LINKS_ALL, *LEGALIZATION)
"""The same for a program on GPUs, and for one as it is where each replica has a machine."""


def enabled_passes(
    device: torch.device = CPU, passes: tuple[Pass, ...] | None = None
) -> tuple[Pass, ...]:
    """The passes that run on a device, without those that ``POPXL_PASSES`` turns off.

    Args:
        passes: of which; default: of those for the device's kind.
    Raises:
        EnvironmentVariableError: it names a pass that is not there, or without which programs
            would be wrong.
    """
    named = os.environ.get("POPXL_PASSES", "").split(",")
    off = {name.strip() for name in named if name.strip()}
    optional = [p.name for p in PASSES if p.is_optional]
    unknown = off - {f"-{name}" for name in (*optional, "all")}
    if unknown:
        raise EnvironmentVariableError(
            f"POPXL_PASSES: got {', '.join(sorted(unknown))}; expected '-name' for some of "
            f"{', '.join(optional)}, or '-all'."
        )
    if passes is None:
        passes = PASSES if device.type == "cpu" else PASSES_GPU
    return tuple(
        p
        for p in passes
        if p.devices(device) and not (p.is_optional and (f"-{p.name}" in off or "-all" in off))
    )


def _printed_after() -> set[str]:
    """The passes after which ``POPXL_PRINT_AFTER`` has programs printed.

    Raises:
        EnvironmentVariableError: it names one that is not there.
    """
    printed = {n.strip() for n in os.environ.get("POPXL_PRINT_AFTER", "").split(",") if n.strip()}
    known = ["lower", *(p.name for p in PASSES)]
    unknown = printed - {*known}
    if unknown:
        raise EnvironmentVariableError(
            f"POPXL_PRINT_AFTER: got {', '.join(sorted(unknown))}; expected some of "
            f"{', '.join(known)}."
        )
    return printed


class PassManager:
    """Runs passes, and prints and verifies after each as the environment asks for."""

    def __init__(self, passes: Sequence[Pass]):
        self.passes = passes
        self._printed = _printed_after()
        self._verifies = os.environ.get("POPXL_VERIFY", "0") not in ("", "0")

    def run_on_graph(self, block: Block) -> Block:
        """The block of a single graph after the passes for these."""
        for each in self.passes:
            if each.per_graph:
                block = self._run(each, block)
        return block

    def run_on_program(self, program: Block) -> Block:
        """A program after the passes for whole programs."""
        program = self._run(Pass("lower", remove_dead_code), program)
        for each in self.passes:
            if not each.per_graph:
                program = self._run(each, program)
        return program

    def _run(self, each: Pass, block: Block) -> Block:
        result = each.fn(block)
        if result is not block and each.leaves_dead_code:
            result = remove_dead_code(result)
        if each.name in self._printed:
            print(f"// after {each.name}\n{to_text(result)}", file=sys.stderr)
        if self._verifies and (result is not block or each.name == "lower"):
            verify(result, each.name, is_graph=each.per_graph)
        return result
