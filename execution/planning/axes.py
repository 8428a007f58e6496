"""The axes of choice: what `--auto` and `--minutes` may choose, an entry of a table each.

An axis names settings that are chosen together, and gives the values that they may have once the
axes before it are chosen. What a command line gives is not chosen. `--auto` opens the axes of
`EXECUTION`, of which the fastest way is searched for, and `--minutes` those of `TRAINED`, see
`training_axes`, of which the largest model is taken that learns enough; with both of them all axes
are open.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import popdist

from popxl_gpt.config.leaves import assemble, flatten
from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.data.known_text import Text
from popxl_gpt.execution.block_graphs import stretches
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
