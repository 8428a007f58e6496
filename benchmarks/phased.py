"""The application as a workload of the benchmarks: the phased program, used as a training script
would use it.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
from popxl_addons import TaskSession

from benchmarks.harness import Figures
from popxl_gpt.config.presets import override
from popxl_gpt.config.schedules import learning_rate
from popxl_gpt.config.schema import Config, Execution, Model, Training
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.inference.inference import evaluate, evaluation
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.variables import copy_weights

Batch = tuple[np.ndarray, np.ndarray]
MOST_EVALUATED = 64
"""Windows that are evaluated at a time, or fewer, whose number divides that of all."""


def random_batches(config: Config) -> Iterator[Batch]:
    """Random tokens without an end, the same every time."""
    random = np.random.default_rng(0)
    shape = (config.training.global_batch_size, config.model.sequence_length + 1)
    while True:
        tokens = random.integers(0, config.model.vocabulary_size, shape)
        yield tokens[:, :-1], tokens[:, 1:]


class PhasedTrainer:
    """A training session and the optimizer steps it has done.

    Args:
        batches: endless (ids, labels), each int [global_batch_size, sequence].
        session: of the configuration; default: with fresh weights.
    """

    def __init__(
        self,
        config: Config,
        batches: Iterator[Batch],
        session: TaskSession | None = None,
    ):
        self.config, self.batches, self.done = config, batches, 0
        self.session = pretraining(config) if session is None else session
        self.session.__enter__()  # the process ends with the workload

    def step(self, count: int) -> Figures:
        """Optimizer steps, a multiple of those of a run; the loss of the last."""
        iterations = self.config.execution.device_iterations
        for _ in range(count // iterations):
            ids, labels = (np.concatenate(part) for part in zip(*islice(self.batches, iterations)))
            rates = [learning_rate(self.config.training, self.done + i) for i in range(iterations)]
            results = run_steps(self.session, self.config, ids, labels, rates)
            self.done += iterations
        return {"loss": results[-1].loss}


class PhasedSteps(PhasedTrainer):
    """`train_step.py`'s workload; each of `batches` is a step's micro-batches, and `options` may
    have `settings` beyond its own.
    """

    def __init__(self, options: Figures, batches: Iterator[list[Batch]]):
        micro_batch, accumulation = options["micro_batch_size"], options["accumulation"]
        config = Config(
            name="train_step",
            model=Model(
                **options["model"],
                dropout=options["dropout"],
                precision=options["dtype"],
            ),
            training=Training(
                steps=1000,
                global_batch_size=micro_batch * accumulation,
                learning_rate=1e-4,
                schedule="constant",
                weight_decay=0.1,
                max_norm=1.0,
                stochastic_rounding=options["dtype"] != "float32",
            ),
            execution=Execution(
                micro_batch_size=micro_batch,
                widening=options["widening"],
                recomputation=options["recomputation"],
            ),
        )
        config = override(config, **options.get("settings", {}))
        whole = (tuple(np.concatenate(part) for part in zip(*step)) for step in batches)
        super().__init__(config, whole)


class PhasedRun(PhasedTrainer):
    """`shakespeare.py`'s workload; `text` gives batches and validation windows, and `options` may
    have `settings` beyond its own. After its last step it waits for others that have more.
    """

    def __init__(
        self,
        options: Figures,
        text: Any,
        model: Mapping[str, Any],
        training: Mapping[str, Any],
        batch: int,
    ):
        self.text, self.sequence = text, model["sequence_length"]
        seed = options["seed"]
        config = Config(
            name="shakespeare",
            model=Model(**model, vocabulary_size=text.vocabulary_size, dropout=0.0),
            training=Training(
                steps=options["steps"], global_batch_size=batch, seed=seed, **training
            ),
            execution=Execution(micro_batch_size=batch, recomputation=False),
        )
        config = override(config, **options.get("settings", {}))
        super().__init__(config, text.batches(seed, self.sequence))

    def step(self, count: int) -> Figures:
        """Optimizer steps, as far as there are any left; the loss of the last."""
        left = self.config.training.steps - self.done
        return super().step(min(count, left)) if left else {}

    def finish(self) -> Figures:
        """Loss over the whole validation text, by the application's own forward program."""
        ids, labels = self.text.validation_windows(self.sequence)
        batch = max(n for n in range(1, 1 + MOST_EVALUATED) if len(ids) % n == 0)
        whole = {"global_batch_size": batch, "micro_batch_size": batch, "data_parallel": 1}
        config = override(self.config, **whole)
        session = evaluation(config)
        copy_weights(self.session, session)
        with session:
            batches = zip(np.split(ids, len(ids) // batch), np.split(labels, len(ids) // batch))
            losses = [evaluate(session, config, *pair) for pair in batches]
        return {"validation_loss": float(np.mean(losses))}
