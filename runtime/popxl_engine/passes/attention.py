"""Softmax attention and its gradient: the ops, and where programs compose them of products, scale,
mask, softmax and dropout.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from popxl_engine.ir import Block, Instr, Value
from popxl_engine.ops.attention import attention, attention_grad
from popxl_engine.ops.gemm import masked_scores
from popxl_engine.passes.rewriter import Rewriter, fused, kept_pattern, pattern

SWAPPED = (0, 1, 3, 2)
LAST = (-1, 3)
"""What says that an axis of four is the last one."""
PLAIN = {"positions": None, "causal": False, "window": None, "softcap": 0.0}
"""Attributes of an attention that a program composes."""


def fuse_attention(block: Block) -> Block:
    """Attention and its gradient in one kernel each, before autodiff or after it."""
    return _composed_gradients(_composed(_declared(block)))


def _declared(block: Block) -> Block:
    """The ops `attention` and `attention_grad`, where a kernel takes their operands."""
    rewriter = Rewriter(block)
    for i, instr in rewriter.ops("attention"):
        rewriter.replace(i, fused(instr, attention))
    for i, instr in rewriter.ops("attention_grad"):
        rewriter.replace(i, fused(instr, attention_grad, {**instr.arguments, "mask": None}))
    return rewriter.result()


def _composed(block: Block) -> Block:
    """Scores with scale and mask, their softmax, dropout of it, and its product with values."""
    scores = pattern(masked_scores.name, lhs="query", rhs="key_t", mask="mask", scale="scale")
    probs = kept_pattern("softmax", t=scores, axis="axis")
    dropped = kept_pattern("dropout", t=probs, seed_tensor="seed_tensor", p="p")
    rewriter = Rewriter(block)
    for i, instr in rewriter.ops("matmul"):
        for factor in (probs, dropped):
            match = rewriter.match(i, lhs=factor, rhs="value", output_type=None)
            if match is None:
                continue
            arguments = {"seed_tensor": None, "p": 0.0, **PLAIN, **match.arguments}
            makers = reversed(match.absorbed[:-1])
            outputs = [v for n in makers for v in rewriter.instrs[n].outputs]
            is_last = arguments.pop("axis") in LAST
            if is_last and _only_after(rewriter, outputs, i, match.absorbed):
                results = (*outputs, *instr.outputs)
                together = fused(instr, attention, arguments, results)
                rewriter.replace(i, together, *match.absorbed)
                break
    return rewriter.result()


class _Gradient(NamedTuple):
    """The positions of the parts of a gradient of attention."""

    d_dropped_probs: int
    """dy @ value_t."""
    dropping: int | None
    softmax_grad: int
    scaling: int
    d_query: int
    d_key_t: int
    d_value: int
    dropped_probs: Value
    """What was multiplied with values."""

    @property
    def positions(self) -> list[int]:
        """The positions of all parts."""
        return [n for n in self[:-1] if isinstance(n, int)]


def _composed_gradients(block: Block) -> Block:
    """The products around a softmax's gradient, with the dropout before it and the scale after
    it.
    """
    rewriter = Rewriter(block)
    for i, _ in rewriter.ops("softmax_grad"):
        parts = _gradient(rewriter, i)
        if parts is None or not _fits(rewriter, parts):
            continue
        last = max(parts.positions)
        results = (parts.d_query, parts.d_key_t, parts.d_value)
        outputs = tuple(rewriter.instrs[n].outputs[0] for n in results)
        if not rewriter.writes_between(min(parts.positions), last) and _only_after(
            rewriter, outputs, last, parts.positions
        ):
            arguments = _gradient_arguments(rewriter, parts)
            gradient = fused(rewriter.instrs[last], attention_grad, arguments, outputs)
            rewriter.replace(last, gradient, *(n for n in parts.positions if n != last))
    return rewriter.result()


def _gradient(rewriter: Rewriter, i: int) -> _Gradient | None:
    """The parts around a softmax's gradient, if they are there."""
    d = _argument(rewriter, i, "dy")
    dropping = rewriter.made_by(d, "dropout")
    d_dropped_probs = rewriter.made_by(
        d if dropping is None else _argument(rewriter, dropping, "t"), "matmul"
    )
    scaling = _only_user(rewriter, rewriter.instrs[i].outputs[0], "mul")
    if d_dropped_probs is None or scaling is None:
        return None
    scaled = rewriter.instrs[scaling].outputs[0]
    products = rewriter.users(scaled)
    by_key = next((n for n in products if _multiplies(rewriter, n, "lhs", scaled)), None)
    by_query = next((n for n in products if _multiplies(rewriter, n, "rhs", scaled)), None)
    by_dy = _transposed_product(rewriter, _argument(rewriter, d_dropped_probs, "lhs"))
    if by_key is None or by_query is None or by_dy is None:
        return None
    if len(products) != 2 or scaled in rewriter.uses.outputs:
        return None
    return _Gradient(d_dropped_probs, dropping, i, scaling, by_key, by_query, *by_dy)


def _fits(rewriter: Rewriter, parts: _Gradient) -> bool:
    """Whether the parts are those of one attention, as far as their shapes do not tell."""
    of_scores = rewriter.instrs[parts.softmax_grad]
    products = (parts.d_dropped_probs, parts.d_query, parts.d_key_t, parts.d_value)
    if any(
        not rewriter.instrs[n].is_op("matmul") or _argument(rewriter, n, "output_type") is not None
        for n in products
    ):
        return False
    factor = _argument(rewriter, parts.scaling, "rhs")
    is_number = rewriter.scalar(factor) is not None and factor.rank <= of_scores.outputs[0].rank
    return is_number and of_scores.arguments["axis"] in LAST


def _gradient_arguments(rewriter: Rewriter, parts: _Gradient) -> dict[str, Any]:
    return {
        "dy": _argument(rewriter, parts.d_dropped_probs, "lhs"),
        "query_t": _argument(rewriter, parts.d_key_t, "lhs"),
        "key": _argument(rewriter, parts.d_query, "rhs"),
        "value_t": _argument(rewriter, parts.d_dropped_probs, "rhs"),
        "probs": _argument(rewriter, parts.softmax_grad, "y"),
        "dropped_probs": parts.dropped_probs,
        "scale": rewriter.scalar(_argument(rewriter, parts.scaling, "rhs")),
        **_dropped(rewriter, parts.dropping),
        "mask": None,
        **PLAIN,
    }


def _argument(rewriter: Rewriter, index: int, name: str) -> Any:
    return rewriter.instrs[index].arguments[name]


def _multiplies(rewriter: Rewriter, index: int, side: str, v: Value) -> bool:
    """Whether a value is this operand of an instruction."""
    return rewriter.instrs[index].arguments.get(side) is v


def _only_user(rewriter: Rewriter, v: Value, name: str) -> int | None:
    """The one instruction that uses a value, as its left operand, if it is an op of this name."""
    users = rewriter.users(v)
    if len(users) != 1 or v in rewriter.uses.outputs or users[0] in rewriter.removed:
        return None
    user: Instr = rewriter.instrs[users[0]]
    return users[0] if user.is_op(name) and user.arguments["lhs"] is v else None


def _transposed_product(rewriter: Rewriter, dy: Value) -> tuple[int, Value] | None:
    """(the product x.T @ dy, x): one that no other gradient has."""
    for n in rewriter.users(dy):
        instr = rewriter.instrs[n]
        if instr.is_op("matmul") and instr.arguments["rhs"] is dy and n not in rewriter.removed:
            maker = rewriter.maker(instr.arguments["lhs"], "transpose")
            if maker is not None and _argument(rewriter, maker, "permutation") == SWAPPED:
                return n, _argument(rewriter, maker, "t")
    return None


def _only_after(
    rewriter: Rewriter, results: Sequence[Value], last: int, absorbed: Sequence[int]
) -> bool:
    """Whether nobody but absorbed instructions uses, before the last one, what a fused one makes
    there.
    """
    return all(n >= last or n in absorbed for v in results for n in rewriter.users(v))


def _dropped(rewriter: Rewriter, dropping: int | None) -> dict[str, Any]:
    if dropping is None:
        return {"seed_tensor": None, "p": 0.0}
    a = rewriter.instrs[dropping].arguments
    return {"seed_tensor": a["seed_tensor"], "p": a["p"]}
