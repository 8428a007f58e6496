"""Flags of settings that have an effect together with another one alone."""

from collections.abc import Set

from popxl_gpt.config.leaves import flatten, leaves, shown
from popxl_gpt.config.schedules import learning_rate
from popxl_gpt.config.schema import Config

OF_REPLICAS = ("replicated_tensor_sharding", "check_replicas")
"""Settings of what several replicas hold."""


def without_partner(config: Config, given: Set[str]) -> list[str]:
    """What to tell of flags that do nothing.

    Args:
        given: names of the settings that a command line says itself.
    """
    values = flatten(config)
    told = [
        f"--{leaf.name}: got {shown(values[leaf.name])}, which {needs.effect} with "
        f"{needs.name} {shown(values[needs.name])}. Give {needs.flag}, or leave it out."
        for leaf in leaves()
        if leaf.name in given
        and (needs := leaf.needs) is not None
        and not needs.is_met(values[needs.name])
    ]
    training = config.training
    if "warmup_steps" in given and training.warmup_steps >= training.steps and not training.minutes:
        told.append(
            f"--warmup_steps: got {training.warmup_steps} with steps {training.steps}, in which "
            f"the learning rate rises to {learning_rate(training, training.steps - 1):.3g}, and "
            f"not to {training.learning_rate:g}. Lower it, or give more --steps."
        )
    if config.execution.replication_factor == 1:
        told += [
            f"--{name}: got {shown(values[name])}, which does nothing with one replica. Give more "
            "replicas, or leave it out."
            for name in OF_REPLICAS
            if name in given and values[name]
        ]
    return told
