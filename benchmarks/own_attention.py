"""Attention of long sequences, forward and backward, beside PyTorch's fused one."""

from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.own_cases import SPEED, Case, clocked

SEQUENCE, HEADS, WINDOW = 16384, 2, 1024
DTYPES, WIDTHS = ("float32", "bfloat16"), (64, 128)


def ways(dtype: str, width: int, *_: object) -> tuple[Callable[[], object], ...]:
    """Calls that attend and differentiate: causally, by PyTorch, and in a window."""
    import torch  # not at the top: `--help` is answered at once
    from popxl_engine.kernels.attention import attention_grad, attention_no_probs

    made = torch.Generator().manual_seed(0)
    query, key, value, dy = (
        torch.randn(1, HEADS, SEQUENCE, width, generator=made).to(getattr(torch, dtype))
        for _ in range(4)
    )
    scale = width**-0.5

    def ours(window: int | None) -> None:
        hides = None, True, window
        attention_no_probs(query, key.mT, value, None, scale, None, 0.0, *hides)
        operands = dy, query.mT, key, value.mT
        attention_grad(*operands, None, None, scale, None, 0.0, None, *hides)

    def plainly() -> None:
        leaves = [t.clone().requires_grad_() for t in (query, key, value)]
        y = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
        torch.autograd.grad(y, leaves, dy)

    return partial(ours, None), plainly, partial(ours, WINDOW)


CASES = tuple(
    Case(
        name=f"attention, {name}: {dtype}, heads of {width}", ready=partial(ways, dtype, width),
        timed=lambda of, timed=timed: clocked(of[timed]),
        beside=lambda of, beside=beside: clocked(of[beside]),
        compared=SPEED, bar=(bar, np.inf), rounds=5, warmup=1,
    )
    for name, timed, beside, bar in (("causal", 0, 1, 1.0), ("window", 2, 0, 5.0))
    for dtype in DTYPES
    for width in WIDTHS
)  # fmt: skip
