"""Resolved configurations as text, as files, and as hashes."""

import hashlib
import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from popxl_gpt.config.leaves import leaves
from popxl_gpt.config.presets import from_mapping, preset, preset_names
from popxl_gpt.config.schema import Config
from popxl_gpt.config.yaml_files import read_yaml, to_text
from popxl_gpt.utils.files.plain import write_plain

NUMERIC_SECTIONS = ("model", "training", "execution")
"""Sections that decide the numbers; the contents of data files are identified by the data itself,
not by paths.
"""


def to_mapping(config: Config) -> dict[str, Any]:
    """The configuration as nested dictionaries of plain values, lists instead of tuples, every leaf
    present.
    """
    mapping: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return mapping


def to_yaml(config: Config) -> str:
    """The configuration as YAML that `load` reads back, every leaf present."""
    return to_text(to_mapping(config))


def changes(config: Config) -> "tuple[str, dict[str, Any]]":
    """What a configuration is but for some leaves, in words, and those leaves by their dotted
    names: the preset of its name, else what the fewest leaves differ from, the defaults or a
    preset.
    """
    presets = {f"preset {name}": name for name in preset_names()}
    named = f"preset {config.name}"
    told = [named] if named in presets else ["the defaults", *presets]
    here = to_mapping(config)
    found = {base: _changed(here, _base(presets.get(base))) for base in told}
    return min(found.items(), key=lambda item: len(item[1]))


@cache
def _base(name: str | None) -> "dict[str, Any]":
    """The preset of this name, or the defaults."""
    return to_mapping(Config() if name is None else preset(name))


def _changed(here: "dict[str, Any]", there: "dict[str, Any]") -> "dict[str, Any]":
    """Leaves of sections that another configuration has otherwise, by their dotted names."""
    return {
        leaf.path: here[leaf.section][leaf.name]
        for leaf in leaves()
        if leaf.section and here[leaf.section][leaf.name] != there[leaf.section][leaf.name]
    }


def save(config: Config, file: Path) -> None:
    """Write the configuration to a file."""
    write_plain(file, to_yaml(config))


def load(file: Path) -> Config:
    """Read a configuration that `save` wrote (or part of one); raises ConfigError if it is not one
    or cannot run.
    """
    return from_mapping(read_yaml(Path(file)))


def numerics_hash(config: Config) -> str:
    """Hash of what decides the numbers: two runs on the same data with equal hashes give the same
    losses.
    """
    mapping: dict[str, Any] = {section: {} for section in NUMERIC_SECTIONS}
    for leaf in leaves():
        if leaf.section in mapping and leaf.decides_numbers:
            mapping[leaf.section][leaf.name] = leaf.of(config)
    mapping["model"] |= {
        "max_positions": config.model.positions,
        "feed_forward_size": config.model.feed_forward,
    }
    mapping["training"]["master_weights"] = config.has_master_weights
    text = json.dumps(mapping, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
