"""`--plan --devices N`: the fastest layouts of a model over N devices, by their plans."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import popdist
from poprun.cores import usable_cores

from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.planning.axes import LAYOUT, Known
from popxl_gpt.execution.planning.machine import speeds
from popxl_gpt.execution.planning.memory import Build, least_device_bytes
from popxl_gpt.execution.planning.options import PlanOptions
from popxl_gpt.execution.planning.run_plan import StepPlan, plan_step
from popxl_gpt.execution.planning.text import layout_name, layout_values, table
from popxl_gpt.utils.errors import ConfigError, UserError
from popxl_gpt.utils.pools import end_with_parent
from popxl_gpt.utils.units import bytes_text, duration, si

SHOWN = 5
"""Layouts that are shown."""
PROCESSES = 4
"""Processes that plan at a time, at most; each takes about 400 MiB."""


def layouts(config: Config, devices: int) -> list[Config]:
    """The configuration with each layout over so many devices that it can have.

    Raises:
        ConfigError: there is none; lists what is wrong with each.
    """
    found, problems = [], []
    for values in LAYOUT.values(config, Known(replicas=devices)):
        try:
            found.append(override(config, **values))
        except ConfigError as error:
            problems.append(f"{' x '.join(map(str, values.values()))}: {error.problems[0]}")
    if not found:
        raise ConfigError(
            [
                f"devices: got {devices}; expected a number that {config.name} splits over, as "
                "dp x tp1 x tp2. Choose another, or change what no layout fits:",
                *problems,
            ]
        )
    return found


@dataclass(frozen=True)
class Search:
    """What a search has found. Peak memory, which takes longest to find, is that of the layouts
    that are shown, and of those that were looked at and did not fit; elsewhere it is 0.
    """

    shown: list[StepPlan]
    """The fastest ones that fit, the fastest first; of equally fast ones that which needs less
    memory.
    """
    others: list[StepPlan]
    """All the others, the fastest first."""


def fastest_layouts(build: Build, config: Config, options: PlanOptions) -> list[Search]:
    """The fastest layouts over each number of `options.devices`; with `--device_memory` the fastest
    that fit. Of several numbers, the fastest one of each is shown.
    """
    if popdist.isPopdistEnvSet():
        raise ConfigError(
            ["--devices: got it under a launcher; expected one process. Start it without poprun."]
        )
    memory = config.execution.device_memory
    if isinstance(memory, float):
        raise ConfigError(
            [
                "device_memory: got a share with --devices, whose memory is not known; expected an "
                "amount, such as 16GiB."
            ]
        )
    machine, measured = speeds(config, options)
    chosen = [layouts(config, devices) for devices in options.devices]
    shown = SHOWN if len(chosen) == 1 else 1
    plan = partial(plan_step, build, machine=machine, measured=measured)
    workers = min(PROCESSES, usable_cores(), max(map(len, chosen)))
    several: AbstractContextManager[ProcessPoolExecutor | None] = nullcontext()
    if workers > 1:
        several = ProcessPoolExecutor(workers, get_context("spawn"), end_with_parent)
    with several as pool:

        def planned(configs: Sequence[Config], with_peaks: bool) -> list[StepPlan]:
            if pool is None:
                return [plan(config, with_peaks=with_peaks) for config in configs]
            return list(pool.map(partial(plan, with_peaks=with_peaks), configs))

        return [
            that_fit(
                sorted(planned(configs, False), key=lambda p: p.seconds),
                memory,
                partial(planned, with_peaks=True),
                shown,
            )
            for configs in chosen
        ]


def that_fit(
    found: list[StepPlan],
    memory: int | None,
    with_peaks: Callable[[Sequence[Config]], list[StepPlan]],
    most_shown: int = SHOWN,
) -> Search:
    """The first layouts that run with so many bytes; peaks are found for as many as it takes.

    Args:
        found: plans without peaks, the fastest first.
        with_peaks: plans configurations with their peaks.
        most_shown: layouts that are shown, at most.

    Raises:
        UserError: none fits.
    """
    most = math.inf if memory is None else memory
    rest = [p for p in found if least_device_bytes(p.config) <= most]
    too_large = [p for p in found if least_device_bytes(p.config) > most]
    shown: list[StepPlan] = []
    while rest and len(shown) < most_shown:
        last = rest[min(most_shown - len(shown), len(rest)) - 1].seconds
        next_ones = [p for p in rest if p.seconds <= last]  # equally fast ones together
        rest = rest[len(next_ones) :]
        for plan in with_peaks([p.config for p in next_ones]):
            (shown if plan.device_bytes <= most else too_large).append(plan)
    if not shown:
        assert memory is not None
        needed = [p.device_bytes for p in too_large if p.device_bytes]
        if not needed:
            smallest = min(too_large, key=lambda p: least_device_bytes(p.config))
            needed = [with_peaks([smallest.config])[0].device_bytes]
        least = min(needed)
        raise UserError(
            f"device_memory: got {bytes_text(memory)}; expected at least {bytes_text(least)}, as "
            f"the smallest of {len(found)} layouts over {found[0].program.replicas} devices takes. "
            "Lower --micro_batch_size, raise --attention_serialisation, or use more devices."
        )
    shown.sort(key=lambda p: (p.seconds, p.program.peak_bytes))
    others = [*shown[most_shown:], *too_large, *rest]
    return Search(shown[:most_shown], sorted(others, key=lambda p: p.seconds))


def layouts_text(search: Search) -> str:
    """The fastest ones as a table, and the flags of the first."""
    found = search.shown
    rows: list[Sequence[str]] = [
        (
            "dp x tp1 x tp2",
            "step",
            "bound by",
            "compute",
            "links",
            "remote",
            "throughput",
            "of the limit",
            "device memory",
            "remote memory",
        )
    ]
    for p in found:
        rows.append(
            (
                layout_name(p.config.execution),
                duration(p.seconds),
                p.bound,
                *map(duration, (p.compute, p.link, p.remote)),
                si(p.tokens_per_second, "tokens/s"),
                f"{p.limit / p.seconds:.1%}",
                bytes_text(p.program.peak_bytes),
                bytes_text(p.program.remote_memory_bytes),
            )
        )
    best = layout_values(found[0].config.execution)
    flags = " ".join(f"--{name} {value}" for name, value in best.items())
    return (
        f"layouts of {found[0].config.name} over {found[0].program.replicas} devices: the fastest "
        f"{len(found)} of {len(found) + len(search.others)}\n\n{table(rows)}\n\n"
        f"Bounds are seconds per step, memory is per device.\nThe first one's flags: {flags}"
    )


def layouts_values(search: Search) -> "list[dict[str, Any]]":
    """All layouts as plain values: those that are shown, then the others, the fastest first."""
    return [
        {
            **layout_values(p.config.execution),
            "seconds": p.seconds,
            "limit_seconds": p.limit,
            "bound": p.bound,
            "tokens_per_second": p.tokens_per_second,
            "device_peak_bytes": p.program.peak_bytes or None,
            "remote_bytes_per_replica": p.program.remote_memory_bytes,
        }
        for p in (*search.shown, *search.others)
    ]


def efficiency(first: StepPlan, plan: StepPlan) -> float:
    """Throughput of a device, over that of a plan with fewer."""
    return (plan.tokens_per_second / plan.program.replicas) / (
        first.tokens_per_second / first.program.replicas
    )


def scaling_text(searches: Sequence[Search]) -> str:
    """The fastest layout over each number of devices, a row each."""
    plans = [search.shown[0] for search in searches]
    rows: list[Sequence[str]] = [
        (
            *("devices", "dp x tp1 x tp2", "step", "compute", "remote", "links", "exposed"),
            *("throughput", "efficiency", "device memory", "remote memory"),
        )
    ]
    for p in plans:
        rows.append(
            (
                str(p.program.replicas),
                layout_name(p.config.execution),
                *map(duration, (p.seconds, p.compute, p.remote, p.link, p.exposed)),
                si(p.tokens_per_second, "tokens/s"),
                f"{efficiency(plans[0], p):.1%}",
                bytes_text(p.program.peak_bytes),
                bytes_text(p.program.remote_memory_bytes),
            )
        )
    return (
        f"the fastest layouts of {plans[0].config.name} over several numbers of devices\n\n"
        f"{table(rows, numbers_from=2)}\n\nSeconds per step; exposed are links while nothing is "
        "computed. Efficiency is throughput of a device beside that of the first row.\nMemory is "
        "per device."
    )


def scaling_values(searches: Sequence[Search]) -> "list[dict[str, Any]]":
    """The same as plain values."""
    first = searches[0].shown[0]
    return [
        {
            "devices": search.shown[0].program.replicas,
            **layouts_values(search)[0],
            "exposed_seconds": search.shown[0].exposed,
            "efficiency": efficiency(first, search.shown[0]),
        }
        for search in searches
    ]
