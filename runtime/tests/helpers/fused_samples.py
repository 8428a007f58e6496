"""Operands of the engine's own ops, and what comes of them by the textbook, in float64."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import popxl
import torch
from popxl.op_records import OPS
from popxl.tensor import TensorSpec
from popxl_engine.ir import Value
from popxl_engine.kernels.registry import KERNELS
from popxl_engine.ops.views import Rearrangement

F32 = torch.float32
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("in order", "heads within rows", "transposed", "strided", "off a boundary")


def lying(t: torch.Tensor, how: str) -> torch.Tensor:
    """The same numbers, elsewhere in memory."""
    if how == "off a boundary":
        return torch.cat((t.new_zeros(1), t.reshape(-1)))[1:].view(t.shape)
    if how == "strided" and t.dim():
        return torch.stack((t, torch.zeros_like(t)), -1).flatten(-2)[..., ::2]
    if how == "heads within rows" and t.dim() == 4:
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "transposed" and t.dim() > 1:
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    return t


class Draw:
    """Random sizes, and operands of one type and layout."""

    def __init__(self, seed: int, dtype: torch.dtype, layout: str = "in order"):
        self.random, self.dtype, self.layout = Random(seed), dtype, layout
        self._numbers = torch.Generator().manual_seed(seed)

    def size(self, most: int = 40) -> int:
        """The size of an axis: small ones often."""
        return self.random.choice((1, 2, 3, self.random.randint(1, most)))

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal numbers, of the operands' type unless another is given."""
        numbers = torch.randn(*shape, generator=self._numbers)
        return lying(numbers.to(dtype or self.dtype), self.layout)

    def one_of(self, *values: Any) -> Any:
        """Any of these."""
        return self.random.choice(values)


@dataclass(frozen=True)
class Sample:
    """Arguments of an op, and its results: of an op that writes, what it leaves in each operand
    that it writes, then its results after the first.
    """

    arguments: dict[str, Any]
    oracle: Callable[..., Any]

    def expected(self) -> list[torch.Tensor]:
        """The results in float64, from the operands as they are rounded."""
        return list(self.oracle(**{n: wide(a) for n, a in self.arguments.items()}))


def wide(argument: Any) -> Any:
    """An argument in float64, in order, and apart from the operand."""
    if not isinstance(argument, torch.Tensor) or not argument.is_floating_point():
        return argument
    return argument.double().clone(memory_format=torch.contiguous_format)


# Views


def rearranged(draw: Draw) -> tuple[Rearrangement, list[torch.Tensor], list[slice]]:
    """A view that memory cannot give, what it views, and where along the last axis it shows that:
    parts that lie apart as one, or a part in reverse.
    """
    rows, columns = draw.size(), [draw.size() + 1 for _ in range(draw.one_of(1, 2, 3))]
    parts = [draw.normal(rows, n) for n in columns]
    values = tuple(
        Value(f"part_{i}", TensorSpec(t.shape, getattr(popxl, str(t.dtype).removeprefix("torch."))))
        for i, t in enumerate(parts)
    )
    if len(parts) > 1:
        view = Rearrangement(OPS["concat"], {"ts": values, "axis": 1})
        ends = [sum(columns[: i + 1]) for i in range(len(columns))]
        return view, parts, [slice(end - n, end) for end, n in zip(ends, columns)]
    reverse = {"start": None, "stop": None, "step": (-1,), "axis": (1,)}
    return Rearrangement(OPS["slice"], {"t": values[0], **reverse}), parts, [slice(None)]


def shown(view: Rearrangement, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """What a view of these shows."""
    return torch.cat(list(parts), 1) if len(parts) > 1 else parts[0].flip(1)


def refresh_view_(draw: Draw) -> Sample:
    view, parts, _ = rearranged(draw)
    target = draw.normal(*shown(view, parts).shape)
    return Sample(
        {"t": target, "parts": tuple(parts), "view": view},
        lambda t, parts, view: [shown(view, [wide(part) for part in parts])],
    )


def write_back_(draw: Draw) -> Sample:
    view, parts, where = rearranged(draw)
    index = draw.random.randrange(len(parts))
    return Sample(
        {
            "t": parts[index],
            "y": draw.normal(*shown(view, parts).shape),
            "view": view,
            "index": index,
        },
        lambda t, y, view, index: [y[:, where[index]] if len(where) > 1 else y.flip(1)],
    )


# Attention


def probs_of(
    query: Any, key_t: Any, mask: Any, scale: float, seed: Any, p: float, softcap: float = 0.0
) -> Any:
    """Probabilities, and those after dropout."""
    scores = query @ key_t * scale
    scores = torch.tanh(scores / softcap) * softcap if softcap else scores
    probs = torch.softmax(scores + mask, -1)
    if seed is None:
        return probs, probs
    return probs, probs * KERNELS["dropout"](torch.ones_like(probs).detach(), seed, p)


def hidden(queries: int, keys: int) -> torch.Tensor:
    """What a causal mask adds; the last query sees the last key."""
    mask = torch.zeros(queries, keys).masked_fill_(
        torch.ones(queries, keys).tril(keys - queries) == 0, -1e4
    )
    return mask


HIDING = ("mask", "positions", "causal", "window", "softcap")


def in_a_wider_one(t: torch.Tensor) -> torch.Tensor:
    """The same numbers with others between the first axis's parts."""
    return torch.stack((t, 1000 + t), 1)[:, 0]


def hiding(draw: Draw, batch: int, queries: int, keys: int) -> dict[str, Any]:
    """A mask or attributes, and a bound of scores."""
    softcap = draw.one_of(0.0, 0.0, 1.5)
    if queries > keys or draw.one_of(True, False, False):
        mask = hidden(queries, keys) if queries <= keys else torch.zeros(queries, keys)
        added = draw.one_of(mask.to(draw.dtype), None)
        return dict(zip(HIDING, (added, None, False, None, softcap)))
    positions = torch.randint(0, keys, (batch, 1, queries, 1), dtype=torch.int32)
    positions = draw.one_of(positions, in_a_wider_one(positions))
    window = draw.one_of(None, draw.size(keys))
    return dict(zip(HIDING, (None, draw.one_of(None, positions), True, window, softcap)))


def added(operands: dict[str, Any], queries: int, keys: int) -> torch.Tensor:
    """What hides keys, as a mask in float64."""
    mask, positions, causal, window, _ = (operands[n] for n in HIDING)
    if mask is not None:
        return mask.double()
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    is_hidden = distance < 0 if causal else distance == math.inf
    if window is not None:
        is_hidden = is_hidden | (distance >= window)
    if positions is not None:
        is_hidden = is_hidden | (distance > positions)
    return torch.zeros(is_hidden.shape, dtype=torch.float64).masked_fill(is_hidden, -math.inf)


def forward_operands(draw: Draw, is_square: bool = False) -> dict[str, Any]:
    batch, heads, queries, keys = draw.size(4), draw.size(3), draw.size(), draw.size(70)
    queries = keys if is_square else queries
    width, seeds = draw.one_of(8, 24, 64), draw.one_of(None, 1, batch)
    seed = None if seeds is None else torch.arange(7, 7 + 2 * seeds).to(torch.uint32)
    return {
        "query": draw.normal(batch, heads, queries, width),
        "key_t": draw.normal(batch, heads, keys, width).transpose(2, 3),
        "value": draw.normal(batch, heads, keys, width),
        "scale": 1 / math.sqrt(width),
        "seed_tensor": None if seed is None else seed.reshape(seeds, 2),
        "p": 0.0 if seed is None else draw.one_of(0.1, 0.5),
        **hiding(draw, batch, queries, keys),
    }


def attention(draw: Draw) -> Sample:
    def oracle(query, key_t, value, scale, seed_tensor, p, **rest):
        mask = added(rest, query.shape[2], key_t.shape[3])
        probs, dropped = probs_of(query, key_t, mask, scale, seed_tensor, p, rest["softcap"])
        kept = (probs,) if seed_tensor is None else (probs, dropped)
        return (*kept, dropped @ value)

    return Sample(forward_operands(draw), oracle)


def attention_no_probs(draw: Draw) -> Sample:
    def oracle(**operands):
        return attention(draw).oracle(**operands)[-1:]

    return Sample(forward_operands(draw), oracle)


def gradients(
    query_t, key, value_t, dy, mask, scale, seed, p, softcap=0.0
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key_t and value, by autograd."""
    leaves = [t.detach().requires_grad_() for t in (query_t.mT, key.mT, value_t.mT)]
    query, key_t, value = leaves
    y = probs_of(query, key_t, mask, scale, seed, p, softcap)[1] @ value
    return torch.autograd.grad(y, leaves, dy)


def attention_grad(draw: Draw, is_square: bool = False) -> Sample:
    """Probabilities are given or computed again; what dropout let through is drawn or shown."""
    of = forward_operands(draw, is_square)
    query, key_t, scale = (of[n] for n in ("query", "key_t", "scale"))
    seed, p, softcap = of["seed_tensor"], of["p"], of["softcap"]
    mask = added(of, query.shape[2], key_t.shape[3])
    way = draw.one_of("given", "given, with what hides", "computed again", "dropout is shown")
    probs, dropped = (
        (
            t.to(draw.dtype)
            for t in probs_of(wide(query), wide(key_t), mask, scale, seed, p, softcap)
        )
        if way != "computed again"
        else (None, None)
    )

    def oracle(dy, query_t, key, value_t, **rest):
        return gradients(query_t, key, value_t, dy, mask, scale, seed, p, softcap)

    arguments = {
        "dy": draw.normal(*query.shape),
        "query_t": query.mT,
        "key": key_t.mT,
        "value_t": of["value"].mT,
        "probs": probs,
        "dropped_probs": dropped,
        "scale": scale,
        "seed_tensor": None if way == "dropout is shown" else seed,
        "p": p,
        **{n: of[n] for n in HIDING},
    }
    if way == "given":
        arguments |= {"mask": None, "positions": None, "causal": False, "window": None}
    return Sample(arguments, oracle)


def attention_grad_packed(draw: Draw) -> Sample:
    of = attention_grad(draw, is_square=True)

    def oracle(**operands):
        d_query, d_key_t, d_value = of.oracle(**operands)
        rows = (t.transpose(1, 2).flatten(2).flatten(0, 1) for t in (d_query, d_key_t.mT, d_value))
        return (torch.cat(list(rows), 1),)

    return Sample(of.arguments, oracle)


def flash_operands(draw: Draw) -> tuple[list[torch.Tensor], float]:
    shape = (draw.size(4), draw.size(3), draw.size(70), draw.one_of(8, 24, 32, 96))
    return [draw.normal(*shape) for _ in range(4)], 0.7 / math.sqrt(shape[3])


def flash_attention(draw: Draw) -> Sample:
    (query, key, value, _), scale = flash_operands(draw)

    def oracle(query, key_t, value, scale):
        scores = query @ key_t * scale + hidden(*query.shape[2:3] * 2)
        return torch.softmax(scores, -1) @ value, scores.logsumexp(-1)

    return Sample({"query": query, "key_t": key.mT, "value": value, "scale": scale}, oracle)


def flash_attention_grad(draw: Draw) -> Sample:
    (query, key, value, dy), scale = flash_operands(draw)
    y, logsumexp = KERNELS["fused_flash_attention"](query, key.mT, value, scale)

    def oracle(dy, query_t, key, value_t, y, logsumexp, scale):
        mask = hidden(*dy.shape[2:3] * 2)
        return gradients(query_t, key, value_t, dy, mask, scale, None, 0.0)

    arguments = {"dy": dy, "query_t": query.mT, "key": key, "value_t": value.mT}
    return Sample({**arguments, "y": y, "logsumexp": logsumexp, "scale": scale}, oracle)


# Products


def gemm(draw: Draw) -> Sample:
    rows, inner, columns = draw.size(600), draw.size(80), draw.size(80)
    bias = draw.normal(columns) if draw.one_of(True, False) else None

    def oracle(lhs, rhs, bias):
        return (lhs @ rhs + (0 if bias is None else bias),)

    operands = {"lhs": draw.normal(rows, inner), "rhs": draw.normal(inner, columns), "bias": bias}
    return Sample(operands, oracle)


def gemm_bias(draw: Draw) -> Sample:
    of = gemm(draw)
    return Sample({**of.arguments, "bias": draw.normal(of.arguments["rhs"].shape[1])}, of.oracle)


def masked_scores(draw: Draw) -> Sample:
    before = [draw.size(4) for _ in range(draw.one_of(1, 2))]
    rows, inner, columns = draw.size(), draw.size(), draw.size()
    operands = {
        "lhs": draw.normal(*before, rows, inner),
        "rhs": draw.normal(*before, inner, columns),
        "mask": draw.normal(rows, columns),
    }
    return Sample(
        {**operands, "scale": 0.3}, lambda lhs, rhs, mask, scale: (lhs @ rhs * scale + mask,)
    )


# Accumulators


def counter(draw: Draw) -> Any:
    return draw.one_of(0.0, 3.0, torch.tensor(0.0), torch.tensor(2.0))


def mean(t: torch.Tensor, value: torch.Tensor, step: Any) -> torch.Tensor:
    return (t * step + value) / (step + 1)


def accumulate_gemm_(draw: Draw, total: torch.dtype | None = None) -> Sample:
    rows, inner, columns = draw.size(80), draw.size(80), draw.size(80)
    operands = {
        "t": draw.normal(rows, columns, dtype=total or draw.one_of(F32, draw.dtype)),
        "lhs": draw.normal(rows, inner),
        "rhs": draw.normal(inner, columns),
        "step": counter(draw),
    }
    return Sample(operands, lambda t, lhs, rhs, step: (mean(t, lhs @ rhs, step),))


def accumulate_gemm_sumsq_(draw: Draw) -> Sample:
    def oracle(t, lhs, rhs, step):
        total = mean(t, lhs @ rhs, step)
        return total, total.square().sum()

    return Sample(accumulate_gemm_(draw, F32).arguments, oracle)


def accumulate_column_sum_(draw: Draw) -> Sample:
    columns = draw.size()
    operands = {
        "t": draw.normal(columns, dtype=draw.one_of(F32, draw.dtype)),
        "X": draw.normal(draw.size(80), columns),
        "step": counter(draw),
    }
    return Sample(operands, lambda t, X, step: (mean(t, X.sum(0), step),))


def table_rows(t: torch.Tensor, dy: torch.Tensor, indices: Any, zero_OOR: bool) -> torch.Tensor:
    """dy at its rows of zeros, one after the other; outside, nothing or the nearest row."""
    found = torch.zeros_like(t)
    for row, index in zip(dy.reshape(-1, t.shape[1]), indices.reshape(-1).tolist()):
        if 0 <= index < len(t) or not zero_OOR:
            found[min(max(index, 0), len(t) - 1)] += row
    return found


def row_operands(draw: Draw) -> dict[str, Any]:
    rows, columns = draw.size(), draw.size()
    shape = [draw.size(6) for _ in range(draw.one_of(1, 2))]
    indices = [draw.random.randint(-2, rows + 1) for _ in range(math.prod(shape))]
    return {
        "t": draw.normal(rows, columns, dtype=F32),
        "dy": draw.normal(*shape, columns),
        "indices": torch.tensor(indices, dtype=torch.int32).reshape(shape),
        "zero_OOR": draw.one_of(True, False),
    }


def accumulate_gather_grad_(draw: Draw) -> Sample:
    operands = {**row_operands(draw), "step": counter(draw)}
    operands["t"] = operands["t"].to(draw.one_of(F32, draw.dtype))

    def oracle(step, **operands):
        return (mean(operands["t"], table_rows(**operands), step),)

    return Sample(operands, oracle)


def scatter_add_rows_(draw: Draw) -> Sample:
    return Sample(row_operands(draw), lambda t, **rest: (t + table_rows(t, **rest),))


# Cross entropy of bounded logits


def loss_of_bounded(logits, indices, cap):
    """Log-sum-exp, and the logit at the index, of logits that a cap bounds."""
    y = logits if cap is None else cap * torch.tanh(logits / cap)
    wide = indices.long()
    is_inside = (wide >= 0) & (wide < logits.shape[1])
    picked = y.gather(1, torch.where(is_inside, wide, 0)[:, None])[:, 0] * is_inside
    return torch.logsumexp(y, 1), picked


def softcap_logsumexp_and_pick(draw: Draw) -> Sample:
    rows, classes = draw.size(), draw.size()
    return Sample(
        {
            "logits": draw.normal(rows, classes) * 3,
            "indices": torch.tensor(
                [draw.random.randint(-1, classes) for _ in range(rows)], dtype=torch.int32
            ),
            "cap": draw.one_of(1.5, 30.0),
        },
        loss_of_bounded,
    )


def softcap_logsumexp_and_pick_grad(draw: Draw) -> Sample:
    of = softcap_logsumexp_and_pick(draw).arguments
    rows = len(of["indices"])
    first, second = (draw.normal(rows, dtype=F32) for _ in range(2))
    total = loss_of_bounded(of["logits"].double(), of["indices"], of["cap"])[0].float()

    def oracle(d_logsumexp, d_picked, logsumexp, logits, indices, cap):
        at = logits.detach().requires_grad_()
        results = loss_of_bounded(at, indices, cap)
        return torch.autograd.grad(results, at, (d_logsumexp, d_picked))

    return Sample(
        {"d_logsumexp": first, "d_picked": second, "logsumexp": total, **of},
        oracle,
    )


def cross_entropy_and_grad(draw: Draw) -> Sample:
    of = softcap_logsumexp_and_pick(draw).arguments
    cap, rows = draw.one_of(None, of["cap"]), len(of["indices"])
    first, second = (draw.normal(rows, dtype=F32) for _ in range(2))

    def oracle(d_logsumexp, d_picked, logits, indices, cap):
        at = logits.detach().requires_grad_()
        results = loss_of_bounded(at, indices, cap)
        (gradient,) = torch.autograd.grad(results, at, (d_logsumexp, d_picked))
        return *(t.detach() for t in results), gradient

    return Sample({"d_logsumexp": first, "d_picked": second, **of, "cap": cap}, oracle)


# AdamW


def adamw_(draw: Draw) -> Sample:
    shape = [draw.size() for _ in range(draw.one_of(1, 2))]
    first, second = draw.one_of(F32, draw.dtype), draw.one_of(F32, draw.dtype)
    operands = {
        "var": draw.normal(*shape),
        "grad": draw.normal(*shape),
        "scale": draw.one_of(None, 0.5, torch.tensor(0.25)),
        "first": draw.normal(*shape, dtype=first),
        "second": lying(draw.normal(*shape, dtype=second).abs() + 0.1, draw.layout),
        "step": torch.tensor(draw.one_of(1.0, 4.0)),
        "minus_lr": draw.one_of(-1e-2, torch.tensor(-1e-2)),
        "beta1": 0.9,
        "beta2": 0.99,
        "epsilon": 1e-6,
        "weight_decay": draw.one_of(None, 0.1),
    }

    def oracle(
        var, grad, scale, first, second, step, minus_lr, beta1, beta2, epsilon, weight_decay
    ):
        g = grad * (1 if scale is None else scale)
        m, v = beta1 * first + (1 - beta1) * g, beta2 * second + (1 - beta2) * g**2
        update = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + epsilon)
        return var + minus_lr * (update + (weight_decay or 0) * var), m, v

    return Sample(operands, oracle)


def adamw_where_(draw: Draw) -> Sample:
    of = adamw_(draw)

    def oracle(condition, **operands):
        kept = tuple(operands[n] for n in ("var", "first", "second"))
        return of.oracle(**operands) if condition else kept

    return Sample({"condition": torch.tensor(draw.one_of(True, False)), **of.arguments}, oracle)


MAKERS: dict[str, Callable[[Draw], Sample]] = {
    f"fused_{make.__name__}": make
    for make in (
        attention,
        attention_no_probs,
        attention_grad,
        attention_grad_packed,
        flash_attention,
        flash_attention_grad,
        gemm,
        gemm_bias,
        masked_scores,
        accumulate_gemm_,
        accumulate_gemm_sumsq_,
        accumulate_column_sum_,
        accumulate_gather_grad_,
        scatter_add_rows_,
        softcap_logsumexp_and_pick,
        softcap_logsumexp_and_pick_grad,
        cross_entropy_and_grad,
        adamw_,
        adamw_where_,
        refresh_view_,
        write_back_,
    )
}
