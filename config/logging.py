"""Settings: what is reported about a run."""

from dataclasses import dataclass
from typing import Annotated, Literal

from popxl_gpt.config.bounds import Count, CountOrZero, Needs, PathText, SameNumbers

_NEEDS = Needs("wandb", "--wandb", bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class Logging:
    """What is reported about a run."""

    run_folder: PathText = "runs"
    """Folder that holds one folder per run, with config.yml, metrics.jsonl, report.html and
    checkpoints.
    """
    log_every: Count = 1
    """Steps between progress lines."""
    norms_every: SameNumbers[CountOrZero] = 0
    """Steps between measures of the norms of weights, gradients and updates, by layer and role;
    each takes another copy of the weights on the host; 0: never.
    """
    log_level: Literal["debug", "info", "warning", "error"] | None = None
    """Least level of messages on standard error; none: MODEL_LOG_LEVEL, or info without it."""
    tensorboard: bool = False
    """Write event files for TensorBoard to tensorboard/ in the run's folder."""
    wandb: bool = False
    """Log to Weights & Biases as well; WANDB_MODE=offline needs no network."""
    wandb_name: Annotated[str | None, _NEEDS] = None
    """Name of the run at Weights & Biases; none: the run's name."""
    wandb_tags: Annotated[tuple[str, ...], _NEEDS] = ()
    """Tags of the run at Weights & Biases."""
    wandb_project: Annotated[str, _NEEDS] = "popxl-gpt"
    """Project at Weights & Biases."""
