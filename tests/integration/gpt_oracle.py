"""What the application is compared with: Hugging Face's GPT-2 in float64, weights at random
everywhere.
"""

import dataclasses

import numpy as np
import torch
from helpers.quick import Later

from popxl_gpt.config.presets import preset
from popxl_gpt.config.schema import Config, Model
from popxl_gpt.execution.exchange.families.gpt2 import GPT2
from popxl_gpt.modelling.gpt import model_table

transformers = Later("transformers")


def hugging_face_name(name: str) -> str:
    """GPT-2's name of one of our parameters."""
    (found,) = GPT2.names(name)
    return found


def small(**values: object) -> Config:
    """A configuration of a GPT that is small and has no two sizes alike; no clipping, decay or
    dropout unless given.
    """
    defaults: dict[str, object] = {
        "layers": 2,
        "hidden_size": 24,
        "heads": 3,
        "sequence_length": 12,
        "vocabulary_size": 37,
        "max_positions": 16,
        "global_batch_size": 4,
        "dropout": 0.0,
        "data_parallel": 1,
        "tensor_parallel_1": 1,
        "tensor_parallel_2": 1,
    }
    return preset("tiny", **{**defaults, **values})


def random_weights(model: Model, seed: int = 0) -> "dict[str, np.ndarray]":
    """Whole tensors by our names. Biases are not zero and gains not one, which would hide
    mistakes.
    """
    generator = np.random.default_rng(seed)
    weights = {}
    for name, parameter in model_table(model).items():
        values = generator.standard_normal(parameter.shape).astype(np.float32)
        weights[name] = values * np.float32(0.15) + np.float32(
            1.0 if parameter.role.value == "gain" else 0.0
        )
    return weights


def random_batch(config: Config, seed: int = 1) -> "tuple[np.ndarray, np.ndarray]":
    """Words and labels, int [global_batch_size, sequence]; unrelated, so that no shift goes
    unseen.
    """
    generator = np.random.default_rng(seed)
    shape = (config.training.global_batch_size, config.model.sequence_length)
    words, labels = (generator.integers(0, config.model.vocabulary_size, shape) for _ in range(2))
    return words, labels


def hugging_face(model: Model, weights: "dict[str, np.ndarray]") -> torch.nn.Module:
    """Hugging Face's model in float64, without dropout, with these weights."""
    gpt = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=model.vocabulary_size,
            n_positions=model.positions,
            n_embd=model.hidden_size,
            n_layer=model.layers,
            n_head=model.heads,
            n_inner=model.feed_forward,
            activation_function="gelu_new",
            layer_norm_epsilon=model.layer_norm_eps,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="eager",
        )
    )
    tensors = {hugging_face_name(name): torch.from_numpy(array) for name, array in weights.items()}
    missing, unexpected = gpt.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return gpt.double()


@dataclasses.dataclass
class Expected:
    """What Hugging Face's model says of a batch."""

    loss: float
    logits: np.ndarray
    gradients: "dict[str, np.ndarray]"
    """By Hugging Face's names."""


def expect(
    model: Model, weights: "dict[str, np.ndarray]", words: np.ndarray, labels: np.ndarray
) -> Expected:
    """Loss, logits and gradients of a batch, int [B, S] each."""
    gpt = hugging_face(model, weights)
    logits = gpt(input_ids=torch.from_numpy(words)).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(labels).flatten()
    )
    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in gpt.named_parameters() if p.grad is not None}
    return Expected(loss.item(), logits.detach().numpy(), gradients)


def distance(got: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference over the norm of what was expected."""
    return float(np.linalg.norm(got.astype(np.float64) - expected) / np.linalg.norm(expected))
