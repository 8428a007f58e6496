"""The baselines of `time_to_loss.py`, in plain PyTorch: nanoGPT's recipe and a modern one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Figures
from benchmarks.modern_gpt import ModernGPT, ModernModel, ModernTrainer, ModernTraining
from benchmarks.plain_gpt import PlainGPT, PlainModel, PlainTrainer, PlainTraining
from benchmarks.timed_runs import Batch, Losses

STATE = "state.pt"


def sizes_of(options: Figures) -> Figures:
    """Sizes of the model, for either class."""
    layers, hidden, heads = map(int, options["settings"]["size"].split("x"))
    return {
        "layers": layers,
        "hidden_size": hidden,
        "heads": heads,
        "sequence_length": options["sequence_length"],
        "vocabulary_size": options["vocabulary_size"],
    }


def mode_of(settings: Figures) -> Figures:
    """How a trainer runs: `compiled-bfloat16`."""
    how, _, precision = settings["mode"].partition("-")
    return {"compiled": how == "compiled", "dtype": getattr(torch, precision)}


def tensors(batch: Sequence[np.ndarray]) -> list[Tensor]:
    """Of int32 arrays, as PyTorch's losses want them."""
    return [torch.from_numpy(part.astype(np.int64)) for part in batch]


@contextmanager
def losses_by(logits: Callable[[Tensor], Tensor]) -> Iterator[Losses]:
    """Losses of a function from ids to logits."""

    def losses(ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
        words, wanted = tensors((ids, labels))
        scores = logits(words).float().flatten(0, 1)
        return F.cross_entropy(scores, wanted.flatten(), reduction="none").view_as(wanted).numpy()

    with torch.no_grad():
        yield losses


class NanoGPT:
    """GPT-2 with AdamW, clipping and a cosine: github.com/karpathy/nanoGPT, with products in the
    mode's type and float32 weights.
    """

    steps_at_once = 1

    def __init__(self, options: Figures):
        settings = options["settings"]
        torch.manual_seed(options["seed"])
        self.sequences = settings["batch"]
        gpt = PlainGPT(PlainModel(**sizes_of(options), dropout=0.0))
        training = PlainTraining(
            steps=1, learning_rate=1.0, beta2=0.99, weight_decay=0.1, max_norm=1.0
        )
        self.rate = settings["rate"]
        self.trainer = PlainTrainer(gpt, training, **mode_of(settings))

    def train(self, batches: list[Batch], factor: float) -> float:
        (batch,) = batches
        training = replace(self.trainer.training, learning_rate=self.rate * factor)
        self.trainer.training = training
        return self.trainer.step([tuple(tensors(batch))])

    @contextmanager
    def evaluating(self) -> Iterator[Losses]:
        with self.trainer.autocast(), losses_by(self.trainer.gpt.logits) as losses:
            yield losses

    def save(self, folder: Path, step: int) -> None:
        trainer = self.trainer
        kept = {"gpt": trainer.gpt.state_dict(), "adam": trainer.optimizer.state_dict()}
        torch.save(kept, folder / STATE)

    def load(self, folder: Path) -> None:
        kept = torch.load(folder / STATE)
        self.trainer.gpt.load_state_dict(kept["gpt"])
        self.trainer.optimizer.load_state_dict(kept["adam"])


class Modern:
    """The modern recipe."""

    steps_at_once = 1

    def __init__(self, options: Figures):
        settings = options["settings"]
        torch.manual_seed(options["seed"])
        self.sequences, self.rate = settings["batch"], settings["rate"]
        mode = mode_of(settings)
        gpt = ModernGPT(ModernModel(**sizes_of(options), dtype=mode["dtype"]))
        self.trainer = ModernTrainer(gpt, ModernTraining(), compiled=mode["compiled"])

    def train(self, batches: list[Batch], factor: float) -> float:
        (batch,) = batches
        return self.trainer.step(*tensors(batch), self.rate * factor)

    @contextmanager
    def evaluating(self) -> Iterator[Losses]:
        with losses_by(self.trainer.gpt.logits) as losses:
            yield losses

    def save(self, folder: Path, step: int) -> None:
        torch.save(self.trainer.state(), folder / STATE)

    def load(self, folder: Path) -> None:
        self.trainer.load(torch.load(folder / STATE))


RECIPES = {"nanogpt": NanoGPT, "modern": Modern}
