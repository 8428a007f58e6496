"""Which configurations a checkpoint can be loaded with, and what they change."""

import logging
from pathlib import Path
from typing import Any

from popxl_gpt.config.model import ARCHITECTURE, BY_DEFAULT, Model
from popxl_gpt.config.saving import numerics_hash, to_mapping
from popxl_gpt.config.schema import Config
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.files.bounded import shown

_LOG = logging.getLogger(__name__)


def check_fits(folder: Path, manifest: "dict[str, Any]", config: Config) -> None:
    """Refuse a checkpoint of another model; tell of other changes."""
    saved, now = manifest["config"], to_mapping(config)
    before = to_mapping(Config())  # what a setting was before it could be chosen

    def old(section: str, name: str) -> Any:
        return saved[section].get(name, before[section][name])

    must_agree = [("model", name) for name in (*ARCHITECTURE, "lora_rank")]
    must_agree.append(("training", "optimizer"))
    problems = [
        f"{name} {shown(old(section, name))}, not {now[section][name]}"
        for section, name in must_agree
        if old(section, name) != now[section][name]
    ]
    then, here = Model(**{name: old("model", name) for name in before["model"]}), config.model
    positions = {"max_positions": "positions"} if here.has_position_table else {}
    problems += [
        f"{name} {getattr(then, told)}, not {getattr(here, told)}"
        for name, told in {**positions, **BY_DEFAULT}.items()
        if getattr(then, told) != getattr(here, told)
    ]
    old_moments, moments = old("training", "moment_precision"), config.training.moment_precision
    if moments not in ("float32", old_moments):  # float32 holds any of them
        problems.append(
            f"moment_precision {old_moments}, not {moments}, which would lose some of it"
        )
    if bool(old("training", "average_weights")) != bool(config.training.average_weights):
        problems.append(
            f"average_weights {old('training', 'average_weights')}, not "
            f"{config.training.average_weights}"
        )
    if problems:
        raise UserError(
            f"{folder}: got a checkpoint with {'; '.join(problems)}. Train with the checkpoint's "
            "settings (its run's config.yml), or start afresh without --checkpoint.load."
        )
    expected = {"master_weights"}  # what follows from it is told
    if config.training.minutes is not None:
        expected |= {"steps", "decay_steps"}
    changed = [
        f"{section}.{name}: {old(section, name)} -> {value}"
        for section in ("model", "training", "execution")
        for name, value in now[section].items()
        if name not in expected and old(section, name) != value
    ]
    old_kept, kept = _weight_precision(saved), config.weight_precision
    if old_kept != kept:
        how = "as they are" if kept == "float32" else "rounded to the nearest"
        changed.append(f"weights kept in {old_kept} -> {kept}, {how}")
    if changed and manifest.get("numerics") != numerics_hash(config):
        _LOG.warning("%s: continuing with other settings: %s.", folder, "; ".join(changed))


def _weight_precision(saved: "dict[str, Any]") -> str:
    """Data type that a saved configuration's run kept weights in."""
    training, precision = saved["training"], str(saved["model"].get("precision", "float32"))
    has_master = training.get("master_weights", False)  # those before the setting had none
    if has_master is None:
        has_master = not training.get("stochastic_rounding", False)
    return "float32" if has_master else precision
