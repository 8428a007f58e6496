"""The environment variables by which a launcher tells instances of their run, and their defaults.

A value is read anew at every call, so that a launcher or a test may still set it.
"""

import os

INDEX, INSTANCES = "RANK", "WORLD_SIZE"
REPLICAS, IPUS = "POPDIST_NUM_TOTAL_REPLICAS", "POPDIST_NUM_IPUS_PER_REPLICA"
TIMEOUT = "POPDIST_TIMEOUT"
"""Seconds that an instance waits for others at a collective before the run ends."""
SECONDS = 60
"""The default of that."""
USAGE_ERROR = 2
"""Exit code of the launcher where its command line cannot be used."""
INTERFACE = "GLOO_SOCKET_IFNAME"
"""The network interface by which other instances are reached."""


class EnvironmentVariableError(ValueError):
    """A variable whose value is none that it may have."""


def number_from_environment(name: str, default: int) -> int:
    """An environment variable as a whole number. EnvironmentVariableError if it is none."""
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise EnvironmentVariableError(
            f"environment variable {name}: got {text!r}; expected a whole number. Correct or "
            "unset it."
        ) from None
