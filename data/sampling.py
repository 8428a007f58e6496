"""Which samples are in the batch of a step: a function of seed and step alone.

Samples form one endless stream: epoch after epoch, each epoch a permutation of the data of its own.
Batch `step` is the stream's samples from `step * global_batch_size` on, so no tail is lost, and any
step is found in O(1).
"""

from dataclasses import dataclass

import numpy as np

from data.errors import DataError

_ROUNDS = 8
_WORD = 2**64 - 1


def mix(values: np.ndarray, key: int = 0) -> np.ndarray:
    """Return a bijective scramble of unsigned 64-bit integers, another one for each key.

    Source: the output function of SplitMix64, Steele et al. 2014, doi:10.1145/2660193.2660195.
    """
    mixed = np.asarray(values, dtype=np.uint64).reshape(-1) + np.uint64(
        (key * 0x9E3779B97F4A7C15 + 1) & _WORD
    )
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))).reshape(np.shape(values))


def derive_key(*parts: int) -> int:
    """Return a 64-bit key that depends on every part and on their order."""
    key = np.zeros(1, dtype=np.uint64)
    for part in parts:
        key = mix(key ^ np.uint64(part & _WORD), 1)
    return int(key[0])


def permute(positions: np.ndarray, size: int, key: int) -> np.ndarray:
    """Return where a pseudo-random permutation of `range(size)` sends each position; O(1) per
    position.

    A Feistel network permutes the next power of four; values that fall outside walk on until they
    are inside. Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", methods 2
    and 3.
    """
    bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << bits) - np.uint64(1)
    keys = mix(np.arange(_ROUNDS, dtype=np.uint64), key)
    values = np.array(positions, dtype=np.uint64)
    walking = np.arange(values.size)
    while walking.size:
        left, right = values[walking] >> bits, values[walking] & mask
        for round_key in keys:
            left, right = right, left ^ (mix(right ^ round_key) & mask)
        values[walking] = left << bits | right
        walking = walking[values[walking] >= size]
    return values.astype(np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSampler:
    """Gives the samples of each step, and the part of them that one instance reads.

    A global batch is `accumulation_steps` slices, one after the other; each slice is split evenly
    over the instances. So samples in the order [accumulation step, replica, micro-batch] stay with
    their replicas however these are spread.

    Raises:
        DataError: if a size is not positive, or the batch does not divide.
    """

    samples: int
    """Samples in the data set."""
    global_batch_size: int
    """Samples per step over all instances."""
    seed: int = 0
    """Chooses the order of every epoch."""
    shuffle: bool = True
    """Off: every epoch is in the order of the files."""
    instance: int = 0
    """Which instance this is."""
    instances: int = 1
    """Instances that read different samples."""
    accumulation_steps: int = 1
    """Slices of the global batch that are split over instances one by one."""

    def __post_init__(self) -> None:
        for name in ("samples", "global_batch_size", "instances", "accumulation_steps"):
            if getattr(self, name) < 1:
                raise DataError(
                    f"{name}: got {getattr(self, name)}; expected at least 1. Raise it."
                )
        if self.global_batch_size % (self.instances * self.accumulation_steps):
            raise DataError(
                f"global_batch_size: got {self.global_batch_size}; expected a multiple of "
                f"instances * accumulation_steps = {self.instances} * {self.accumulation_steps}. "
                "Change one of them."
            )
        if not 0 <= self.instance < self.instances:
            raise DataError(
                f"instance: got {self.instance}; expected 0 to {self.instances - 1}. Check "
                "the launcher."
            )

    def epochs(self, step: int) -> float:
        """Return how often the data has been seen when `step` begins."""
        return step * self.global_batch_size / self.samples

    def indices(self, step: int) -> np.ndarray:
        """Return this instance's samples of step `step`, int64 [global_batch_size / instances], in
        global order.
        """
        if step < 0:
            raise DataError(f"step: got {step}; expected 0 or more. Steps count from 0.")
        shape = (self.accumulation_steps, self.instances, -1)
        places = np.arange(self.global_batch_size).reshape(shape)[:, self.instance].reshape(-1)
        epoch, start = divmod(step * self.global_batch_size, self.samples)
        wraps, positions = np.divmod(places + start, self.samples)
        if not self.shuffle:
            return positions
        for wrap in np.unique(wraps):
            inside = wraps == wrap
            key = derive_key(self.seed, epoch + int(wrap))
            positions[inside] = permute(positions[inside], self.samples, key)
        return positions
