"""The plain PyTorch loop that runs are compared with, and a run to compare."""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch

from benchmarks.plain_gpt import PlainGPT, PlainModel
from popxl_gpt.config.schedules import learning_rate
from popxl_gpt.config.schema import Config, Training
from popxl_gpt.execution.host import StepResult
from tests.integration.gpt_oracle import hugging_face_name, random_weights, small
from tests.integration.plain_adamw import PlainAdamW
from tests.integration.plain_muon import PlainMuon
from tests.integration.runs import batches

STEPS = 50
TRAINED = small(
    layers=2,
    max_positions=12,
    global_batch_size=8,
    micro_batch_size=4,
    steps=STEPS,
    learning_rate=3e-3,
    schedule="cosine",
    warmup_steps=5,
    minimum_learning_rate=3e-4,
    beta2=0.97,
    epsilon=1e-7,
    weight_decay=0.2,
    max_norm=0.5,
    loss_scaling=64.0,
)


def plain_optimizer(gpt: PlainGPT, training: Training) -> torch.optim.Optimizer:
    """AdamW, or Muon and AdamW. The last group is of embeddings, which have a rate of their own."""
    (matrices, *rest), names = gpt.parameter_groups(training.weight_decay), ("wte", "wpe")
    tables = [p for name, p in gpt.named_parameters() if name.split(".")[0] in names]
    assert len(tables) == len(names)
    others = [p for p in matrices["params"] if all(p is not table for table in tables)]
    multiplier = training.embedding_rate_multiplier
    groups = [{**matrices, "params": others}, *rest]
    groups.append({**matrices, "params": tables, "multiplier": multiplier})
    if training.optimizer == "muon":
        return PlainMuon(gpt, groups, training)
    betas = (training.beta1, training.beta2)
    return PlainAdamW(groups, lr=0.0, betas=betas, eps=training.epsilon)


def train_plainly(
    config: Config,
    skipped: Collection[int] = (),
    is_spike: Callable[[float], bool] = lambda norm: False,
    weights: "Mapping[str, np.ndarray] | None" = None,
    data: "Sequence[tuple[np.ndarray, np.ndarray]] | None" = None,
) -> "tuple[list[StepResult], dict[str, np.ndarray]]":
    """The same in a plain PyTorch loop, in float64, whose optimizer leaves some steps out.

    Args:
        weights: those it begins with; None: random ones.
        data: words and labels of each step; None: those of `batches`.
    """
    model, training = config.model, config.training
    gpt = PlainGPT(
        PlainModel(
            layers=model.layers,
            hidden_size=model.hidden_size,
            heads=model.heads,
            sequence_length=model.sequence_length,
            vocabulary_size=model.vocabulary_size,
        )
    ).double()
    ours = {
        hugging_face_name(name).removeprefix("transformer."): name for name in random_weights(model)
    }
    weights = random_weights(model) if weights is None else weights
    gpt.load_state_dict(
        {theirs: torch.from_numpy(weights[name]).double() for theirs, name in ours.items()}
    )
    optimizer = plain_optimizer(gpt, training)
    results = []
    for step, (words, labels) in enumerate(batches(config) if data is None else data):
        gpt.zero_grad()
        loss = gpt(torch.from_numpy(words), torch.from_numpy(labels))
        loss.backward()
        norm = torch.sqrt(sum(p.grad.square().sum() for p in gpt.parameters()))
        if training.max_norm:
            for p in gpt.parameters():
                p.grad *= training.max_norm / max(norm.item(), training.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, step) * group.get("multiplier", 1.0)
        if step not in skipped and not is_spike(norm.item()):
            optimizer.step()
        results.append(StepResult(loss.item(), norm.item()))
    return results, {ours[name]: tensor.numpy() for name, tensor in gpt.state_dict().items()}
