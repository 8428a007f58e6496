"""Gradients of attention that know its mask, and need no seed: the same numbers, only where both
are the forward's.
"""

import math
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import popxl
import pytest
import torch
from popxl import Tensor, ops
from popxl.ops.normalisation import softmax_grad
from popxl_engine.ir import Block, Instr
from popxl_engine.kernels.attention import attention, attention_grad
from test_fused_attention import DATA, MASK, SHAPES, dtypes, hiding, normal, ways
from test_joined_gradients import program
from test_rewrites import observe
from test_streamed_attention import training


def attended(
    shape: Tuple[int, ...], mask: torch.Tensor, dtype: torch.dtype, p: float
) -> Tuple[Any, Any, Any]:
    """Of an attention: its gradient's operands, its probabilities with what is left of them, and
    its seeds.
    """
    batch, heads, queries, keys, width = shape
    query, key, value, dy = (
        normal(dtype, batch, heads, n, width, seed=i, is_nested=True)
        for i, n in enumerate((queries, keys, keys, queries))
    )
    seed = torch.arange(5, 5 + 2 * batch).to(torch.uint32).reshape(batch, 2) if p else None
    shares, *dropped, _ = attention(query, key.transpose(2, 3), value, mask, 0.2, seed, p)
    operands = (dy, query.transpose(2, 3), key, value.transpose(2, 3))
    return operands, (shares, (dropped or [shares])[0]), seed


@ways
@dtypes
@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3]])
@pytest.mark.parametrize("band", [None, 3])
def test_gradients_are_the_same(
    shape: Tuple[int, ...],
    band: Optional[int],
    p: float,
    dtype: torch.dtype,
    way: str,
    by: Any,
) -> None:
    by(way)
    *_, queries, keys, _ = shape
    mask = hiding(queries, keys, band or keys, dtype)
    operands, shares, seed = attended(shape, mask, dtype, p)
    expected = attention_grad(*operands, *shares, 0.2, seed, p)
    assert all(t.abs().sum() > 0 for t in expected)
    for one, other in zip(attention_grad(*operands, *shares, 0.2, None, p, mask), expected):
        if way == "parts":
            torch.testing.assert_close(
                one, other, rtol=0.02 if dtype is torch.bfloat16 else 1e-5, atol=1e-3
            )
        else:
            assert torch.equal(one, other)


@ways
@dtypes
def test_what_a_query_without_keys_touches_is_no_number(
    dtype: torch.dtype, way: str, by: Any
) -> None:
    by(way)
    query, key, value, dy = (normal(dtype, 1, 1, 96, 8, seed=i) for i in range(4))
    mask = hiding(96, 96, 96, dtype)
    mask[3] = -math.inf
    shares, _ = attention(query, key.transpose(2, 3), value, mask, 0.2, None, 0.0)
    operands = (
        dy,
        query.transpose(2, 3),
        key,
        value.transpose(2, 3),
        shares,
        shares,
        0.2,
        None,
        0.0,
    )
    for one, other in zip(attention_grad(*operands, mask), attention_grad(*operands)):
        assert torch.equal(one.isnan(), other.isnan()) and one.isnan().any()


# Programs


def gradients_in(block: Block) -> Iterator[Instr]:
    for instr in block.instrs:
        for body in instr.bodies:
            yield from gradients_in(body)
        if instr.definition is not None and "attention_grad" in instr.definition.name:
            yield instr


def known(build: Callable[[popxl.Ir], Sequence[Tensor]]) -> List[Tuple[bool, bool]]:
    """(whether its mask is known, whether it draws) of each gradient; the program's numbers are the
    interpreter's.
    """
    expected, _ = observe(build, True)
    found, engine = observe(build, False)
    for name, (value, _) in found.items():
        np.testing.assert_allclose(value, expected[name][0], rtol=1e-5, atol=1e-5)
    arguments = [instr.arguments for instr in gradients_in(engine.program.block)]
    return [(a["mask"] is not None, a["seed_tensor"] is not None) for a in arguments]


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_gradient_in_the_same_block_knows_both(p: float) -> None:
    assert known(program(popxl.float32, p, "")) == [(True, False)]


@pytest.mark.parametrize(
    "options", [{}, {"micro_batches": 3, "is_loop": True}, {"recomputing": False}], ids=str
)
def test_gradients_of_layers_know_the_mask(options: Any) -> None:
    assert known(training(popxl.float32, **options)) == [(True, False)]


TWISTS = {
    "": (True, False),
    "seed is copied": (True, False),
    "another seed": (True, True),
    "another p": (True, True),
    "other factors": (False, True),
    "shares as factors": (True, True),
    "mask is changed": (False, False),
    "seed is changed": (True, True),
    "other shares": (False, True),
    "shares come dropped": (False, True),
}


def twisted(twist: str, is_read: bool = True) -> Callable[[popxl.Ir], Sequence[Tensor]]:
    """Attention and its gradient by hand, with a twist that rules must see. Whether anything reads
    the result.
    """

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        query, key, value, dy = (popxl.variable(DATA[n], name=n) for n in "qkvd")
        mask, other = (
            popxl.variable(MASK[:4, :4], name="mask"),
            popxl.variable(np.ones((2, 6, 4, 4), np.float32) / 4),
        )
        seed, other_seed = (
            popxl.variable(np.array([3, n], np.uint32), name=f"seed{n}") for n in (4, 5)
        )
        asking = asked = query
        if twist == "a part of the query is changed":
            parts = [query[:, :, :1], query[:, :, 1:] + 1.0]
            asking = ops.concat(parts, axis=2)
        shares = ops.softmax(asking @ key.transpose((0, 1, 3, 2)) * 0.3 + mask, axis=-1)
        dropped = ops.dropout(shares, seed, 0.25)
        y = dropped @ value
        changed = {"mask is changed": mask, "seed is changed": seed, "query is changed": query}.get(
            twist
        )
        if changed is not None:
            ops.add_(changed, changed)
        if twist == "a part of the query is changed":
            ops.add_(parts[1], parts[1])
            asked = ops.concat(parts, axis=2)
        drawn_from = other_seed if twist == "another seed" else seed
        if twist == "seed is copied":
            (drawn_from,) = ops.call(ir.create_graph(lambda t: t, seed), seed)
        given = {"other shares": other, "shares come dropped": dropped}.get(twist, shares)
        factors = {"other factors": other, "shares as factors": shares}.get(twist, dropped)
        d = ops.dropout(
            dy @ value.transpose((0, 1, 3, 2)), drawn_from, 0.5 if twist == "another p" else 0.25
        )
        d = softmax_grad(d, given, -1) * (0.4 if twist == "another scale" else 0.3)
        by_key = d @ (value if twist == "another key" else key)
        found: List[Tensor] = [
            by_key,
            asked.transpose((0, 1, 3, 2)) @ d,
            factors.transpose((0, 1, 3, 2)) @ dy,
        ]
        return [
            *([y] if is_read else []),
            *([shares] if twist == "shares are read" else []),
            *found,
        ]

    return build


@pytest.mark.parametrize("twist, expected", TWISTS.items())
def test_only_what_is_the_forwards_is_known(twist: str, expected: Tuple[bool, bool]) -> None:
    assert known(twisted(twist)) == [expected]
