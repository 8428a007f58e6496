"""Attention of a few queries in one pass over keys and values, beside the same in float64."""

import pytest
import torch
from helpers.matrices import random
from popxl_engine.kernels.attention import attention_of_few_queries, composed_attention
from popxl_engine.native import library as native

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="no C++ compiler: the plain kernels run"
)
SHAPES = [(1, 12, 1, 80, 64), (2, 3, 4, 37, 20), (3, 2, 8, 70, 33)]
"""Batch, heads, queries, keys, and the width of a head."""


def operands(shape, dtype):
    """Operands as a step of generation has them: queries beside one another, a mask for each
    sequence.
    """
    batch, heads, queries, keys, width = shape
    query = random(batch, queries, heads, width, dtype=dtype, seed=1).transpose(1, 2)
    key, value = (random(batch, heads, keys, width, dtype=dtype, seed=seed) for seed in (2, 3))
    mask = random(batch, 1, queries, keys, dtype=dtype, seed=4)
    mask[..., keys - 5 :] = -torch.inf
    mask[0, :, :, :3] = -torch.inf
    return query, key.transpose(2, 3), value, mask


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_results_are_those_of_the_composition_in_float64(shape, dtype, tolerance):
    given = operands(shape, dtype)
    exact = composed_attention(*(t.double() for t in given), shape[4] ** -0.5, None, 0.0)
    found = attention_of_few_queries(*given, shape[4] ** -0.5, None, 0.0)
    for got, expected in zip(found, exact):
        assert got.dtype == dtype and got.shape == expected.shape
        assert (got.double() - expected).abs().max() < tolerance * max(1, expected.abs().max())


def test_a_query_has_the_same_bits_with_any_threads_and_other_queries():
    before, given = torch.get_num_threads(), operands(SHAPES[2], torch.float32)
    try:
        found = []
        for threads in (1, 5):
            torch.set_num_threads(threads)
            found.append(attention_of_few_queries(*given, 1.0, None, 0.0)[1])
            query, key_t, value, mask = given
            rows = [
                attention_of_few_queries(
                    query[:, :, i : i + 1], key_t, value, mask[:, :, i : i + 1], 1.0, None, 0.0
                )[1]
                for i in range(SHAPES[2][2])
            ]
            found.append(torch.cat(rows, 2))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_what_is_not_finite_or_sees_nothing_is_nan_as_in_the_composition():
    query, key_t, value, mask = operands(SHAPES[1], torch.float32)
    mask[0, 0, 1] = -torch.inf
    query[1, 2, 3, 4] = torch.nan
    key_t[1, 0, 0, 7] = torch.nan
    found, expected = (
        attend(query, key_t, value, mask, 0.3, None, 0.0)
        for attend in (attention_of_few_queries, composed_attention)
    )
    for got, like in zip(found, expected):
        assert got.isnan().any()
        assert torch.equal(got.isnan(), like.isnan())


def test_many_queries_and_other_masks_and_types_are_composed():
    query, key_t, value, mask = operands((1, 2, 9, 16, 8), torch.float32)
    for taken in (
        (query, key_t, value, mask),
        (query[:, :, :3], key_t, value, mask[0, 0, :3, 8:9].expand(3, 16)),
        tuple(
            t[..., :3, :].double() if t is query or t is mask else t.double()
            for t in (query, key_t, value, mask)
        ),
    ):
        found = attention_of_few_queries(*taken, 0.3, None, 0.0)
        composed = composed_attention(*taken, 0.3, None, 0.0)
        assert all(torch.equal(got, like) for got, like in zip(found, composed))
