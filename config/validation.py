"""Rules that a whole configuration must keep. Problems are reported all at once, with fixes."""

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from math import gcd, isqrt
from typing import Any

from popxl_gpt.config.leaves import assemble, flatten, leaves
from popxl_gpt.config.schedules import rampup_sizes
from popxl_gpt.config.schema import Config, Training
from popxl_gpt.utils.errors import ConfigError
from popxl_gpt.utils.texts import shown_text

SEARCHED = 100_000
"""Numbers next to a value among which a divisor is looked for."""
DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,9})?")
LARGEST = {
    **dict.fromkeys(("layers", "data_parallel", "tensor_parallel_1", "tensor_parallel_2"), 2**16),
    **dict.fromkeys(("hidden_size", "heads", "sequence_length", "vocabulary_size"), 2**31 - 1),
    **dict.fromkeys(("max_positions", "feed_forward_size", "attention_serialisation"), 2**31 - 1),
    "device_iterations": 2**20,
    "global_batch_size": 2**31 - 1,
    "head_serialisation": 2**10,
    "minutes": 10**7,
}
"""Far beyond any run: a program has objects for each layer, replica and iteration, tensors count in
32 bits, and steps in 63.
"""
MOST_STAGES = 64
"""Of a batch that grows."""
LONGEST_NAME = 200
"""Bytes of a run's name: file systems take 255, and some go to what is appended."""


@dataclass(frozen=True)
class Problem:
    """A combination that cannot run."""

    involves: frozenset[str]
    """Leaves that take part; when one of them is wrong by itself, this problem says nothing new."""
    message: str


def validate(config: Config, *, replicas: int | None = None) -> None:
    """Check the values and combinations of a configuration.

    Args:
        replicas: number of replicas that were started, where a launcher started them.
    Raises:
        ConfigError: if anything is wrong; lists every problem.
    """
    values, problems, bad = check_values(flatten(config))
    problems += combination_problems(assemble(values), bad, replicas)
    if problems:
        raise ConfigError(problems)


def check_values(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], frozenset[str]]:
    """Check each leaf by itself.

    Args:
        values: a value for every leaf, by name.
    Returns:
        the values in their final types, with the default for each that is wrong; the messages about
        those that are wrong; and their names.
    """
    checked, problems, bad = {}, [], set()
    for leaf in leaves():
        try:
            checked[leaf.name] = leaf.check(values[leaf.name])
        except ValueError as error:
            checked[leaf.name] = leaf.default
            problems.append(str(error))
            bad.add(leaf.name)
    return checked, problems, frozenset(bad)


def combination_problems(config: Config, bad: Set[str], replicas: int | None = None) -> list[str]:
    """Messages about combinations of leaves that are each fine by themselves; `bad` ones are
    not.
    """
    rules = [
        _name,
        _model,
        _batch,
        _rampup,
        _moments,
        _master_weights,
        _scaling,
        _schedule,
        _iterations,
        _validation,
        _mix,
        _device,
        _activations,
        _files,
    ]
    large = _too_large(config)
    found = [problem for rule in rules for problem in rule(config)]
    if replicas is not None:
        found += _replicas(config, replicas)
    wrong = bad | large.keys()
    of_values = [message for name, message in large.items() if name not in bad]
    return of_values + [problem.message for problem in found if not problem.involves & wrong]


def _problem(involves: str, message: str) -> Problem:
    return Problem(frozenset(involves.split()), message)


def _name(config: Config) -> Iterator[Problem]:
    if not config.name.strip(". ") or set(config.name) & set("/\\\0\n"):
        yield _problem(
            "name",
            f"name: got {config.name!r}; expected a name for a folder. Use letters, digits, - "
            "and _.",
        )
    elif len(config.name.encode()) > LONGEST_NAME:
        yield _problem(
            "name",
            f"name: got {shown_text(config.name)} of {len(config.name.encode())} bytes; expected "
            f"at most {LONGEST_NAME}, for it names a folder. Shorten it.",
        )


def _too_large(config: Config) -> dict[str, str]:
    """Messages about values that are beyond any run, by name."""
    return {
        name: f"{name}: got {value}; expected at most {most}. Lower it."
        for record in (config.model, config.training, config.execution)
        for name, most in LARGEST.items()
        if (value := getattr(record, name, None)) is not None and value > most
    }


def _model(config: Config) -> Iterator[Problem]:
    model, execution = config.model, config.execution
    tp1, tp2 = execution.tensor_parallel_1, execution.tensor_parallel_2
    yield from _divides("hidden_size", model.hidden_size, "heads", model.heads)
    yield from _divides("heads", model.heads, "tensor_parallel_1", tp1)
    yield from _attention(config)
    yield from _divides("hidden_size", model.hidden_size, "tensor_parallel_2", tp2)
    if model.feed_forward_size is not None:  # the default follows from hidden_size
        yield from _divides("feed_forward_size", model.feed_forward_size, "tensor_parallel_1", tp1)
    yield from _divides(
        "sequence_length",
        model.sequence_length,
        "attention_serialisation",
        model.attention_serialisation,
    )
    if model.sequence_length > model.positions:
        yield _problem(
            "sequence_length max_positions",
            f"sequence_length: got {model.sequence_length}; expected at most max_positions = "
            f"{model.positions}. Shorten the sequence or raise max_positions.",
        )
    if model.lora_rank > model.hidden_size:
        yield _problem(
            "lora_rank hidden_size",
            f"lora_rank: got {model.lora_rank}; expected at most hidden_size = "
            f"{model.hidden_size}, for a wider adapter is no smaller than the layer. Use 8 or 16.",
        )
    if model.lora_rank and config.training.optimizer == "muon":
        yield _problem(
            "optimizer lora_rank",
            f"optimizer: got muon with lora_rank = {model.lora_rank}; expected adamw, which "
            "updates adapters. Use --optimizer adamw.",
        )
    if model.end_of_text >= model.vocabulary_size:
        yield _problem(
            "end_of_text vocabulary_size",
            f"end_of_text: got {model.end_of_text}; expected a token below vocabulary_size = "
            f"{model.vocabulary_size}. Use the end_of_text of the data's dataset.json.",
        )


def _attention(config: Config) -> Iterator[Problem]:
    model, tp1 = config.model, config.execution.tensor_parallel_1
    if model.key_value_heads is not None:
        problems = list(_divides("heads", model.heads, "key_value_heads", model.key_value_heads))
        yield from problems or _divides(
            "key_value_heads", model.key_value_heads, "tensor_parallel_1", tp1
        )
    if model.position_embedding == "rotary" and model.head_size % 2:
        yield _problem(
            "position_embedding hidden_size heads",
            f"position_embedding: got rotary with heads of hidden_size / heads = {model.head_size} "
            "features; expected an even number, for they turn in pairs. Change hidden_size or "
            "heads.",
        )


def _divides(name: str, value: int, by: str, divisor: int) -> Iterator[Problem]:
    if value % divisor:
        # a model is given more often than its layout
        advice = (
            f"Use {by} = {_largest_divisor(value, divisor)}, or change {name}."
            if by.startswith("tensor_parallel")
            else f"Use {_multiples(value, divisor)}, or change {by}."
        )
        yield _problem(
            f"{name} {by}",
            f"{name}: got {value}; expected a multiple of {by} = {divisor}. {advice}",
        )


def _largest_divisor(value: int, most: int) -> int:
    """The largest divisor of a value that is at most another."""
    lower = [number for number in range(1, isqrt(value) + 1) if value % number == 0]
    return max(number for low in lower for number in (low, value // low) if number <= most)


def _multiples(value: int, divisor: int) -> str:
    """The positive multiples next to a value."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)


def _batch(config: Config) -> Iterator[Problem]:
    batch, execution = config.training.global_batch_size, config.execution
    at_once = execution.data_parallel * execution.micro_batch_size
    if batch % at_once:
        yield _problem(
            "global_batch_size data_parallel micro_batch_size",
            f"global_batch_size: got {batch}; expected a multiple of data_parallel * "
            f"micro_batch_size = {at_once}. Use {_multiples(batch, at_once)}.",
        )
    elif config.gradient_accumulation % execution.widening:
        yield _widening(config)
    rows = execution.widening * execution.micro_batch_size * config.model.sequence_length
    if rows % execution.head_serialisation:
        yield _problem(
            "head_serialisation widening micro_batch_size sequence_length",
            f"head_serialisation: got {execution.head_serialisation}; expected a divisor of the "
            f"rows of a run of the head, widening * micro_batch_size * sequence_length = {rows}. "
            f"Use {gcd(rows, execution.head_serialisation)}.",
        )


def _rampup(config: Config) -> Iterator[Problem]:
    training, execution = config.training, config.execution
    first, last = training.rampup_batch_size, training.global_batch_size
    if first is None:
        yield from _without_rampup(training)
        return
    if training.rampup_tokens is None:
        yield _problem(
            "rampup_tokens rampup_batch_size",
            f"rampup_tokens: got none with rampup_batch_size = {first}; expected the tokens over "
            "which the batch grows. Give --rampup_tokens.",
        )
    if first >= last:
        yield _problem(
            "rampup_batch_size global_batch_size",
            f"rampup_batch_size: got {first}; expected fewer than global_batch_size = {last}. "
            "Lower it, or leave it out.",
        )
        return
    step, sizes = training.rampup_increment, rampup_sizes(training)
    if len(sizes) > MOST_STAGES:
        yield _problem(
            "rampup_increment rampup_batch_size global_batch_size",
            f"rampup_increment: got {step}, which makes {len(sizes)} stages; expected at most "
            f"{MOST_STAGES}, for each is a program of its own. Raise it.",
        )
    elif (last - first) % step if step is not None else sizes[-1] * 2 != last:
        how = f"in steps of rampup_increment = {step}" if step else "by doubling"
        yield _problem(
            "rampup_batch_size rampup_increment global_batch_size",
            f"rampup_batch_size: got {first}; expected a number from which global_batch_size = "
            f"{last} is reached {how}. Change it, or --rampup_increment.",
        )
    at_once = execution.data_parallel * execution.micro_batch_size * execution.widening
    wrong = next((size for size in sizes[:MOST_STAGES] if size % at_once), None)
    if wrong is not None:
        yield _problem(
            "rampup_batch_size rampup_increment data_parallel micro_batch_size widening",
            f"rampup_batch_size: got {first}, and so a stage of {wrong} sequences; expected "
            f"multiples of data_parallel * micro_batch_size * widening = {at_once}. Use "
            f"{_multiples(first, at_once)}, or change one of the three.",
        )


def _without_rampup(training: Training) -> Iterator[Problem]:
    for name in ("rampup_increment", "rampup_tokens"):
        value = getattr(training, name)
        if value is not None:
            yield _problem(
                f"{name} rampup_batch_size",
                f"{name}: got {value} without rampup_batch_size; expected the batch that a ramp "
                f"begins with. Give --rampup_batch_size, or leave --{name} out.",
            )


def _widening(config: Config) -> Problem:
    steps, widening = config.gradient_accumulation, config.execution.widening
    below = next(
        (
            count
            for count in range(widening - 1, max(0, widening - SEARCHED), -1)
            if steps % count == 0
        ),
        1,
    )
    above = (
        count
        for count in range(widening + 1, min(steps, widening + SEARCHED) + 1)
        if steps % count == 0
    )
    others = [below, *([next(above, steps)] if widening < steps else [])]
    return _problem(
        "widening global_batch_size data_parallel micro_batch_size",
        f"widening: got {widening}; expected a divisor of the micro-batches per step, "
        f"global_batch_size / (data_parallel * micro_batch_size) = {steps}. Use "
        f"{' or '.join(map(str, others))}.",
    )


def _moments(config: Config) -> Iterator[Problem]:
    training = config.training
    if training.moment_precision != "float32" and not training.stochastic_rounding:
        yield _problem(
            "moment_precision stochastic_rounding",
            f"moment_precision: got {training.moment_precision} while stochastic_rounding is "
            "false; expected true, for what a step adds to a second moment is lost in rounding "
            "to the nearest. Give --stochastic_rounding.",
        )
    if training.moment_precision == "8bit" and training.optimizer != "adamw":
        yield _problem(
            "moment_precision optimizer",
            f"moment_precision: got 8bit with optimizer {training.optimizer}; expected float32 or "
            "bfloat16, for 8 bits are kept of AdamW's moments alone. Use bfloat16, or "
            "--optimizer adamw.",
        )


def _master_weights(config: Config) -> Iterator[Problem]:
    if config.training.master_weights and config.model.precision == "float32":
        yield _problem(
            "master_weights precision",
            "master_weights: got true while precision is float32; expected false or none, for "
            "weights in float32 are kept as they are. Use precision float16 or bfloat16, or leave "
            "--master_weights out.",
        )


def _scaling(config: Config) -> Iterator[Problem]:
    if config.training.is_scaled_by_program and config.model.precision == "float32":
        yield _problem(
            "loss_scaling precision",
            "loss_scaling: got auto while precision is float32; expected a number, for float32 "
            "needs no scaling. Use --loss_scaling 1, or precision float16 or bfloat16.",
        )


def _schedule(config: Config) -> Iterator[Problem]:
    training = config.training
    if training.minimum_learning_rate > training.learning_rate:
        yield _problem(
            "minimum_learning_rate learning_rate",
            f"minimum_learning_rate: got {training.minimum_learning_rate:g}; expected at most "
            f"learning_rate = {training.learning_rate:g}. Lower it or raise learning_rate.",
        )
    if training.minutes is not None and training.schedule != "wsd":
        yield _problem(
            "minutes schedule",
            f"minutes: got {training.minutes:g} with schedule {training.schedule}; expected "
            "wsd, which ends when it is told. Give --schedule wsd, or leave --minutes out.",
        )
    if training.decay_steps is None:
        return
    most = training.steps - training.warmup_steps
    if training.schedule != "wsd":
        yield _problem(
            "decay_steps schedule",
            f"decay_steps: got {training.decay_steps} with schedule {training.schedule}; expected "
            "schedule wsd, which has them. Give --schedule wsd, or leave --decay_steps out.",
        )
    elif training.decay_steps > max(0, most) and training.minutes is None:
        yield _problem(
            "decay_steps steps warmup_steps",
            f"decay_steps: got {training.decay_steps}; expected at most steps - warmup_steps = "
            f"{most}. Lower it.",
        )


def _iterations(config: Config) -> Iterator[Problem]:
    iterations = config.execution.device_iterations
    yield from _divides("steps", config.training.steps, "device_iterations", iterations)
    yield from _divides(
        "validate_every", config.training.validate_every, "device_iterations", iterations
    )
    yield from _divides("every", config.checkpoint.every, "device_iterations", iterations)


def _validation(config: Config) -> Iterator[Problem]:
    data, every = config.data, config.training.validate_every
    if data.validation_files and data.is_synthetic:
        yield _problem(
            "validation_files input_files mix",
            "validation_files: got files while input_files is empty; expected both or none, for "
            "synthetic data is validated on synthetic data. Give --input_files.",
        )
    if config.training.validation_batches == "all" and every and data.is_synthetic:
        yield _problem(
            "validation_batches validate_every input_files mix",
            "validation_batches: got all while input_files is empty; expected a number, for "
            "synthetic data has no end. Use 8.",
        )
    if config.training.validate_first and not every:
        yield _problem(
            "validate_first validate_every",
            "validate_first: got true while validate_every is 0; expected steps between "
            "validations. Give --validate_every.",
        )
    if config.training.validate_training and not every:
        yield _problem(
            "validate_training validate_every",
            "validate_training: got true while validate_every is 0; expected steps between "
            "validations. Give --validate_every.",
        )
    if every and not data.is_synthetic and not data.validation_files:
        yield _problem(
            "validate_every input_files mix validation_files",
            f"validation_files: got none; expected files, for validate_every is {every}. "
            "Give --validation_files or use --validate_every 0.",
        )


def _mix(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.mix and data.input_files:
        yield _problem(
            "mix input_files",
            "mix: got some while there are input_files; expected one of the two. Leave one out.",
        )
    try:
        data.mixed()
    except ValueError as error:
        yield _problem(
            "mix",
            f"mix: got {shown_text(str(error))}; expected FOLDER=WEIGHT, a number above 0, each "
            "folder once, such as data/files/code=0.7. Correct it.",
        )


def _device(config: Config) -> Iterator[Problem]:
    if not DEVICE.fullmatch(config.execution.device):
        yield _problem(
            "device",
            f"device: got {config.execution.device!r}; expected auto, cpu, cuda or cuda:N. "
            "Give one of these.",
        )


def _activations(config: Config) -> Iterator[Problem]:
    execution = config.execution
    if execution.activation_memory is not None and not execution.recomputation:
        yield _problem(
            "activation_memory recomputation",
            f"activation_memory: got {execution.activation_memory} while recomputation is false, "
            "which keeps all there is; expected true, for what the memory does not hold. Give "
            "--recomputation, or leave --activation_memory out.",
        )


def _files(config: Config) -> Iterator[Problem]:
    execution = config.execution
    if execution.host_memory is not None and execution.memmap_dir is None:
        yield _problem(
            "host_memory memmap_dir",
            f"host_memory: got {execution.host_memory} while memmap_dir is none; expected a "
            "folder for what does not fit. Give --memmap_dir.",
        )


def _replicas(config: Config, replicas: int) -> Iterator[Problem]:
    execution = config.execution
    if replicas != execution.replication_factor:
        yield _problem(
            "data_parallel tensor_parallel_1 tensor_parallel_2",
            f"replicas: got {replicas} from the launcher; expected data_parallel * "
            f"tensor_parallel_1 * tensor_parallel_2 = {execution.data_parallel} * "
            f"{execution.tensor_parallel_1} * {execution.tensor_parallel_2} = "
            f"{execution.replication_factor}. Start that many (poprun --num-replicas "
            f"{execution.replication_factor}; with torchrun set POPDIST_NUM_TOTAL_REPLICAS="
            f"{execution.replication_factor}), or change one of the three.",
        )
