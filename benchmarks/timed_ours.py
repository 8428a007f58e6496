"""The application as a recipe of `time_to_loss.py`."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from benchmarks.harness import Figures
from benchmarks.timed_runs import EVALUATED, Batch, Losses
from popxl_gpt.config.presets import from_mapping, override
from popxl_gpt.config.schedules import NO_RAMPUP
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.inference.inference import evaluation, token_losses
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.variables import copy_weights


class Ours:
    """The training program of a configuration, run as a job does."""

    def __init__(self, options: Figures):
        self.config = override(from_mapping(options["config"]), seed=options["seed"])
        self.sequences = self.config.training.global_batch_size
        self.steps_at_once = self.config.execution.device_iterations
        sizes = {"global_batch_size": EVALUATED, "micro_batch_size": EVALUATED, **NO_RAMPUP}
        self.forward_config = override(
            self.config, **sizes, widening=1, head_serialisation=1, device_iterations=1
        )
        self.forward = None
        self.session = pretraining(self.config)
        self.session.__enter__()  # the process ends with the run

    def train(self, batches: list[Batch], factor: float) -> float:
        ids, labels = (np.concatenate(part) for part in zip(*batches))
        rates = [self.config.training.learning_rate * factor] * len(batches)
        return run_steps(self.session, self.config, ids, labels, rates)[-1].loss

    @contextmanager
    def evaluating(self) -> Iterator[Losses]:
        if self.forward is None:
            self.forward = evaluation(self.forward_config)
        copy_weights(self.session, self.forward)
        with self.forward as session:
            yield lambda ids, labels: token_losses(session, self.forward_config, ids, labels)


RECIPES = {"ours": Ours}
