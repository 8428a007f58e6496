"""The configuration: its sections in one record, and the rules on them. The string under a field is
its help text and its line in the reference.
"""

from dataclasses import dataclass, field, replace

from popxl_gpt.config import (
    batch,
    data,
    execution,
    held_out,
    inference,
    learning_rate,
    model,
    training,
)
from popxl_gpt.config.checkpoint import Checkpoint
from popxl_gpt.config.data import Data
from popxl_gpt.config.execution import Execution
from popxl_gpt.config.inference import FOLLOWED, Inference
from popxl_gpt.config.logging import Logging
from popxl_gpt.config.model import Model
from popxl_gpt.config.rules import largest_divisor, rule
from popxl_gpt.config.training import Training
from popxl_gpt.utils.texts import shown_text

LONGEST_NAME = 200
"""Bytes of a run's name: file systems take 255, and some go to what is appended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything that decides a run."""

    name: str = "pretraining"
    """Name of the run and of its folder; a preset's name unless given."""
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    data: Data = field(default_factory=Data)
    execution: Execution = field(default_factory=Execution)
    inference: Inference = field(default_factory=Inference)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    logging: Logging = field(default_factory=Logging)

    @property
    def in_inference(self) -> "Config":
        """The same for programs that run forward between steps: with the fields of `inference` in
        place of those of `execution`, and a global batch of whole runs that holds training's.
        """
        own = {name: getattr(self.inference, f"inference_{name}") for name in FOLLOWED}
        own = {name: value for name, value in own.items() if value is not None}
        execution = replace(self.execution, **own)
        at_once = execution.data_parallel * execution.micro_batch_size * execution.widening
        batch = -(-self.training.global_batch_size // at_once) * at_once
        training = replace(self.training, global_batch_size=batch)
        return replace(self, training=training, execution=execution, inference=Inference())

    @property
    def has_master_weights(self) -> bool:
        """Whether weights are kept in float32, and computed with in 16 bits."""
        if self.training.master_weights is not None:
            return self.training.master_weights
        return self.model.precision != "float32" and not self.training.stochastic_rounding

    @property
    def weight_precision(self) -> str:
        """Data type that weights are kept in."""
        return "float32" if self.has_master_weights else self.model.precision

    @property
    def gradient_accumulation(self) -> int:
        """Micro-batches per replica and optimizer step."""
        return self.training.global_batch_size // (
            self.execution.micro_batch_size * self.execution.data_parallel
        )

    @property
    def groups(self) -> int:
        """Groups of micro-batches, each of which runs through all layers by itself."""
        return self.runs_per_step // self.runs_per_phase

    @property
    def runs_per_step(self) -> int:
        """Runs of a layer in an optimizer step, each over `execution.widening` micro-batches."""
        return self.gradient_accumulation // self.execution.widening

    @property
    def runs_per_phase(self) -> int:
        """Runs of a layer in a phase: those of a group. Where `micro_batch_group` does not divide a
        step, as in validation with other micro-batches, the most that do.
        """
        group = self.execution.micro_batch_group
        if group is None:
            return self.runs_per_step
        return largest_divisor(self.runs_per_step, max(1, group // self.execution.widening))

    @property
    def interleaved_runs(self) -> int:
        """Runs of a layer that alternate."""
        return largest_divisor(self.runs_per_phase, self.execution.interleaving)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one global batch."""
        return self.training.global_batch_size * self.model.sequence_length


@rule
def _name(name: str) -> str | None:
    size = len(name.encode())
    if not name.strip(". ") or set(name) & set("/\\\0\n"):
        return f"name: got {name!r}; expected a name for a folder. Use letters, digits, - and _."
    if size > LONGEST_NAME:
        return (
            f"name: got {shown_text(name)} of {size} bytes; expected at most {LONGEST_NAME}, for "
            "it names a folder. Shorten it."
        )
    return None


RULES = (
    _name,
    *model.RULES,
    *batch.RULES,
    *training.RULES,
    *learning_rate.RULES,
    *execution.CALLS,
    *held_out.RULES,
    *data.RULES,
    *execution.RULES,
    *inference.RULES,
)
"""All rules, in the order in which their problems are listed."""
