"""Programs of `pass_programs` through the interpreter and through every choice of passes."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import popxl
import torch
from helpers.pass_programs import Build, Program, build, built_by, shrunk
from helpers.tolerance import TOLERANCE, assert_close
from popxl_engine.engine import Engine
from popxl_engine.ir import Block, blocks_of
from popxl_engine.passes import LEGALIZATION, OPTIMIZATIONS, Pass

BITWISE = frozenset(
    {
        "drop_casts",
        "hide_by_attributes",
        "pack_qkv_grads",
        "recompute_probs",
        "reuse_dropout",
        "drop_unused_probs",
        "elide_zero_init",
        "scalar_cse",
    }
)
"""Passes after which a program gives the same bits. The others add in another order, or leave out a
rounding in between.
"""
NEEDS: dict[str, tuple[str, ...]] = {
    "fuse_attention": ("fuse_masked_scores",),
    "pack_qkv_grads": ("fuse_attention",),
    "recompute_probs": ("fuse_masked_scores", "fuse_attention"),
    "reuse_dropout": ("fuse_masked_scores", "fuse_attention"),
    "drop_unused_probs": ("fuse_masked_scores", "fuse_attention"),
    "fuse_embedding_grad": ("fuse_accumulated_gather_grad",),
    "fuse_grad_norm": ("fuse_accumulated_gemm",),
    "hide_by_attributes": ("fuse_masked_scores", "fuse_attention"),
    "flash_attention": ("fuse_masked_scores", "fuse_attention", "hide_by_attributes"),
}
"""Passes without which one finds nothing."""
NAMES = frozenset(each.name for each in OPTIMIZATIONS)
ON_DEVICES = {
    "all of a CPU": NAMES - {"flash_attention"},
    "all of a GPU": NAMES - {"fuse_cross_entropy"},
}
SCALE = 8
"""Roundings of a whole program, in units of `tolerance.TOLERANCE`."""

Results = list[tuple[np.ndarray, popxl.dtype]]


class PassCounts(Counter):
    """How often each pass has changed a block."""

    def passes(self, names: frozenset[str]) -> list[Pass]:
        """The passes of these names and what code generation needs, counted."""
        chosen = [self._counted(each) for each in OPTIMIZATIONS if each.name in names]
        return [*chosen, *LEGALIZATION]

    def _counted(self, each: Pass) -> Pass:
        def run(block: Block) -> Block:
            result = each.fn(block)
            self[each.name] += _instrs(result) != _instrs(block)
            return result

        return replace(each, fn=run)


def _instrs(program: Block) -> list[Any]:
    """What a program runs; bodies count by what is in them."""
    return [
        (i.kind, i.definition, i.outputs, tuple(i.arguments.items()))
        for block in blocks_of(program)
        for i in block.instrs
    ]


class Failure(AssertionError):
    """A choice of passes gives other numbers, or none."""


class Checker:
    """One program, of scenes or that a function builds in the main graph, and what is compared."""

    def __init__(self, program: Program | Build):
        self.program, self.ran = program, 0
        self.expected = self._run(None)
        kinds = [kind for _, kind in self.expected if kind.is_floating_point]
        self.rtol = SCALE * max((TOLERANCE[kind][0] for kind in kinds), default=0)
        self.alone: dict[frozenset[str], Results] = {}
        self.is_dense = isinstance(program, tuple) and not any(
            p.kind == "operand transposed" for scene in program for p in scene.perturbations
        )
        """Kernels add up in the order of memory, and the interpreter copies views."""

    def check(self, is_thorough: bool = False) -> "Counter[str]":
        """How often each pass changed something where it ran with all.

        Args:
            is_thorough: run each pass alone, too, that changes nothing where it runs with all.
        Raises:
            Failure: some choice of passes gives other numbers.
        """
        total: Counter[str] = Counter()
        self._compare("none", frozenset(), PassCounts())
        for what, names in ON_DEVICES.items():
            found = PassCounts()
            results = self._compare(what, names, found)
            for name in sorted(n for n in names if found[n]):
                self._without(what, name, names, found, results)
                self._alone(name)
            total |= found
        for name in sorted(NAMES) if is_thorough else ():
            self._alone(name)
        return total

    def check_all(self) -> "Counter[str]":
        """How often each pass changed something, with all passes only. Raises Failure."""
        total: Counter[str] = Counter()
        for what, names in ON_DEVICES.items():
            found = PassCounts()
            self._compare(what, names, found)
            total |= found
        return total

    def _without(
        self, what: str, name: str, names: frozenset[str], found: PassCounts, results: Results
    ) -> None:
        left = PassCounts()
        others = self._compare(f"{what} but {name}", names - {name}, left)
        is_same = {n: k for n, k in found.items() if n != name and k} == {
            n: k for n, k in left.items() if k
        }
        if name in BITWISE and is_same:
            self._same(f"{what}, with and without {name}", results, others)

    def _alone(self, name: str) -> None:
        names = frozenset((*NEEDS.get(name, ()), name))
        if names not in self.alone:
            self.alone[names] = self._compare(f"{name} alone", names, PassCounts())

    def _compare(self, what: str, names: frozenset[str], found: PassCounts) -> Results:
        """The results with these passes, which are the interpreter's."""
        try:
            results = self._run(found.passes(names))
        except Exception as error:
            raise Failure(f"{what}: {type(error).__name__}: {error}") from error
        if self.is_dense and {n for n, k in found.items() if k} <= BITWISE:
            self._same(what, results, self.expected)
        for i, ((one, kind), (other, _)) in enumerate(zip(results, self.expected)):
            self._near(f"{what}: result {i}", one, other, kind)
        return results

    def _same(self, what: str, results: Results, expected: Results) -> None:
        for i, ((one, _), (other, _)) in enumerate(zip(results, expected)):
            if not np.array_equal(_bits(one), _bits(other)):
                raise Failure(f"{what}: result {i} differs by {_distance(one, other)}, not a bit")

    def _near(self, what: str, one: np.ndarray, other: np.ndarray, kind: popxl.dtype) -> None:
        with np.errstate(all="ignore"):
            finite = np.abs(other.astype(np.float64))[np.isfinite(other.astype(np.float64))]
        try:
            assert_close(one, other, kind, what, self.rtol, self.rtol * max(1, *finite.flat, 0))
        except AssertionError as error:
            raise Failure(str(error)) from error

    def _run(self, passes: Sequence[Pass] | None) -> Results:
        """Every result of two runs, and every variable after them."""
        program = self.program
        ir, streams = build(program) if isinstance(program, tuple) else built_by(program)
        engine = Engine(ir, range(1), passes)
        self.ran += 1
        results: Results = []
        torch.use_deterministic_algorithms(True)  # memory that is not cleared holds NaN
        try:
            for _ in range(2):
                outputs = {s: np.zeros((1, 1, *s.shape), s.dtype.as_numpy()) for s in streams}
                engine.run({}, outputs)
                results += [(outputs[s], s.dtype) for s in streams]
        finally:
            torch.use_deterministic_algorithms(False)
        return results + [(engine.read(v), v.dtype) for v in ir.main_graph.variables]


def _bits(a: np.ndarray) -> np.ndarray:
    """Numbers as they are told apart: NaN is NaN."""
    a = np.ascontiguousarray(a)
    if a.dtype.kind in "biu":
        return a
    wide = a.astype(np.float64)
    return np.where(np.isnan(wide), np.nan, wide).view(np.uint64)


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.nanmax(np.abs(one.astype(np.float64) - other.astype(np.float64))))


def why_not(program: Program) -> str | None:
    """Why a program is not compiled right; None where it is."""
    try:
        Checker(program).check()
    except Failure as failure:
        return str(failure)
    return None


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """A program that still fails, and none of those that are a step smaller does."""
    smaller = next((each for each in shrunk(program) if fails(each)), None)
    return program if smaller is None else shrink(smaller, fails)
