"""Samples of random ops. What the generator draws is tested in test_random.py; here, what the ops
make of it.
"""

import numpy as np
import popxl
from popxl import generator
from popxl.errors import DTypeError, ShapeError

from .sample import Operand, Refusal, Sample

SEED = np.array([7, 2**32 - 1], np.uint32)
SEEDS = np.array([[7, 2**32 - 1], [8, 3], [7, 2**32 - 1]], np.uint32)


def kept(seed, shape, p):
    """The definition: which elements stay."""
    signed = generator.draws(seed, int(np.prod(shape))).view(np.int32).astype(np.int64)
    return signed.reshape(shape) >= round(p * 2**32) - 2**31


def dropped(t, seed_tensor, p):
    if seed_tensor.ndim == 2:
        parts = zip(np.split(t, len(seed_tensor)), seed_tensor)
        return np.concatenate([dropped(part, seed, p) for part, seed in parts])
    return np.where(kept(seed_tensor, t.shape, p), t / (1 - p), 0)


def dropped_in_shape(t, seed_tensor, shape, ratio):
    return np.where(kept(seed_tensor, shape, ratio), t / (1 - ratio), 0)


def uniform(seed_tensor, shape, low=0.0, high=1.0, dtype=popxl.float32):
    steps = generator.draws(seed_tensor, int(np.prod(shape))) >> 8
    return (low + (high - low) * steps / 2**24).reshape(shape)


def normal(seed_tensor, shape, mean=0.0, std=1.0, dtype=popxl.float32):
    count = int(np.prod(shape))
    pairs = generator.draws(seed_tensor, count + count % 2).astype(np.float64).reshape(-1, 2)
    radius = np.sqrt(-2 * np.log((pairs[:, 0] + 1) / 2**32))
    angle = 2 * np.pi * pairs[:, 1] / 2**32
    both = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)
    return (mean + std * both[:count]).reshape(shape)


def children(seed, n=2):
    return [child(seed, np.uint32(i)) for i in range(n)]


def child(seed, modifier):
    if seed.ndim == 2:
        return np.stack([generator.child_seed(one, modifier) for one in seed])
    return generator.child_seed(seed, modifier)


def jumped(seed, count):
    for _ in range(int(count.reshape(()))):
        seed = children(seed)[1]
    return seed


SAMPLES = [
    Sample("dropout", operands=((5, 7), SEED), attrs={"p": 0.3}, oracle=dropped),
    Sample("dropout", operands=(Operand((4, 6), layout="transposed"), SEED), attrs={"p": 0.5}, oracle=dropped),
    Sample("dropout", operands=((3, 3), SEED), attrs={"p": 0.0}, oracle=dropped),
    Sample("dropout", operands=((), SEED), attrs={"p": 0.5}, oracle=dropped),
    Sample("dropout", operands=((3, 5, 7), SEEDS), attrs={"p": 0.4}, oracle=dropped),
    Sample("dropout", operands=(Operand((6, 5), layout="transposed"), SEEDS), attrs={"p": 0.4}, oracle=dropped),
    Sample("dropout", operands=((4, 5), SEEDS[:1]), attrs={"p": 0.4}, oracle=dropped),
    Sample("dropout", operands=((0, 5), SEEDS), attrs={"p": 0.4}, oracle=dropped),
    Sample("shaped_dropout", operands=((4, 3, 5), SEED), attrs={"shape": [4, 1, 5], "ratio": 0.4},
           oracle=dropped_in_shape),
    Sample("shaped_dropout", operands=((4, 5), SEED), attrs={"shape": [5], "ratio": 0.4}, oracle=dropped_in_shape),
    Sample("random_uniform", operands=(SEED,), attrs={"shape": (3, 5)}, oracle=uniform, in_16_bits=False),
            # has its own dtype
    Sample("random_uniform", operands=(SEED,), attrs={"shape": (31,), "low": -3.0, "high": 2.0,
           "dtype": popxl.float16}, oracle=uniform,
           dtype=popxl.float16),
    Sample("random_normal", operands=(SEED,), attrs={"shape": (3, 5)}, oracle=normal, in_16_bits=False),
            # has its own dtype
    Sample("random_normal", operands=(SEED,), attrs={"shape": (8,), "mean": 3.0, "std": 0.5, "dtype": popxl.bfloat16},
           oracle=normal,
           dtype=popxl.bfloat16),
    Sample("create_random_seed", operands=(SEED, np.array(5, np.uint32)), oracle=generator.child_seed),
    Sample("create_random_seed", operands=(SEED, np.array([2**32 - 1], np.uint32)), oracle=generator.child_seed),
    Sample("create_random_seed", operands=(SEED, np.array(-2, np.int32)), oracle=generator.child_seed),
    Sample("create_random_seed", operands=(SEEDS, np.array(5, np.uint32)), oracle=child),
    Sample("split_random_seed", operands=(SEED,), oracle=children),
    Sample("split_random_seed", operands=(SEEDS,), attrs={"n": 3}, oracle=children),
    Sample("split_random_seed", operands=(SEED,), attrs={"n": 5}, oracle=children),
    Sample("jump_seed", operands=(SEED, np.array(0, np.int32)), oracle=jumped),
    Sample("jump_seed", operands=(SEED, np.array([70], np.uint32)), oracle=jumped),
    Sample("jump_seed", operands=(SEEDS, np.array(3, np.int32)), oracle=jumped),
]  # fmt: skip

REFUSALS = [
    Refusal("dropout", operands=((3,), SEED), attrs={"p": 1.0}, error=ValueError, says="0 <= p < 1"),
    Refusal("dropout", operands=((3,), SEED), attrs={"p": -0.1}, error=ValueError, says="0 <= p < 1"),
    Refusal("dropout", operands=((3,), SEED[:1]), attrs={"p": 0.1}, error=ValueError,
            says=r"uint32\[1\]; expected uint32\[2\]"),
    Refusal("dropout", operands=((3,), SEED.astype(np.int32)), attrs={"p": 0.1}, error=ValueError,
            says=r"expected uint32\[2\]"),
    Refusal("dropout", operands=((4, 3), SEEDS), attrs={"p": 0.1}, error=ShapeError,
            says="3 stacked seeds; expected a first axis of t that is a multiple of 3"),
    Refusal("dropout", operands=((), SEEDS), attrs={"p": 0.1}, error=ShapeError, says="3 stacked seeds"),
    Refusal("dropout", operands=((6,), SEEDS[:0]), attrs={"p": 0.1}, error=ShapeError, says=r"expected uint32\[2\]"),
    Refusal("dropout", operands=((6,), SEEDS[:, :1]), attrs={"p": 0.1}, error=ShapeError, says=r"expected uint32\[2\]"),
    Refusal("random_normal", operands=(SEEDS,), attrs={"shape": (3,)}, error=ShapeError, says=r"expected uint32\[2\]"),
    Refusal("dropout", operands=(Operand((3,), popxl.int32), SEED), attrs={"p": 0.1}, error=DTypeError,
            says="floating point"),
    Refusal("shaped_dropout", operands=((3, 4), SEED), attrs={"shape": [3], "ratio": 0.1}, error=ShapeError,
            says="broadcasts to t's"),
    Refusal("shaped_dropout", operands=((3, 4), SEED), attrs={"shape": [1], "ratio": 2}, error=ValueError,
            says="0 <= ratio < 1"),
    Refusal("random_uniform", operands=(SEED,), attrs={"shape": (3,), "low": 1.0}, error=ValueError, says="low < high"),
    Refusal("random_uniform", operands=(SEED,), attrs={"shape": (3,), "dtype": popxl.int32}, error=TypeError,
            says="floating point"),
    Refusal("random_normal", operands=(SEED,), attrs={"shape": (3,), "std": -1.0}, error=ValueError,
            says="number >= 0"),
    Refusal("create_random_seed", operands=((2,), np.array(1, np.uint32)), error=ValueError,
            says=r"expected uint32\[2\]"),
    Refusal("create_random_seed", operands=(SEED, SEED), error=ValueError, says="expected one integer"),
    Refusal("jump_seed", operands=(SEED, SEED), error=ValueError, says="expected one integer"),
    Refusal("split_random_seed", operands=(SEED,), attrs={"n": 0}, error=ValueError, says="at least 1"),
]  # fmt: skip
