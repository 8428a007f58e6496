"""AdamW with moments of 8 bits: pieces of them are float32 for a moment."""

from typing import Any

import torch
from popxl.moments import (
    BLOCK,
    FIRST,
    LEAST_SCALE,
    MANTISSA,
    MOST_SCALE,
    NOT_FINITE,
    SCALE_BIAS,
    SECOND,
    TO_NEAREST,
    MomentFormat,
    blocks_of,
)

from popxl_engine.kernels.adamw import CHUNK, moments, updated_weight
from popxl_engine.kernels.registry import KERNELS, kernel
from popxl_engine.kernels.rounding import TORCH_HALF_DTYPES, Noise, drawn_noise, update_part
from popxl_engine.kernels.var_updates import factor
from popxl_engine.native import library as native

STREAMS = 3
"""Tensors that an update rounds: var, first and second."""


@kernel("adamw_8bit_")
def adamw_8bit_(
    var: torch.Tensor,
    grad: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    step: torch.Tensor,
    lr: Any,
    beta1: Any,
    beta2: Any,
    epsilon: Any,
    weight_decay: Any,
    scale: Any,
    condition: torch.Tensor | None,
) -> torch.Tensor:
    """Piece by piece."""
    noises = _noises(var)
    state = [t.contiguous() for t in (var, first, second)]
    if condition is not None and not var.is_cuda:  # nobody waits for a GPU's
        if not bool(condition):
            return var
        condition = None
    weight, flat = state[0].view(-1), grad.reshape(-1)
    as_factor = factor if var.is_cuda else float
    numbers = [as_factor(n) for n in (lr, beta1, beta2, epsilon, weight_decay)]
    moment_noises = [TO_NEAREST if noise is None else noise for noise in noises[1:]]
    size = max(var.numel(), 1) if var.is_cuda else CHUNK * torch.get_num_threads()
    for begin in range(0, var.numel(), size):
        end = min(begin + size, var.numel())
        parts = [Part(t, var.numel(), begin, end) for t in state[1:]]
        g = flat[begin:end].to(torch.float32) * as_factor(scale)
        m, v = moments(g, parts[0].decode(FIRST), parts[1].decode(SECOND), numbers[1], numbers[2])
        u = updated_weight(weight[begin:end], m, v, step.reshape(()), *numbers)
        update_part(weight[begin:end], u, noises[0], begin, condition)
        for part, form, x, noise in zip(parts, (FIRST, SECOND), (m, v), moment_noises):
            part.encode(form, x, noise, condition)
    for t, kept in zip((var, first, second), state):
        if kept is not t:
            t.copy_(kept.view(t.shape))
    return var


@kernel("adamw_8bit_", device="cpu")
def adamw_8bit_in_one_pass(
    var: torch.Tensor,
    grad: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    step: torch.Tensor,
    lr: Any,
    beta1: Any,
    beta2: Any,
    epsilon: Any,
    weight_decay: Any,
    scale: Any,
    condition: torch.Tensor | None,
) -> torch.Tensor:
    """Block by block."""
    factors = (lr, beta1, beta2, epsilon, weight_decay)
    are_in_order = first.is_contiguous() and second.is_contiguous()
    if not native.updates(var, grad) or not are_in_order:
        plain: torch.Tensor = KERNELS["adamw_8bit_"](
            var, grad, first, second, step, *factors, scale, condition
        )
        return plain
    noises = _noises(var)
    if condition is not None and not bool(condition):
        return var
    keys = [0 if noise is None else noise.key for noise in noises]
    start = next((noise.start for noise in noises if noise is not None), 0)
    operands = [argument for t in (var, grad) for argument in (t, native.CODES[t.dtype])]
    numbers = [float(n) for n in (scale, step, *factors)]
    native.call("adamw_8bit", (), *operands, first, second, *keys, start, *numbers, var.numel())
    return var


def _noises(var: torch.Tensor) -> list[Noise | None]:
    """The noise of var and each moment: an update draws one seed; each takes a child of it."""
    drawn = drawn_noise(var, STREAMS)
    return [drawn[0] if var.dtype in TORCH_HALF_DTYPES else None, *drawn[1:]]


class Part:
    """Elements ``begin`` to ``end`` of a coded moment of ``count`` elements; begin is a multiple of
    a block's length.
    """

    def __init__(self, coded: torch.Tensor, count: int, begin: int, end: int):
        scales = slice(count + begin // BLOCK, count + blocks_of(end))
        self.codes, self.scales, self.begin = coded[begin:end], coded[scales], begin

    def decode(self, form: MomentFormat) -> torch.Tensor:
        """The same as `MomentFormat.decode`."""
        sizes = (self.codes & form.largest).to(torch.int32)
        normal = sizes + (SCALE_BIAS - form.bias << MANTISSA)
        values = normal.bitwise_left_shift_(20).view(torch.float32)
        small = sizes * 2.0 ** (1 - form.bias - MANTISSA)
        values = torch.where(sizes < 1 << MANTISSA, small, values)
        factors = (self.scales.to(torch.int32) << 23).view(torch.float32)
        values = values * _spread(factors, values)
        return torch.where(self.codes > form.largest, -values, values) if form.is_signed else values

    def encode(
        self,
        form: MomentFormat,
        x: torch.Tensor,
        noise: int | Noise,
        condition: torch.Tensor | None,
    ) -> None:
        """The same as `MomentFormat.encode`, with 16 random bits for each element."""
        sizes = x.abs()
        filled = torch.nn.functional.pad(sizes, (0, -x.numel() % BLOCK))
        most = filled.view(-1, BLOCK).amax(1)
        exponents = (most.view(torch.int32) - 1 >> 23) + 1
        scales = exponents.clamp(LEAST_SCALE, MOST_SCALE)
        sizes = sizes * _spread(((254 - scales) << 23).view(torch.float32), sizes)
        bits = noise if isinstance(noise, int) else self._bits(noise, x.numel())
        normal = (sizes.view(torch.int32) + (bits << 4)) >> 20
        normal = normal - (SCALE_BIAS - form.bias << MANTISSA)
        steps = sizes * 2.0 ** (form.bias - 1 + MANTISSA) + bits * 2.0**-16
        is_small = sizes < 2.0 ** (1 - form.bias)
        codes = torch.where(is_small, steps.floor(), normal.to(torch.float32))
        codes = codes.clamp(0, form.largest).to(torch.uint8)
        if form.is_signed:
            codes = codes | (x.signbit().to(torch.uint8) << 7)
        else:
            codes = torch.where(x != 0, codes.clamp(min=1), codes)
        scales = torch.where(most.isfinite(), scales, NOT_FINITE).to(torch.uint8)
        for kept, new in ((self.codes, codes), (self.scales, scales)):
            kept.copy_(new if condition is None else torch.where(condition, new, kept))

    def _bits(self, noise: Noise, count: int) -> torch.Tensor:
        """int32 [count], from 0 to 65535."""
        drawn = noise.bits(count, noise.start + self.begin)
        return drawn.to(torch.int32) + TO_NEAREST


def _spread(factors: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Each block's number at each of its elements."""
    return factors.repeat_interleave(BLOCK)[: like.numel()]
