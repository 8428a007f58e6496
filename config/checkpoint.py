"""Settings: what is saved, and where a run starts from."""

from dataclasses import dataclass
from typing import Annotated

from popxl_gpt.config.bounds import Count, CountOrZero, PathText, PositiveOrZero
from popxl_gpt.config.held_out import VALIDATION


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What is saved for a later run, and where a run starts from."""

    load: PathText | None = None
    """Checkpoint to continue from, or a run's folder, of which the newest whole one; auto: that of
    this run's folder; best: the one with the lowest validation loss there; none: start afresh.
    """
    init_from: PathText | None = None
    """Model whose weights a fresh run begins with, its optimizer at step 0: the folder of a run, a
    checkpoint, or a model as Hugging Face saves it, which brings its settings, or such a model's
    name at the hub, as Qwen/Qwen3-0.6B; none: random weights.
    """
    save: PathText | None = None
    """Folder that checkpoints are written to; none: checkpoints/ in the run's folder."""
    every: CountOrZero = 0
    """Steps between checkpoints; 0: those by the clock, and one after the last step."""
    every_minutes: PositiveOrZero = 30.0
    """Minutes of training after which a checkpoint is due, whatever the step; from half of them on
    a step that is validated is saved; 0: never."""
    every_validation: Annotated[bool, VALIDATION] = False
    """Save each step that is validated, too."""
    keep: Count = 2
    """Newest checkpoints that are kept; older ones are deleted, but that with the lowest validation
    loss of all that were saved."""
