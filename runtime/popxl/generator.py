"""The random number generator, on the host: bit for bit what the engine computes with torch.

Bits: Squares64 (Widynski 2020, "Squares: A Fast Counter-Based RNG", arXiv:2004.06278), five rounds
of middle-square with a key. A seed is two 32-bit words; its key is SplitMix64's output (Steele, Lea
& Flood 2014, doi:10.1145/2714064.2660195) for the 64-bit word that they form, made odd. The 32-bit
draw of element i is half of the output for counter i // 2: its low word for even i, its high word
for odd i. Nothing else enters.

New seeds: the first word stays; the second goes through a permutation of the 32-bit numbers that
the first word selects (MurmurHash3's finalizer by Appleby, between two keys). A permutation,
because chains of splits would fall into a cycle after about 2**16 steps if words could collide; and
so the children of one seed always differ.
"""

from typing import Any

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
SPLITMIX_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MURMUR_MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)
MASK32 = 2**32 - 1
MASK64 = 2**64 - 1


def splitmix64(state: int) -> int:
    """SplitMix64's output for a state: a permutation of the 64-bit numbers."""
    z = (state + GOLDEN) & MASK64
    z = ((z ^ (z >> 30)) * SPLITMIX_MULTIPLIERS[0]) & MASK64
    z = ((z ^ (z >> 27)) * SPLITMIX_MULTIPLIERS[1]) & MASK64
    return z ^ (z >> 31)


def murmur32(x: int) -> int:
    """MurmurHash3's finalizer: a permutation of the 32-bit numbers."""
    x = ((x ^ (x >> 16)) * MURMUR_MULTIPLIERS[0]) & MASK32
    x = ((x ^ (x >> 13)) * MURMUR_MULTIPLIERS[1]) & MASK32
    return x ^ (x >> 16)


def key(seed: np.ndarray) -> int:
    """The generator's odd 64-bit key for a seed, uint32 [2]."""
    high, low = seed.tolist()
    return splitmix64((high << 32) | low) | 1


def child_seed(seed: np.ndarray, modifier: Any) -> np.ndarray:
    """The seed that a modifier, one integer, makes of a seed: uint32 [2] -> uint32 [2]; of stacked
    seeds, of each.
    """
    if seed.ndim > 1:
        return np.stack([child_seed(one, modifier) for one in seed])
    first, second = seed.tolist()
    keys = splitmix64(first)
    before = (second + int(np.asarray(modifier).item()) + keys) & MASK32
    return np.array([first, murmur32(before) ^ (keys >> 32)], np.uint32)


def jumped_seed(seed: np.ndarray, count: Any) -> np.ndarray:
    """The second child of the second child, so many times: what splits of a seed in two leave."""
    for _ in range(int(np.asarray(count).item())):
        seed = child_seed(seed, 1)
    return seed


def squares64(counter: np.ndarray, key: int) -> np.ndarray:
    """Squares64's output for counters, uint64."""
    half = np.uint64(32)

    def swap(x: np.ndarray) -> np.ndarray:
        return (x >> half) | (x << half)

    y = counter * np.uint64(key)
    z = y + np.uint64(key)
    x = swap(y * y + y)
    x = swap(x * x + z)
    x = swap(x * x + y)
    t = x * x + z
    x = swap(t)
    return np.asarray(t ^ ((x * x + y) >> half))


def draws(seed: np.ndarray, count: int, offset: int = 0) -> np.ndarray:
    """The 32-bit draws of elements offset .. offset + count - 1: seed uint32 [2] -> uint32
    [count].
    """
    counters = np.arange(offset // 2, -(-(offset + count) // 2), dtype=np.uint64)
    words = squares64(counters, key(seed))
    halves = np.stack([words & np.uint64(MASK32), words >> np.uint64(32)], axis=-1).reshape(-1)
    return halves[offset % 2 : offset % 2 + count].astype(np.uint32)
