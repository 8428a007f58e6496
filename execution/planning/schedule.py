"""`--print_schedule`: what each phase of a step computes and moves, in order, as the program says
it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import popxl
from popxl_addons.named_tensors import NamedTensors

from popxl_gpt.config.schema import Config
from popxl_gpt.execution.graphs import TrainingGraphs, TrainingStep
from popxl_gpt.execution.pretraining import make_ir, make_kept, run_phases, training_step
from popxl_gpt.utils.runtime import planner
from popxl_gpt.utils.units import bytes_text, si

KEPT = "kept for the backward pass"
"""What a buffer holds that is none of the step's other buffers."""
MOST_TURNS = 16
"""Moves of a cycle, at most."""
WIDTH = len(KEPT)
MOVES = {
    "host_load": ("load", "host"),
    "host_store": ("store", "host"),
    "remote_load": ("load", ""),
    "remote_load_": ("load", ""),
    "remote_store": ("store", ""),
    "replicated_all_gather": ("gather", "from replicas"),
    "replicated_all_reduce": ("sum", "over replicas"),
    "replicated_all_reduce_": ("sum", "over replicas"),
    "replicated_reduce_scatter": ("sum", "over replicas, cut"),
    "wide_all_reduce": ("sum", "over replicas"),
    "wide_reduce_scatter": ("sum", "over replicas, cut"),
}
"""What ops do, and with what, where their buffer does not say it."""


@dataclass(frozen=True)
class Move:
    """Tensors that a phase moves one after the other, by the same kind of op."""

    verb: str
    what: str
    tensors: int
    nbytes: int
    """Bytes of all of them, on one replica."""
    rounds: int = 1
    """How often this move and those beside it, of as many rounds, take turns."""


@dataclass(frozen=True)
class PhaseSchedule:
    """A phase of a step."""

    name: str
    times: int
    """How often it runs in a step."""
    moves: tuple[Move, ...]
    """What its runs move together, over all micro-batches, in the order of one of them."""
    flops_by_op: dict[str, int]
    """FLOPs of each kind of op, of all its runs, on one replica."""


def step_program(config: Config) -> tuple[popxl.Ir, TrainingStep]:
    """The main graph of one optimizer step, without a session, and what its phases are given."""
    execution = replace(config.execution, device_iterations=1, host_memory=None)
    config = replace(config, execution=execution)
    ir = make_ir(config)
    with ir.main_graph:
        step = training_step(config, ir)
        run_phases(step, make_kept(step, NamedTensors()))
    return ir, step


def contents(step: TrainingStep) -> dict[Any, str]:
    """What each remote buffer of the step holds, but those that are kept for the backward pass."""
    found: dict[Any, str] = {step.io.buffers["x"]: "x", step.io.buffers["dx"]: "dx"}
    for layer in (step.embedding, step.decoder, step.head):
        trees = [(layer.weights.buffers, "weights")]
        if isinstance(layer, TrainingGraphs):  # else it is frozen
            trees.append((layer.gradients.buffers, "gradients"))
            trees.append((layer.optimizer_state.buffers, "optimizer state"))
        for tree, what in trees:
            for buffer in tree.values_flat():
                found.setdefault(buffer, what)
    return found


def schedule(config: Config) -> list[PhaseSchedule]:
    """The phases of a step, in order."""
    ir, step = step_program(config)
    held, tools = contents(step), planner()
    planned = tools.plan(ir, with_peaks=False).phases
    by_phase: dict[str, list[Move]] = {phase.name: [] for phase in planned}
    for each in tools.moves(ir):
        verb, what = MOVES[each.op]
        if each.buffer is not None:
            what = held.get(each.buffer, KEPT)
        by_phase[each.phase].append(Move(verb, what, each.times, each.times * each.nbytes))
    return [
        PhaseSchedule(
            phase.name,
            phase.runs,
            tuple(_in_rounds(list(_joined(by_phase[phase.name])))),
            phase.flops_by_op,
        )
        for phase in planned
    ]


def _joined(moves: Iterable[Move]) -> Iterator[Move]:
    """Moves of a kind that follow each other as one."""
    for (verb, what), group in groupby(moves, lambda move: (move.verb, move.what)):
        same = list(group)
        tensors, nbytes = (sum(getattr(m, n) for m in same) for n in ("tensors", "nbytes"))
        yield Move(verb, what, tensors, nbytes)


def _in_rounds(moves: list[Move]) -> list[Move]:
    """Moves that come again and again in one order, as those of each parameter's update, once."""
    kinds = [(move.verb, move.what) for move in moves]
    found, begin = [], 0
    while begin < len(moves):
        period, rounds = _longest_cycle(kinds, begin)
        end = begin + period * rounds
        for place in range(begin, begin + period):
            same = moves[place:end:period]
            tensors, nbytes = (sum(getattr(m, n) for m in same) for n in ("tensors", "nbytes"))
            found.append(replace(same[0], tensors=tensors, nbytes=nbytes, rounds=rounds))
        begin = end
    return found


def _longest_cycle(kinds: list[tuple[str, str]], begin: int) -> tuple[int, int]:
    """The period and the rounds of what repeats for the most moves from here on; else (1, 1)."""
    best = 1, 1
    for period in range(2, MOST_TURNS + 1):
        cycle, rounds = kinds[begin : begin + period], 1
        while kinds[begin + rounds * period :][:period] == cycle:
            rounds += 1
        if rounds > 1 and period * rounds > best[0] * best[1]:
            best = period, rounds
    return best


def schedule_text(config: Config) -> str:
    """The phases of a step with what each computes and moves, a line each."""
    lines = [f"schedule of {config.name}: tensors and bytes of each replica in one optimizer step"]
    for phase in schedule(config):
        often = "" if phase.times == 1 else f", {phase.times} times, together"
        lines.append(f"\n{phase.name}{often}")
        flops = si(sum(phase.flops_by_op.values()), "FLOP")
        lines.append(f"  compute {'':<{WIDTH}} {'':>9} {flops:>12}")
        for move in phase.moves:
            rounds = f"  in {move.rounds} rounds" if move.rounds > 1 else ""
            size = bytes_text(move.nbytes)
            lines.append(
                f"  {move.verb:<7} {move.what:<{WIDTH}} {move.tensors:>9,} {size:>12}{rounds}"
            )
    return "\n".join(lines)
