"""Gradients of attention that know its mask, and need no seed: the same numbers, only where both
are the forward's.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import popxl
import pytest
import torch
from helpers.attention_by_hand import attended, twisted
from helpers.attention_gradients import program
from helpers.attention_programs import SHAPES, dtypes, hiding, normal, ways
from helpers.fused_programs import observe
from helpers.streamed_attention import training
from popxl import Tensor
from popxl_engine.ir import Block, Instr
from popxl_engine.kernels.attention import attention, attention_grad


@pytest.mark.quick_every(7)
@ways
@dtypes
@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3]])
@pytest.mark.parametrize("band", [None, 3])
def test_gradients_are_the_same(
    shape: tuple[int, ...],
    band: int | None,
    p: float,
    dtype: torch.dtype,
    way: str,
    by: Any,
) -> None:
    by(way)
    *_, queries, keys, _ = shape
    mask = hiding(queries, keys, band or keys, dtype)
    operands, probs, seed = attended(shape, mask, dtype, p)
    expected = attention_grad(*operands, *probs, 0.2, seed, p)
    assert all(t.abs().sum() > 0 for t in expected)
    for one, other in zip(attention_grad(*operands, *probs, 0.2, None, p, mask), expected):
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
    probs, _ = attention(query, key.transpose(2, 3), value, mask, 0.2, None, 0.0)
    operands = (
        dy,
        query.transpose(2, 3),
        key,
        value.transpose(2, 3),
        probs,
        probs,
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


def known(build: Callable[[popxl.Ir], Sequence[Tensor]]) -> list[tuple[bool, bool]]:
    """(whether what hides keys is known, whether it draws) of each gradient; the program's numbers are the
    interpreter's.
    """
    expected, _ = observe(build, True)
    found, engine = observe(build, False)
    for name, (value, _) in found.items():
        np.testing.assert_allclose(value, expected[name][0], rtol=1e-5, atol=1e-5)
    arguments = [instr.arguments for instr in gradients_in(engine.program.block)]
    return [(a["mask"] is not None or a["causal"], a["seed_tensor"] is not None) for a in arguments]


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
    "probs as factors": (True, True),
    "mask is changed": (False, False),
    "seed is changed": (True, True),
    "other probs": (False, True),
    "probs come dropped": (False, True),
}


@pytest.mark.parametrize("twist, expected", TWISTS.items())
def test_only_what_is_the_forwards_is_known(twist: str, expected: tuple[bool, bool]) -> None:
    assert known(twisted(twist)) == [expected]
