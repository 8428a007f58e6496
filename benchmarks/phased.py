"""The application as a workload of the benchmarks: the phased program, used as a training script
would use it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness import Figures
from popxl_gpt.config.presets import override
from popxl_gpt.config.schedules import learning_rate
from popxl_gpt.config.schema import Config, Execution, Model, Training

if TYPE_CHECKING:
    from popxl_addons import TaskSession

Batch = tuple[np.ndarray, np.ndarray]


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
        session: "TaskSession | None" = None,
    ):
        # here and below, not at the top: benchmarks answer `--help` at once
        from popxl_gpt.execution.pretraining import pretraining

        self.config, self.batches, self.done = config, batches, 0
        self.session = pretraining(config) if session is None else session
        self.session.__enter__()  # the process ends with the workload

    def step(self, count: int) -> Figures:
        """Optimizer steps, a multiple of those of a run; the loss of the last."""
        from popxl_gpt.execution.host import run_steps

        iterations = self.config.execution.device_iterations
        for _ in range(count // iterations):
            ids, labels = (np.concatenate(part) for part in zip(*islice(self.batches, iterations)))
            rates = [learning_rate(self.config.training, self.done + i) for i in range(iterations)]
            results = run_steps(self.session, self.config, ids, labels, rates)
            self.done += iterations
        return {"loss": results[-1].loss}

    def finish(self) -> Figures:
        """Nothing to add."""
        return {}


class PhasedSteps(PhasedTrainer):
    """`train_step.py`'s workload; `batches.next` gives micro-batches, and `options` may have
    `settings` beyond its own.
    """

    def __init__(self, options: Figures, batches: Any):
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
        super().__init__(config, self._whole(batches))

    @staticmethod
    def _whole(batches: Any) -> Iterator[Batch]:
        while True:
            yield tuple(np.concatenate(part) for part in zip(*batches.next()))


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
        batch = self.config.training.global_batch_size
        whole = len(ids) // batch * batch
        total = self._loss(ids[:whole], labels[:whole], batch) * whole
        if whole < len(ids):
            rest = len(ids) - whole
            total += self._loss(ids[whole:], labels[whole:], rest) * rest
        return {"validation_loss": total / len(ids)}

    def _loss(self, ids: np.ndarray, labels: np.ndarray, batch: int) -> float:
        """Mean loss over windows whose number is a multiple of `batch`."""
        from popxl_gpt.execution.inference.inference import evaluate, evaluation
        from popxl_gpt.execution.variables import copy_weights

        config = replace(
            self.config,
            training=replace(self.config.training, global_batch_size=batch),
            execution=replace(self.config.execution, micro_batch_size=batch),
        )
        session = evaluation(config)
        copy_weights(self.session, session)
        with session:
            batches = zip(np.split(ids, len(ids) // batch), np.split(labels, len(ids) // batch))
            return float(np.mean([evaluate(session, config, *pair) for pair in batches]))
