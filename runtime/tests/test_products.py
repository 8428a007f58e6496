"""Matrix products go to the fastest library on this CPU; whatever the operands' strides, numbers and speed stay."""

import time

import pytest
import torch
from popxl_engine.kernels.linalg import matrix_product

WIDE = torch.randn(512, 1536, generator=torch.Generator().manual_seed(0))
OPERANDS = {
    "contiguous": WIDE[:, :512].contiguous(),
    "transposed": WIDE[:, :512].contiguous().t(),
    "columns of a wider one": WIDE[:, 512:1024],
    "transposed columns of a wider one": WIDE[:, 512:1024].t(),
    "every third column": WIDE[:, ::3],
    "one row expanded": WIDE[:1, :512].expand(512, 512),
    "one column expanded": WIDE[:, :1].expand(512, 512),
}


@pytest.mark.parametrize("lhs", OPERANDS)
@pytest.mark.parametrize("rhs", OPERANDS)
def test_products_of_views_equal_products_of_copies_and_are_not_slow(lhs, rhs):
    bias = WIDE[0, :512]
    start = time.process_time()
    result = matrix_product(OPERANDS[lhs], OPERANDS[rhs], bias)
    seconds = time.process_time() - start
    expected = OPERANDS[lhs].double() @ OPERANDS[rhs].double() + bias.double()
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-3)
    assert seconds < 0.5, "a thousandfold slower reference loop took over"
