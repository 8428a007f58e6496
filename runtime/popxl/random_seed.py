"""Seeds for random ops: pairs of 32-bit words, made on the host."""

import numpy as np

MAX_UINT64 = int(np.iinfo(np.uint64).max)


def uint64_to_two_uint32(num: int) -> tuple[int, int]:
    """The (high, low) 32-bit words of a 64-bit number. ValueError if it is negative or wider."""
    if not 0 <= num <= MAX_UINT64:
        raise ValueError(f"uint64_to_two_uint32: got {num}; expected 0 <= num < 2**64.")
    return num >> 32, num & 0xFFFFFFFF


def two_uint32_to_uint64(a: int, b: int) -> int:
    """The 64-bit number with high word ``a`` and low word ``b``. ValueError if either is out of
    range.
    """
    if not (0 <= a < 2**32 and 0 <= b < 2**32):
        raise ValueError(
            f"two_uint32_to_uint64: got {a} and {b}; expected two numbers in 0 <= x < 2**32."
        )
    return (a << 32) | b


def create_seeds(
    seed: int,
    offset: int = 0,
    batches_per_step: int = 1,
    gradient_accumulation_factor: int = 1,
    replicas: int = 1,
) -> np.ndarray:
    """Different seeds for every batch, accumulation step and replica, from
    ``numpy.random.default_rng(seed + offset)``.

    Returns:
        uint32 [batches, accumulation steps, replicas, 2]; axes of size one are dropped.
    """
    shape = (batches_per_step, gradient_accumulation_factor, replicas)
    words = np.random.default_rng(seed + offset).integers(
        0, MAX_UINT64, size=shape, dtype=np.uint64
    )
    pairs = np.stack([words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)], axis=-1).astype(
        np.uint32
    )
    return pairs.reshape((*(n for n in shape if n != 1), 2))
