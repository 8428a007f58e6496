"""Plain PyTorch as a workload of the benchmarks."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks import offloading
from benchmarks.harness import Figures
from benchmarks.phased import Batch, random_batches
from benchmarks.plain_gpt import PlainGPT, PlainModel, PlainTrainer, PlainTraining


class PlainSteps:
    """A trainer's optimizer steps.

    Args:
        batches: endless (ids, labels), which are cut into micro-batches.
        device: what computes.
    """

    def __init__(
        self,
        trainer: PlainTrainer,
        batches: Iterator[Batch],
        micro_batch_size: int,
        device: str = "cpu",
    ):
        self.trainer, self.batches, self.size = trainer, batches, micro_batch_size
        self.device = device

    def step(self, count: int) -> Figures:
        """Optimizer steps; the loss of the last."""
        for _ in range(count):
            whole = (torch.from_numpy(part).to(self.device) for part in next(self.batches))
            loss = self.trainer.step(list(zip(*(part.split(self.size) for part in whole))))
        return {"loss": loss}


def trainer_of(
    gpt: nn.Module, training: PlainTraining, *, offloads: bool, device: str = "cpu", **kept: Any
) -> PlainTrainer:
    """A trainer on a device; one that offloads is FSDP2's."""
    if not offloads:
        return PlainTrainer(gpt, training, **kept)
    offloading.start_alone(device)
    return offloading.ShardedTrainer(gpt, training, device=device, **kept)


def plain_steps(options: Figures) -> PlainSteps:
    """`train_step.py`'s workload: random tokens; FSDP2 where it is to offload."""
    torch.manual_seed(0)
    model = PlainModel(**options["model"], dropout=options["dropout"], **options["forms"])
    training = PlainTraining(steps=1000, learning_rate=1e-4, weight_decay=0.1, max_norm=1.0)
    kept = {"dtype": getattr(torch, options["dtype"]), "compiled": options["compiled"]}
    trainer = trainer_of(PlainGPT(model), training, offloads="offloading" in options, **kept)
    sequences = options["accumulation"] * options["micro_batch_size"]
    return PlainSteps(trainer, random_batches(sequences, model), options["micro_batch_size"])


class PlainRun(PlainSteps):
    """`shakespeare.py`'s workload: one seed."""

    def __init__(self, options: Figures, text: Any, model: Figures, training: Figures, batch: int):
        torch.manual_seed(options["seed"])
        self.windows = text.validation_windows(model["sequence_length"])
        gpt = PlainGPT(PlainModel(**model, vocabulary_size=text.vocabulary_size))
        how = PlainTraining(steps=options["steps"], **training)
        trainer = PlainTrainer(gpt, how, compiled=options["compiled"])
        super().__init__(trainer, text.batches(options["seed"], model["sequence_length"]), batch)

    def finish(self) -> Figures:
        """Loss over the whole validation text."""
        pairs = zip(*(torch.from_numpy(part).split(self.size) for part in self.windows))
        return {"validation_loss": self.trainer.evaluate(pairs)}
