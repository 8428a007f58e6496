"""The configuration: its sections in one record. The string under a field is its help text and
its line in the reference.
"""

from dataclasses import dataclass, field

from popxl_gpt.config.checkpoint import Checkpoint
from popxl_gpt.config.data import Data
from popxl_gpt.config.execution import Execution
from popxl_gpt.config.logging import Logging
from popxl_gpt.config.model import Model
from popxl_gpt.config.training import Training


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything that decides a run."""

    name: str = "pretraining"
    """Name of the run and of its folder; a preset's name unless given."""
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    data: Data = field(default_factory=Data)
    execution: Execution = field(default_factory=Execution)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    logging: Logging = field(default_factory=Logging)

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
    def runs_per_phase(self) -> int:
        """Runs of a layer in a phase, each over `execution.widening` micro-batches."""
        return self.gradient_accumulation // self.execution.widening

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one global batch."""
        return self.training.global_batch_size * self.model.sequence_length
