"""The flags of the training run beside its settings, and what they need."""

from dataclasses import dataclass
from pathlib import Path

from popxl_gpt.config.bounds import CountOrZero, PathText
from popxl_gpt.execution.planning.options import PlanOptions
from popxl_gpt.utils.errors import ConfigError, UserError
from popxl_gpt.utils.files.hub import hub_hint

ALONE = ("plan", "profile", "profile_every", "print_schedule")
"""Flags of which a command has one, at most: what each leaves in place of another's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions(PlanOptions):
    """What this program takes over, prints at the end, profiles on the way, or plans instead of
    running.
    """

    ipu_config: PathText | None = None
    """What optimum-graphcore has written of how IPUs execute a model: ipu_config.json, or its
    folder. It wins over --config, and flags over it.
    """
    limit: bool = False
    """Plan the run at its start, in some seconds: progress tells the share of the machine's
    physical limit that it reaches, and the report what bounds each phase.
    """
    print_schedule: bool = False
    """Print what each phase of a step computes, loads, gathers, sums and stores, in order and with
    bytes, and stop; nothing of the model's size is allocated.
    """
    profile_every: CountOrZero = 0
    """Steps between profiles, each in profiles/ of the run's folder, the newest as that of
    --profile; 0: none.
    """
    samples: CountOrZero = 2
    """Texts that the model writes at the end, where there is a tokenizer; 0: none."""
    sample_every: CountOrZero = 0
    """Steps after which it writes them on the way, too, for the report; 0: never."""

    def is_plan(self) -> bool:
        """See `PlanOptions.is_plan`.

        Raises:
            ConfigError: also for flags of which one leaves nothing for another.
        """
        chosen = [name for name in ALONE if getattr(self, name)]
        if len(chosen) > 1 and chosen != ["plan", "profile"]:  # which plans refuse themselves
            told = " and ".join(f"--{name}" for name in chosen)
            raise ConfigError([f"{told}: got them together; expected one of them. Choose one."])
        return PlanOptions.is_plan(self)


def no_tensorboard(reason: object) -> UserError:
    """What to raise where the optional package cannot be imported."""
    return UserError(
        f"--tensorboard: got it without the package tensorboard ({reason}); expected that it can "
        "be imported. Run `pip install tensorboard`, or leave --tensorboard out."
    )


def unreadable_tokenizer(path: Path, error: OSError) -> UserError:
    """What to raise for a tokenizer's file that cannot be opened or read."""
    return UserError(
        f"--tokenizer: got {path}: {error.strerror}; expected a readable tokenizer.json. "
        f"Check the path.{hub_hint(path)}"
    )
