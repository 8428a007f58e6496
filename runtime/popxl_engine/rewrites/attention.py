"""Softmax attention and its gradient as one op each."""

from typing import Any, Dict, List, Optional, Tuple

from popxl.graph import Graph
from popxl.values import Tensor

from popxl_engine.ops.attention import attention, attention_grad
from popxl_engine.ops.gemm import masked_scores
from popxl_engine.rewrites.match import Steps, fused_step, scalar_constant
from popxl_engine.steps import Step

SWAPPED = (0, 1, 3, 2)


def fuse_attention(steps: List[Step], graph: Graph) -> List[Step]:
    """Scores with scale and mask, their softmax, dropout of it, and its product with values."""
    found = Steps(steps, graph)
    for i, step in enumerate(steps):
        if step.definition.name != "matmul" or step.arguments["output_type"] is not None:
            continue
        dropping = _maker(found, step.arguments["lhs"], "dropout")
        probs = step.arguments["lhs"] if dropping is None else steps[dropping].arguments["t"]
        normalising = _maker(found, probs, "softmax")
        if (
            normalising is None
            or probs.rank != 4
            or steps[normalising].arguments["axis"] not in (-1, 3)
        ):
            continue
        scoring = found.made_by(steps[normalising].arguments["t"], masked_scores.name)
        value = step.arguments["rhs"]
        if (
            scoring is None
            or value.shape[:2] != probs.shape[:2]
            or found.writes_between(scoring, i)
        ):
            continue
        if value.shape[3] != steps[scoring].arguments["lhs"].shape[3]:
            continue
        absorbed = [n for n in (scoring, normalising, dropping) if n is not None]
        outputs = tuple(t for n in absorbed[1:] for t in steps[n].outputs) + step.outputs
        if _only_after(found, outputs[:-1], i, absorbed):
            of = steps[scoring].arguments
            arguments = {"query": of["lhs"], "key_t": of["rhs"], "value": value, "mask": of["mask"]}
            arguments |= {"scale": of["scale"], **_dropped(steps, dropping)}
            found.replace(i, fused_step(attention, arguments, outputs, step.source), *absorbed)
    return found.result()


def fuse_attention_grad(steps: List[Step], graph: Graph) -> List[Step]:
    """The products around a softmax's gradient, with the dropout before it and the scale after
    it.
    """
    found = Steps(steps, graph)
    for i, step in enumerate(steps):
        if step.definition.name == "softmax_grad" and (match := _gradient(found, i)) is not None:
            indices, arguments, outputs = match
            last = max(indices)
            if not found.writes_between(min(indices), last) and _only_after(
                found, outputs, last, indices
            ):
                absorbed = [n for n in indices if n != last]
                found.replace(
                    last,
                    fused_step(attention_grad, arguments, outputs, steps[last].source),
                    *absorbed,
                )
    return found.result()


def _gradient(
    found: Steps, i: int
) -> Optional[Tuple[List[int], Dict[str, Any], Tuple[Tensor, ...]]]:
    """(steps of the pattern around a softmax's gradient, the fused step's arguments, its
    outputs).
    """
    steps, a = found.steps, found.steps[i].arguments
    probs, d = a["y"], a["dy"]
    dropping = found.made_by(d, "dropout")
    before = found.made_by(d if dropping is None else steps[dropping].arguments["t"], "matmul")
    if before is None or probs.rank != 4 or a["axis"] not in (-1, 3):
        return None
    dy, value_t = steps[before].arguments["lhs"], steps[before].arguments["rhs"]
    scaling = _only_user(found, steps[i].outputs[0], "mul")
    if scaling is None or (scale := scalar_constant(steps[scaling].arguments["rhs"])) is None:
        return None
    scaled = steps[scaling].outputs[0]
    products = found.users.get(scaled, [])
    by_key = next((n for n in products if steps[n].arguments.get("lhs") is scaled), None)
    by_query = next((n for n in products if steps[n].arguments.get("rhs") is scaled), None)
    by_dy = _transposed_product(found, dy)
    if (
        by_key is None
        or by_query is None
        or by_dy is None
        or len(products) != 2
        or scaled in found.outputs
    ):
        return None
    indices = [
        n for n in (before, dropping, i, scaling, by_key, by_query, by_dy[0]) if n is not None
    ]
    multiplying = [steps[n] for n in (before, by_key, by_query, by_dy[0])]
    if any(
        s.definition.name != "matmul" or s.arguments["output_type"] is not None for s in multiplying
    ):
        return None
    key, query_t = steps[by_key].arguments["rhs"], steps[by_query].arguments["lhs"]
    if any(t.rank != 4 or t.shape[:2] != probs.shape[:2] for t in (dy, query_t, key, value_t)):
        return None
    if dy.shape[3] != key.shape[3]:
        return None
    arguments = {
        "dy": dy,
        "query_t": query_t,
        "key": key,
        "value_t": value_t,
        "probs": probs,
    }
    arguments |= {
        "dropped_probs": by_dy[1],
        "scale": scale,
        **_dropped(steps, dropping),
        "mask": None,
    }
    return indices, arguments, tuple(steps[n].outputs[0] for n in (by_key, by_query, by_dy[0]))


def _maker(found: Steps, t: Any, name: str) -> Optional[int]:
    """The step that makes a tensor, if it is an op of this name; others may use the tensor as
    well.
    """
    index = found.maker.get(t) if isinstance(t, Tensor) else None
    is_it = (
        index is not None
        and index not in found.removed
        and found.steps[index].definition.name == name
    )
    return index if is_it else None


def _only_user(found: Steps, t: Tensor, name: str) -> Optional[int]:
    """The one step that uses a tensor, as its left operand, if it is an op of this name."""
    users = found.users.get(t, [])
    if len(users) != 1 or t in found.outputs or users[0] in found.removed:
        return None
    step = found.steps[users[0]]
    return users[0] if step.definition.name == name and step.arguments["lhs"] is t else None


def _transposed_product(found: Steps, dy: Tensor) -> Optional[Tuple[int, Tensor]]:
    """(the product x.T @ dy, x)."""
    for n in found.users.get(dy, []):
        step = found.steps[n]
        if step.definition.name == "matmul" and step.arguments["rhs"] is dy:
            made = _maker(found, step.arguments["lhs"], "transpose")
            if made is not None and found.steps[made].arguments["permutation"] == SWAPPED:
                return n, found.steps[made].arguments["t"]
    return None


def _only_after(found: Steps, made: Tuple[Tensor, ...], last: int, absorbed: List[int]) -> bool:
    """Whether nobody but absorbed steps uses, before the last one, what a fused step makes
    there.
    """
    return all(n >= last or n in absorbed for t in made for n in found.users.get(t, []))


def _dropped(steps: List[Step], dropping: Optional[int]) -> Dict[str, Any]:
    if dropping is None:
        return {"seed_tensor": None, "p": 0.0}
    return {
        "seed_tensor": steps[dropping].arguments["seed_tensor"],
        "p": steps[dropping].arguments["p"],
    }
