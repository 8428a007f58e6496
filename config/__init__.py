"""Configuration of a run: dataclasses, presets and the command line that derives from them.

Imports the standard library and yaml only. A new setting is a field with a docstring in
`schema.py`, and a rule in `validation.py` if it must fit others, or a line of `partners.py` if it
does nothing without another one. A new preset is an entry of `pretraining.yml`. `--help` and the
reference follow.
"""

from popxl_gpt.config.command_line import (
    check_command_line,
    given_settings,
    parse_command_line,
    parse_options,
)
from popxl_gpt.config.leaves import Leaf, leaves, reference
from popxl_gpt.config.presets import from_mapping, override, preset, preset_names
from popxl_gpt.config.saving import (
    changes,
    config_hash,
    load,
    numerics_hash,
    save,
    to_mapping,
    to_yaml,
)
from popxl_gpt.config.schedules import NO_RAMPUP, learning_rate, stage_of, tokens_ahead
from popxl_gpt.config.schema import Checkpoint, Config, Data, Execution, Logging, Model, Training
from popxl_gpt.config.validation import validate
from popxl_gpt.utils.errors import (
    ConfigError,
    CorruptedError,
    DivergedError,
    LostError,
    NotFiniteError,
    SpikeError,
    UserError,
    exit_on_user_error,
    hear_ctrl_c,
)

__all__ = [
    "NO_RAMPUP",
    "Checkpoint",
    "Config",
    "ConfigError",
    "CorruptedError",
    "Data",
    "DivergedError",
    "Execution",
    "Leaf",
    "Logging",
    "LostError",
    "Model",
    "NotFiniteError",
    "SpikeError",
    "Training",
    "UserError",
    "changes",
    "check_command_line",
    "config_hash",
    "exit_on_user_error",
    "from_mapping",
    "given_settings",
    "hear_ctrl_c",
    "learning_rate",
    "leaves",
    "load",
    "numerics_hash",
    "override",
    "parse_command_line",
    "parse_options",
    "preset",
    "preset_names",
    "reference",
    "save",
    "stage_of",
    "to_mapping",
    "to_yaml",
    "tokens_ahead",
    "validate",
]
