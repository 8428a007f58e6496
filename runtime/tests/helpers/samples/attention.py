"""Samples of attention and its gradient, against torch in float64."""

import math

import numpy as np
import popxl
import torch
from popxl import generator
from popxl.errors import DTypeError, ShapeError
from popxl.extensions import attention

from .sample import Operand, Refusal, Sample

SEED = np.array([7, 2**32 - 1], np.uint32)
SEEDS = np.array([[7, 2**32 - 1], [8, 3]], np.uint32)
HEADS = {"query": (2, 2, 3, 4), "key": (2, 2, 5, 4), "value": (2, 2, 5, 4)}
SQUARE = {n: (1, 2, 4, 3) for n in HEADS}


def factors(seed_tensor, shape, p):
    """What dropout multiplies probabilities with: each seed draws for its own part of the batch."""
    seeds = np.asarray(seed_tensor).reshape(-1, 2).astype(np.uint32)
    part = (shape[0] // len(seeds), *shape[1:])
    draws = [generator.draws(seed, math.prod(part)).view(np.int32) for seed in seeds]
    kept = np.concatenate(draws).astype(np.int64) >= round(p * 2**32) - 2**31
    return torch.from_numpy(kept.reshape(shape) / (1 - p))


def textbook(
    query, key, value, mask=None, causal=False, scale=None, seed_tensor=None, p=0.0,
    window=None, positions=None, softcap=0.0,
):  # fmt: skip
    scores = query @ key.mT * (1 / math.sqrt(query.shape[3]) if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    if causal:
        queries, keys = scores.shape[2:]
        distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
        hidden = (distance < 0) | (distance >= (window or keys))
        if positions is not None:
            hidden = hidden | (distance > torch.as_tensor(positions))
        scores = scores.masked_fill(hidden, -math.inf)
    probs = torch.softmax(scores if mask is None else scores + mask, -1)
    if seed_tensor is not None:
        probs = probs * factors(seed_tensor, probs.shape, p)
    return probs @ value


def textbook_grad(
    dy, query_t, key, value_t, probs, dropped_probs, scale, seed_tensor=None, p=0.0, softcap=0.0,
    **hiding,
):  # fmt: skip
    d = dy @ value_t
    if seed_tensor is not None:
        d = d * factors(seed_tensor, d.shape, p).numpy()
    d = probs * (d - (probs * d).sum(-1, keepdims=True)) * scale
    if softcap:
        scores = np.swapaxes(query_t, 2, 3) @ np.swapaxes(key, 2, 3) * scale
        d = d * (1 - np.tanh(scores / softcap) ** 2)
    return d @ key, query_t @ d, np.swapaxes(dropped_probs, 2, 3) @ dy


GRADIENT = {
    "dy": (1, 2, 3, 4),
    "query_t": (1, 2, 4, 3),
    "key": (1, 2, 5, 4),
    "value_t": (1, 2, 4, 5),
    "probs": Operand((1, 2, 3, 5), low=0.0, high=0.4),
    "dropped_probs": Operand((1, 2, 3, 5), low=0.0, high=0.4),
}
POSITIONS = np.array([0, 3, 1], np.int32).reshape(1, 1, 3, 1).repeat(2, 0)
PLAIN = {"causal": False, "window": None, "softcap": 0.0, "positions": None}


def sample(operands, **attrs):
    # Scale is rounded to the operands' type: 0.5 and 0.25 are the same in each.
    attrs = {"scale": 0.5, **attrs}
    return Sample("attention", operands=operands, attrs=attrs, autograd=textbook, build=attention)


SAMPLES = [
    sample(HEADS),
    sample({n: Operand(shape, layout="transposed") for n, shape in HEADS.items()}),
    sample({**HEADS, "mask": (3, 5)}),
    sample({**HEADS, "mask": (2, 1, 1, 5)}),
    sample({**HEADS, "mask": ()}),
    sample(HEADS, causal=True),
    sample(HEADS, causal=True, window=2),
    sample(HEADS, causal=True, window=9, softcap=0.5),
    sample({**HEADS, "positions": POSITIONS}, causal=True, window=3, softcap=2.0),
    sample({**HEADS, "mask": (3, 5), "seed_tensor": SEED}, p=0.3, softcap=1.5),
    sample(SQUARE, causal=True, scale=0.25),
    sample({**HEADS, "seed_tensor": SEED}, p=0.3),
    sample({**HEADS, "mask": (3, 5), "seed_tensor": SEEDS}, p=0.5),
    sample({**SQUARE, "seed_tensor": SEED}, causal=True, p=0.25),
    Sample(
        "attention",
        operands=HEADS,
        autograd=textbook,
        build=attention,
    ),  # 1 / sqrt(4) is exact
    Sample("attention_grad", operands=GRADIENT, attrs={"scale": 0.5, "seed_tensor": None, "p": 0.0, **PLAIN},
           oracle=textbook_grad),
    Sample("attention_grad", operands={**GRADIENT, "seed_tensor": SEED},
           attrs={"scale": 0.25, "p": 0.3, **PLAIN, "softcap": 0.75}, oracle=textbook_grad),
]  # fmt: skip


def refusal(says, operands=HEADS, error=ShapeError, **options):
    return Refusal("attention", operands, error=error, says=says, build=attention, **options)


REFUSALS = [
    refusal(r"expected \[b, h, q, d\]", {**HEADS, "key": (2, 2, 5, 3)}),
    refusal(r"expected \[b, h, q, d\]", {n: shape[1:] for n, shape in HEADS.items()}),
    refusal("mask .*broadcasts", {**HEADS, "mask": (5, 3)}),
    refusal("both mask and causal", {**HEADS, "mask": (3, 5)}, ValueError, attrs={"causal": True}),
    refusal("window without causal", error=ValueError, attrs={"window": 2}),
    refusal("positions without causal", {**HEADS, "positions": POSITIONS}, ValueError),
    refusal("window 0; expected at least 1", error=ValueError, attrs={"causal": True, "window": 0}),
    refusal("softcap -1", error=ValueError, attrs={"softcap": -1.0}),
    refusal(r"expected int32 \[2, 1, 3, 1\]", {**HEADS, "positions": POSITIONS[:1]},
            attrs={"causal": True}),
    refusal("p 0.1 without a seed", error=ValueError, attrs={"p": 0.1}),
    refusal("0 <= p < 1", {**HEADS, "seed_tensor": SEED}, ValueError, attrs={"p": 1.0}),
    refusal("5 causal queries over 3", {**HEADS, "query": (2, 2, 5, 4), "key": (2, 2, 3, 4),
                                       "value": (2, 2, 3, 4)}, attrs={"causal": True}),
    refusal("seed_tensor", {**HEADS, "seed_tensor": np.zeros(3, np.uint32)}, ValueError),
    refusal("multiple of 3", {**HEADS, "seed_tensor": np.zeros((3, 2), np.uint32)}, attrs={"p": 0.5}),
    refusal("floating point", error=DTypeError, dtype=popxl.int32),
    refusal("dtype|type", {**HEADS, "value": Operand((2, 2, 5, 4), popxl.float16)}, DTypeError),
]  # fmt: skip
