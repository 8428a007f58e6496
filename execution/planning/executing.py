"""`--auto`: the fastest way to execute a model here that fits, chosen now or by the run before."""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import popdist

from popxl_gpt.config.command_line import RUN_CONFIG
from popxl_gpt.config.presets import override
from popxl_gpt.config.saving import load
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.planning.axes import EXECUTED, in_words, replicas_here, ways
from popxl_gpt.execution.planning.machine import speeds
from popxl_gpt.execution.planning.memory import Build
from popxl_gpt.execution.planning.options import PlanOptions
from popxl_gpt.execution.planning.placing import Placed, Room, placed_together
from popxl_gpt.execution.planning.run_plan import StepPlan, plan_step
from popxl_gpt.execution.planning.text import table
from popxl_gpt.execution.planning.trial import Clock, Program, Trials
from popxl_gpt.utils.errors import ConfigError, UserError
from popxl_gpt.utils.runtime import gather, read_note, runtime_errors_are_told
from popxl_gpt.utils.units import bytes_text, duration, si

SECONDS = 60.0
"""Seconds after which no further trial begins."""
FAST_TOKENS = 4096
"""Tokens of a replica that run as one where trials begin: products are wide, caches not full."""
DOUBLING = 0.05
"""What a candidate's plan is taken to be slower by, for each doubling or halving of those."""
FAR = 1.2
"""A plan that is slower by so much than the plan of the fastest trial is not tried."""
CLOSE = 1.5
"""Ways up to so many times as slow as the fastest are tried a second time: a machine that others
use, too, is not as fast in every trial.
"""


@dataclass(frozen=True)
class Tried:
    """A way to execute a model that fits, with its time."""

    placed: Placed
    seconds: float
    """Time of a step, from trials."""
    planned: float
    """Time of a step, by the plan."""


@dataclass(frozen=True)
class Choice:
    """What is chosen, and why."""

    tried: tuple[Tried, ...]
    """Ways that were timed, the fastest first; the first one is chosen."""
    left_out: tuple[tuple[Config, str], ...]
    """Ways that were not, with the reasons."""
    given: tuple[str, ...]
    """Settings that were not searched, as they were given."""
    search_seconds: float

    @property
    def config(self) -> Config:
        """What is chosen."""
        return self.tried[0].placed.config

    @property
    def seconds(self) -> float:
        """What trials let expect of a step."""
        return self.tried[0].seconds


def choose(
    config: Config,
    given: Collection[str],
    program: Program,
    build: Build,
    validation: Build | None = None,
    seconds: float = SECONDS,
    clock: Clock = time.perf_counter,
) -> Choice:
    """The fastest way to execute a model that fits this machine, by plans and short trials.

    Training comes to the same numbers up to rounding. All processes of a run call it together.

    Args:
        given: settings that stay as they are.
        program: makes a session of the training program.
        build: the training program by itself.
        validation: the one that runs between steps.
        seconds: after which no further trial begins.
        clock: what trials and the search are timed by.

    Raises:
        ConfigError: what is given leaves no way to execute the model.
        UserError: none fits.
    """
    begin = clock()
    fixed = frozenset(given) & frozenset(EXECUTED)
    ranked = _ranked(config, fixed, build)
    room, trials = Room.of(build, validation, fixed), Trials(program, clock)
    tried: list[Tried] = []
    left_out: list[tuple[Config, str]] = []
    for planned, candidate in ranked:
        fastest = min(tried, key=lambda each: each.seconds, default=None)
        if fastest is not None and planned > FAR * fastest.planned:
            left_out.append((candidate, f"its plan is slower by more than {FAR - 1:.0%}"))
            continue
        if fastest is not None and _told(clock() - begin > seconds):
            left_out.append((candidate, f"the {seconds:g} seconds were over"))
            continue
        placed = placed_together(room, candidate)
        if isinstance(placed, str):
            left_out.append((candidate, placed))
        else:
            tried.append(Tried(placed, trials.seconds(placed.config), planned))
    if not tried:
        raise UserError(_nothing_fits(config, left_out))
    tried = _tried_again(tried, trials, lambda: clock() - begin > seconds)
    return Choice(tuple(tried), tuple(left_out), tuple(sorted(fixed)), clock() - begin)


def _tried_again(tried: list[Tried], trials: Trials, is_over: Callable[[], bool]) -> list[Tried]:
    """Ways, the fastest first, of which those near it have the better of two trials."""
    tried = sorted(tried, key=lambda each: each.seconds)
    close = [each for each in tried[1:] if each.seconds <= CLOSE * tried[0].seconds]
    again = {}
    for each in (tried[0], *close) if close else ():
        if _told(is_over()):
            break
        again[each] = min(each.seconds, trials.seconds(each.placed.config))
    better = (replace(each, seconds=again.get(each, each.seconds)) for each in tried)
    return sorted(better, key=lambda each: each.seconds)


def _ranked(config: Config, given: frozenset[str], build: Build) -> list[tuple[float, Config]]:
    """Candidates with their planned seconds, the most promising first."""
    machine, measured = speeds(config, PlanOptions())
    found = ways(config, given)

    def expected(number: int) -> tuple[float, float, int]:
        each = found[number]
        seconds = _at_work(plan_step(build, each, machine, measured, with_peaks=False))
        sequences = each.execution.micro_batch_size * each.execution.widening
        tokens = sequences * each.model.sequence_length
        return seconds * (1 + DOUBLING * abs(math.log2(tokens / FAST_TOKENS))), seconds, number

    ranked = sorted(map(expected, range(len(found))))
    return [(seconds, found[number]) for _, seconds, number in _told(ranked)]


def _at_work(plan: StepPlan) -> float:
    """Planned seconds of a step; on processors without rows, which are used where they lie."""
    if plan.config.execution.device.startswith("cuda"):
        return plan.seconds
    return float(sum(time.compute + time.link for time in plan.times) / plan.program.steps)


def _told(value: Any) -> Any:
    """The first process's value, for all to go the same way."""
    return gather(value, patiently=True)[0]


def _nothing_fits(config: Config, left_out: list[tuple[Config, str]]) -> str:
    reasons = "; ".join(f"{in_words(each)}: {why}" for each, why in left_out)
    return (
        f"--auto: got {config.name}, none of whose {len(left_out)} ways to execute it fits; "
        f"expected one. Choose a smaller model or batch, or start more processes. {reasons}."
    )


def choice_text(choice: Choice) -> str:
    """The choice in words, with what it was chosen from."""
    rows = [("way to execute", "step, trial", "step, plan", "resident")]
    for each in choice.tried:
        rows.append(
            (
                in_words(each.placed.config),
                duration(each.seconds),
                duration(each.planned),
                bytes_text(each.placed.memory.resident),
            )
        )
    best, config = choice.tried[0], choice.config
    why = "the only one that was timed" if len(choice.tried) == 1 else (
        f"the fastest of {len(choice.tried)}, "
        f"{choice.tried[1].seconds / best.seconds - 1:.1%} before the next"
    )  # fmt: skip
    lines = [
        f"chosen      {in_words(config)}: {why}",
        f"memory      {best.placed.why}",
        (
            f"prediction  {duration(choice.seconds)} a step, "
            f"{si(config.tokens_per_step / choice.seconds, 'tokens/s')}, "
            f"{bytes_text(best.placed.memory.resident)} resident"
        ),
    ]
    if config.execution.memmap_dir is not None:
        lines[-1] += "; files may take longer"
    if choice.given:
        lines.append(f"given       {', '.join(f'--{name}' for name in choice.given)}")
    reasons = Counter(reason for _, reason in choice.left_out)
    lines += [f"left out    {count}: {reason}" for reason, count in reasons.items()]
    head = f"auto: {config.name}, searched for {duration(choice.search_seconds)}"
    return "\n\n".join([head, table(rows), "\n".join(lines)])


def executable(config: Config, given: Collection[str]) -> Config:
    """Some way to execute it on the launcher's replicas, for what is checked before the search.

    Raises:
        ConfigError: there is none.
    """
    is_one = config.execution.replication_factor == replicas_here(config, given)
    return config if is_one else ways(config, given)[0]


def resolved(
    config: Config,
    given: Collection[str],
    options: PlanOptions,
    program: Program,
    build: Build,
    validation: Build | None = None,
) -> Config:
    """The configuration as it is to be executed: as the run that is continued was, else chosen now.
    The first process tells which, and why.

    Args:
        given: settings that flags give, which stay.
        program: makes a session of the training program.
        build: the training program by itself.
        validation: the one that runs between steps.
    """
    is_leader = popdist.getInstanceIndex() == 0
    values = _earlier(config, given) if is_leader else None
    values = _told(values)
    if values is not None:
        if is_leader:
            print("auto: executed as the run was that goes on")
        return override(config, **values)
    with runtime_errors_are_told():
        config, text = fastest(config, math.inf, given, options, (program, build, validation))
    if is_leader:
        print(text, end="\n\n", flush=True)
    return config


def fastest(
    config: Config,
    seconds: float,
    given: Collection[str],
    options: PlanOptions,
    programs: tuple[Program, Build, Build | None],
) -> tuple[Config, str]:
    """The configuration as it is fastest here, and the choice in words.

    Args:
        seconds: after which no further trial begins, if `options` say no fewer.
        programs: what `choose` takes.
    """
    most = SECONDS if options.auto_seconds is None else options.auto_seconds
    choice = choose(config, given, *programs, min(seconds, most))
    return choice.config, choice_text(choice)


def _earlier(config: Config, given: Collection[str]) -> "dict[str, Any] | None":
    """What the run that is continued has chosen, but for what is given; None where there is none,
    or it had other replicas.
    """
    file = next((path for path in _files(config) if path.is_file()), None)
    if file is None:
        return None
    earlier = load(file)
    names = [name for name in EXECUTED if name not in given]
    values = {name: getattr(earlier.execution, name) for name in names}
    try:
        found = override(config, **values)
    except ConfigError:  # the batch is another one, say
        return None
    is_possible = found.execution.replication_factor == replicas_here(config, given)
    return values if is_possible or not popdist.isPopdistEnvSet() else None


def _files(config: Config) -> list[Path]:
    """The files that may have the configuration of the run that is continued."""
    if (note := read_note()) is not None:  # the launcher starts it again
        return [Path(note[0]) / RUN_CONFIG]
    load_from = config.checkpoint.load
    if load_from is None:
        return []
    if load_from in ("auto", "best"):
        return [Path(config.logging.run_folder) / config.name / RUN_CONFIG]
    folder = Path(load_from).absolute()
    return [place / RUN_CONFIG for place in (folder, *folder.parents[:2])]
