"""The ways to execute a model that are compared: layouts, sequences that run as one, and what is
kept.
"""

from collections.abc import Collection, Iterator
from typing import Any

import popdist

from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.layer_graphs import kept_layers
from popxl_gpt.execution.planning.plan.layouts import splits
from popxl_gpt.execution.planning.text import layout_name
from popxl_gpt.utils.errors import ConfigError

LAYOUT = ("data_parallel", "tensor_parallel_1", "tensor_parallel_2")
CHOSEN = (
    *LAYOUT, "micro_batch_size", "widening", "recomputation", "activation_memory", "memmap_dir",
    "host_memory",
)  # fmt: skip
"""Settings that are chosen, unless they are given as flags."""
MOST_TOKENS = 16384
"""Of a replica that run as one: products of more are no faster, and take more memory."""


def replicas_here(config: Config, given: Collection[str]) -> int:
    """Replicas of the run: as many as the launcher starts; else what flags ask for, or one, as
    replicas of one process share its processors.
    """
    if popdist.isPopdistEnvSet():
        return popdist.getNumTotalReplicas()
    replicas = 1
    for name in LAYOUT:
        replicas *= getattr(config.execution, name) if name in given else 1
    return replicas


def candidates(config: Config, given: Collection[str]) -> list[Config]:
    """The configuration with each way to execute it that it can have, whatever memory it takes.

    Args:
        given: settings that stay as they are.

    Raises:
        ConfigError: there is none; lists what is wrong with each.
    """
    found: list[Config] = []
    problems: dict[str, None] = {}
    replicas = replicas_here(config, given)
    for layout in splits(replicas):
        names = dict(zip(LAYOUT, layout))
        if any(names[name] != getattr(config.execution, name) for name in given if name in names):
            continue
        for micro_batch, widening in _sizes(config, given, layout[0]):
            for recomputation in _recomputations(config, given):
                values: dict[str, Any] = {
                    **names,
                    "micro_batch_size": micro_batch,
                    "widening": widening,
                    "recomputation": recomputation,
                }
                if "activation_memory" not in given:  # `Account.place` gives some where it is short
                    values["activation_memory"] = None
                try:
                    found.append(override(config, **values))
                except ConfigError as error:
                    problems.update(dict.fromkeys(error.problems))
    if not found:
        told = [f"  {problem}" for problem in problems]
        raise ConfigError(
            [
                f"--auto: got flags that leave no way to execute {config.name} on {replicas} "
                f"replica{'s' * (replicas > 1)}; expected some. Leave one out, or change the "
                "batch:",
                *(told or _what_is_fixed(config, given)),
            ]
        )
    return found


def _what_is_fixed(config: Config, given: Collection[str]) -> list[str]:
    return [
        f"  --{name} {getattr(config.execution, name)}"
        for name in CHOSEN
        if name in given or (name == "micro_batch_size" and config.model.dropout)
    ]


def _sizes(config: Config, given: Collection[str], data_parallel: int) -> Iterator[tuple[int, int]]:
    """Micro-batch and width for each number of sequences that may run as one.

    With dropout the micro-batch stays, for another one would draw other masks; its width may
    change.
    """
    execution, batch = config.execution, config.training.global_batch_size // data_parallel
    now = execution.micro_batch_size
    most = max(1, MOST_TOKENS // config.model.sequence_length, now * execution.widening)
    for together in range(1, min(batch, most) + 1):
        if batch % together:
            continue
        if "widening" in given:
            micro_batch = together // execution.widening
            is_kept = "micro_batch_size" in given or config.model.dropout > 0
            if together % execution.widening or (is_kept and micro_batch != now):
                continue
            yield micro_batch, execution.widening
        elif together % now == 0:
            yield now, together // now
        elif "micro_batch_size" not in given and config.model.dropout == 0:
            yield together, 1


def _recomputations(config: Config, given: Collection[str]) -> tuple[bool, ...]:
    return (config.execution.recomputation,) if "recomputation" in given else (False, True)


def in_words(config: Config) -> str:
    """How a configuration is executed, by what is chosen."""
    execution = config.execution
    parts = []
    if execution.replication_factor > 1:
        parts.append(f"dp x tp1 x tp2 = {layout_name(execution)}")
    parts.append(f"micro-batch {execution.micro_batch_size}")
    if execution.widening > 1:
        parts.append(f"{execution.widening} of them as one")
    if execution.activation_memory is None:
        parts.append(f"activations {'recomputed' if execution.recomputation else 'kept'}")
    else:
        parts.append(f"activations of {kept_layers(config)} of {config.model.layers} blocks kept")
    if execution.memmap_dir is not None:
        parts.append("rows in files")
    return ", ".join(parts)
