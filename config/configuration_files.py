"""Files that `--config` names: a configuration, several by name, or those of Graphcore's GPT
application, whose keys are translated.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from popxl_gpt.config.leaves import leaves
from popxl_gpt.config.other_programs import INSTEAD, SAME
from popxl_gpt.config.presets import INHERITS, SECTIONS, entry_mapping
from popxl_gpt.config.yaml_files import read_yaml
from popxl_gpt.utils.errors import ConfigError
from popxl_gpt.utils.texts import did_you_mean, shown_text

CONSTANT = "training.optimizer.learning_rate.constant"
"""Graphcore's key that says the schedule, too."""
TRANSLATED = {
    "checkpoint.steps": "every",
    "training.optimizer.name": "optimizer",
    CONSTANT: "learning_rate",
    "training.optimizer.learning_rate.function": "schedule",
    "training.optimizer.learning_rate.maximum": "learning_rate",
}
"""Graphcore's keys whose last name says too little: names here. Others are those of `SAME`."""
GROUPS = ("attention", "embedding", "optimizer", "learning_rate")
"""Graphcore's keys that hold settings, which here are all in sections."""
WITHOUT_EFFECT = (
    "available_memory_proportion", "code_load", "code_loading", "eval", "extended_memory",
    "io_tiles", "optim_state", "rts_activations",
)  # fmt: skip
"""Graphcore's keys that are accepted: devices have nothing of the kind, or it is always so."""


def read_configuration(file: Path, name: str = "") -> dict[str, Any]:
    """The sections of a configuration in a file.

    Args:
        name: which one of a file of several; empty where there is one.
    Raises:
        ConfigError: the file cannot be read, or has no such configuration; lists every key that
            has no meaning here.
    """
    content = read_yaml(file)
    if not name and content.keys() & {"name", *SECTIONS}:
        found = content
    else:
        found = _entry(file, name, content)
    return _translated(file, found) if _is_graphcores(found) else found


def _entry(file: Path, name: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """One of several configurations, which may stand in groups such as `release`."""
    found = list(_entries(content))
    entries = dict(found)
    if others := [each for each in entries if not isinstance(each, str)]:
        raise ConfigError(
            [
                f"{file}: got a configuration of the name {others[0]!r}; expected text. Put it in "
                "quotes."
            ]
        )
    if len(entries) != len(found):
        repeated = sorted(each for each, count in Counter(n for n, _ in found).items() if count > 1)
        raise ConfigError(
            [
                f"{file}: got several configurations of the name {', '.join(repeated)}; expected "
                "one of each. Rename the others."
            ]
        )
    if not name and len(entries) == 1:
        (name,) = entries
    if name in entries:
        return entry_mapping(name, entries, file)
    if not entries:
        if name not in ("", content.get("name")) and content.keys() & {"name", *SECTIONS}:
            raise ConfigError(
                [
                    f"--config {file}: got {shown_text(name)}; expected no name, for the file is "
                    f"one configuration. Write --config {file}."
                ]
            )
        return dict(content)  # whose keys are refused one by one
    got = shown_text(name) if name else f"a file of {len(entries)} configurations"
    hint = did_you_mean(name, dict.fromkeys(entries), listed=True) if name else ""
    raise ConfigError(
        [
            f"--config {file}: got {got}; expected the name of one. "
            + (hint or f"Write --config {file}:NAME, with one of {', '.join(entries)}.")
        ]
    )


def _entries(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            if value.keys() & {INHERITS, *SECTIONS}:
                yield name, value
            else:
                yield from _entries(value)


def _is_graphcores(content: Mapping[str, Any]) -> bool:
    sections = (section for section in content.values() if isinstance(section, Mapping))
    return any(
        key in GROUPS and isinstance(value, Mapping)
        for section in sections
        for key, value in section.items()
    )


def _translated(file: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of this program from those of Graphcore's, in which settings stand deeper."""
    known = {leaf.name: leaf for leaf in leaves()}
    sections: dict[str, Any] = {"name": content["name"]} if "name" in content else {}
    problems, ignored = [], []
    found = dict(_settings(content))
    if CONSTANT in found:
        found = {"training.schedule": "constant", **found}
    for path, value in found.items():
        last = path.rpartition(".")[2]
        ours = TRANSLATED.get(path) or SAME.get(last) or last
        if path == "name":
            continue
        if last in WITHOUT_EFFECT:
            ignored.append(path)
        elif ours in known:
            section = sections.setdefault(known[ours].section, {})
            if section.get(ours, value) != value:
                problems.append(
                    f"{file}: {path}: got a second {ours}; expected one. Leave one out."
                )
            section[ours] = value
        elif value is not None:
            hint = INSTEAD.get(last) or did_you_mean(last, known) or "Leave it out."
            problems.append(f"{file}: {path}: got a key that has no meaning here. {hint}")
    if problems:
        raise ConfigError(problems)
    if ignored:
        print(f"{file}: without effect here: {', '.join(ignored)}.", file=sys.stderr)
    return sections


def _settings(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Settings with their dotted paths."""
    for key, value in content.items():
        path = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _settings(value, f"{path}.")
        else:
            yield path, value
