"""The random number generator, on numpy: the host's side of what the engine computes with torch, bit for bit.

Bits: Squares64 (Widynski 2020, "Squares: A Fast Counter-Based RNG", arXiv:2004.06278), five rounds of middle-square
with a key. A seed is two 32-bit words; its key is SplitMix64's output (Steele, Lea & Flood 2014,
doi:10.1145/2714064.2660195) for the 64-bit word that they form, made odd. The 32-bit draw of element i is half of the
output for counter i // 2: its low word for even i, its high word for odd i. Nothing else enters.

New seeds: the first word stays; the second goes through a permutation of the 32-bit numbers that the first word selects
(MurmurHash3's finalizer by Appleby, between two keys). A permutation, because chains of splits would fall into a cycle
after about 2**16 steps if words could collide; and so the children of one seed always differ.
"""

from typing import Any

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
SPLITMIX_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MURMUR_MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)


def _u64(x: Any) -> np.ndarray:
    return np.asarray(x, dtype=np.uint64)


def splitmix64(state: np.ndarray) -> np.ndarray:
    """SplitMix64's output for a state: uint64 -> uint64, a permutation."""
    with np.errstate(over="ignore"):
        z = _u64(state) + _u64(GOLDEN)
        z = (z ^ (z >> _u64(30))) * _u64(SPLITMIX_MULTIPLIERS[0])
        z = (z ^ (z >> _u64(27))) * _u64(SPLITMIX_MULTIPLIERS[1])
        return np.asarray(z ^ (z >> _u64(31)))


def key(seed: np.ndarray) -> np.ndarray:
    """The generator's odd 64-bit key for seeds: uint32 [..., 2] -> uint64 [...]."""
    words = _u64(seed)
    return np.asarray(splitmix64((words[..., 0] << _u64(32)) | words[..., 1]) | _u64(1))


def squares64(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Squares64's output for counters and keys that broadcast: uint64 -> uint64."""

    def swap(x: np.ndarray) -> np.ndarray:
        return (x >> _u64(32)) | (x << _u64(32))

    with np.errstate(over="ignore"):
        y = _u64(counter) * key
        z = y + key
        x = swap(y * y + y)
        x = swap(x * x + z)
        x = swap(x * x + y)
        t = x * x + z
        x = swap(t)
        return np.asarray(t ^ ((x * x + y) >> _u64(32)))


def draws(seed: np.ndarray, count: int, offset: int = 0) -> np.ndarray:
    """The 32-bit draws of elements offset .. offset + count - 1: seed uint32 [2] -> uint32 [count]."""
    counters = np.arange(offset // 2, -(-(offset + count) // 2), dtype=np.uint64)
    words = squares64(counters, key(seed)[None])
    halves = np.stack([words & _u64(0xFFFFFFFF), words >> _u64(32)], axis=-1).reshape(-1)
    return halves[offset % 2 : offset % 2 + count].astype(np.uint32)


def murmur32(x: np.ndarray) -> np.ndarray:
    """MurmurHash3's 32-bit finalizer on 32-bit numbers kept in uint64: a permutation."""
    mask = _u64(0xFFFFFFFF)
    with np.errstate(over="ignore"):
        x = ((x ^ (x >> _u64(16))) * _u64(MURMUR_MULTIPLIERS[0])) & mask
        x = ((x ^ (x >> _u64(13))) * _u64(MURMUR_MULTIPLIERS[1])) & mask
        return np.asarray(x ^ (x >> _u64(16)))


def child_seed(seed: np.ndarray, modifier: Any) -> np.ndarray:
    """The seed that a modifier makes of a seed: uint32 [2], uint32 scalar -> uint32 [2]."""
    words, mask = _u64(seed), _u64(0xFFFFFFFF)
    keys = splitmix64(words[0])
    with np.errstate(over="ignore"):
        before = (words[1] + _u64(modifier).reshape(()) + (keys & mask)) & mask
    return np.stack([words[0], murmur32(before) ^ (keys >> _u64(32))]).astype(np.uint32)
