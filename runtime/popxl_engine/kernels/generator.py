"""The random number generator of `popxl.generator` on torch: Squares64 in wrapping int64
arithmetic, the same bits.

Everything stays on the device of the seed, so that no kernel waits for it. Counters go through in
blocks that fit a CPU's second-level cache: all rounds of a block run before the next block starts.
"""

from collections.abc import Callable, Iterator

import torch
from popxl import generator as on_host
from popxl.generator import GOLDEN, MURMUR_MULTIPLIERS, SPLITMIX_MULTIPLIERS

from popxl_engine.kernels import compiled
from popxl_engine.native import library as native

CPU_BLOCK = 1 << 15
"""Counters per block and thread on a CPU: six buffers of 256 KiB (3.5 ns per draw on one core; 5.5
at 2**13).
"""
LARGE_BLOCK = 1 << 22
"""Counters per block elsewhere: few launches, 160 MiB of scratch memory at most."""
MASK_32 = 0xFFFFFFFF


def signed(x: int) -> int:
    """The int64 with the bits of a 64-bit number."""
    return (x + 2**63) % 2**64 - 2**63


def shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of int64: zeros come in from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def splitmix64(state: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output for a state: int64 -> int64."""
    z = state + signed(GOLDEN)
    z = (z ^ shift_right(z, 30)) * signed(SPLITMIX_MULTIPLIERS[0])
    z = (z ^ shift_right(z, 27)) * signed(SPLITMIX_MULTIPLIERS[1])
    return z ^ shift_right(z, 31)


def key(seed: torch.Tensor) -> torch.Tensor:
    """The generator's odd key for a seed: uint32 [2] -> int64 scalar."""
    high, low = seed.to(torch.int64).unbind(-1)
    return splitmix64((high << 32) | low) | 1


Key = int | torch.Tensor


def key_here(seed: torch.Tensor) -> int:
    """`key` as a number: seed uint32 [2], on the host."""
    return int(key(seed)) if seed.is_meta else signed(on_host.key(seed.numpy()))


def is_native(seed: torch.Tensor) -> bool:
    """Whether the native library draws from a seed."""
    return seed.is_cpu and native.library() is not None


def swap_halves(x: torch.Tensor, scratch: torch.Tensor) -> None:
    """Exchange the two 32-bit halves of every element, in place."""
    torch.bitwise_right_shift(x, 32, out=scratch).bitwise_and_(MASK_32)
    x.bitwise_left_shift_(32).bitwise_or_(scratch)


def squares64(
    first: int, counters: int, key: Key, device: torch.device
) -> Iterator[tuple[int, torch.Tensor]]:
    """Squares64 for ``counters`` counters from ``first``: yields (first counter, int64 outputs)
    block by block.

    A block is overwritten by the next one.
    """
    is_here = native.is_here(device)
    size = min(counters, CPU_BLOCK * torch.get_num_threads() if is_here else LARGE_BLOCK)
    if is_here and native.library() is not None:
        words, number = torch.empty(size, dtype=torch.int64, device=device), int(key)
        for start in range(first, first + counters, size):
            count = min(size, first + counters - start)
            native.call("random_words", (), words, number, start, count)
            yield start, words[:count]
        return
    if isinstance(key, torch.Tensor) and key.is_cuda and compiled.compiles():
        for start in range(first, first + counters, size):
            yield start, words_at_once(key, start, min(size, first + counters - start))
        return
    multiples = torch.arange(size, dtype=torch.int64, device=device) * key
    x, y, z, half, t = (torch.empty_like(multiples) for _ in range(5))
    for start in range(first, first + counters, size):
        torch.add(multiples, key * start, out=y)
        torch.add(y, key, out=z)
        torch.addcmul(y, y, y, out=x)
        swap_halves(x, half)
        torch.addcmul(z, x, x, out=x)
        swap_halves(x, half)
        torch.addcmul(y, x, x, out=x)
        swap_halves(x, half)
        t.copy_(torch.addcmul(z, x, x, out=x))
        swap_halves(x, half)
        torch.bitwise_right_shift(torch.addcmul(y, x, x, out=x), 32, out=half).bitwise_and_(MASK_32)
        t.bitwise_xor_(half)
        yield start, t[: first + counters - start]


@compiled.one_pass
def words_at_once(key: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """`squares64` of some counters as one expression, for compilers: key int64 scalar -> int64
    [count].
    """
    return words_of(torch.arange(count, dtype=torch.int64, device=key.device) + first, key)


def words_of(counters: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Squares64 of each counter: int64."""

    def swapped(x: torch.Tensor) -> torch.Tensor:
        return (x << 32) | ((x >> 32) & MASK_32)

    y = counters * key
    z = y + key
    x = swapped(y * y + y)
    x = swapped(x * x + z)
    x = swapped(x * x + y)
    t = x * x + z
    x = swapped(t)
    return t ^ (((x * x + y) >> 32) & MASK_32)


Pairs = Callable[[torch.Tensor], torch.Tensor]


def _as_drawn(pairs: torch.Tensor) -> torch.Tensor:
    return pairs


def counters_of(count: int, offset: int) -> tuple[int, int]:
    """(the first counter, how many) for the draws of elements offset .. offset + count - 1."""
    first = offset // 2
    return first, -(-(offset + count) // 2) - first


def blocks(
    seed: torch.Tensor,
    count: int,
    device: torch.device,
    offset: int = 0,
    of_pairs: Pairs = _as_drawn,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """The draws of elements offset .. offset + count - 1, block by block: yields (part of the
    result, its values).

    Args:
        seed: uint32 [2].
        device: where the draws are made.
        offset: index of the first element; for a shard, in the unsharded tensor.
        of_pairs: from draws, int32 [n, 2] with the bits of the unsigned 32-bit draws of elements 2i
            and 2i + 1, to values of the same shape; default: the draws themselves. Values are
            overwritten by the next block.
    """
    if not count:
        return
    first, counters = counters_of(count, offset)
    seed_key = key_here(seed) if is_native(seed) else key(seed)
    for start, words in squares64(first, counters, seed_key, device):
        values = of_pairs(words.view(torch.int32).view(-1, 2)).reshape(-1)
        begin = 2 * start - offset
        skip, stop = max(0, -begin), min(count, begin + values.numel())
        yield slice(begin + skip, stop), values[skip : stop - begin]


def draws(seed: torch.Tensor, count: int, offset: int = 0) -> torch.Tensor:
    """The draws as one tensor: seed uint32 [2] -> int32 [count], with the bits of the unsigned
    draws.
    """
    if count and is_native(seed):
        first, counters = counters_of(count, offset)
        words = torch.empty(counters, dtype=torch.int64, device=seed.device)
        native.call("random_words", (), words, key_here(seed), first, counters)
        return words.view(torch.int32)[offset % 2 :][:count]
    result = torch.empty(count, dtype=torch.int32, device=seed.device)
    for part, values in blocks(seed, count, seed.device, offset):
        result[part] = values
    return result


def murmur32(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finalizer on 32-bit numbers kept in int64."""
    x = ((x ^ (x >> 16)) * MURMUR_MULTIPLIERS[0]) & MASK_32
    x = ((x ^ (x >> 13)) * MURMUR_MULTIPLIERS[1]) & MASK_32
    return x ^ (x >> 16)


def child_seed(seed: torch.Tensor, modifier: torch.Tensor) -> torch.Tensor:
    """The seed that a modifier makes of each seed: uint32 [..., 2], uint32 scalar -> uint32 [...,
    2].
    """
    first, second = seed.to(torch.int64).unbind(-1)
    keys = splitmix64(first)
    before = (second + modifier.to(torch.int64).reshape(()) + (keys & MASK_32)) & MASK_32
    return torch.stack([first, murmur32(before) ^ shift_right(keys, 32)], dim=-1).to(torch.uint32)
