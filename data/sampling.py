"""Which samples are in the batch of a step: a function of seed and step alone.

Samples form one endless stream: epoch after epoch, each epoch a permutation of the data of its own.
Batch `step` is the stream's samples from `step * global_batch_size` on, so no tail is lost, and any
step is found in O(1). Where steps before had batches of another size, that place is shifted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from popxl_gpt.utils.errors import DataError

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


BLOCK = 1000
"""Places of a block: weights are exact to a thousandth."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Which samples of several sources are at the places of the stream.

    The endless stream of samples is cut into blocks. In each, every source has a share that its
    weight gives, and the block's places are a permutation of its own. So the source of any place is
    found in O(1), and how many samples of that source come before it: each source's samples are
    taken epoch after epoch, in an order of its own.
    """

    sizes: tuple[int, ...]
    """Samples of each source; sources' samples are numbered one after the other."""
    shares: tuple[int, ...]
    """Places of each source in a block."""

    def samples(self, places: np.ndarray, seed: int, shuffle: bool = True) -> np.ndarray:
        """Return the samples at places of the stream, int64 [n] -> int64 [n]: a function of both.

        Args:
            shuffle: off: each source's samples are taken in their order.
        """
        found = np.empty(len(places), np.int64)
        blocks, inside = np.divmod(places, BLOCK)
        for block in np.unique(blocks):
            here = blocks == block
            inside[here] = permute(inside[here], BLOCK, derive_key(seed, BLOCK, int(block)))
        ends = np.cumsum(self.shares)
        sources = np.searchsorted(ends, inside, side="right")
        before = np.cumsum([0, *self.sizes])
        for number in np.unique(sources):
            here, size = sources == number, self.sizes[number]
            first = ends[number] - self.shares[number]
            taken = blocks[here] * self.shares[number] + inside[here] - first
            epochs, samples = np.divmod(taken, size)
            for epoch in np.unique(epochs) if shuffle else ():
                now = epochs == epoch
                key = derive_key(seed, int(number) + 1, int(epoch))
                samples[now] = permute(samples[now], size, key)
            found[here] = before[number] + samples
        return found


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Places of a block by weights, rounded so that their sum is the block's."""
    whole = [weight / math.fsum(weights) * BLOCK for weight in weights]
    shares = [math.floor(share) for share in whole]
    by_rest = sorted(range(len(whole)), key=lambda n: shares[n] - whole[n])
    for number in by_rest[: BLOCK - sum(shares)]:
        shares[number] += 1
    if min(shares) < 1:
        least = weights[shares.index(min(shares))]
        raise DataError(
            f"mix: got weight {least:g} of {math.fsum(weights):g}; expected at least 1/{BLOCK} of "
            "the sum. Raise it, or leave the source out."
        )
    return tuple(shares)


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
    mixture: Mixture | None = None
    """The mixture of several sources; none: the samples are those of one."""
    shift: int = 0
    """Samples that were taken before, more than steps of this size take; below zero: fewer."""

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
        return self._first(step) / self.samples

    def indices(self, step: int) -> np.ndarray:
        """Return this instance's samples of step `step`, int64 [global_batch_size / instances], in
        global order.
        """
        first = self._first(step)
        if step < 0 or first < 0:
            raise DataError(f"step: got {step}; expected 0 or more. Steps count from 0.")
        shape = (self.accumulation_steps, self.instances, -1)
        places = np.arange(self.global_batch_size).reshape(shape)[:, self.instance].reshape(-1)
        if self.mixture is not None:
            return self.mixture.samples(first + places, self.seed, self.shuffle)
        epoch, start = divmod(first, self.samples)
        wraps, positions = np.divmod(places + start, self.samples)
        if not self.shuffle:
            return positions
        for wrap in np.unique(wraps):
            inside = wraps == wrap
            key = derive_key(self.seed, epoch + int(wrap))
            positions[inside] = permute(positions[inside], self.samples, key)
        return positions

    def _first(self, step: int) -> int:
        """Place of a step's first sample in the stream."""
        return step * self.global_batch_size + self.shift
