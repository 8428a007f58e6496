"""Settings: what the optimizer does. Features of a run that have several settings stand in files of
their own; `Training` is all of them.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from popxl_gpt.config.batch import Batch
from popxl_gpt.config.bounds import (
    Count,
    CountOrZero,
    Fraction,
    Needs,
    Norm,
    Positive,
    PositiveOrZero,
    SameNumbers,
    Scale,
    Seed,
)
from popxl_gpt.config.held_out import HeldOut
from popxl_gpt.config.learning_rate import LearningRate, Length
from popxl_gpt.config.rules import rule
from popxl_gpt.config.spikes import Spikes


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How a gradient becomes an update."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """What updates the matrices of decoder blocks; embeddings, gains and biases are AdamW's."""
    muon_momentum: Annotated[
        Fraction, Needs("optimizer", "--optimizer muon", lambda value: value == "muon")
    ] = 0.95
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
    average_weights: CountOrZero = 0
    """Horizon of a moving average of the weights, in steps: the mean of all steps at first, later
    each step has one of so many parts. What is validated, evaluated, exported and writes texts is
    the average; training goes on with the weights. 0: no average.
    """
    max_norm: Norm = 1.0
    """Global gradient norm above which gradients are scaled down to it; 0: no clipping."""
    updates: bool = True
    """Change weights after each step; false: forward and backward alone, to time or debug them."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The loss that gradients are of, and what happens where they are not finite."""

    loss_scaling: Scale | Literal["auto"] = 1.0
    """Factor on the loss, divided out before the update, that keeps 16-bit gradients from
    vanishing; auto: from 65536 on, halved by a step that overflows, doubled after
    loss_scaling_window others."""
    loss_scaling_window: Annotated[
        Count, Needs("loss_scaling", "--loss_scaling auto", lambda value: value == "auto")
    ] = 1000
    """Steps in a row without an overflow after which `--loss_scaling auto` doubles its factor."""
    max_skipped: SameNumbers[Count] = 20
    """Steps skipped in a row, for the gradient norm is not finite, that end the run with exit code
    3.
    """
    masked_labels: bool = False
    """Leave labels out of the loss that the data mark, such as those of prompts; the mean is over
    all that count in the global batch."""

    z_loss: PositiveOrZero = 0.0
    """Weight of the z-loss, the mean square of the logarithm of the softmax's denominator, beside
    the cross entropy: it keeps logits from drifting; 0: none.
    """

    @property
    def losses(self) -> dict[str, float]:
        """Weights of the losses whose sum is trained, by name."""
        return {"cross_entropy": 1.0, **({"z_loss": self.z_loss} if self.z_loss else {})}

    @property
    def losses_apart(self) -> tuple[str, ...]:
        """Names of the losses that are told beside their sum: all, where there are several."""
        return tuple(self.losses) if len(self.losses) > 1 else ()

    @property
    def is_scaled_by_program(self) -> bool:
        """Whether the program itself finds the loss scale."""
        return self.loss_scaling == "auto"

    @property
    def fixed_scale(self) -> float:
        """The factor on the loss, where the program does not find it."""
        return 1.0 if isinstance(self.loss_scaling, str) else self.loss_scaling


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """What is kept in 16 bits or fewer, and what draws are drawn from."""

    moment_precision: Literal["float32", "bfloat16", "8bit"] = "float32"
    """Data type of Adam's two moments, and of Muon's momentum; bfloat16 takes half the memory, 8bit
    (numbers in blocks that share an exponent; AdamW alone) a quarter, and both need
    stochastic_rounding.
    """
    gradient_precision: Literal["float32", "bfloat16"] = "float32"
    """Data type of gradients that wait for the update; bfloat16 takes half the memory and traffic,
    is rounded from float32 sums as they are stored, and needs stochastic_rounding.
    """
    reduce_precision: Annotated[
        Literal["float32", "bfloat16"],
        Needs("data_parallel", "--data_parallel 2", lambda value: value > 1),
    ] = "float32"
    """Data type in which gradients travel between data-parallel replicas; bfloat16 takes half the
    bytes: each replica rounds its own to the nearest, and the sums are float32.
    """
    stochastic_rounding: bool = False
    """Round 16-bit weights and moments at their updates, and 16-bit gradients, at random, without
    bias; float32 needs no such rounding.
    """
    master_weights: bool | None = None
    """Keep weights in float32, and round them to the 16-bit precision for each phase; none: where
    precision is 16 bits and stochastic_rounding is off; false: small updates may be lost.
    """
    seed: Seed = 42
    """Source of initial weights, dropout, the order of the data, and what texts draw."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training(HeldOut, Rounding, Spikes, Loss, Optimizer, LearningRate, Batch, Length):
    """What the optimizer does. A step is one optimizer step, over one global batch."""

    # fields are those of the last base first


RULES = (
    rule(
        lambda moment_precision, stochastic_rounding: (
            moment_precision != "float32"
            and not stochastic_rounding
            and f"moment_precision: got {moment_precision} while stochastic_rounding is false; "
            "expected true, for what a step adds to a second moment is lost in rounding to the "
            "nearest. Give --stochastic_rounding."
        )
    ),
    rule(
        lambda gradient_precision, stochastic_rounding: (
            gradient_precision != "float32"
            and not stochastic_rounding
            and f"gradient_precision: got {gradient_precision} while stochastic_rounding is false; "
            "expected true, for gradients rounded to the nearest are off to one side. Give "
            "--stochastic_rounding, and --master_weights true to keep weights in float32 beside "
            "a 16-bit precision."
        )
    ),
    rule(
        lambda moment_precision, optimizer: (
            moment_precision == "8bit"
            and optimizer != "adamw"
            and f"moment_precision: got 8bit with optimizer {optimizer}; expected float32 or "
            "bfloat16, for 8 bits are kept of AdamW's moments alone. Use bfloat16, or --optimizer "
            "adamw."
        )
    ),
    rule(
        lambda master_weights, precision: (
            master_weights
            and precision == "float32"
            and "master_weights: got true while precision is float32; expected false or none, for "
            "weights in float32 are kept as they are. Use precision float16 or bfloat16, or leave "
            "--master_weights out."
        )
    ),
    rule(
        lambda loss_scaling, precision: (
            loss_scaling == "auto"
            and precision == "float32"
            and "loss_scaling: got auto while precision is float32; expected a number, for "
            "float32 needs no scaling. Use --loss_scaling 1, or precision float16 or bfloat16."
        )
    ),
)
