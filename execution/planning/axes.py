"""The axes of choice: what `--auto` and `--minutes` may choose, an entry of a table each.

An axis names settings that are chosen together, and gives the values that they may have once the
axes before it are chosen. What a command line gives is not chosen. `--auto` opens the axes of
`EXECUTION`, of which the fastest way is searched for, and `--minutes` those of `TRAINED`, of which
the largest model is taken that learns enough; with both of them all axes are open.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import popdist

from popxl_gpt.config.batch import MOST_STAGES
from popxl_gpt.config.leaves import assemble, flatten
from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.data.known_text import Text
from popxl_gpt.execution.block_graphs import stretches
from popxl_gpt.execution.planning.machine import may_narrow
from popxl_gpt.execution.planning.text import layout_name
from popxl_gpt.execution.recomputation import stretches_text
from popxl_gpt.utils.errors import ConfigError
from popxl_gpt.utils.runtime import runs_on_gpu

Values = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known when values are looked for."""

    given: frozenset[str] = frozenset()
    """Settings that stay as they are."""
    replicas: int = 1
    seconds: float = 0.0
    """The whole time of a run that ends by the clock."""
    left: float = 0.0
    """The part of it that training has."""
    speed: float = 0.0
    """FLOP/s of the program itself."""
    text: Text | None = None
    """The data; None for random tokens, or where nothing is known of them."""


@dataclass(frozen=True)
class Axis:
    """Settings that are chosen together."""

    settings: tuple[str, ...]
    values: Callable[[Config, Known], Iterable[Values]]
    """Values that the settings may have in a configuration, which is not checked."""
    words: Callable[[Config], str] = lambda config: ""
    """What is chosen, for people; nothing of what is usual."""


def usual(axis: Axis) -> Axis:
    """An axis with the first of its values alone."""
    return replace(axis, values=lambda config, known: islice(axis.values(config, known), 1))


def candidates(
    config: Config, axes: tuple[Axis, ...], known: Known, errors: list[ConfigError]
) -> Iterator[Config]:
    """The configuration with each combination of values that it can have.

    Args:
        errors: gets what is wrong with each other one.
    """
    for values in _combinations(config, axes, known):
        try:
            yield override(config, **values)
        except ConfigError as error:
            errors.append(error)


def _combinations(config: Config, axes: tuple[Axis, ...], known: Known) -> Iterator[dict[str, Any]]:
    if not axes:
        yield {}
        return
    seen: list[dict[str, Any]] = []
    for values in axes[0].values(config, known):
        free = {name: value for name, value in values.items() if name not in known.given}
        if free in seen:
            continue
        seen.append(free)
        changed = assemble({**flatten(config), **free}) if free else config
        for others in _combinations(changed, axes[1:], known):
            yield {**free, **others}


# How a model is executed

MOST_TOKENS = 16384
"""Tokens of a replica that run as one: products of more are no faster, and take more memory."""

LOGIT = 4
"""Bytes that a logit takes with its gradient, in 16 bits each, or alone in 32."""
LOGITS = 2**31
"""Bytes of logits that a GPU holds at a time, at most: no more than its memory says where that is
unknown, so that a run does not depend on whose memory is free.
"""
LOGITS_SHARE = 16
"""Part of the device memory that is given, which they are at most. Each piece reads and writes the
gradient of the head's matrix once more, so more pieces than needed take time.
"""
MOST_PIECES = 2**10
"""The largest number of pieces that can be given."""


def splits(devices: int) -> list[tuple[int, int, int]]:
    """All (data parallel, tensor parallel 1, tensor parallel 2) over a number of devices."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    return [
        (dp, tp1, devices // (dp * tp1))
        for dp in divisors
        for tp1 in divisors
        if devices // dp % tp1 == 0
    ]


def _layouts(config: Config, known: Known) -> Iterator[Values]:
    for layout in splits(known.replicas):
        values = dict(zip(LAYOUT.settings, layout))
        given = values.keys() & known.given
        if all(values[name] == getattr(config.execution, name) for name in given):
            yield values


def _sequences(config: Config, known: Known) -> Iterator[Values]:
    """Micro-batch and width for each number of sequences that may run as one.

    With dropout the micro-batch stays, for another one would draw other masks; its width may
    change.
    """
    execution, given = config.execution, known.given
    batch, now = (
        config.training.global_batch_size // execution.data_parallel,
        execution.micro_batch_size,
    )
    is_kept = "micro_batch_size" in given or config.model.dropout > 0
    most = max(1, MOST_TOKENS // config.model.sequence_length, now * execution.widening)
    for together in range(1, min(batch, most) + 1):
        if batch % together:
            continue
        if "widening" in given:
            micro_batch, rest = divmod(together, execution.widening)
            if rest == 0 and (micro_batch == now or not is_kept):
                yield {"micro_batch_size": micro_batch}
        elif together % now == 0:
            yield {"micro_batch_size": now, "widening": together // now}
        elif not is_kept:
            yield {"micro_batch_size": together, "widening": 1}


def _sequences_words(config: Config) -> str:
    execution = config.execution
    wide = f", {execution.widening} of them as one" if execution.widening > 1 else ""
    return f"micro-batch {execution.micro_batch_size}{wide}"


def _activations_words(config: Config) -> str:
    execution = config.execution
    if execution.activation_memory is None:
        return f"activations {'recomputed' if execution.recomputation else 'kept'}"
    return f"activations: {stretches_text(stretches(config))}"


def _pieces(config: Config, known: Known) -> Iterator[Values]:
    """The fewest pieces of the head's rows of which none has logits beyond a limit, on a GPU. A
    number of pieces that is not the usual one stays.
    """
    execution, model = config.execution, config.model
    memory = execution.device_memory
    limit = memory // LOGITS_SHARE if isinstance(memory, int) else LOGITS
    rows = execution.micro_batch_size * execution.widening * model.sequence_length
    nbytes = rows * LOGIT * model.vocabulary_size // execution.tensor_parallel_1
    values: Values = {}
    if execution.head_serialisation == 1 and nbytes > limit and runs_on_gpu(execution.device):
        fits = (n for n in range(2, MOST_PIECES + 1) if rows % n == 0 and nbytes <= n * limit)
        values = {"head_serialisation": next(fits, math.gcd(rows, MOST_PIECES))}
    yield values


LAYOUT = Axis(
    ("data_parallel", "tensor_parallel_1", "tensor_parallel_2"),
    _layouts,
    lambda config: (
        f"dp x tp1 x tp2 = {layout_name(config.execution)}"
        if config.execution.replication_factor > 1
        else ""
    ),
)
SEQUENCES = Axis(("micro_batch_size", "widening"), _sequences, _sequences_words)
ACTIVATIONS = Axis(
    ("recomputation", "activation_memory"),
    lambda config, known: (
        {"recomputation": each, "activation_memory": None} for each in (False, True)
    ),
    _activations_words,
)
"""All kept or none: where those of all do not fit, those of some are kept (`Room.place`)."""
GROUPS = Axis(
    ("micro_batch_group",),
    lambda config, known: ({},),
    lambda config: (
        f"groups of {config.execution.micro_batch_group} micro-batches" if config.groups > 1 else ""
    ),
)
"""How many micro-batches run through all layers by themselves: as many as fit (`Room.place`)."""
HEAD = Axis(
    ("head_serialisation",),
    _pieces,
    lambda config: (
        f"head in {config.execution.head_serialisation} pieces"
        if config.execution.head_serialisation > 1
        else ""
    ),
)
ROWS = Axis(
    ("memmap_dir", "host_memory"),
    lambda config, known: ({},),
    lambda config: "rows in files" if config.execution.memmap_dir is not None else "",
)
"""The places of rows: `Room.place` says where they fit."""
EXECUTION = (LAYOUT, SEQUENCES, HEAD, ACTIVATIONS, GROUPS, ROWS)
"""Axes of the ways to execute a model: training comes to the same numbers, up to rounding."""
EXECUTED = tuple(name for axis in EXECUTION for name in axis.settings)
"""Their settings."""


def replicas_here(config: Config, given: Iterable[str]) -> int:
    """Replicas of the run: as many as the launcher starts; else what flags ask for, or one, as
    replicas of one process share its processors.
    """
    if popdist.isPopdistEnvSet():
        return popdist.getNumTotalReplicas()
    wanted = (getattr(config.execution, n) for n in LAYOUT.settings if n in given)
    return math.prod(wanted)


def ways(config: Config, given: Iterable[str]) -> list[Config]:
    """The configuration with each way to execute it that it can have, whatever memory it takes.

    Args:
        given: settings that stay as they are.

    Raises:
        ConfigError: there is none; lists what is wrong with each.
    """
    known = Known(given=frozenset(given), replicas=replicas_here(config, given))
    errors: list[ConfigError] = []
    found = list(candidates(config, EXECUTION, known, errors))
    if found:
        return found
    told = dict.fromkeys(f"  {problem}" for error in errors for problem in error.problems)
    fixed = [
        f"  --{name} {getattr(config.execution, name)}"
        for name in EXECUTED
        if name in known.given or (name == "micro_batch_size" and config.model.dropout)
    ]
    raise ConfigError(
        [
            f"--auto: got flags that leave no way to execute {config.name} on {known.replicas} "
            f"replica{'s' * (known.replicas > 1)}; expected some. Leave one out, or change the "
            "batch:",
            *(told or fixed),
        ]
    )


def with_pieces(config: Config, given: Iterable[str]) -> Config:
    """The configuration with as many pieces of the head as its logits need; all else stays."""
    (values,) = _combinations(config, (HEAD,), Known(given=frozenset(given)))
    return override(config, **values) if values else config


def in_words(config: Config) -> str:
    """How a configuration is executed, by what is chosen."""
    return ", ".join(filter(None, (axis.words(config) for axis in EXECUTION)))


# What is trained in a given time

SHAPES = (
    (2, 128), (2, 192), (3, 192), (4, 192), (4, 256), (6, 256), (6, 384), (8, 512), (10, 640),
    (12, 768), (16, 1024), (20, 1280), (24, 1536), (28, 1792), (32, 2048),
)  # fmt: skip
"""Layers and hidden sizes, from the smallest model on."""
HEAD_SIZE = 64
BIGRAMS_WORTH, BIGRAM_WIDTH = {16: 1.33, 4: 1.24}, 256
"""What a step is worth with so many rows of the table of bigrams for each word, over one without a
table; and the widest model that has one. 2 layers of 128 come to 1.290 bits per byte from 480 steps
of 4,096 tokens of a dictionary without a table, to 1.259 with 4 rows for each word and to 1.248
with 16; a hundredth of the time is 0.0013. What rows cost is a hundredth of a step where products
are slow, and a fifth where they are fast. Wider models were not measured, nor texts that are seen
more than once.
"""
BATCH = 2.6
"""Tokens of a batch over the root of all that the run sees, at least. 4 layers of 256 learn most
from 2.4 M tokens, in 5 minutes on two cores with AVX2, with batches of 4,096: of 2,048 they see
fewer in the time, of 8,192 they learn less from each. What a batch may have grows with about the
root of the tokens: Zhang et al. 2024, "How does critical batch size scale in pre-training?",
arXiv:2410.21676.
"""
CRITICAL = 10
"""The critical batch over the usual one, for which a step is worth half of what one of all tokens
is: 1 / (1 + critical / batch). In a minute on two cores with AMX 2 layers of 128 take 95, 146 and
255 ms for steps of 2,048, 4,096 and 8,192 tokens, and come to 1.367, 1.311 and 1.297 bits per byte.
Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", arXiv:1812.06162,
equation 2.11.
"""
LEAST_BATCH, MOST_AT_ONCE = 2048, 4096
"""Tokens of the smallest batch, for products of fewer are slower, and of a micro-batch at most: 4
layers of 192 take 1.07 and 1.2 times the time (two runs) for two of 2,048 that one of 4,096 takes.
"""
RATE, RATE_WIDTH = 8e-3, 256
"""The highest learning rate of so wide a model; it falls with the root of the width. Rates of 6e-3,
9e-3 and 12e-3 come to 1.346, 1.340 and 1.340 bits per byte in as many tokens.
"""
LENGTHS = ((8 * 3600.0, 1024), (3600.0, 512), (0.0, 256))
"""Seconds of a run, and the tokens of a sequence from those on."""


def _data(config: Config, known: Known) -> Iterator[Values]:
    """What data say of themselves. Where some are held out they are validated on: once a call,
    until steps are known.
    """
    text, values = known.text, {}
    if text is not None:
        values = {name: getattr(text, name) for name in DATA.settings if hasattr(text, name)}
    if config.data.validation_files or values.get("validation_files"):
        values["validate_every"] = config.execution.device_iterations
    yield values


def _sizes(config: Config, known: Known) -> Iterator[Values]:
    """Shapes, from the smallest model on. Those that do not go with what was given drop out."""
    for layers, hidden in SHAPES:
        if "hidden_size" in known.given:
            hidden = config.model.hidden_size
        yield {"layers": layers, "hidden_size": hidden, "heads": _heads(hidden)}


def _heads(hidden: int) -> int:
    """The most that have HEAD_SIZE features or more; an even number, for rotary positions."""
    wanted = max(1, hidden // HEAD_SIZE)
    return next((n for n in range(wanted, 1, -1) if hidden % (2 * n) == 0), 1)


def _batches(config: Config, known: Known) -> Iterator[Values]:
    """The usual batch for all the tokens that the run will see, and ever larger ones; as many
    sequences of it at a time as are of use, and the rate that goes with both.
    """
    training, execution, model = config.training, config.execution, config.model
    length = model.sequence_length
    wanted = usual_batch(config, known) / length
    at_once = range(1, max(1, MOST_AT_ONCE // length) + 1)
    for times in (1, 2, 4):
        batch = training.global_batch_size
        if "global_batch_size" not in known.given:
            batch = _batch(config, known, times * wanted)
        sizes = batch, training.rampup_batch_size or batch, training.rampup_increment or batch
        whole = math.gcd(*(size // execution.widening for size in sizes))
        yield {
            "global_batch_size": batch,
            "micro_batch_size": max(n for n in at_once if whole % n == 0),
            "learning_rate": RATE * math.sqrt(RATE_WIDTH / model.hidden_size),
            "minimum_learning_rate": 0.0,
        }


def _bigrams(config: Config, known: Known) -> Iterator[Values]:
    """Rows of a table of bigrams, ever fewer, where a small model sees no text twice."""
    model, text = config.model, known.text
    is_new = text is None or tokens_in_time(config, known) <= text.tokens
    has_table = is_new and model.hidden_size <= BIGRAM_WIDTH
    for per_word in BIGRAMS_WORTH if has_table else (0,):
        yield {"bigram_rows": per_word * model.vocabulary_size}


def worth(config: Config, known: Known) -> float:
    """What a step is worth beside others of models of this size: in a time in which worth over
    seconds comes to more, the model learns more.
    """
    rows = config.model.bigram_rows / config.model.vocabulary_size
    table = next((gain for least, gain in BIGRAMS_WORTH.items() if rows >= least), 1.0)
    return table / (1 + CRITICAL * usual_batch(config, known) / config.tokens_per_step)


def usual_batch(config: Config, known: Known) -> float:
    """Tokens of a batch by the number of all that the run will see."""
    return max(LEAST_BATCH, BATCH * math.sqrt(tokens_in_time(config, known)))


def _batch(config: Config, known: Known, wanted: float) -> int:
    """Sequences of a step, about as many as are wanted; such as a ramp leads to that was given."""
    first, increment = config.training.rampup_batch_size, config.training.rampup_increment
    if first is None:
        execution = config.execution
        given = execution.micro_batch_size if "micro_batch_size" in known.given else 1
        at_once = execution.widening * given
        return int(at_once * 2 ** max(0, round(math.log2(wanted / at_once))))
    if increment is None:
        return int(first * 2 ** max(1, round(math.log2(wanted / first))))
    return first + increment * min(MOST_STAGES, max(1, round((wanted - first) / increment)))


def matrices(config: Config) -> int:
    """Parameters of the matrices of decoder blocks, about."""
    return 12 * config.model.layers * config.model.hidden_size**2


def flops_of_token(config: Config) -> float:
    """Floating-point operations of a token, about, as the sizes of matrices have it."""
    model = config.model
    products = matrices(config) + model.vocabulary_size * model.hidden_size
    return 6.0 * products + 12.0 * model.layers * model.sequence_length * model.hidden_size


def tokens_in_time(config: Config, known: Known) -> float:
    """Tokens that a run has time for."""
    return known.speed * known.left / flops_of_token(config)


DATA = Axis(("vocabulary_size", "tokenizer", "validation_files", "validate_every"), _data)
PRECISION = Axis(
    ("precision",),
    lambda config, _: ({"precision": "bfloat16"} if may_narrow(config.execution.device) else {},),
)
"""The narrow one, where it may be faster."""
LENGTH = Axis(
    ("sequence_length",),
    lambda config, known: (
        {"sequence_length": next(n for least, n in LENGTHS if known.seconds >= least)},
    ),
)
SIZE = Axis(("layers", "hidden_size", "heads"), _sizes)
BATCH_AND_RATE = Axis(
    ("global_batch_size", "micro_batch_size", "learning_rate", "minimum_learning_rate"), _batches
)
BIGRAMS = Axis(("bigram_rows",), _bigrams)
REFINED = (BATCH_AND_RATE, BIGRAMS)
"""Axes along which a size is refined by what its steps take. The usual values come first."""
TRAINED = (DATA, PRECISION, LENGTH, SIZE, usual(BIGRAMS), usual(BATCH_AND_RATE))
"""Axes of what is trained in a given time. Those after the size have one value for each of it."""
