"""Causal attention by PyTorch's kernels that keep no probabilities: the gradient computes them
again, piece by piece.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from popxl_engine.kernels.registry import kernel
from popxl_engine.ops.attention import ALIGNMENT

aten = torch.ops.aten

WIDEST = 192
"""Size of a head up to which every GPU with the flash kernels has their gradient."""
MULTIPROCESSORS = 132
"""Multiprocessors of the largest GPUs in use, H100 and H200."""
TILE = (128, 32)
"""Rows and columns of which its sums of a query's gradient are multiples."""


def has_flash_attention(device: torch.device) -> bool:
    """Whether a device has the kernels: a GPU from compute capability 8.0 on. One that is not there
    counts as such.
    """
    if device.type != "cuda":
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


@kernel("fused_flash_attention")
def flash_attention(
    query: torch.Tensor, key_t: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(query @ key_t * scale) @ value over the keys up to each query's own; and what the
    gradient needs.

    Shapes: query and value [b, h, s, d], key_t [b, h, d, s] -> [b, h, s, d]; float32 [b, h, s], the
    log-sum-exp of each query's scores, which a kernel may lengthen.
    Source: Dao 2023, "FlashAttention-2", arXiv:2307.08691; for float32 Rabe and Staats 2021,
    arXiv:2112.05682.
    """
    operands = tuple(map(_in_rows, (query, key_t.transpose(2, 3), value)))
    if query.device.type == "cpu":
        y, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            *operands, 0.0, True, scale=scale
        )
    elif _takes_flash(query):
        y, logsumexp, *_ = aten._scaled_dot_product_flash_attention(
            *operands, 0.0, True, scale=scale
        )
    else:
        y, logsumexp, *_ = aten._scaled_dot_product_efficient_attention(
            *operands, None, True, 0.0, True, scale=scale
        )
    return y, logsumexp


@kernel("fused_flash_attention_grad")
def flash_attention_grad(
    dy: torch.Tensor,
    query_t: torch.Tensor,
    key: torch.Tensor,
    value_t: torch.Tensor,
    y: torch.Tensor,
    logsumexp: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients for query, key_t and value of `flash_attention`; the same bits every time."""
    operands = tuple(map(_in_rows, (dy, query_t.transpose(2, 3), key, value_t.transpose(2, 3), y)))
    if dy.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *operands, logsumexp, 0.0, True, scale=scale
        )
    else:
        found = _gradient_on_gpu(operands, logsumexp, scale)
    return found[0], found[1].transpose(2, 3), found[2]


def _gradient_on_gpu(
    operands: tuple[torch.Tensor, ...], logsumexp: torch.Tensor, scale: float
) -> Any:
    dy, query, key, value, y = operands
    sequence, is_flash = query.shape[2], _takes_flash(query)
    sums = _sums_of_flash(query) if is_flash and query.is_meta else None
    with _one_order():
        if is_flash:
            # dropout's: none
            draws = query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)
            found = aten._scaled_dot_product_flash_attention_backward(
                *(*operands, logsumexp, None, None, sequence, sequence, 0.0, True, *draws),
                scale=scale,
            )
        else:
            draws = query.new_empty((), dtype=torch.int64), query.new_empty((), dtype=torch.int64)
            found = aten._scaled_dot_product_efficient_attention_backward(
                *(
                    dy,
                    query,
                    key,
                    value,
                    None,
                    y,
                    logsumexp,
                    *draws,
                    0.0,
                    [True, True, True, False],
                    True,
                ),
                scale=scale,
            )
    del sums
    return found


def _sums_of_flash(query: torch.Tensor) -> torch.Tensor:
    """What the flash kernel takes beside its results to add in one order, which a dry run would
    not see.

    A part for each of the GPU's multiprocessors, as far as heads leave some without work, of whole
    tiles.
    """
    batch, heads, sequence, width = query.shape
    parts = -(-MULTIPROCESSORS // (batch * heads))
    rows, columns = (-(-n // unit) * unit for n, unit in zip((sequence, width), TILE))
    return query.new_empty((parts, batch, heads, rows, columns), dtype=torch.float32)


def _takes_flash(query: torch.Tensor) -> bool:
    return query.dtype is not torch.float32 and query.shape[3] <= WIDEST


def _in_rows(t: torch.Tensor) -> torch.Tensor:
    """[b, h, s, d] as the kernels read it: its last axis side by side, and each row of it on a
    boundary.

    What rows of projections hold is so already.
    """
    unit = ALIGNMENT // t.element_size()
    is_placed = t.stride(3) == 1 and not any(
        n % unit for n in (t.storage_offset(), *t.stride()[:3])
    )
    return t if is_placed else t.clone(memory_format=torch.contiguous_format)


@contextmanager
def _one_order() -> Iterator[None]:
    """A block in which kernels add in one order, where torch lets them choose otherwise, even if it
    is asked to warn only.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    settings: Any = torch.utils.deterministic
    fills, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = fills
