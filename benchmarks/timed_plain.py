"""The baselines of `time_to_loss.py`, in plain PyTorch: nanoGPT's recipe and a modern one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Figures
from benchmarks.modern_gpt import ModernGPT, ModernModel, ModernTrainer, ModernTraining
from benchmarks.plain_gpt import PlainGPT, PlainModel, PlainTrainer, PlainTraining
from benchmarks.timed_runs import Batch, Losses


def tensors(batch: Sequence[np.ndarray]) -> list[Tensor]:
    """The tensors of int32 arrays, as PyTorch's losses want them."""
    return [torch.from_numpy(part.astype(np.int64)) for part in batch]


def losses_by(gpt: PlainGPT | ModernGPT) -> Losses:
    """The losses of a model as it is."""

    def losses(ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
        words, wanted = tensors((ids, labels))
        scores = gpt.logits(words).float().flatten(0, 1)
        found = F.cross_entropy(scores, wanted.flatten(), reduction="none")
        return found.view_as(wanted).numpy()

    return losses


class NanoGPT:
    """GPT-2 with AdamW, clipping and a cosine: github.com/karpathy/nanoGPT, with products in the
    mode's type and float32 weights.
    """

    steps_at_once = 1

    def __init__(self, options: Figures):
        settings = options["settings"]
        torch.manual_seed(options["seed"])
        self.sequences, self.rate = settings["batch"], settings["rate"]
        self.bigrams = settings.get("bigrams", 0)
        how, _, precision = settings["mode"].partition("-")  # as in compiled-bfloat16
        layers, hidden, heads = map(int, settings["size"].split("x"))
        sizes = {name: options[name] for name in ("sequence_length", "vocabulary_size")}
        self.trainer = self.made(
            {"layers": layers, "hidden_size": hidden, "heads": heads, **sizes},
            getattr(torch, precision),
            how == "compiled",
        )

    def made(self, sizes: Figures, dtype: torch.dtype, compiled: bool) -> PlainTrainer:
        """The trainer of a model."""
        training = PlainTraining(
            steps=1, learning_rate=1.0, beta2=0.99, weight_decay=0.1, max_norm=1.0
        )
        return PlainTrainer(PlainGPT(PlainModel(**sizes)), training, compiled=compiled, dtype=dtype)

    def train(self, batches: list[Batch], factor: float) -> float:
        training = replace(self.trainer.training, learning_rate=self.rate * factor)
        self.trainer.training = training
        return self.trainer.step([tuple(tensors(batch)) for batch in batches])

    @contextmanager
    def evaluating(self) -> Iterator[Losses]:
        with torch.no_grad(), getattr(self.trainer, "autocast", nullcontext)():
            yield losses_by(self.trainer.gpt)


class Modern(NanoGPT):
    """The modern recipe."""

    def made(self, sizes: Figures, dtype: torch.dtype, compiled: bool) -> ModernTrainer:
        gpt = ModernGPT(
            ModernModel(**sizes, bigram_rows=self.bigrams * sizes["vocabulary_size"], dtype=dtype)
        )
        return ModernTrainer(gpt, ModernTraining(), compiled=compiled)

    def train(self, batches: list[Batch], factor: float) -> float:
        (batch,) = batches
        return self.trainer.step(*tensors(batch), self.rate * factor)


RECIPES = {"nanogpt": NanoGPT, "modern": Modern}
