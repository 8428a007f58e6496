"""Checkpoints of each layout, loaded into each other."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import popxl_addons as addons

from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.saving import save
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.variables import read_weights
from tests.integration.runs import TRAINED, batches
from tests.torture.application import Workshop
from tests.torture.judge import Broken
from tests.torture.torture import Torture

PLAIN = override(
    TRAINED, layers=2, dropout=0.0, precision="float32", stochastic_rounding=False, steps=6
)
LAYOUTS = list(itertools.product((1, 2), repeat=3))
"""Data parallel, tensor parallel 1 and 2."""
CASES = list(itertools.product(LAYOUTS, repeat=2))
BEFORE, AFTER = range(3), range(3, 6)
"""Steps before the checkpoint, and after it."""
CLOSE = 1e-4
"""Relative distance of losses: layouts add in another order."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint, the weights in it, and the losses of the steps after it."""

    folder: Path
    weights: "dict[str, np.ndarray]"
    losses: "list[float]"


def trial(case: int, shop: Workshop) -> str:
    one, other = CASES[case]
    told = f"from {one} to {other}"
    saved = shop.shared(("layout", one), lambda: saved_of(one, shop))
    config = config_of(other)
    session = pretraining(config)
    SavedRun(saved.folder, config).restore(session)
    weights = read_weights(session, config)
    for name, array in saved.weights.items():
        if weights[name].tobytes() != array.tobytes():
            raise Broken(f"{told}: {name} has other bytes")
    again = save(session, config, shop.fresh(), Position(len(BEFORE), "data"))
    for path in saved.folder.glob("*.safetensors"):
        if path.read_bytes() != (again / path.name).read_bytes():
            raise Broken(f"{told}: {path.name} is another when it is saved again")
    losses = train(session, config, AFTER)
    if not np.allclose(losses, saved.losses, rtol=CLOSE, atol=0.0):
        raise Broken(f"{told}: losses {losses} after it, not {saved.losses}")
    return f"{told}: the same weights"


def config_of(layout: "tuple[int, int, int]") -> Config:
    names = ("data_parallel", "tensor_parallel_1", "tensor_parallel_2")
    return override(PLAIN, **dict(zip(names, layout)))


def saved_of(layout: "tuple[int, int, int]", shop: Workshop) -> Saved:
    config = config_of(layout)
    session = pretraining(config)
    train(session, config, BEFORE)
    folder = save(session, config, shop.fresh(), Position(len(BEFORE), "data"))
    weights = {name: np.array(array) for name, array in read_weights(session, config).items()}
    return Saved(folder, weights, train(session, config, AFTER))


def train(session: addons.TaskSession, config: Config, steps: range) -> "list[float]":
    """Losses of steps."""
    data = batches(config)
    with session:
        return [
            result.loss
            for step in steps
            for result in run_steps(session, config, *data[step], [1e-3])
        ]


ANY_LAYOUT = Torture(
    "layouts",
    "A checkpoint of each layout loads into each: weights bit for bit, losses near.",
    trial,
    lambda shop: len(CASES),
)
