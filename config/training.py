"""Settings: what the optimizer does."""

from dataclasses import dataclass
from typing import Literal

from popxl_gpt.config.bounds import (
    Count,
    CountOrZero,
    Fraction,
    Norm,
    Positive,
    PositiveOrZero,
    Scale,
    Seed,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What the optimizer does. A step is one optimizer step, over one global batch."""

    steps: Count = 1000
    """Optimizer steps of the whole run; the schedule ends there."""
    epochs: Positive | None = None
    """Passes over the training data, in place of steps: the run has as many steps as they take;
    none: steps.
    """
    minutes: Positive | None = None
    """Minutes that the run may take, with start-up, validation and the last checkpoint: the
    schedule wsd ends with them, whatever steps says. Without --config and --checkpoint.load the
    program chooses what is trained, too, but what other flags say; none: as many as steps take.
    """
    global_batch_size: Count = 8
    """Sequences per optimizer step, over all replicas."""
    rampup_batch_size: Count | None = None
    """Sequences per optimizer step at the beginning, which grow in stages to global_batch_size;
    none: global_batch_size from the first step on. Each stage is a program of its own, which goes
    on from a checkpoint.
    """
    rampup_increment: Count | None = None
    """Sequences that each stage adds; none: each stage doubles them."""
    rampup_tokens: Count | None = None
    """Tokens over which the batch grows, for each stage as many."""
    learning_rate: Positive = 6e-4
    """Highest learning rate, reached after warm-up."""
    minimum_learning_rate: PositiveOrZero = 0.0
    """Learning rate that all schedules but the constant one fall to."""
    embedding_rate_multiplier: Positive = 1.0
    """Learning rate of embeddings over learning_rate, of value embeddings three times as much; an
    untied head is no embedding.
    """
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """How the learning rate falls after warm-up; wsd (warm-up, stable, decay) stays at the highest
    rate and falls linearly over the last decay_steps.
    """
    decay_steps: Count | None = None
    """Last steps of the run, over which the schedule wsd falls; none: a fifth of steps."""
    warmup_steps: CountOrZero = 0
    """Steps over which the learning rate rises linearly to its highest value."""
    warmup_proportion: Fraction | None = None
    """Share of steps that warm up, in place of warmup_steps; none: warmup_steps."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """What updates the matrices of decoder blocks; embeddings, gains and biases are AdamW's."""
    muon_momentum: Fraction = 0.95
    """Muon's decay of the momentum, per step."""
    beta1: Fraction = 0.9
    """Adam's decay of the first moment, per step."""
    beta2: Fraction = 0.95
    """Adam's decay of the second moment, per step."""
    epsilon: Positive = 1e-8
    """Added to the root of Adam's second moment."""
    weight_decay: PositiveOrZero = 0.1
    """Decoupled weight decay of matrices, times the learning rate per step; gains, biases and the
    factors of token shift and convolutions have none.
    """
    max_norm: Norm = 1.0
    """Global gradient norm above which gradients are scaled down to it; 0: no clipping."""
    loss_scaling: Scale | Literal["auto"] = 1.0
    """Factor on the loss, divided out before the update, that keeps 16-bit gradients from
    vanishing; auto: from 65536 on, halved by a step that overflows, doubled after
    loss_scaling_window others."""
    loss_scaling_window: Count = 1000
    """Steps in a row without an overflow after which `--loss_scaling auto` doubles its factor."""
    max_skipped: Count = 20
    """Steps skipped in a row, for the gradient norm is not finite, that end the run with exit code
    3.
    """
    masked_labels: bool = False
    """Leave labels out of the loss that the data mark, such as those of prompts; the mean is over
    all that count in the global batch."""
    on_spike: Literal["off", "skip", "stop"] = "off"
    """What a gradient norm does that is far above those before: skip leaves its step's update out,
    stop does too and ends the run with exit code 6.
    """
    spike_threshold: Positive = 6.0
    """Standard deviations above the mean from which on a gradient norm is a spike."""
    spike_window: Count = 100
    """Steps over which mean and deviation of gradient norms run; the first as many have no
    spikes.
    """
    moment_precision: Literal["float32", "bfloat16", "8bit"] = "float32"
    """Data type of Adam's two moments; bfloat16 takes half the memory, 8bit (floating-point numbers
    in blocks that share an exponent) a quarter, and both need stochastic_rounding.
    """
    stochastic_rounding: bool = False
    """Round the updates of 16-bit weights and moments at random, without bias; float32 needs no
    such rounding.
    """
    master_weights: bool | None = None
    """Keep weights in float32, and round them to the 16-bit precision for each phase; none: where
    precision is 16 bits and stochastic_rounding is off; false: small updates may be lost.
    """
    seed: Seed = 42
    """Source of initial weights, dropout, the order of the data, and what texts draw."""
    validate_every: CountOrZero = 0
    """Steps between validations; 0: never."""
    validation_batches: Count | Literal["all"] = 8
    """Global batches per validation, always the same ones, of samples spread over all of the
    validation data; all: every token once. Data that fit into them are read whole.
    """
    validate_first: bool = False
    """Validate before the first step, too."""
    validate_training: bool = False
    """Measure as many samples of the training data with each validation, in the same way."""

    @property
    def decay(self) -> int:
        """Last steps over which the schedule wsd falls: never those of warm-up."""
        wanted = -(-self.steps // 5) if self.decay_steps is None else self.decay_steps
        return min(wanted, max(0, self.steps - self.warmup_steps))

    @property
    def looks_for_spikes(self) -> bool:
        """Whether the program compares gradient norms with those before."""
        return self.on_spike != "off"

    @property
    def is_scaled_by_program(self) -> bool:
        """Whether the program itself finds the loss scale."""
        return self.loss_scaling == "auto"

    @property
    def fixed_scale(self) -> float:
        """The factor on the loss, where the program does not find it."""
        return 1.0 if isinstance(self.loss_scaling, str) else self.loss_scaling
