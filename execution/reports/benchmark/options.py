"""The benchmark's command line, which is answered before anything slow is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass

from popxl_gpt.config.command_line import CommandLine, parse_command_line
from popxl_gpt.execution.planning.options import PlanOptions
from popxl_gpt.utils.errors import UserError

UNUSED = (
    "data", "checkpoint", "inference", "epochs", "minutes", "rampup_batch_size",
    "rampup_increment", "rampup_tokens", "max_skipped", "check_replicas",
    "validate_every", "validation_batches", "validate_first", "validate_training",
    "log_every", "norms_every", "tensorboard", "wandb", "wandb_name", "wandb_tags", "wandb_project",
)  # fmt: skip
"""Settings that some steps on random tokens, of which nothing is kept, have no use for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options(PlanOptions):
    """What is measured, profiled or planned."""

    measured_runs: int = 5
    """Runs of the session that are timed."""
    unmeasured_runs: int = 2
    """Runs before those, which compile and fill caches."""


def parse(arguments: Sequence[str]) -> CommandLine:
    """What is measured, and how.

    Raises:
        UserError: the command line is wrong.
    """
    line = parse_command_line(
        arguments,
        program="execution/pretraining.py: speed of the training program on synthetic data",
        default="test",
        options=Options,
        unused=UNUSED,
    )
    options = line.options
    if options.measured_runs < 1 or options.unmeasured_runs < 0:
        raise UserError(
            f"measured_runs, unmeasured_runs: got {options.measured_runs} and "
            f"{options.unmeasured_runs}; expected at least 1 and at least 0. Raise them."
        )
    return line
