"""Presets: named entries of `pretraining.yml`, merged deeply over the presets they inherit from."""

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from popxl_gpt.config.leaves import assemble, flatten, leaves, records
from popxl_gpt.config.other_programs import hint_of
from popxl_gpt.config.schema import Config
from popxl_gpt.config.shorthands import without_replaced, without_shorthands
from popxl_gpt.config.validation import check_values, combination_problems
from popxl_gpt.config.yaml_files import read_yaml
from popxl_gpt.utils.errors import SHOWN, ConfigError
from popxl_gpt.utils.files.bounded import shortened
from popxl_gpt.utils.texts import did_you_mean

PRESETS_FILE = Path(__file__).with_name("pretraining.yml")
INHERITS = "inherits"
SECTIONS = tuple(name for name in records() if name)


def preset_names(file: Path = PRESETS_FILE) -> tuple[str, ...]:
    """Names of the presets, in the file's order."""
    return tuple(_presets(file))


@cache
def _presets(file: Path) -> dict[str, Any]:
    """What is in a file, read once."""
    return read_yaml(file)


def preset(name: str, /, **values: Any) -> Config:
    """The preset of this name, with some leaves changed: `preset("tiny", layers=3)`.

    Raises:
        ConfigError: if there is no such preset, or with the changes it cannot run.
    """
    return build(preset_mapping(name), values)


def override(config: Config, /, **values: Any) -> Config:
    """A copy of a configuration with some leaves changed, by their names; raises ConfigError as
    `preset` does.
    """
    return build({}, values, base=config)


def update_from_string(config: Config, text: str) -> Config:
    """The same with the changes that a text says: `"layers=3,tied_head=false,betas=[a b]"`. Values
    are written as on the command line, lists in brackets with spaces between.

    Raises:
        ConfigError: as `preset` does.
    """
    known = {leaf.name: leaf for leaf in leaves()}
    values: dict[str, Any] = {}
    problems: list[str] = []
    for change in text.split(","):
        name, _, word = change.strip().partition("=")
        leaf = known.get(name)
        if leaf is None:
            hint = hint_of(name, known) or did_you_mean(name, known)
            problems.append(f"{shortened(change)}: expected NAME=VALUE of a setting. {hint}")
            continue
        try:
            values[name] = word.strip("[]").split() if leaf.is_list else leaf.parse(word)
        except ValueError as error:
            problems.append(str(error))
    return build({}, values, base=config, problems=tuple(problems))


def from_mapping(mapping: Mapping[str, Any]) -> Config:
    """The configuration that a mapping of sections describes; what it does not mention has its
    default.

    Raises:
        ConfigError: lists every unknown key, wrong value and combination that cannot run.
    """
    return build(mapping, {})


def preset_mapping(name: str, file: Path = PRESETS_FILE) -> dict[str, Any]:
    """A preset's sections with everything it inherits merged in, as it stands in the file,
    unchecked.
    """
    return entry_mapping(name, _presets(file), file)


def entry_mapping(name: str, presets: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The same of an entry of what a file holds."""
    chain: list[str] = []
    wanted: str | None = name
    while wanted is not None:
        if wanted in chain:
            raise ConfigError(
                [
                    f"{file.name}: preset {name!r} inherits from itself: "
                    f"{' -> '.join([*chain, wanted])}."
                ]
            )
        if wanted not in presets:
            origin = "--config" if not chain else f"{file.name}: preset {chain[-1]!r} inherits"
            raise ConfigError(
                [
                    f"{origin}: unknown preset {shortened(wanted)}. "
                    f"{did_you_mean(wanted, presets, listed=True)}"
                ]
            )
        chain.append(wanted)
        if not isinstance(presets[wanted], dict):
            raise ConfigError(
                [
                    f"{file.name}: preset {wanted!r}: got {presets[wanted]!r}; expected "
                    "sections of settings."
                ]
            )
        parent = presets[wanted].get(INHERITS)
        if parent is not None and not isinstance(parent, str):
            raise ConfigError(
                [
                    f"{file.name}: preset {wanted!r}: {INHERITS}: got {shortened(parent)}; "
                    "expected the name of one preset."
                ]
            )
        wanted = parent
    merged: dict[str, Any] = {"name": name}
    for ancestor in reversed(chain):
        merged = merge(without_replaced(merged, presets[ancestor]), presets[ancestor])
    merged.pop(INHERITS, None)
    return deepcopy(merged)


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two nested mappings; where both hold a value, `above` wins; lists are replaced."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(merged.get(key), Mapping) and isinstance(value, Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def build(
    mapping: Mapping[str, Any],
    values: Mapping[str, Any],
    *,
    base: Config | None = None,
    problems: tuple[str, ...] = (),
    bad: frozenset[str] = frozenset(),
) -> Config:
    """Build and check a configuration: base < mapping < values.

    Args:
        mapping: values by section, as in a file.
        values: values by leaf name.
        problems: what was found wrong before (on the command line), to be told together with what
            is found here.
        bad: the leaves that those problems are about.
    Raises:
        ConfigError: lists every problem.
    """
    found = list(problems)
    given = from_sections(mapping, found)
    given |= _known(values, "config", _names("", *SECTIONS), found)
    checked, wrong, names = check_values({**flatten(base or Config()), **given})
    try:
        checked = without_shorthands(checked, values.keys() - names, given.keys() - names)
    except ValueError as error:
        wrong = [*wrong, *error.args[0]]
    config = assemble(checked)
    found += wrong + combination_problems(checked, names | bad)
    if found:
        raise ConfigError(found)
    return config


def from_sections(mapping: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Values by leaf name; adds a problem for each key that is unknown."""
    given: dict[str, Any] = {}
    for key, value in mapping.items():
        if key not in SECTIONS:
            given |= _known({key: value}, "config", _names(""), problems, SECTIONS)
        elif isinstance(value, Mapping):
            given |= _known(value, f"config.{key}", _names(key), problems)
        else:
            problems.append(f"config.{key}: got {shortened(value)}; expected settings by name.")
    return given


REMOVED = ("verify_every", 0)
"""A setting that runs of earlier versions have in their configuration, without effect."""


def _names(*sections: str) -> set[str]:
    """Names of the leaves of sections."""
    return {leaf.name for leaf in leaves() if leaf.section in sections}


def _known(
    values: Mapping[Any, Any],
    where: str,
    names: set[str],
    problems: list[str],
    others: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Values by name; adds a problem for each key that is unknown.

    Args:
        others: what else may have been meant.
    """
    for name, value in values.items():
        if name not in names and (name, value) != REMOVED:
            # of more than are shown nothing like it is looked for, which takes its time
            meant = _meant(name, names.union(others)) if len(problems) < SHOWN else ""
            problems.append(f"{where}: unknown key {shortened(name)}. {meant}")
    return {name: value for name, value in values.items() if name in names}


def _meant(name: Any, known: set[str]) -> str:
    """What to write instead of an unknown key: a close one here, else a leaf of that name in
    another section.
    """
    for leaf in leaves():
        if leaf.name == str(name):
            return f"It belongs to {f'config.{leaf.section}'.rstrip('.')}."
    return did_you_mean(str(name), known, listed=True)
