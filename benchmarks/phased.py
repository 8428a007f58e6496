"""The application as a workload of the benchmarks: the phased program, used as a training script
would use it.
"""

from collections.abc import Iterator
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
from popxl_gpt.utils.runtime import file_traffic

Batch = tuple[np.ndarray, np.ndarray]
MOVED = ("read_bytes", "written_bytes", "waited")
"""What is kept of what a session counts, per step."""
MOST_EVALUATED = 64
"""Windows that are evaluated at a time, or fewer, whose number divides that of all."""


def random_batches(sequences: int, model: Any) -> Iterator[Batch]:
    """Random tokens without an end, the same every time: (ids, labels), each int [sequences, S].

    Args:
        model: has a sequence length and a vocabulary size.
    """
    random = np.random.default_rng(0)
    while True:
        shape = (sequences, model.sequence_length + 1)
        tokens = random.integers(0, model.vocabulary_size, shape)
        yield tokens[:, :-1], tokens[:, 1:]


class PhasedTrainer:
    """A training session and the optimizer steps it has done.

    Args:
        batches: endless (ids, labels), each int [global_batch_size, sequence]; default: random.
        session: of the configuration; default: with fresh weights.
    """

    def __init__(
        self,
        config: Config,
        batches: Iterator[Batch] | None = None,
        session: TaskSession | None = None,
    ):
        self.config, self.done = config, 0
        self.batches = batches or random_batches(config.training.global_batch_size, config.model)
        self.session = pretraining(config) if session is None else session
        self.session.__enter__()  # the process ends with the workload

    def step(self, count: int) -> Figures:
        """Optimizer steps, a multiple of those of a run; the loss of the last, and where rows move
        what each moved and waited for.
        """
        before = file_traffic(self.session)
        iterations = self.config.execution.device_iterations
        for _ in range(count // iterations):
            ids, labels = (np.concatenate(part) for part in zip(*islice(self.batches, iterations)))
            rates = [learning_rate(self.config.training, self.done + i) for i in range(iterations)]
            results = run_steps(self.session, self.config, ids, labels, rates)
            self.done += iterations
        figures = {"loss": results[-1].loss}
        if before is not None:
            after = file_traffic(self.session)
            for name in MOVED:
                figures[name] = (getattr(after, name) - getattr(before, name)) / count
        return figures


class PhasedSteps(PhasedTrainer):
    """`train_step.py`'s workload."""

    def __init__(self, options: Figures):
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
                stochastic_rounding=options["dtype"] != "float32" and not options["master_weights"],
            ),
            execution=Execution(
                micro_batch_size=micro_batch,
                widening=options["widening"],
                recomputation=options["recomputation"],
            ),
        )
        super().__init__(config)


class PhasedRun(PhasedTrainer):
    """`shakespeare.py`'s workload; `text` gives batches and validation windows. After its last step
    it waits for others that have more.
    """

    def __init__(self, config: Config, text: Any):
        self.text, self.sequence = text, config.model.sequence_length
        super().__init__(config, text.batches(config.training.seed, self.sequence))

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
