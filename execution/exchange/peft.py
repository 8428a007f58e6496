"""Adapters in the form of peft, which puts them onto the model that they were trained for."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from popxl_gpt.config.schema import Model
from popxl_gpt.execution.checkpoints.tensor_files import write_tensors
from popxl_gpt.execution.exchange.families.family import Family
from popxl_gpt.execution.exchange.families.known import ALL, family_of
from popxl_gpt.execution.exchange.hub import hub_name
from popxl_gpt.modelling.gpt import model_table
from popxl_gpt.modelling.linear import DOWN, UP
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.files.plain import write_plain

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_model_name_or_path"
PREFIX = "base_model.model."
"""What peft puts before the names of the model."""


def write_peft(
    folder: Path, model: Model, adapters: "Iterable[tuple[str, np.ndarray]]", base: str | None
) -> Family:
    """Fill a folder with a model's adapters. Returns the family of the model.

    Where several layers of theirs are one of ours, each gets the same matrix into the low rank, and
    its rows of the one out of it.

    Args:
        adapters: by our names.
        base: the model that they were trained for, by its place or its name at the hub.
    Raises:
        UserError: transformers has no class for the model.
    """
    family, table, tensors = family_of(model), model_table(model), {}
    if family.code is not None:
        raise UserError(
            "to_peft: got adapters of a model of ours alone; expected one of a family that "
            f"transformers has: {', '.join(f.model_type for f in ALL if f.code is None)}. Export "
            "it with its adapters merged: to_hugging_face."
        )
    for name, array in adapters:
        layer, _, part = name.rpartition(".")
        weight = f"{layer}.weight"
        if part == UP:
            split = family.split(weight, table[weight], array)
            found = {n: up if family.is_transposed else up.T for n, up in split.items()}
        else:
            found = dict.fromkeys(family.names(weight), array.T)
        kind = {DOWN: "lora_A", UP: "lora_B"}[part]
        for theirs, matrix in found.items():
            tensors[f"{PREFIX}{theirs.removesuffix('.weight')}.{kind}.weight"] = matrix
    write_tensors(tensors, folder / WEIGHTS, {"format": "pt"})
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        **_base(base),
        "r": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": not family.is_transposed,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "inference_mode": True,
    }
    write_plain(folder / CONFIG, json.dumps(values, indent=2) + "\n")
    return family


def _base(named: str | None) -> "dict[str, Any]":
    """The model that adapters are for, as peft looks for it from any folder."""
    if named is None:
        return {BASE: None}
    at_hub = hub_name(Path(named))
    if at_hub is not None:
        return {BASE: at_hub["name"], "revision": at_hub["revision"]}
    return {BASE: os.path.abspath(named) if os.path.exists(named) else named}
