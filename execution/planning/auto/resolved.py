"""`--auto` in a program: the configuration to go on with, chosen now or by the run before."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import popdist

from popxl_gpt.config.command_line import RUN_CONFIG
from popxl_gpt.config.presets import override
from popxl_gpt.config.saving import load
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.planning.auto.candidates import CHOSEN, candidates, replicas_here
from popxl_gpt.execution.planning.auto.choice import SECONDS, choice_text, choose
from popxl_gpt.execution.planning.auto.trial import Program
from popxl_gpt.execution.planning.options import PlanOptions
from popxl_gpt.execution.planning.plan.process import Build
from popxl_gpt.utils.errors import ConfigError
from popxl_gpt.utils.runtime import gather, read_note, runtime_errors_are_told


def executable(config: Config, given: Collection[str]) -> Config:
    """Some way to execute it on the launcher's replicas, for what is checked before the search.

    Raises:
        ConfigError: there is none.
    """
    is_one = config.execution.replication_factor == replicas_here(config, given)
    return config if is_one else candidates(config, frozenset(given))[0]


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
    values = gather(values, popdist.getNumInstances(), patiently=True)[0]
    if values is not None:
        if is_leader:
            print("auto: executed as the run was that goes on")
        return override(config, **values)
    seconds = SECONDS if options.auto_seconds is None else options.auto_seconds
    with runtime_errors_are_told():
        choice = choose(config, given, program, build, validation, seconds)
    if is_leader:
        print(choice_text(choice), end="\n\n", flush=True)
    return choice.config


def _earlier(config: Config, given: Collection[str]) -> "dict[str, Any] | None":
    """What the run that is continued has chosen, but for what is given; None where there is none,
    or it had other replicas.
    """
    file = next((path for path in _files(config) if path.is_file()), None)
    if file is None:
        return None
    earlier = load(file)
    names = [name for name in CHOSEN if name not in given]
    values = {name: getattr(earlier.execution, name) for name in names}
    try:
        found = override(config, **values)
    except ConfigError:  # the batch is another one, say
        return None
    is_possible = found.execution.replication_factor == replicas_here(config, given)
    return values if is_possible or not popdist.isPopdistEnvSet() else None


def _files(config: Config) -> list[Path]:
    """Where the configuration of the run that is continued may be."""
    if (note := read_note()) is not None:  # the launcher starts it again
        return [Path(note[0]) / RUN_CONFIG]
    load_from = config.checkpoint.load
    if load_from is None:
        return []
    if load_from in ("auto", "best"):
        return [Path(config.logging.run_folder) / config.name / RUN_CONFIG]
    folder = Path(load_from).absolute()
    return [place / RUN_CONFIG for place in (folder, *folder.parents[:2])]
