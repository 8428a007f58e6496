"""Short trials of the training program: few layers, few micro-batches, random tokens.

A step's time is linear in layers, and in the runs of a phase: so the time of a deep model over a
large batch follows from small ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import popdist
import popxl_addons as addons

from popxl_gpt.config.presets import override
from popxl_gpt.config.schedules import NO_RAMPUP
from popxl_gpt.config.schema import Config
from popxl_gpt.data.in_memory import SyntheticDataset
from popxl_gpt.data.loader import BatchLoader
from popxl_gpt.execution.block_graphs import levels, stretches
from popxl_gpt.execution.host import data_share, run_steps
from popxl_gpt.execution.planning.memory import least_rows, state_bytes
from popxl_gpt.execution.planning.text import layout_name
from popxl_gpt.utils.runtime import drop_dead_sessions, gather

Program = Callable[[Config], addons.TaskSession]
"""Makes a session of a configuration's training program."""
Clock = Callable[[], float]
DEPTHS: "dict[str, tuple[int, ...]]" = {"precision": (1, 2), "fp8": (3, 4)}
"""Layers of the trials of a deeper model, by its products: fp8 is what blocks multiply between the
first and the last one.
"""
RUNS = (1, 2)
"""Runs of a phase in the trials of a batch of more."""
WHOLE_SECONDS = 2.0
"""A step that takes no more, as small trials have it, is timed as it is: what these are wrong by is
multiplied.
"""
ROUNDS = 3
"""Steps that are timed, after one that is not; the fastest counts."""


def at(known: tuple[float, ...], where: tuple[int, ...], place: int) -> float:
    """A linear quantity at a place, from what it is at one or two others."""
    if len(where) == 1:
        return known[0]
    slope = max(0.0, known[1] - known[0]) / (where[1] - where[0])
    return known[0] + slope * (place - where[0])


@dataclass
class Trials:
    """Trials of ways to execute one model.

    Attributes:
        clock: gives seconds: wall-clock time, or on a busy machine a process's processor time.
    """

    program: Program
    clock: Clock
    updates: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Seconds of a step that do not depend on its micro-batches, at each depth, by layout."""

    def seconds(self, config: Config) -> float:
        """Time of a step of the whole model, over its whole batch."""
        if config.execution.activation_memory is None:
            return self._of_equal_blocks(config)
        recomputing = override(config, activation_memory=None)
        seconds, runs = self._of_equal_blocks(recomputing), config.runs_per_step
        if seconds <= WHOLE_SECONDS:
            return self._measured(config, config.model.layers, runs)
        keeping = override(recomputing, recomputation=False)
        few = DEPTHS[config.model.products][0]
        once, again = (self._measured(each, few, 1) for each in (keeping, recomputing))
        none, *_, every = levels(recomputing)
        saved = sum(
            len(some.layers) * (none.flops - some.level.flops) for some in stretches(config)
        )
        blocks = saved / (none.flops - every.flops)
        return seconds - blocks * runs * max(0.0, again - once) / few

    def _of_equal_blocks(self, config: Config) -> float:
        """`seconds` of a model all of whose blocks keep their activations, or none does."""
        layers, runs = config.model.layers, config.runs_per_step
        depths = DEPTHS[config.model.products]
        depths = depths if layers > depths[-1] else (layers,)
        at_once = runs if runs <= RUNS[-1] else RUNS[0]
        first = self._measured(config, depths[0], at_once)
        if (layers, runs) == (depths[0], at_once):
            return first
        seconds = first * (layers / depths[0]) * (runs / at_once)
        if seconds > WHOLE_SECONDS:
            seconds = self._predicted(config, depths, at_once, first)
        return self._measured(config, layers, runs) if seconds <= WHOLE_SECONDS else seconds

    def _predicted(
        self, config: Config, depths: tuple[int, ...], at_once: int, first: float
    ) -> float:
        """Seconds by trials of so many layers and runs, of which the first is made."""
        layers, runs = config.model.layers, config.runs_per_step
        one = (first, *(self._measured(config, depth, at_once) for depth in depths[1:]))
        if runs == at_once:
            return at(one, depths, layers)
        updates = self._updates(config, depths, one)
        whole = tuple(update + runs * (run - update) for update, run in zip(updates, one))
        return at(whole, depths, layers)

    def _updates(
        self, config: Config, depths: tuple[int, ...], one: tuple[float, ...]
    ) -> tuple[float, ...]:
        """What a step takes beside its runs, found once for a layout: the optimizer's part."""
        layout = layout_name(config.execution)
        if layout not in self.updates:
            two = [self._measured(config, depth, RUNS[1]) for depth in depths]
            self.updates[layout] = tuple(max(0.0, 2 * a - b) for a, b in zip(one, two))
        # no more than what a run and its update took together
        return tuple(min(update, run) for update, run in zip(self.updates[layout], one))

    def _measured(self, config: Config, layers: int, runs: int) -> float:
        """The fastest of some steps of a program of so many layers and runs. Its rows are where the
        configuration has them: of those in files the same share is in memory, but at least what one
        layer alone takes.
        """
        execution = config.execution
        at_once = execution.data_parallel * execution.micro_batch_size * execution.widening
        is_whole = layers == config.model.layers and runs == config.runs_per_step
        small = override(
            config,
            layers=layers,
            global_batch_size=at_once * runs,
            **NO_RAMPUP,
            device_iterations=1,
            # few layers and runs would all fit in: time at most
            activation_memory=execution.activation_memory if is_whole else None,
            micro_batch_group=execution.micro_batch_group if is_whole else None,
        )
        if execution.host_memory is not None:
            share = execution.host_memory * state_bytes(small) // state_bytes(config)
            least = min(execution.host_memory, least_rows(small, popdist.getNumInstances()))
            small = override(small, host_memory=max(share, least))
        times = step_times(self.program, small, 1, ROUNDS, self.clock)
        own = min(times)
        return max(gather(own, patiently=True))


def step_times(
    program: Program, config: Config, unmeasured: int, measured: int, clock: Clock
) -> list[float]:
    """Seconds of each of some steps on random tokens, after others that compile and fill caches."""
    model, training, share = config.model, config.training, data_share(config)
    data = SyntheticDataset(model.sequence_length, model.vocabulary_size, training.seed)
    iterations = config.execution.device_iterations
    loader = BatchLoader(
        data,
        training.global_batch_size * iterations,
        seed=training.seed,
        instance=share.index,
        instances=share.count,
        accumulation_steps=config.gradient_accumulation * iterations,
    )
    times = []
    with program(config) as session, loader:
        for number in range(unmeasured + measured):
            words, labels = loader.batch(number)
            begin = clock()
            run_steps(session, config, words, labels, [training.learning_rate] * iterations)
            if number >= unmeasured:
                times.append((clock() - begin) / iterations)
    del session
    drop_dead_sessions()
    return times
