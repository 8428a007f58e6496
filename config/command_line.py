"""The command line, derived from the dataclasses: every leaf is a flag."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from textwrap import fill
from types import MappingProxyType
from typing import Any, TypeVar

from popxl_gpt.config.configuration_files import read_configuration
from popxl_gpt.config.leaves import Leaf, leaves, sections, shown
from popxl_gpt.config.other_programs import hint_of
from popxl_gpt.config.presets import (
    build,
    from_sections,
    preset_mapping,
    preset_names,
)
from popxl_gpt.config.schema import Config
from popxl_gpt.utils.errors import SHOWN, ConfigError
from popxl_gpt.utils.files.plain import is_file
from popxl_gpt.utils.texts import did_you_mean, user_path

RUN_CONFIG, RUN_METRICS = "config.yml", "metrics.jsonl"
"""Files in a run's folder."""
YAML = (".yml", ".yaml")
HELP_FLAGS = ("--help", "-h")
Record = TypeVar("Record")


def parse_command_line(
    arguments: Sequence[str],
    *,
    program: str,
    default: str = "",
    options: type | None = None,
    defaults: dict[str, Any] | None = None,
    unused: Sequence[str] = (),
    sections_of: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    implied: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> tuple[Config, Any]:
    """Read a command line: defaults < preset < flags < what flags imply.

    Args:
        arguments: the words after the program's name.
        program: what the program is called and does, for `--help`: "demo/pretraining.py: train a
            GPT".
        default: preset that is taken without `--config`; empty with `sections_of`.
        options: a dataclass of further flags that belong to this program and not to the run; its
            leaf names differ from the configuration's.
        defaults: leaves that this program sets differently from the preset, by name; flags win over
            them.
        unused: sections and leaves that this program has no use for: a preset may set them, a flag
            is refused.
        sections_of: gives what a preset gives elsewhere, the sections of the configuration, from
            the values of the flags: a program that uses what another has made. There is no
            `--config` then.
        implied: gives the leaves that follow from the values of flags, and from those of the file
            that `--config` names, by name.
    Returns:
        the configuration, and an instance of `options` (None without it).
    Raises:
        ConfigError: lists every problem of flags, values and combinations.
        SystemExit: with code 0 after printing the help.
    """
    words = _read(arguments, program, default, options, defaults, unused, sections_of is None)
    own = {item.name for item in fields(options)} if options else set()
    values = {name: value for name, value in words.values.items() if name not in own}
    try:
        if sections_of is None:
            named = default if words.config is None else words.config
            file, entry = _config_file(named)
            mapping: Mapping[str, Any] = (
                preset_mapping(named) if file is None else read_configuration(file, entry)
            )
        elif words.problems:
            raise ConfigError(words.problems)
        else:
            file, mapping = None, sections_of(words.values)
    except ConfigError as error:
        told = [problem for problem in error.problems if problem not in words.problems]
        raise ConfigError([*words.problems, *told]) from error
    of_file = {} if file is None else from_sections(mapping, [])
    if file is not None and "name" not in values:
        values = {**_place_of_run(file, {**of_file, **values}), **values}
    following = implied(values, of_file) if implied else {}
    config = build(
        mapping,
        {**(defaults or {}), **values, **following},
        problems=tuple(words.problems),
        bad=frozenset(words.bad),
    )
    if options is None:
        return config, None
    return config, options(**{name: value for name, value in words.values.items() if name in own})


def check_command_line(
    arguments: Sequence[str],
    *,
    program: str,
    options: type,
    defaults: dict[str, Any] | None = None,
    unused: Sequence[str] = (),
) -> None:
    """Look at the flags alone of a program that uses what another has made: what
    `parse_command_line` with `sections_of` says before it calls it.

    Raises:
        ConfigError: lists every problem of flags.
        SystemExit: with code 0 after printing the help.
    """
    words = _read(arguments, program, "", options, defaults, unused, has_presets=False)
    if words.problems:
        raise ConfigError(words.problems)


def _read(
    arguments: Sequence[str],
    program: str,
    default: str,
    options: type | None,
    defaults: dict[str, Any] | None,
    unused: Sequence[str],
    has_presets: bool,
) -> "_Words":
    """The flags that were given, and what is wrong with each."""
    if any(word in HELP_FLAGS for word in arguments):
        print(help_text(program, default, options, unused, defaults=defaults or {}))
        sys.exit(0)
    known = (*leaves(Config), *(leaves(options) if options else ()))
    not_used = [leaf for leaf in leaves(Config) if is_in(leaf, unused)]
    words = _Words(arguments, known, not_used=not_used, has_presets=has_presets)
    words.read()
    words.refuse(not_used, program.partition(":")[0])
    return words


def given_settings(arguments: Sequence[str], options: type) -> set[str]:
    """Names of what a command line says itself, `config` among them, right or wrong.

    Args:
        options: as of `parse_command_line`.
    """
    words = _Words(arguments, (*leaves(Config), *leaves(options)), has_presets=True)
    words.read()
    return {*words.values, *words.bad, *(["config"] if words.config is not None else [])}


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
    if any(word in HELP_FLAGS for word in arguments):
        print(help_text(program, "", options, (), words, config=None))
        sys.exit(0)
    record: type = options
    found = _Words(arguments, leaves(record), words, has_presets=False)
    found.read()
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
    if found.problems:
        raise ConfigError(found.problems, "command line")
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


def is_in(leaf: Leaf, names: Sequence[str]) -> bool:
    """Whether a setting, or its section, is among some."""
    return leaf.name in names or leaf.section in names


class _Words:
    """The words of a command line, and what was read from them."""

    def __init__(
        self,
        arguments: Sequence[str],
        known: Sequence[Leaf],
        words: str | None = None,
        *,
        not_used: Sequence[Leaf] = (),
        has_presets: bool,
    ):
        self.has_presets = has_presets
        self.not_suggested = {leaf.name for leaf in not_used}
        self.rest = list(arguments)
        self.words = words
        self.flags = {leaf.name: leaf for leaf in known} | {leaf.path: leaf for leaf in known}
        self.config: str | None = None
        self.values: dict[str, Any] = {}
        self.problems: list[str] = []
        self.bad: set[str] = set()

    def read(self) -> None:
        while self.rest:
            word = self.rest.pop(0)
            if self.words is not None and not word.startswith("-"):
                self.values[self.words] = (*self.values.get(self.words, ()), word)
                continue
            if not word.startswith("--") or word == "--":
                self.problems.append(
                    f"{word}: got a word without a flag before it; expected --name value."
                )
                continue
            flag, has_value, value = word[2:].partition("=")
            flag = flag.replace("-", "_")
            if has_value:
                self.rest.insert(0, value)
            if flag == "config" and self.has_presets:
                self.config = self._value("config")
            elif flag in self.flags:
                self._read_leaf(self.flags[flag], attached=bool(has_value))
            elif (
                flag.removeprefix("no_") in self.flags
                and self.flags[flag.removeprefix("no_")].kind is bool
            ):
                self._read_no(self.flags[flag.removeprefix("no_")], word, attached=bool(has_value))
            else:
                self._refuse_flag(word, flag)

    def refuse(self, unused: Sequence[Leaf], program: str) -> None:
        """Note as problems which flags among those that were read the program has no use for."""
        for leaf in unused:
            if leaf.name in self.values or leaf.name in self.bad:
                self.problems.append(
                    f"--{leaf.name}: got a flag that {program} does not use; expected none. "
                    "Leave it out."
                )

    def _read_leaf(self, leaf: Leaf, *, attached: bool) -> None:
        if leaf.is_list:
            self._read_list(leaf, attached)
        elif leaf.kind is bool and not attached and not self._boolean_follows():
            self.values[leaf.name] = True
        else:
            text = self.rest.pop(0) if attached else self._value(leaf.name)
            if text is None:
                self.bad.add(leaf.name)
                return
            try:
                self.values[leaf.name] = leaf.parse(text)
            except ValueError as error:
                self.problems.append(f"--{error}")
                self.bad.add(leaf.name)

    def _read_no(self, leaf: Leaf, word: str, *, attached: bool) -> None:
        if attached:
            self.problems.append(f"{word}: got a value; expected none. Write --no-{leaf.name}.")
            self.rest.pop(0)
        self.values[leaf.name] = False

    def _refuse_flag(self, word: str, flag: str) -> None:
        name, hint = word.partition("=")[0][: 2 * SHOWN], ""
        if len(self.problems) < SHOWN:  # others are counted only
            leaf_names = dict.fromkeys(leaf.name for leaf in self.flags.values())
            known = {**leaf_names, **({"config": None} if self.has_presets else {})}
            known = {name: None for name in known if name not in self.not_suggested}
            near = did_you_mean(flag, known).replace("mean '", "mean '--")
            hint = hint_of(flag, known) or near
        self.problems.append(f"{name}: unknown flag. {hint or 'See --help for all of them.'}")
        while self.rest and not self.rest[0].startswith("--"):
            self.rest.pop(0)

    def _value(self, name: str) -> str | None:
        if not self.rest or self.rest[0].startswith("--"):
            self.problems.append(f"--{name}: got no value; expected one. Write --{name} VALUE.")
            return None
        return self.rest.pop(0)

    def _read_list(self, leaf: Leaf, attached: bool) -> None:
        """Read the words up to the next flag; `none` is the empty list."""
        found = [self.rest.pop(0)] if attached else []
        while self.rest and not self.rest[0].startswith("--"):
            found.append(self.rest.pop(0))
        if found:
            is_none = not leaf.is_free_text and found == ["none"]
            try:  # paths are checked with the configuration
                checked = tuple(found) if leaf.is_path else leaf.check(found)
                self.values[leaf.name] = () if is_none else checked
            except ValueError as error:
                self.problems.append(f"--{error}")
                self.bad.add(leaf.name)
        else:
            what = "paths or patterns" if leaf.is_path else "texts"
            what += "" if leaf.is_free_text else ", or none"
            self.problems.append(f"--{leaf.name}: got no value; expected {what}.")
            self.bad.add(leaf.name)

    def _boolean_follows(self) -> bool:
        return bool(self.rest) and not self.rest[0].startswith("--")


def help_text(
    program: str,
    default: str,
    options: type | None = None,
    unused: Sequence[str] = (),
    words: str | None = None,
    config: type | None = Config,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """The help: presets, then every flag that is used with its values, default and meaning."""
    lines = [program]
    if default:
        presets = ", ".join(preset_names())
        lines += ["", "  --config NAME"]
        lines.append(
            _wrapped(
                f"Preset, a run's folder, or a .yml file (default {default}). Presets: {presets}."
            )
        )
    sections_told = "Each flag may carry its section: --model.layers. " if config else ""
    lines.append(f"\n{sections_told}Booleans are switched off by --no-NAME.")
    for record in (options, config):
        if record is None:
            continue
        for section, doc in sections(record).items():
            own = [leaf for leaf in leaves(record) if leaf.section == section]
            used = [leaf for leaf in own if not is_in(leaf, unused)]
            if not used:
                continue
            told = f"{section or 'run'}: {doc}" if record is Config else doc
            lines.append("\n" + fill(told, 110, break_on_hyphens=False))
            # what comes without a flag comes first
            for leaf in sorted(used, key=lambda leaf: leaf.name != words):
                lines.append(f"  {_usage(leaf, is_word=leaf.name == words)}")
                value = defaults.get(leaf.name, leaf.default)
                told = "needed" if value is MISSING else f"default {shown(value)}"
                lines.append(_wrapped(f"{leaf.doc} ({leaf.expected}; {told})"))
    if default:
        lines.append(
            "\nDefaults are those without a preset; what differs from one is printed when a run "
            "starts."
        )
    return "\n".join(lines)


def _usage(leaf: Leaf, is_word: bool) -> str:
    if is_word:
        name = leaf.name.upper()
        return f"{name} [{name} ...]" if leaf.is_list else name
    if leaf.kind is bool:
        return f"--{leaf.name} | --no-{leaf.name}"
    what = "PATH [PATH ...]" if leaf.is_path else "TEXT [TEXT ...]"
    return f"--{leaf.name} {what if leaf.is_list else leaf.name.upper()}"


def _wrapped(text: str) -> str:
    return fill(text, width=110, initial_indent=" " * 6, subsequent_indent=" " * 6)
