"""Ops that `popxl_engine.native` computes on CPUs in one pass over memory; plain kernels do what it
does not take.
"""

from collections.abc import Sequence
from typing import Any

import torch
from popxl.ops.newton_schulz import Coefficients, is_by_gram_matrix

from popxl_engine.kernels import generator
from popxl_engine.kernels.cross_entropy import losses, pick, row_chunks
from popxl_engine.kernels.normalisation import gain
from popxl_engine.kernels.random import by_seed, threshold
from popxl_engine.kernels.registry import KERNELS, kernel
from popxl_engine.kernels.rounding import TORCH_HALF_DTYPES, Updates, as_float32, update_noise
from popxl_engine.kernels.var_updates import mean_factors
from popxl_engine.native import library as native


def _pointwise(name: str) -> None:
    """An op that makes each element of one, and its gradient."""

    @kernel(name, device="cpu")
    def forward(t: torch.Tensor) -> torch.Tensor:
        return _each(name, t)

    @kernel(f"{name}_grad", device="cpu")
    def gradient(dy: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return _each_grad(f"{name}_grad", dy, at)


def _each(name: str, t: torch.Tensor, *numbers: float) -> torch.Tensor:
    """What an op makes of each element, and of numbers."""
    if not native.takes(t):
        return KERNELS[name](t, *numbers)
    result = torch.empty_like(t)
    native.call(name, (t.dtype,), t, result, *numbers, t.numel())
    return result


def _each_grad(name: str, dy: torch.Tensor, at: torch.Tensor, *numbers: float) -> torch.Tensor:
    if not native.takes(dy, at) or dy.dtype != at.dtype or dy.shape != at.shape:
        return KERNELS[name](dy, at, *numbers)
    result = torch.empty_like(at)
    native.call(name, (at.dtype,), dy, at, result, *numbers, at.numel())
    return result


_pointwise("gelu")
_pointwise("relu2")


@kernel("softcap", device="cpu")
def softcap(t: torch.Tensor, cap: float) -> torch.Tensor:
    """The softcap in one pass."""
    return _each("softcap", t, cap)


@kernel("softcap_grad", device="cpu")
def softcap_grad(dy: torch.Tensor, y: torch.Tensor, cap: float) -> torch.Tensor:
    """The gradient of softcap in one pass."""
    return _each_grad("softcap_grad", dy, y, cap)


def _gated(name: str) -> None:
    """An op that multiplies values by a function of their gates, row by row, and its gradient."""

    @kernel(name, device="cpu")
    def forward(t: torch.Tensor) -> torch.Tensor:
        if not native.takes(t):
            return KERNELS[name](t)
        result = t.new_empty(t.shape[0], t.shape[1] // 2)
        native.call(name, (t.dtype,), t, result, *result.shape)
        return result

    @kernel(f"{name}_grad", device="cpu")
    def gradient(dy: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        if not native.takes(dy, t) or dy.dtype != t.dtype:
            return KERNELS[f"{name}_grad"](dy, t)
        result = torch.empty_like(t)
        native.call(f"{name}_grad", (t.dtype,), dy, t, result, *dy.shape)
        return result


_gated("swiglu")
_gated("geglu")


@kernel("rotary", device="cpu")
def rotary(
    t: torch.Tensor,
    sin: torch.Tensor,
    cos: torch.Tensor,
    inverse: bool = False,
    size: int | None = None,
) -> torch.Tensor:
    """Row by row, which need not follow one another."""
    if not native.takes_rows(t) or not native.takes(sin, cos):
        return KERNELS["rotary"](t, sin, cos, inverse, size)
    result = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    tables, sizes = (as_float32(-sin if inverse else sin), as_float32(cos)), (*t.shape, *sin.shape)
    width = size or 2 * sin.shape[1]
    native.call("rotary", (t.dtype,), t, t.stride(0), *tables, result, *sizes, width)
    return result


@kernel("short_convolution", device="cpu")
def short_convolution(
    t: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """Row by row."""
    if not native.takes(t, weight) or not positions.is_contiguous():
        return KERNELS["short_convolution"](t, weight, positions, transposed)
    result, sizes = torch.empty_like(t), (*t.shape, weight.shape[0])
    operands = t, as_float32(weight), positions, result
    native.call("short_convolution", (t.dtype,), *operands, *sizes, int(transposed))
    return result


@kernel("short_convolution_weight_grad", device="cpu")
def short_convolution_weight_grad(
    dy: torch.Tensor, t: torch.Tensor, positions: torch.Tensor, size: int
) -> torch.Tensor:
    """Row by row, added up in float32."""
    is_empty = not t.numel() or not size
    fits = dy.dtype == t.dtype and native.takes(dy, t) and positions.is_contiguous()
    if is_empty or not fits:
        return KERNELS["short_convolution_weight_grad"](dy, t, positions, size)
    result = t.new_empty(size, t.shape[1], dtype=torch.float32)
    operands = dy, t, positions, result
    native.call("short_convolution_weight_grad", (t.dtype,), *operands, *t.shape, size)
    return result.to(t.dtype)


LARGEST = {torch.float32: 512, torch.bfloat16: 2048}
"""Rows of a matrix, the smaller side, up to which `native.newton_schulz` is faster than products of
PyTorch's libraries."""


@kernel("newton_schulz", device="cpu")
def newton_schulz(
    t: torch.Tensor, coefficients: Coefficients, steps: int, eps: float
) -> torch.Tensor:
    """Matrix by matrix, in its own type."""
    t, (rows, columns) = t.contiguous(), t.shape[-2:]
    is_small = 0 < min(rows, columns) <= LARGEST.get(t.dtype, 0) and t.numel() > 0
    if not is_small or not native.takes(t) or t.dtype == torch.bfloat16 and not native.has_tiles():
        result: torch.Tensor = KERNELS["newton_schulz"](t, coefficients, steps, eps)
        return result
    y = torch.empty_like(t)
    scratch = t.new_empty(native.scratch("newton_schulz", (t.dtype,), rows, columns))
    sizes = (t.numel() // (rows * columns), rows, columns)
    how = eps, steps, is_by_gram_matrix(t.shape, t.element_size())
    native.call("newton_schulz", (t.dtype,), t, y, scratch, *sizes, *coefficients, *how)
    return y


@kernel("dropout", device="cpu")
def dropout(t: torch.Tensor, seed_tensor: torch.Tensor, p: float) -> torch.Tensor:
    """Draw, compare, scale and zero in one pass for each seed."""
    if not native.takes(t):
        return KERNELS["dropout"](t, seed_tensor, p)
    result = torch.empty_like(t)
    for seed, values, kept in zip(*by_seed(seed_tensor, t, result)):
        seed_key = generator.key_here(seed)
        native.call(
            "dropout", (t.dtype,), values, kept, seed_key, threshold(p), 1 / (1 - p), values.numel()
        )
    return result


@kernel("logsumexp_and_pick", device="cpu")
def logsumexp_and_pick(
    logits: torch.Tensor, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row, in float32."""
    if not native.takes_rows(logits) or not logits.numel():
        return losses(logits, indices)
    return _logsumexp("logsumexp", logits), pick(logits, indices)


@kernel("fused_softcap_logsumexp_and_pick", device="cpu")
def softcap_logsumexp_and_pick(
    logits: torch.Tensor, indices: torch.Tensor, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of bounded logits, which are stored nowhere."""
    if _is_float16(logits):
        parts = [
            softcap_logsumexp_and_pick(logits[rows].float(), indices[rows], cap)
            for rows in row_chunks(logits)
        ]
        total, picked = map(torch.cat, zip(*parts))
        return total, picked
    if not native.takes_rows(logits) or not logits.numel():
        return losses(logits, indices, cap)
    return _logsumexp("softcap_logsumexp", logits, cap), softcap(pick(logits, indices), cap)


def _logsumexp(name: str, logits: torch.Tensor, *cap: float) -> torch.Tensor:
    total = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    native.call(name, (logits.dtype,), logits, logits.stride(0), total, *cap, *logits.shape)
    return total


@kernel("logsumexp_and_pick_grad", device="cpu", over="logits")
def logsumexp_and_pick_grad(
    d_logsumexp: torch.Tensor,
    d_picked: torch.Tensor,
    logsumexp: torch.Tensor,
    logits: torch.Tensor,
    indices: torch.Tensor,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """exp(logits - logsumexp) * d_logsumexp, plus d_picked at the index."""
    numbers = (d_logsumexp, d_picked, logsumexp)
    if not _takes_gradients(logits, *numbers):
        return KERNELS["logsumexp_and_pick_grad"](*numbers, logits, indices)
    return _logits_gradient("logsumexp_grad", numbers, logits, indices, into)


@kernel("fused_softcap_logsumexp_and_pick_grad", device="cpu", over="logits")
def softcap_logsumexp_and_pick_grad(
    d_logsumexp: torch.Tensor,
    d_picked: torch.Tensor,
    logsumexp: torch.Tensor,
    logits: torch.Tensor,
    indices: torch.Tensor,
    cap: float,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same at bounded logits, times the slope of the bound."""
    numbers = (d_logsumexp, d_picked, logsumexp)
    if _is_float16(logits):
        result = torch.empty_like(logits) if into is None else into
        for rows in row_chunks(logits):
            wide, of_rows = logits[rows].float(), [t[rows] for t in numbers]
            result[rows] = softcap_logsumexp_and_pick_grad(*of_rows, wide, indices[rows], cap)
        return result
    if not _takes_gradients(logits, *numbers):
        return KERNELS["fused_softcap_logsumexp_and_pick_grad"](*numbers, logits, indices, cap)
    return _logits_gradient("softcap_logsumexp_grad", numbers, logits, indices, into, cap)


@kernel("fused_cross_entropy_and_grad", device="cpu", over="logits")
def cross_entropy_and_grad(
    d_logsumexp: torch.Tensor,
    d_picked: torch.Tensor,
    logits: torch.Tensor,
    indices: torch.Tensor,
    cap: float | None,
    into: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss and its gradient while a row is in the cache: each exponential is taken once."""
    numbers = (d_logsumexp, d_picked)
    if _is_float16(logits):
        result = torch.empty_like(logits) if into is None else into
        parts = []
        for rows in row_chunks(logits):
            of_rows, wide = [t[rows] for t in numbers], logits[rows].float()
            *of_loss, gradient = cross_entropy_and_grad(*of_rows, wide, indices[rows], cap, wide)
            parts.append(of_loss)
            result[rows] = gradient
        total, picked = map(torch.cat, zip(*parts))
        return total, picked, result
    if not _takes_gradients(logits, *numbers):
        return KERNELS["fused_cross_entropy_and_grad"](*numbers, logits, indices, cap)
    total = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    picked = pick(logits, indices)  # the gradient may take the logits' place
    operands = (d_logsumexp, d_picked, total)
    if cap is None:
        return total, picked, _logits_gradient("cross_entropy", operands, logits, indices, into)
    name = "softcap_cross_entropy"
    return total, softcap(picked, cap), _logits_gradient(name, operands, logits, indices, into, cap)


def _is_float16(logits: torch.Tensor) -> bool:
    """Whether rows of these go to the library as float32, some at a time."""
    return logits.dtype == torch.float16 and logits.numel() > 0 and native.library() is not None


def _takes_gradients(logits: torch.Tensor, *numbers: torch.Tensor) -> bool:
    takes = native.takes_rows(logits) and logits.numel() > 0
    return takes and all(t.dtype == torch.float32 for t in numbers)


def _logits_gradient(
    name: str,
    numbers: Sequence[torch.Tensor],
    logits: torch.Tensor,
    indices: torch.Tensor,
    into: torch.Tensor | None,
    *cap: float,
) -> torch.Tensor:
    result = torch.empty_like(logits) if into is None else into
    scales, picked, totals = (t.contiguous() for t in numbers)
    wide = indices.to(torch.int64).contiguous()
    factors, gradient = (
        (logits, logits.stride(0), totals, scales, picked, wide),
        (result, result.stride(0)),
    )
    native.call(name, (logits.dtype,), *factors, *gradient, *cap, *logits.shape)
    return result


@kernel("accumulate_mean_", device="cpu")
def accumulate_mean_(t: torch.Tensor, X: torch.Tensor, step: Any) -> torch.Tensor:
    """t = t * step / (step + 1) + X / (step + 1)."""
    if t.dtype != torch.float32 or t.shape != X.shape or not native.takes(t, X):
        return KERNELS["accumulate_mean_"](t, X, step)
    native.call("accumulate", (X.dtype,), t, X, *mean_factors(step), t.numel())
    return t


@kernel("copy_var_update_", device="cpu")
def copy_var_update_(t: torch.Tensor, X: torch.Tensor) -> torch.Tensor:
    """Float32 rounded at random to 16 bits."""
    is_random = Updates.next_seed is not None and t.dtype in TORCH_HALF_DTYPES
    noise = None
    if is_random and X.dtype == torch.float32 and native.updates(t, X):
        noise = update_noise(t)
    if noise is None:
        return KERNELS["copy_var_update_"](t, X)
    code, key = native.CODES[t.dtype], noise.key
    native.call("round_at_random", (), t, code, X, key, noise.start, t.numel())
    return t


@kernel("sum_to", device="cpu")
def sum_to(t: torch.Tensor, shape: tuple[int, ...], dropped: tuple[int, ...]) -> torch.Tensor:
    """The sum of a matrix over its rows: `dropped` tells which axis of a square one that is."""
    is_over_rows = t.dim() == 2 and tuple(shape) == tuple(t.shape[1:]) and 1 not in dropped
    if not is_over_rows or not t.numel() or not native.takes(t):
        return KERNELS["sum_to"](t, shape, dropped)
    total = torch.empty(t.shape[1], dtype=torch.float32, device=t.device)
    native.call("column_sums", (t.dtype,), t, total, 0.0, 1.0, *t.shape)
    return total.to(t.dtype)


@kernel("layer_norm", device="cpu")
def layer_norm(
    t: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """The normalisation of rows. PyTorch takes 1.3 to 2.4 times as long, and loses digits of rows
    that are far from zero.
    """
    if t.dim() != 2 or not t.numel() or not native.takes(t, weight, bias):
        return KERNELS["layer_norm"](t, weight, bias, eps)
    result = torch.empty_like(t)
    native.call(
        "layer_norm", (t.dtype,), t, as_float32(weight), as_float32(bias), result, eps, *t.shape
    )
    return result


@kernel("group_norm_grad", device="cpu")
def group_norm_grad(
    dy: torch.Tensor, t: torch.Tensor, weight: torch.Tensor, num_groups: int, eps: float
) -> tuple[torch.Tensor, ...]:
    """The gradients of one group, row by row. PyTorch adds up gradients of bfloat16 gains in
    bfloat16: 3 % off; here 0.2 %.
    """
    plain = t.dim() != 2 or num_groups != 1 or not t.numel() or t.dtype != dy.dtype
    if plain or not native.takes(dy, t, weight):
        result: tuple[torch.Tensor, ...] = KERNELS["group_norm_grad"](
            dy, t, weight, num_groups, eps
        )
        return result
    dt, gradients = torch.empty_like(t), t.new_empty(2, t.shape[1], dtype=torch.float32)
    native.call(
        "layer_norm_grad", (t.dtype,), dy, t, as_float32(weight), dt, gradients, eps, *t.shape
    )
    return dt, *gradients.to(weight.dtype).unbind()


@kernel("rms_norm", device="cpu")
def rms_norm(
    t: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """Row by row."""
    if not t.numel() or not native.takes(t, weight):
        return KERNELS["rms_norm"](t, weight, eps, offset)
    result = torch.empty_like(t)
    native.call("rms_norm", (t.dtype,), t, gain(weight, offset), result, eps, *t.shape)
    return result


@kernel("rms_norm_grad", device="cpu")
def rms_norm_grad(
    dy: torch.Tensor, t: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, ...]:
    """Row by row; gradients of gains are added up in float32."""
    if not t.numel() or t.dtype != dy.dtype or not native.takes(dy, t, weight):
        result: tuple[torch.Tensor, ...] = KERNELS["rms_norm_grad"](dy, t, weight, eps, offset)
        return result
    dt, dweight = torch.empty_like(t), t.new_empty(t.shape[1], dtype=torch.float32)
    operands = dy, t, gain(weight, offset), dt, dweight
    native.call("rms_norm_grad", (t.dtype,), *operands, eps, *t.shape)
    return dt, dweight.to(weight.dtype)


FEW_SLICES = 4
"""Slices that PyTorch adds up one after the other, whatever their strides are, as the library does.
"""


@kernel("merge_moments", device="cpu")
def merge_moments(own: torch.Tensor, slices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same bits at once: rows are too few for a dozen ops."""
    if len(slices) > FEW_SLICES or own.dtype != torch.float32 or not native.takes(own, slices):
        both: tuple[torch.Tensor, torch.Tensor] = KERNELS["merge_moments"](own, slices)
        return both
    shift, variance = (own.new_empty(own.shape[0], 1) for _ in range(2))
    native.call("merge_moments", (), own, slices, shift, variance, *slices.shape[:2])
    return shift, variance


@kernel("sumsquare", device="cpu")
def sumsquare(t: torch.Tensor, axis: Any, keepdims: bool) -> torch.Tensor:
    """The squares of the whole tensor: of rows in float32, which are added up in float64."""
    if axis is not None or keepdims or not native.takes(t):
        return KERNELS["sumsquare"](t, axis, keepdims)
    total = t.new_empty(())
    native.call("squares", (t.dtype,), t, total, t.numel())
    return total
