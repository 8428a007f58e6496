"""The weights that a run begins with: those of another model, from a folder of Hugging Face's or
from a checkpoint.
"""

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from popxl_gpt.config.model import Model
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.exchange.hub import model_folder
from popxl_gpt.execution.exchange.hugging_face import HuggingFaceFolder, Weights, is_hugging_face
from popxl_gpt.execution.exchange.kept_files import OF_WEIGHTS
from popxl_gpt.execution.exchange.trained import INIT_FROM, find_model
from popxl_gpt.execution.instances import check_same_checkpoint
from popxl_gpt.modelling.gpt import model_table
from popxl_gpt.utils.errors import UserError

POSITIONS = "embedding.position.weight"
_LOG = logging.getLogger(__name__)


def initial_weights(path: Path, config: Config) -> Weights:
    """Whole weights by name, for the model of a configuration. Position embeddings are cropped, or
    get fresh rows at their end.

    Raises:
        UserError: there are none, or they are of another model; told before the first is read.
    """
    saved = find_model(path, INIT_FROM)
    check_same_checkpoint(saved.folder, INIT_FROM)
    model, weights = saved.config.model, saved.weights()
    problems = [
        f"{name} {getattr(model, told)}, not {getattr(config.model, told)}"
        for name, told in OF_WEIGHTS.items()
        if getattr(model, told) != getattr(config.model, told)
    ]
    if problems:
        raise UserError(
            f"--init_from: got {path} with {'; '.join(problems)}; expected the model that is "
            "trained. Give the run the settings of these weights."
        )
    if model.has_position_table and model.positions != config.model.positions:
        _LOG.warning(
            "--init_from: %d positions become %d: %s.",
            model.positions,
            config.model.positions,
            "the last ones are left out"
            if config.model.positions < model.positions
            else "the last ones are fresh",
        )
    return resized(weights, config.model, config.training.seed)


def settings_of_model(path: Path) -> "dict[str, Any]":
    """The settings that a run takes from a model of Hugging Face's whose weights it begins with;
    of one of ours, whose configuration can be given, none.
    """
    folder = model_folder(path, INIT_FROM)
    if not is_hugging_face(folder):
        return {}
    model = HuggingFaceFolder(folder).model
    found = {name: getattr(model, name) for name in (*OF_WEIGHTS, "dropout", "end_of_text")}
    return {**found, "max_positions": model.positions}


def with_positions(
    model: Model, positions: int | None, weights: Weights
) -> "tuple[Model, Weights]":
    """A model and its weights with so many positions; None: as they are."""
    if positions is None:
        return model, weights
    longest = min(model.sequence_length, positions)
    model = replace(model, sequence_length=longest, max_positions=positions)
    return model, resized(weights, model, seed=0)


def resized(weights: "Iterable[tuple[str, np.ndarray]]", model: Model, seed: int) -> Weights:
    """Weights whose position embedding has a model's rows: the first ones, and fresh ones after
    them where it has more.
    """
    for name, array in weights:
        if name == POSITIONS and len(array) != model.positions:
            fresh = model_table(model)[name].initial(name, seed).astype(array.dtype)
            kept = min(len(array), model.positions)
            fresh[:kept] = array[:kept]
            array = fresh
        yield name, array
