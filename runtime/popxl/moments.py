"""Adam's moments in 8 bits a number, on the host: what `adamw_8bit_` keeps, to and from float32.

Numbers are cut into blocks of 32, the last of which may be shorter. A block has the least
power of two 2**k that none of its numbers is above; a number's code is a small floating-point
number, relative to it:

============  ====  ========  ========  ==============  ===================
moment        sign  exponent  mantissa  largest         smallest above 0
============  ====  ========  ========  ==============  ===================
first         1     4 bits    3 bits    1.875 * 2**k    2**(k - 17)
second        0     5 bits    3 bits    1.875 * 2**k    2**(k - 33)
============  ====  ========  ========  ==============  ===================

A tensor is one vector, uint8: the codes of its n numbers, then a byte k + 127 for each block, 255
where a number is not finite. Numbers that a block holds stay as they are when they are coded again,
in blocks cut otherwise too, unless they are 2**13 times (2**29 times) smaller than the largest.

Sources: Dettmers et al. 2022, "8-bit optimizers via block-wise quantization", arXiv:2110.02861, for
moments in blocks; OCP Microscaling Formats (MX) specification 1.0, 2023, for powers of two.
"""

from dataclasses import dataclass

import numpy as np

BLOCK = 32
"""Numbers that share a power of two."""
MANTISSA = 3
"""Bits."""
SCALE_BIAS = 127
"""What is added to a block's exponent."""
LEAST_SCALE, MOST_SCALE = 37, 253
"""Bytes of a block: with these, codes are products that float32 holds."""
NOT_FINITE = 255
TO_NEAREST = 0x8000
"""The 16 random bits of a number that is rounded to the nearest, up from the middle."""
AT_ONCE = 2**15 * BLOCK
"""Numbers of a tensor that are worked on at a time, which takes several times their memory."""


@dataclass(frozen=True)
class MomentFormat:
    """What codes stand for. ``bias``: of the exponent, which is largest for numbers near 2**k."""

    bias: int
    is_signed: bool
    """Whether codes have a sign. Where not, no number above zero becomes zero: it divides."""

    @property
    def largest(self) -> int:
        """The code of the largest number."""
        return 0x7F if self.is_signed else 0xFF

    def decode(self, coded: np.ndarray, count: int) -> np.ndarray:
        """Numbers of coded tensors: uint8 [.., coded_length(n)] -> float32 [.., n]."""
        found = np.empty((*coded.shape[:-1], count), np.float32)
        for at in range(0, count, AT_ONCE):
            codes = coded[..., at : min(at + AT_ONCE, count)]
            scales = coded[..., count + at // BLOCK : count + (at + AT_ONCE) // BLOCK]
            found[..., at : at + AT_ONCE] = self._decoded(codes, scales)
        return found

    def _decoded(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        sizes = (codes & np.uint8(self.largest)).astype(np.uint32)
        normal = ((sizes + np.uint32(SCALE_BIAS - self.bias << MANTISSA)) << np.uint32(20)).view(
            np.float32
        )
        small = sizes.astype(np.float32) * np.float32(2.0 ** (1 - self.bias - MANTISSA))
        values = np.where(sizes < 1 << MANTISSA, small, normal)
        factors = (scales.astype(np.uint32) << np.uint32(23)).view(np.float32)
        with np.errstate(invalid="ignore"):
            values *= np.repeat(factors, BLOCK, axis=-1)[..., : codes.shape[-1]]
        return np.negative(values, where=codes > self.largest, out=values)

    def encode(self, x: np.ndarray) -> np.ndarray:
        """Coded tensors of the nearest numbers: float32 [.., n] -> uint8 [.., coded_length(n)]."""
        count = x.shape[-1]
        found = np.empty((*x.shape[:-1], coded_length(count)), np.uint8)
        for at in range(0, count, AT_ONCE):
            codes, scales = self._encoded(x[..., at : at + AT_ONCE])
            found[..., at : at + codes.shape[-1]] = codes
            found[..., count + at // BLOCK :][..., : scales.shape[-1]] = scales
        return found

    def _encoded(self, x: np.ndarray) -> "tuple[np.ndarray, np.ndarray]":
        """Codes, and scales of the blocks."""
        count = x.shape[-1]
        sizes = np.zeros((*x.shape[:-1], blocks_of(count) * BLOCK), np.float32)
        np.abs(x, out=sizes[..., :count])
        most = sizes.reshape(*x.shape[:-1], -1, BLOCK).max(axis=-1)
        scales = np.clip((most.view(np.int32) - 1 >> 23) + 1, LEAST_SCALE, MOST_SCALE)
        inverse = ((254 - scales).astype(np.uint32) << np.uint32(23)).view(np.float32)
        sizes *= np.repeat(inverse, BLOCK, axis=-1)
        steps = sizes * np.float32(2.0 ** (self.bias - 1 + MANTISSA)) + np.float32(0.5)
        upper = (sizes.view(np.uint32) + (TO_NEAREST << 4)) >> np.uint32(20)
        normal = upper.astype(np.int64) - (SCALE_BIAS - self.bias << MANTISSA)
        is_small = sizes < 2.0 ** (1 - self.bias)
        codes = np.where(is_small, np.floor(np.where(is_small, steps, 0.0)), normal)[..., :count]
        codes = np.minimum(codes, self.largest).astype(np.uint8)
        if self.is_signed:
            codes |= np.signbit(x).astype(np.uint8) << 7
        else:
            codes[(codes == 0) & (x != 0)] = 1
        scales = np.where(np.isfinite(most), scales, NOT_FINITE).astype(np.uint8)
        return codes, scales


FIRST = MomentFormat(bias=15, is_signed=True)
SECOND = MomentFormat(bias=31, is_signed=False)
MOMENTS = {"first_order": FIRST, "second_order": SECOND}
"""Formats by the names that optimizers give them."""


def blocks_of(count: int) -> int:
    """Blocks of so many numbers."""
    return -(-count // BLOCK)


def coded_length(count: int) -> int:
    """Bytes of so many numbers."""
    return count + blocks_of(count)
