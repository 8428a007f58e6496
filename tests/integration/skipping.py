"""Sessions whose steps can be made to have an infinite gradient, and what a step leaves in them."""

from pathlib import Path

import numpy as np

from popxl_gpt.config.schema import Config
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.overflow import COUNTED
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.variables import write_whole_weights
from tests.integration.gpt_oracle import random_weights
from tests.integration.runs import batches

POISON = 1e3
"""A learning rate with which the poisoned program has an infinite gradient."""
GRID = {"data_parallel": 2, "tensor_parallel_1": 2, "tensor_parallel_2": 2, "micro_batch_size": 1}
DP_TP1, DP_TP2 = {**GRID, "tensor_parallel_2": 1}, {**GRID, "tensor_parallel_1": 1}
"""Half of the grid, for what one layout of the whole grid holds already."""


def session_of(config: Config):
    session = pretraining(config)
    write_whole_weights(session, config, random_weights(config.model).items())
    return session


def run(session, config: Config, first: int, rates: "list[float]"):
    data = batches(config)[first : first + len(rates)]
    with session:
        return run_steps(session, config, *(np.concatenate(part) for part in zip(*data)), rates)


def state_of(session) -> "dict[str, bytes]":
    """The bits of weights, moments and Adam's counts."""
    variables = {
        n: v for n, v in session.state.to_dict().items() if "seed" not in n and n not in COUNTED
    }
    data = session.get_tensors_data(variables.values())
    return {name: np.asarray(data[v]).tobytes() for name, v in variables.items()}


def flags(folder: Path, *words: object) -> "list[str]":
    alone = ["--data_parallel", 1, "--tensor_parallel_1", 1, "--tensor_parallel_2", 1]
    return [str(word) for word in ("--config", "tiny", "--run_folder", folder, *alone, *words)]
