"""The command line, derived from the dataclasses: every leaf is a flag."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from popxl_gpt.config.configuration_files import read_configuration
from popxl_gpt.config.flags import Flags
from popxl_gpt.config.ipu_config import IpuConfigFile
from popxl_gpt.config.leaves import leaves
from popxl_gpt.config.presets import (
    build,
    from_sections,
    merge,
    preset_mapping,
    preset_names,
)
from popxl_gpt.config.schema import Config
from popxl_gpt.config.shorthands import without_replaced
from popxl_gpt.utils.errors import ConfigError
from popxl_gpt.utils.files.plain import is_file
from popxl_gpt.utils.texts import user_path

RUN_CONFIG, RUN_METRICS = "config.yml", "metrics.jsonl"
"""Files in a run's folder."""
YAML = (".yml", ".yaml")
IPU_CONFIG = "ipu_config"
"""The flag of a program that takes such a file beside `--config`."""
Record = TypeVar("Record")
Implied = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]


class CommandLine(NamedTuple):
    """What a command line was read to be."""

    config: Config
    options: Any
    """An instance of the program's dataclass of further flags; None without one."""
    given: frozenset[str]
    """Names of what it says itself, `config` among them, and of what its `--ipu_config` says."""


def parse_command_line(
    arguments: Sequence[str],
    *,
    program: str,
    default: str = "",
    options: type | None = None,
    defaults: Mapping[str, Any] | None = None,
    unused: Sequence[str] = (),
) -> CommandLine:
    """Read a command line: defaults < preset < flags.

    Args:
        arguments: the words after the program's name.
        program: what the program is called and does, for `--help`: "demo/pretraining.py: train a
            GPT".
        default: preset that is taken without `--config`.
        options: a dataclass of further flags that belong to this program and not to the run; its
            leaf names differ from the configuration's.
        defaults: leaves that this program sets differently from the preset, by name; flags win over
            them.
        unused: sections and leaves that this program has no use for: a preset may set them, a flag
            is refused.
    Raises:
        ConfigError: lists every problem of flags, values and combinations.
        SystemExit: with code 0 after printing the help.
    """
    flags = read_flags(arguments, program=program, options=options, unused=unused)
    return configured(flags, options, default=default, defaults=defaults)


def read_flags(
    arguments: Sequence[str],
    *,
    program: str,
    options: type | None = None,
    unused: Sequence[str] = (),
    has_presets: bool = True,
) -> Flags:
    """The flags of a command line, of which `configured` makes a configuration; for arguments see
    `parse_command_line`.
    """
    records = (options, Config) if options else (Config,)
    return Flags(arguments, program, records, unused=unused, has_presets=has_presets)


def configured(
    flags: Flags,
    options: type | None,
    *,
    default: str = "",
    defaults: Mapping[str, Any] | None = None,
    sections: Mapping[str, Any] | None = None,
    implied: Implied | None = None,
) -> CommandLine:
    """The configuration that flags give: defaults < preset < flags < what flags imply.

    Args:
        sections: of the configuration, in place of a preset's: of a program that uses what another
            has made. The flags are checked.
        implied: gives the leaves that follow from the values of flags, and from those of the file
            that `--config` names, by name.
    Raises:
        ConfigError: lists every problem of flags, values and combinations.
        SystemExit: with code 0 after printing the help.
    """
    flags.answer_help(default, defaults or {})
    theirs = None
    own = {item.name for item in fields(options)} if options else set()
    values = {name: value for name, value in flags.values.items() if name not in own}
    try:
        if sections is None:
            named = default if flags.config is None else flags.config
            file, entry = _config_file(named)
            mapping: Mapping[str, Any] = (
                preset_mapping(named) if file is None else read_configuration(file, entry)
            )
            if flags.values.get(IPU_CONFIG) is not None:
                theirs = IpuConfigFile(flags.values[IPU_CONFIG])
                mapping = merge(without_replaced(mapping, theirs.sections), theirs.sections)
        else:
            file, mapping = None, sections
    except ConfigError as error:
        told = [problem for problem in error.problems if problem not in flags.problems]
        raise ConfigError([*flags.problems, *told]) from error
    of_file = {} if file is None else from_sections(mapping, [])
    if file is not None and "name" not in values:
        values = {**_place_of_run(file, {**of_file, **values}), **values}
    following = implied(values, of_file) if implied else {}
    config = build(
        mapping,
        {**(defaults or {}), **values, **following},
        problems=tuple(flags.problems),
        bad=frozenset(flags.bad),
    )
    if theirs is not None:
        theirs.check_layers(config.model.layers)
    record = options(**{n: v for n, v in flags.values.items() if n in own}) if options else None
    given = flags.given if theirs is None else flags.given | theirs.names
    return CommandLine(config, record, given)


def parse_options(
    arguments: Sequence[str], *, program: str, options: type[Record], words: str | None = None
) -> Record:
    """Read a command line whose flags are the fields of a dataclass, in the same dialect.

    Args:
        arguments: the words after the program's name.
        program: what the program is called and does, for `--help`.
        options: the dataclass.
        words: the field that words without a flag before them go to; one word, unless it is a
            list.
    Returns:
        an instance of `options`.
    Raises:
        ConfigError: lists every problem.
        SystemExit: with code 0 after printing the help.
    """
    record: type = options
    found = Flags(arguments, program, (record,), words=words)
    found.answer_help()
    for leaf in leaves(record):
        if leaf.name == words and not leaf.is_list and leaf.name in found.values:
            first, *more = found.values[leaf.name]
            found.values[leaf.name] = first
            found.problems += [f"{word}: got a second {leaf.name}; expected one." for word in more]
        if leaf.default is MISSING and leaf.name not in (found.values.keys() | found.bad):
            what = leaf.name.upper() if leaf.name == words else f"--{leaf.name}"
            expected = "a path, or several" if leaf.is_path and leaf.is_list else leaf.expected
            found.problems.append(f"{what}: got none; expected {expected}. Give one.")
        elif leaf.is_path and leaf.name in found.values:
            try:
                found.values[leaf.name] = leaf.check(found.values[leaf.name])
            except ValueError as error:
                found.problems.append(str(error))
    found.check("command line")
    return options(**found.values)


def _config_file(name: str) -> tuple[Path | None, str]:
    """The file that `--config` names, where it ends in .yml or is a run's folder, and the name of
    one of its configurations, where that follows a colon; no file of a preset.
    """
    if name and name not in preset_names() and is_file(Path(name, RUN_CONFIG)):
        name = os.path.join(name, RUN_CONFIG)
    file, _, entry = name.rpartition(":")
    if not file.endswith(YAML):
        file, entry = name, ""
    return (user_path("--config", file) if file.endswith(YAML) else None), entry


def _place_of_run(file: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Name and folder of a run that goes on, where `--config` names its `config.yml`: those of
    where that lies now, as the run may have been renamed or moved.
    """
    continues = values.get("load") in ("auto", "best")
    if file.name != RUN_CONFIG or not continues:
        return {}
    folder = file.parent
    if folder.name in ("", "..") or folder.is_symlink():
        folder = Path(os.path.realpath(folder))
    if not is_file(folder / RUN_METRICS):
        return {}  # no run has begun there
    return {"name": folder.name, "run_folder": str(folder.parent)}
