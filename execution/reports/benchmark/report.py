"""A preset's speed, for people and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict

import popdist

from popxl_gpt.config.command_line import CommandLine
from popxl_gpt.execution.instances import check_instances, check_launch
from popxl_gpt.execution.planning.executing import executable, resolved
from popxl_gpt.execution.planning.memory import check_fits, check_memory, own_bytes
from popxl_gpt.execution.planning.model_size import parameter_count
from popxl_gpt.execution.planning.plan_report import plan_and_show
from popxl_gpt.execution.pretraining import pretraining, training_program
from popxl_gpt.execution.reports.benchmark.options import parse
from popxl_gpt.execution.reports.benchmark.speed import FileUse, measure
from popxl_gpt.execution.reports.profile.report import step_profiler
from popxl_gpt.utils.runtime import runtime_errors_are_told
from popxl_gpt.utils.units import bytes_text, duration, si


def main(arguments: Sequence[str]) -> None:
    """Print the speed of a preset's training program, as a table and, in the last line, as JSON; or
    plan it.
    """
    run(parse(arguments))


def run(line: CommandLine) -> None:
    """The same for a command line that was read."""
    config, options, given = line
    check_launch()
    is_plan = options.is_plan()
    if options.auto:
        config = executable(config, given)
    is_leader = check_instances(config)
    if options.auto:
        config = resolved(config, given, options, pretraining, training_program)
    if is_plan:
        plan_and_show(training_program, config, options)
        return
    check_memory(config, popdist.getNumInstances())
    with runtime_errors_are_told():
        check_fits(config, training_program, None)
        profiler = step_profiler(config, options)
        if profiler is not None:
            profiler.itself = own_bytes()  # before there is a session
        speed = measure(pretraining, config, options, profiler)
    if not is_leader:
        return
    print(
        f"configuration   {config.name} ({si(parameter_count(config.model))} parameters, "
        f"{config.model.precision})"
    )
    print(f"step time       {duration(speed.seconds_per_step)}")
    print(
        f"throughput      {si(speed.tokens_per_second, 'tokens/s')}, "
        f"{si(speed.samples_per_second, 'samples/s')}"
    )
    mfu = "" if speed.mfu is None else f", {speed.mfu:.0%} MFU"
    print(f"arithmetic      {si(speed.tflops_per_second * 1e12, 'FLOP/s')}{mfu}")
    if speed.files is not None:
        print(files_line(speed.files))
    print(json.dumps(asdict(speed)))


def files_line(files: FileUse) -> str:
    """What was moved, for people."""
    read, written = bytes_text(files.read_bytes_per_step), bytes_text(files.written_bytes_per_step)
    way = (
        ""
        if files.store != "files"
        else ", direct"
        if files.is_direct
        else ", through the page cache"
    )
    moved = f"{read} read and {written} written a step{way}"
    return (
        f"{files.store:15} {moved}; {100 * files.waiting:.1f} % of the time spent waiting for them"
    )
