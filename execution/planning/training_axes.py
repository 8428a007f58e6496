"""The axes of what is trained in a given time: size, batch and rate, number format, and what the
data say.
"""

import math
from collections.abc import Iterator

from popxl_gpt.config.batch import MOST_STAGES
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.planning.axes import Axis, Known, Values, usual
from popxl_gpt.execution.planning.machine import may_narrow

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
