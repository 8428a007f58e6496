"""The weights that a run begins with: those of another model, from a folder of Hugging Face's or
from a checkpoint.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from popxl_gpt.config.model import ARCHITECTURE, BY_DEFAULT, Model
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.checkpoints.finding import find_trained
from popxl_gpt.execution.exchange.hugging_face import HuggingFaceFolder, is_hugging_face
from popxl_gpt.modelling.gpt import model_table
from popxl_gpt.utils.errors import UserError

POSITIONS = "embedding.position.weight"
MUST_AGREE = {**{name: name for name in (*ARCHITECTURE, "layer_norm_eps")}, **BY_DEFAULT}
"""Settings that weights are for, and what of a model tells them."""
_LOG = logging.getLogger(__name__)
Weights = Iterator["tuple[str, np.ndarray]"]


def initial_weights(path: Path, config: Config) -> Weights:
    """Whole weights by name, for the model of a configuration. Position embeddings are cropped, or
    get fresh rows at their end.

    Raises:
        UserError: there are none, or they are of another model; told before the first is read.
    """
    if is_hugging_face(path):
        theirs = HuggingFaceFolder(path)
        model, weights = theirs.model, theirs.weights()
    else:
        saved = find_trained(path, "--init_from")
        model, weights = saved.config.model, saved.weights()
    problems = [
        f"{name} {getattr(model, told)}, not {getattr(config.model, told)}"
        for name, told in MUST_AGREE.items()
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
