"""The training job: `python demo/pretraining.py --config NAME --input_files data/files/mine`.
See --help.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    if not __package__:  # run by its path: the packages are beside this folder
        sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from popxl_gpt.demo import starting

    starting.train()

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from shlex import quote

import popdist

from popxl_gpt.config.command_line import CommandLine
from popxl_gpt.config.partners import without_partner
from popxl_gpt.config.saving import changes
from popxl_gpt.config.schedules import stage_of
from popxl_gpt.config.schema import Config
from popxl_gpt.data.known_text import text_of
from popxl_gpt.demo.commands import parse_training
from popxl_gpt.demo.job.choice import chooses_model
from popxl_gpt.demo.job.description import describe
from popxl_gpt.demo.job.interruption import Interruption
from popxl_gpt.demo.job.options import TrainOptions as Options
from popxl_gpt.demo.job.output import lasting_output
from popxl_gpt.demo.job.part import Job
from popxl_gpt.demo.job.parts import PARTS
from popxl_gpt.demo.job.run import TrainingRun
from popxl_gpt.demo.job.run_folder import RunFolder, check_folders, claimed
from popxl_gpt.demo.job.run_memory import RunMemory
from popxl_gpt.demo.job.text import read_tokenizer
from popxl_gpt.demo.job.training_data import (
    begun_tokenizer,
    check_same_in_all,
    given_tokenizer,
    in_steps,
    open_data,
    run_tokenizer,
)
from popxl_gpt.demo.job.warnings_file import WarningsFile, warnings_kept
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.checkpoint_folder import best_in, checkpoints_in
from popxl_gpt.execution.exchange.initial_weights import Weights, initial_weights
from popxl_gpt.execution.inference.inference import evaluation_program
from popxl_gpt.execution.instances import check_instances, check_launch, check_same_checkpoint
from popxl_gpt.execution.planning.axes import with_pieces
from popxl_gpt.execution.planning.executing import executable, fastest, resolved
from popxl_gpt.execution.planning.memory import ProcessMemory, check_fits, check_memory
from popxl_gpt.execution.planning.model_size import parameter_count, trained_count
from popxl_gpt.execution.planning.parameter_groups import parameter_groups, parameter_text
from popxl_gpt.execution.planning.plan_report import plan_and_show, write_plan
from popxl_gpt.execution.planning.run_plan import make_run_plan
from popxl_gpt.execution.planning.schedule import schedule_text
from popxl_gpt.execution.planning.sizing import as_it_is, chosen
from popxl_gpt.execution.pretraining import pretraining, training_program
from popxl_gpt.execution.reports.profile.report import step_profiler
from popxl_gpt.execution.variables import write_whole_weights
from popxl_gpt.utils import program_clock
from popxl_gpt.utils.errors import (
    ConfigError,
    UserError,
    failure_number,
    numbered,
)
from popxl_gpt.utils.files.output_folder import written_to
from popxl_gpt.utils.program_clock import since_start
from popxl_gpt.utils.programs import typed_as
from popxl_gpt.utils.runtime import gather, runtime_errors_are_told
from popxl_gpt.utils.units import si

_LOG = logging.getLogger(__name__)
PROGRAMS = (pretraining, training_program, evaluation_program)
"""What trials make sessions of, and what plans are made of: training, and what runs between steps.
"""
LEAST_SECONDS = 10.0
"""The least seconds in which what is trained is chosen, and something is learned."""


def main(arguments: Sequence[str]) -> int:
    """Train as the command line says. Returns the exit code."""
    program_clock.begin()
    return run(parse_training(arguments))


OnFolder = Callable[[Path], None]


def _tell_nobody(folder: Path) -> None:
    """A folder is of no interest."""


@runtime_errors_are_told()
def run(line: CommandLine, on_folder: OnFolder = _tell_nobody) -> int:
    """Train as a command line says that was read. Returns the exit code.

    Args:
        on_folder: gets the run's folder.
    """
    config, options, given = line
    is_plan = options.is_plan()
    check_launch()
    if chooses_model(given, config.training.minutes, config.checkpoint.load):
        with lasting_output():
            config = choose(config, given, options)
        options = replace(options, auto=False, auto_seconds=None)  # that is chosen, too
    config = in_steps(config)
    if options.auto:
        config = executable(config, given)
        if not is_plan:
            check_files(config)
    if options.print_schedule:
        is_leader, config = begun(config, options, given)
        if is_leader:
            print(schedule_text(config))
        return 0
    if is_plan:
        _, config = begun(config, options, given)
        plan_and_show(training_program, config, options, evaluation_program)
        return 0
    with lasting_output():
        return train(config, options, given, on_folder)


def choose(config: Config, given: Set[str], options: Options) -> Config:
    """What to train in the minutes that the configuration has, and with `--auto` how to execute it;
    prints why.

    Raises:
        UserError: there are several processes, or fewer seconds than choosing takes.
    """
    if popdist.getNumTotalReplicas() > 1 or config.execution.replication_factor > 1:
        raise UserError(
            "--minutes: got several replicas without --config; expected one, on which the program "
            "tries what it chooses. Choose with one replica, and go on with its config.yml."
        )
    seconds = 60.0 * (config.training.minutes or 0.0)
    left = seconds - since_start()
    if left < LEAST_SECONDS:
        raise UserError(
            f"--minutes: got {config.training.minutes:g}; expected at least "
            f"{(seconds - left + LEAST_SECONDS) / 60:.2g}, for trials of the program take some of "
            "them. Give more, or say with --config what is trained."
        )
    if config.data.tokenizer:
        read_tokenizer(Path(config.data.tokenizer))  # refused now, not after the trials
    check_folders(config)
    execute = as_it_is
    if options.auto:
        execute = partial(fastest, given=given, options=options, programs=PROGRAMS)
    choice = chosen(config, given, text_of(config), left, execute=execute, check=check_first)
    print("\n".join(choice.reasons), flush=True)
    return choice.config


def check_first(config: Config) -> None:
    """Refuse what a choice cannot lead to, before its trials take their time.

    Raises:
        UserError: data or weights that were given are not of such a model, or cannot be used.
    """
    first_weights(config)
    check_files(config)


def begun(config: Config, options: Options, given: Set[str]) -> tuple[bool, Config]:
    """Let processes meet. Whether this is the first one, and the configuration as it is executed.

    Args:
        given: settings that `--auto` leaves as they are.
    """
    is_leader = check_instances(config)
    if not options.auto:
        return is_leader, with_pieces(config, given)
    return is_leader, resolved(config, given, options, *PROGRAMS)


@runtime_errors_are_told()
def train(
    config: Config,
    options: Options,
    given: Set[str] = frozenset(),
    on_folder: OnFolder = _tell_nobody,
) -> int:
    """Train, and leave a run folder. Returns the exit code. `given` is that of `begun`, `on_folder`
    that of `run`.
    """
    is_leader, config = begun(config, options, given)
    check_memory(config, popdist.getNumInstances())
    with Interruption() as interruption:
        data, validation_data = open_data(config)
        check_same_in_all(data, validation_data)
        given_one = given_tokenizer(config, data, validation_data)
        with (
            warnings_kept() as kept,
            claimed_together(config) as (config, folder, saved),
        ):
            on_folder(folder.path)
            tokenizer = run_tokenizer(config, given_one, saved, data, validation_data)
            if saved is not None:
                check_goes_on(config, saved)
            weights = None if saved is not None else first_weights(config)
            seen = 0 if saved is None else saved.position.tokens or 0
            profiler = step_profiler(stage_of(config, seen), options, folder.path)
            limit, planned = step_limit(config, options, folder)
            planned = check_fits(config, training_program, evaluation_program, planned)
            with folder.prepared(config) if is_leader else contextlib.nullcontext():
                if is_leader:
                    show_start(config, folder, saved, given)
                job = Job(
                    config=config,
                    options=options,
                    folder=folder,
                    data=data,
                    validation_data=validation_data,
                    tokenizer=tokenizer,
                    saved=saved,
                    interruption=interruption,
                    memory=RunMemory(config, planned),  # loads PyTorch
                    profiler=profiler,
                    limit_seconds=limit,
                    is_leader=is_leader,
                )
                run = TrainingRun(job, PARTS)
            if weights is not None:
                write_whole_weights(run.session, config, weights)
            signal = run_to_the_end(run, job, kept)
    if signal is None and run.failure is not None:
        raise run.failure
    return 0 if signal is None else 128 + signal


def run_to_the_end(run: TrainingRun, job: Job, kept: WarningsFile) -> int | None:
    """Train, complete the run's folder, and print what is in it. Returns the signal that ended the
    run early, if one did.
    """
    folder, saved = job.folder, job.saved
    kept.begin(run, folder.warnings if job.is_leader else None)
    if job.is_leader:
        describe(folder, job.config, job.data, job.validation_data, run.built)
        if saved is not None:
            saved.set_aside_passed_over()
    try:
        signal = run.run()
        if signal is None and run.failure is not None:  # the report says so, too
            kept.keep(str(run.failure))
    finally:
        run.each_surely("close")
    if job.is_leader:
        show_files(run, job.memory.text())
    return signal


def check_files(config: Config) -> None:
    """Refuse files that the run cannot read, or write, before a search takes its time.

    Raises:
        UserError: data, tokenizer, checkpoint or the run's folders cannot be used.
    """
    data, validation_data = open_data(config)
    tokenizer = given_tokenizer(config, data, validation_data)
    if config.checkpoint.load is None:
        begun_tokenizer(config, tokenizer, data, validation_data)
    if popdist.getInstanceIndex() == 0:
        check_folders(config)


def first_weights(config: Config) -> Weights | None:
    """The weights that a new run begins with, where it takes those of another model."""
    begun = config.checkpoint.init_from
    if begun is not None:
        return initial_weights(Path(begun), config)
    if config.model.lora_rank:
        raise UserError(
            f"--lora_rank: got {config.model.lora_rank} without --init_from; expected weights to "
            "adapt, for all but the adapters stays as it is. Give --init_from."
        )
    return None


def step_limit(
    config: Config, options: Options, folder: RunFolder
) -> "tuple[float | None, ProcessMemory | None]":
    """Seconds of a step at the machine's physical limit, and what this process is to take; the
    run's folder gets the plan. None where no limit is asked for, or another process tells it.
    """
    if not options.limit or popdist.getInstanceIndex() != 0:
        return None, None
    plan = make_run_plan(training_program, config, options, evaluation_program)
    with written_to(folder.path, "--run_folder"):
        write_plan(plan, folder.path)
    return plan.limit, plan.process


def check_goes_on(config: Config, saved: SavedRun) -> None:
    """Raise UserError where whole runs of the session do not lead from a checkpoint to the last
    step.
    """
    if config.training.minutes is not None:
        return  # the clock says which step is the last
    done, total, iterations = (
        saved.position.step,
        config.training.steps,
        config.execution.device_iterations,
    )
    if done > total:
        told = f"steps: got {total}; expected at least {done} (see {saved.folder})"
        raise ConfigError([f"{told}. Train for more steps, or load an older checkpoint."])
    if done % iterations:
        told = (
            f"device_iterations: got {iterations}; expected a divisor of the {done} steps done "
            f"(see {saved.folder})"
        )
        raise ConfigError(
            [f"{told}. Use {math.gcd(done, iterations)}, or load another checkpoint."]
        )


@contextlib.contextmanager
def claimed_together(config: Config) -> "Iterator[tuple[Config, RunFolder, SavedRun | None]]":
    """The configuration with the name that the run has, its folder and its checkpoint, as instance
    0 finds them and keeps other runs out of them.

    Raises:
        UserError: the checkpoint cannot be used, or not by all processes.
    """
    if popdist.getInstanceIndex() == 0:
        with claimed(config) as (folder, saved):
            told = [str(folder.path), str(folder.checkpoints), saved and str(saved.folder)]
            gather(told, patiently=True)
            _check_all_can_read(None)
            if saved is not None:
                check_same_checkpoint(saved.folder)
            yield _named(config, folder), folder, saved
        return
    told = gather(None, patiently=True)[0]
    path, checkpoints, named = told
    problem, saved = None, None
    if named is not None:
        try:
            saved = SavedRun(Path(named), config)
        except UserError as error:
            problem = str(error), failure_number(error)
    _check_all_can_read(problem)
    if saved is not None:
        check_same_checkpoint(saved.folder)
    folder = RunFolder(Path(path), Path(checkpoints))
    yield _named(config, folder), folder, saved


def _named(config: Config, folder: RunFolder) -> Config:
    """A run's files say what it is called, which is another name where that was taken."""
    return replace(config, name=folder.path.name)


def _check_all_can_read(problem: "tuple[str, int] | None") -> None:
    for number, theirs in enumerate(gather(problem, patiently=True)):
        if theirs is not None:
            told, failure = theirs
            advice = (
                " Instance 0 can read it: checkpoints have to be on a file system that all "
                "machines see."
            )
            raise UserError(f"instance {number}: {told}{'' if failure else advice}") from numbered(
                failure
            )


def show_start(config: Config, folder: RunFolder, saved: SavedRun | None, given: Set[str]) -> None:
    """Print what is trained, where its files go and where it begins; warn of flags that were given
    and do nothing.
    """
    for told in without_partner(config, given):
        _LOG.warning("%s", told)
    base, changed = changes(config)
    print(f"configuration: {base}{', but' if changed else ''}")
    for name, value in changed.items():
        print(f"  {name}: {json.dumps(value, ensure_ascii=False)}")
    if config.data.is_synthetic:
        print(
            "data: random tokens, as there are no --input_files. `make demo` trains on real text, "
            "and data/prepare.py makes files of yours."
        )
    rank = config.model.lora_rank
    trained = f", {si(trained_count(config.model))} of them trained" if rank else ""
    print(f"{si(parameter_count(config.model))} parameters{trained}, run folder {folder.path}")
    print(parameter_text(parameter_groups(config)))
    if saved is not None:
        seen = si(saved.position.tokens or 0, "tokens")
        print(f"continuing after step {saved.position.step}, {seen}, from {saved.folder}")
        if saved.position.step == config.training.steps and config.training.minutes is None:
            print("nothing is left of the run's steps; it trains for longer with more --steps")
    elif config.checkpoint.load == "auto":
        print(f"no checkpoint in {folder.checkpoints}: training begins afresh")


def show_files(run: TrainingRun, memory: str) -> None:
    """Print where the run's files are, what memory it took, and how it goes on if it is to."""
    folder = run.folder
    print(f"\nAfter step {run.step}:")
    for name, path in (
        ("metrics", folder.metrics),
        ("report", folder.report),
        ("checkpoints", folder.checkpoints),
        ("configuration", folder.config),
    ):
        print(f"  {name:<14}{path}")
    best, saved = None, []
    with contextlib.suppress(OSError):  # all is saved: a disk that fails now costs a line here
        saved = checkpoints_in(folder.checkpoints)
        best = best_in(folder.checkpoints)
    if best is not None:
        print(f"  {'best':<14}{best}")
    print(f"  {'memory':<14}{memory}")
    is_stopped = run.failure is None and run.step < run.config.training.steps
    if is_stopped and saved:
        program = typed_as("popxl-gpt-train", "python demo/pretraining.py")
        words = f"--config {quote(str(folder.config))} --checkpoint.load auto"
        print(f"  {'continue with':<14}{program} {words}")
