"""A run of so many minutes in which the program chooses what is trained: what its command line says
until that is chosen.
"""

import importlib
import math
import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from popxl_gpt.config.command_line import RUN_CONFIG
from popxl_gpt.config.flags import Flags
from popxl_gpt.config.logging import Logging
from popxl_gpt.data.dataset_info import implied_settings
from popxl_gpt.utils.errors import ConfigError
from popxl_gpt.utils.files.plain import is_file, is_folder, real_path
from popxl_gpt.utils.texts import text_of_path

NOTE, RUNTIME = "POPDIST_NOTE", "popxl_gpt.utils.runtime"
"""Variable of a launcher that starts runs again; and the module that reads its note, which takes
time to load: only where there is one.
"""

BY_THE_CLOCK = {"validate_every": 0, "schedule": "wsd"}
"""Settings of a run whose size the program chooses: it finds the files to validate on."""
ONE_HEAD = {"heads": 1}
"""The setting until the program has chosen heads: any hidden size will do."""
NARROW = {"precision": "bfloat16"}
"""The setting where another one needs 16 bits."""
OTHERWISE = {
    "ipu_config": (
        "how a model is executed; expected one of them. Leave it out, or say with --config what is "
        "trained."
    ),
    "gradient_accumulation_steps": (
        "how a batch is executed; expected --global_batch_size. Give that, or say with --config "
        "what is trained."
    ),
    "init_from": (
        "the size of a model; expected that of the weights. Give --layers and --hidden_size, or "
        "say with --config what is trained."
    ),
}
"""Flags that say what is chosen, and what to do instead."""
AT_ONCE = ("data_parallel", "micro_batch_size", "widening")
"""Settings whose product divides a batch."""


WAITING = ("validate_first", "validate_training")
"""Settings that are checked when it is known whether there are files to validate on."""


def check_choice(given: Set[str]) -> None:
    """Raise ConfigError for a flag that says what is chosen."""
    for name, told in OTHERWISE.items():
        is_sized = name == "init_from" and {"layers", "hidden_size"} <= given
        if name in given and not is_sized:
            raise ConfigError([f"--{name}: got it with --minutes, which chooses {told}"])


def defaults_of_choice(flags: Mapping[str, Any]) -> dict[str, Any]:
    """What stands in place of the preset's settings until something is chosen."""
    has_free_heads = "hidden_size" in flags and "key_value_heads" not in flags
    is_narrow = flags.get("master_weights") is True or flags.get("loss_scaling") == "auto"
    heads, precision = ONE_HEAD if has_free_heads else {}, NARROW if is_narrow else {}
    return {**BY_THE_CLOCK, **heads, **precision}


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


def chosen_before(flags: Flags) -> str | None:
    """The configuration of the run that goes on, in which is chosen what is trained: the one that
    the launcher starts again, or of the name that the run has; None where nothing goes on.
    """
    values = flags.values
    if values.get("minutes") is None or flags.config is not None:
        return None
    load = values.get("load")
    if load is None and NOTE in os.environ:
        had = importlib.import_module(RUNTIME).read_note()
        folder = None if had is None else Path(had[0])
    elif load in ("auto", "best"):
        name = values.get("name") or name_by_the_clock(values)
        folder = Path(values.get("run_folder") or Logging().run_folder, name)
    else:
        return None
    is_there = folder is not None and is_file(folder / RUN_CONFIG)
    return text_of_path(folder / RUN_CONFIG) if folder is not None and is_there else None


def chooses_model(given: Set[str], minutes: float | None, load: str | None) -> bool:
    """Whether a command line lets the program choose what is trained.

    Args:
        given: names of what it says, and of what `chosen_before` finds.
        minutes: that it gives; None where it gives none, or such as are refused.
        load: the checkpoint that it gives.
    """
    return minutes is not None and "config" not in given and load in (None, "auto")
