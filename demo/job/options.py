"""The flags of the training run beside its settings, and what they need."""

from dataclasses import dataclass
from pathlib import Path

from popxl_gpt.config.bounds import CountOrZero, PathText
from popxl_gpt.execution.planning.options import PlanOptions
from popxl_gpt.utils.errors import ConfigError, UserError
from popxl_gpt.utils.files.hub import hub_hint


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
    """Print what each phase of a step loads, gathers, sums and stores, in order and with bytes, and
    stop; nothing of the model's size is allocated.
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
            ConfigError: also for one profile and several.
        """
        if self.profile and self.profile_every:
            told = f"--profile_every: got {self.profile_every} with --profile; expected one of them"
            raise ConfigError([f"{told}. Choose one."])
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
