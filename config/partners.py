"""Flags of settings that have an effect together with another one alone."""

from collections.abc import Set

from popxl_gpt.config.leaves import flatten, leaves, shown
from popxl_gpt.config.schema import Config


def without_partner(config: Config, given: Set[str]) -> list[str]:
    """What to tell of flags that do nothing.

    Args:
        given: names of the settings that a command line says itself.
    """
    values = flatten(config)
    told = [
        f"--{leaf.name}: got {shown(values[leaf.name])}, which does nothing with {needs.name} "
        f"{shown(values[needs.name])}. Give {needs.flag}, or leave it out."
        for leaf in leaves()
        if leaf.name in given
        and (needs := leaf.needs) is not None
        and not needs.is_met(values[needs.name])
    ]
    sharding = "replicated_tensor_sharding"
    if sharding in given and values[sharding] and config.execution.replication_factor == 1:
        told.append(
            f"--{sharding}: got true, which does nothing with one replica. Give more replicas, or "
            "leave it out."
        )
    return told
