"""The configuration's records. The string under a field is its help text and its line in the
reference.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from popxl_gpt.config.bounds import AtLeast, Between, Bytes, BytesOrShare, MoreThan, Within
from popxl_gpt.utils.texts import IsPath

Count = Annotated[int, AtLeast(1)]
CountOrZero = Annotated[int, AtLeast(0)]
Positive = Annotated[float, MoreThan(0.0)]
PositiveOrZero = Annotated[float, AtLeast(0.0)]
Fraction = Annotated[float, Between(0.0, 1.0)]
TopP = Annotated[float, Within(1e-6, 1.0)]
"""The probability that tokens to choose from have together."""
Norm = Annotated[float, Within(1e-30, 1e30, or_zero=True)]
"""What float32 holds, and what it gives divided by a norm or multiplied with one."""
Scale = Annotated[float, Within(1e-6, 1e12)]
"""Numbers whose squares float32 divides gradients by without losing them."""
Memory = Annotated[int, Bytes()]
MemoryOrShare = Annotated[int | float, BytesOrShare()]
Seed = Annotated[int, Between(0, 2**32)]
PathText = Annotated[str, IsPath()]


ARCHITECTURE = (
    "layers", "hidden_size", "heads", "vocabulary_size", "norm", "position_embedding",
    "rotary_base", "token_shift", "qk_norm", "value_embeddings", "activation", "biases",
    "tied_head", "logit_softcap", "convolution_size",
)  # fmt: skip
"""Settings of the model that weights are for; beside them those that may be none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The GPT that is trained."""

    layers: Count = 12
    """Decoder blocks."""
    hidden_size: Count = 768
    """Width of the activations between blocks; a multiple of heads."""
    heads: Count = 12
    """Attention heads per block."""
    key_value_heads: Count | None = None
    """Heads of keys and values per block, each of which serves equally many heads of queries
    (grouped queries); none: as many as heads.
    """
    sequence_length: Count = 1024
    """Tokens per training sequence."""
    vocabulary_size: Count = 50257
    """Token ids; padded to a multiple of tensor_parallel_1 inside the program."""
    max_positions: Count | None = None
    """Tokens of a text that the model sees at most, which is the rows of a learned position
    embedding; none: sequence_length.
    """
    feed_forward_size: Count | None = None
    """Width inside the feed-forward layer; none: 4 * hidden_size."""
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    """How activations are normalised; RMS norms subtract no mean, and have no bias."""
    position_embedding: Literal["learned", "rotary"] = "learned"
    """Positions are told by vectors that are added to words, or by turning queries and keys."""
    rotary_base: Positive = 10000.0
    """Features i and i + D/2 of a head of size D turn by rotary_base ** (-2i / D) radians per
    token.
    """
    token_shift: bool = False
    """Add to the vector of each word that of the word before it, times a factor per channel that is
    trained.
    """
    convolution_size: Count = 1
    """Tokens that short convolutions see, the token itself among them: in front of attention and
    feed-forward layers, and in queries, keys and values, they add those before it, each times a
    factor per channel that is trained; 1: none.
    """
    qk_norm: bool = False
    """Normalise queries and keys of each head by an RMS norm, before they are turned."""
    value_embeddings: bool = False
    """Add to the values of each block's attention an embedding of the words, from a table of its
    own.
    """
    activation: Literal["gelu", "relu2", "swiglu"] = "gelu"
    """Between the feed-forward layer's projections: GELU in its tanh form, squared ReLU, or the
    product of one half of the first projection and the swish of the other, which makes it twice as
    wide.
    """
    biases: bool = True
    """Add biases in linear layers and layer norms."""
    tied_head: bool = True
    """Use the word embedding for the logits as well; false: the head has a matrix of its own."""
    logit_softcap: PositiveOrZero = 0.0
    """Bound c of the logits, which become c * tanh(logit / c); 0: none."""
    dropout: Fraction = 0.1
    """Probability that a unit is dropped, for embeddings, attention probabilities and residual
    branches.
    """
    attention_serialisation: Count = 1
    """Pieces the queries are cut into: less of the score matrix is held at once, and later keys
    cost nothing.
    """
    lora_rank: CountOrZero = 0
    """Width of the low-rank adapters of linear layers: they are trained, and all else is frozen; 0:
    no adapters, and all is trained.
    """
    lora_alpha: Positive = 16.0
    """What adapters add is times this over lora_rank."""
    document_attention: bool = False
    """Let tokens attend to their own document only, where a sequence holds several; positions count
    from each document's beginning.
    """
    end_of_text: CountOrZero = 0
    """Token that ends a document, for document_attention; 0 in tokenizers that data/prepare.py
    trains.
    """
    precision: Literal["float32", "float16", "bfloat16"] = "float32"
    """Data type of weights and activations; sums and gradient accumulators are float32."""
    initial_std: Positive = 0.02
    """Standard deviation of fresh weights; projections into the residual stream use it divided by
    sqrt(2 * layers).
    """
    initialisation: Literal["fixed", "width"] = "fixed"
    """What initial_std is for: fixed, all weights; width, embeddings and head, while matrices of
    decoder blocks have 1/sqrt(inputs) in its place, so that a rate found for a narrow model serves
    a wide one better.
    """
    zero_init_residual: bool = False
    """Start projections into the residual stream at zero, so that each decoder block starts as the
    identity.
    """
    layer_norm_eps: Positive = 1e-5
    """Added to the variance by layer norms, to the mean square by RMS norms."""

    @property
    def positions(self) -> int:
        """Tokens of a text that the model sees at most."""
        return self.sequence_length if self.max_positions is None else self.max_positions

    @property
    def feed_forward(self) -> int:
        """Width inside the feed-forward layer."""
        return 4 * self.hidden_size if self.feed_forward_size is None else self.feed_forward_size

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.heads

    @property
    def key_value(self) -> int:
        """Heads of keys and values per block."""
        return self.heads if self.key_value_heads is None else self.key_value_heads

    @property
    def shares_keys(self) -> bool:
        """Whether several heads of queries share keys and values."""
        return self.key_value != self.heads

    @property
    def has_convolutions(self) -> bool:
        """Whether there are short convolutions."""
        return self.convolution_size > 1

    @property
    def has_position_table(self) -> bool:
        """Whether positions are learned vectors."""
        return self.position_embedding == "learned"


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Where the tokens come from."""

    input_files: tuple[PathText, ...] = ()
    """TFRecord files to train on, as paths or glob patterns; none: synthetic data. A folder that
    data/prepare.py made gives its tokenizer, vocabulary_size and validation_files, too, and with
    document_attention end_of_text.
    """
    mix: tuple[str, ...] = ()
    """Data to train on in place of input_files, as FOLDER=WEIGHT: a folder that data/prepare.py
    made, or a glob pattern of TFRecord files, and how much of the samples is of it.
    """
    validation_files: tuple[PathText, ...] = ()
    """TFRecord files to validate on, as paths or glob patterns."""
    skip_damaged: bool = False
    """Leave out what is in records of TFRecord files whose checksum is wrong, and name each in the
    log.
    """
    tokenizer: PathText | None = None
    """Tokenizer file (JSON of the tokenizers package) that made the tokens; used to show text that
    the model writes.
    """

    @property
    def is_synthetic(self) -> bool:
        """Whether tokens are random."""
        return not self.input_files and not self.mix

    def mixed(self) -> dict[str, float]:
        """Weights of what is mixed, by folder or pattern; ValueError names a wrong entry."""
        found: dict[str, float] = {}
        for entry in self.mix:
            name, _, text = entry.rpartition("=")
            try:
                weight = float(text)
            except ValueError:
                weight = math.nan
            if not (name and 0 < weight < math.inf) or name in found:
                raise ValueError(entry)
            found[name] = weight
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """How one optimizer step is spread over replicas and memory."""

    micro_batch_size: Count = 1
    """Sequences per replica and step of gradient accumulation."""
    gradient_accumulation_steps: Count | None = None
    """Micro-batches per replica and optimizer step, in place of global_batch_size, which is their
    sequences over all data-parallel replicas; none: global_batch_size.
    """
    widening: Count = 1
    """Micro-batches that run as one: larger matrix products for more memory; the same numbers up to
    rounding.
    """
    data_parallel: Count = 1
    """Replicas that hold the same weights and see different sequences."""
    tensor_parallel_1: Count = 1
    """Replicas over which heads, feed-forward width and vocabulary are split."""
    tensor_parallel_2: Count = 1
    """Replicas over which the hidden size is split."""
    device_iterations: Count = 1
    """Optimizer steps per call of the session; nothing returns in between, and updates run beside
    the next step.
    """
    recomputation: bool = True
    """Compute activations again in the backward phase instead of keeping them; attention's
    probabilities either way.
    """
    activation_memory: Memory | None = None
    """Remote memory of each replica for what decoder blocks keep of their forward pass, of all
    micro-batches: as many of the last blocks as it holds keep it, and the others compute it again;
    none: recomputation decides for all.
    """
    head_serialisation: Count = 1
    """Pieces that the rows (tokens) of a run of the head are cut into, one after the other with its
    gradient: only one piece's logits are held at once.
    """
    replicated_tensor_sharding: bool = True
    """Split weights, gradients, optimizer state and stored activations over the replicas that would
    hold them twice.
    """
    device: str = "auto"
    """Where replicas run: cpu, cuda (each process its own GPU), cuda:N; auto: a GPU where there is
    one.
    """
    device_memory: MemoryOrShare | None = None
    """What each process may take of a device's memory; other rows wait on the host; auto: what a
    GPU has free.
    """
    memmap_dir: PathText | None = None
    """Folder for files that hold the remote memory; none: host memory."""
    host_memory: Memory | None = None
    """Memory of each process for rows of those files that are needed soon; none: the files are
    mapped into memory.
    """
    io_mode: Literal["compute", "io", "io_overlapped"] = "io"
    """How batch-serialised loops load and store: between computations, on their own, or overlapped
    with them.
    """
    check_replicas: CountOrZero = 0
    """Steps between comparisons of what replicas must hold alike, by hash, also before each
    checkpoint; where they differ the run ends with exit code 4; 0: never.
    """
    verify_every: CountOrZero = 0
    """Steps between verifications: one phase, of one layer, runs again from what it had found, each
    time the next one; where it comes to other bytes the run ends with exit code 4; 0: never.
    """

    @property
    def replication_factor(self) -> int:
        """Replicas in total."""
        return self.data_parallel * self.tensor_parallel_1 * self.tensor_parallel_2


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What is saved for a later run, and where a run starts from."""

    load: PathText | None = None
    """Checkpoint to continue from, or a run's folder, of which the newest whole one; auto: that of
    this run's folder; best: the one with the lowest validation loss there; none: start afresh.
    """
    init_from: PathText | None = None
    """Folder whose weights a fresh run begins with, its optimizer at step 0: a run, a checkpoint,
    or a GPT-2, Llama or Qwen3 as Hugging Face saves it; none: random weights.
    """
    save: PathText | None = None
    """Folder that checkpoints are written to; none: checkpoints/ in the run's folder."""
    every: CountOrZero = 0
    """Steps between checkpoints; 0: those by the clock, and one after the last step."""
    every_minutes: PositiveOrZero = 30.0
    """Minutes of training after which a checkpoint is due, whatever the step; from half of them on
    a step that is validated is saved; 0: never."""
    keep: Count = 2
    """Newest checkpoints that are kept; older ones are deleted, but that with the lowest validation
    loss of all that were saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Logging:
    """What is reported about a run."""

    run_folder: PathText = "runs"
    """Folder that holds one folder per run, with config.yml, metrics.jsonl, report.html and
    checkpoints.
    """
    log_every: Count = 1
    """Steps between progress lines."""
    log_level: Literal["debug", "info", "warning", "error"] | None = None
    """Least level of messages on standard error; none: MODEL_LOG_LEVEL, or info without it."""
    tensorboard: bool = False
    """Write event files for TensorBoard to tensorboard/ in the run's folder."""
    wandb: bool = False
    """Log to Weights & Biases as well; WANDB_MODE=offline needs no network."""
    wandb_name: str | None = None
    """Name of the run at Weights & Biases; none: the run's name."""
    wandb_tags: tuple[str, ...] = ()
    """Tags of the run at Weights & Biases."""
    wandb_project: str = "popxl-gpt"
    """Project at Weights & Biases."""


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
