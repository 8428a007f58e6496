"""Random ops, on the draws of `popxl_engine.kernels.generator`."""

import math

import numpy as np
import torch
from popxl import generator as on_host
from popxl.dtypes import dtype as Dtype  # noqa: N812 - `dtype` is a parameter of two ops

from popxl_engine.kernels import generator
from popxl_engine.kernels.dtypes import torch_dtype
from popxl_engine.kernels.registry import kernel


def threshold(p: float) -> int:
    """p as the least int32 that is kept: a draw's bits, read as int32, are at least this with
    probability 1 - p.
    """
    return min(round(p * 2**32), 2**32 - 1) - 2**31


@kernel("dropout")
def dropout(t: torch.Tensor, seed_tensor: torch.Tensor, p: float) -> torch.Tensor:
    """Draw, compare, scale and zero block by block, each seed's elements by themselves."""
    flat = t.reshape(-1)
    result = torch.empty_like(flat)
    for seed, values, kept in zip(*by_seed(seed_tensor, flat, result)):
        for part, bits in generator.blocks(seed, values.numel(), t.device):
            torch.mul(values[part], 1 / (1 - p), out=kept[part]).masked_fill_(
                bits < threshold(p), 0
            )
    return result.view(t.shape)


def by_seed(seeds: torch.Tensor, *tensors: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], ...]:
    """The seeds of uint32 [2] or [n, 2], and for each tensor its n equal parts along the first
    axis.
    """
    each = seeds.reshape(-1, 2)
    return each.unbind(), *(t.tensor_split(len(each)) if len(each) > 1 else (t,) for t in tensors)


@kernel("shaped_dropout")
def shaped_dropout(
    t: torch.Tensor, seed_tensor: torch.Tensor, shape: tuple[int, ...], ratio: float
) -> torch.Tensor:
    """Scale, and zero where the mask says so."""
    dropped = torch.empty(math.prod(shape), dtype=torch.bool, device=t.device)
    for part, bits in generator.blocks(seed_tensor, dropped.numel(), t.device):
        torch.lt(bits, threshold(ratio), out=dropped[part])
    return (t * (1 / (1 - ratio))).masked_fill_(dropped.view(shape), 0)


def _largest_below(high: float, dtype: torch.dtype) -> float:
    """The largest value of a type that is below ``high``."""
    nearest = torch.tensor(high, dtype=dtype, device="cpu")
    if float(nearest) >= high:
        nearest = torch.nextafter(nearest, torch.tensor(-math.inf, dtype=dtype, device="cpu"))
    return float(nearest)


@kernel("random_uniform")
def random_uniform(
    seed_tensor: torch.Tensor, shape: tuple[int, ...], low: float, high: float, dtype: Dtype
) -> torch.Tensor:
    """The upper 24 bits of each draw, scaled."""
    result = torch.empty(tuple(shape), dtype=torch_dtype(dtype), device=seed_tensor.device)
    flat, limit = result.view(-1), _largest_below(high, result.dtype)
    for part, bits in generator.blocks(seed_tensor, flat.numel(), result.device):
        steps = ((bits >> 8) & 0xFFFFFF).to(torch.float64)
        flat[part] = steps.mul_((high - low) * 2.0**-24).add_(low)
    return result.clamp_(max=limit)


def _box_muller(pairs: torch.Tensor) -> torch.Tensor:
    """Two independent normal values from each pair of draws: int32 [n, 2] -> float64 [n, 2]."""
    unsigned = (pairs.to(torch.int64) & generator.MASK_32).to(torch.float64)
    radius = torch.sqrt(-2 * torch.log((unsigned[:, 0] + 1) * 2.0**-32))
    angle = unsigned[:, 1] * (2 * math.pi * 2.0**-32)
    return torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], dim=1)


@kernel("random_normal")
def random_normal(
    seed_tensor: torch.Tensor, shape: tuple[int, ...], mean: float, std: float, dtype: Dtype
) -> torch.Tensor:
    """Box-Muller on pairs of draws."""
    result = torch.empty(tuple(shape), dtype=torch_dtype(dtype), device=seed_tensor.device)
    flat = result.view(-1)
    for part, values in generator.blocks(
        seed_tensor, flat.numel(), result.device, of_pairs=_box_muller
    ):
        flat[part] = values.mul_(std).add_(mean)
    return result


@kernel("create_random_seed")
def create_random_seed(seed: torch.Tensor, modifier: torch.Tensor) -> torch.Tensor:
    """A keyed permutation of each seed's second word."""
    return _child_seed(seed, modifier)


@kernel("split_random_seed")
def split_random_seed(seed: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
    """The children for modifiers 0 .. n - 1."""
    return tuple(_child_seed(seed, torch.full((), i, device=seed.device)) for i in range(n))


@kernel("jump_seed")
def jump_seed(seed: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """One child after the other, on the host: a chain of two words is no work for tensors."""
    if seed.is_meta:
        return torch.empty_like(seed)
    left = on_host.jumped_seed(np.array(seed.tolist(), np.uint32), count.item())
    return torch.from_numpy(left).to(seed.device)


def _child_seed(seed: torch.Tensor, modifier: torch.Tensor) -> torch.Tensor:
    """A seed made on the host in numbers of Python, a tenth of the time: two words are no work for
    tensors.
    """
    if seed.is_cpu and modifier.is_cpu:
        return torch.from_numpy(on_host.child_seed(seed.numpy(), modifier.numpy()))
    return generator.child_seed(seed, modifier)
