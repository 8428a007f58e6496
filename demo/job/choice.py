"""A run of so many minutes in which the program chooses what is trained: what its command line says
until that is chosen.
"""

import math
import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from popxl_gpt.data.dataset_info import implied_settings
from popxl_gpt.utils.files.plain import is_folder, real_path

BY_THE_CLOCK = {"validate_every": 0, "schedule": "wsd"}
"""Settings of a run whose size the program chooses: it finds the files to validate on."""
ONE_HEAD = {"heads": 1}
"""The setting until the program has chosen heads: any hidden size will do."""
AT_ONCE = ("data_parallel", "micro_batch_size", "widening")
"""Settings whose product divides a batch."""


WAITING = ("validate_first", "validate_training")
"""Settings that are checked when it is known whether there are files to validate on."""


def implied_for_choice(flags: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """What a run takes from its data; until batch and steps are chosen, such as go with what flags
    say runs at once.
    """
    found: dict[str, Any] = {}
    first = flags.get("rampup_batch_size")
    if first is not None or not flags.keys().isdisjoint((*AT_ONCE, "global_batch_size")):
        batch = math.prod(flags.get(name, 1) for name in AT_ONCE)
        if first is not None:
            batch = first + (flags.get("rampup_increment") or first)
        found = {"micro_batch_size": 1, "global_batch_size": batch}
    if "device_iterations" in flags:
        found |= {"steps": flags["device_iterations"], "every": 0}
    found["name"] = name_by_the_clock(flags)
    found = {name: value for name, value in found.items() if name not in flags}
    if "validate_every" not in flags:
        found |= dict.fromkeys(WAITING, False)
    return {**found, **implied_settings(flags, file)}


def name_by_the_clock(flags: Mapping[str, Any]) -> str:
    """The name of a run that ends by the clock: that of its data's folder, and its minutes."""
    minutes = f"{flags['minutes']:g}_minutes"
    for folder in map(Path, flags.get("input_files", ())[:1]):
        name = real_path(folder).name if is_folder(folder) else ""
        if name.isprintable() and 0 < len(os.fsencode(name)) < 100:
            return f"{name}_{minutes}"
    return minutes


def chooses_model(given: Set[str], minutes: float | None) -> bool:
    """Whether a command line lets the program choose what is trained.

    Args:
        given: names of what it says.
        minutes: that it gives; None where it gives none, or such as are refused.
    """
    return minutes is not None and given.isdisjoint(("config", "load"))
