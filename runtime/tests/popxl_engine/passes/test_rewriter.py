"""What a pattern asks of the operands that it names."""

import numpy as np
import popxl
import pytest
from popxl import ops
from popxl_engine import compiler
from popxl_engine.passes.rewriter import Match, Rewriter, ScalarPattern, pattern


def match(factor: float, is_same: bool) -> Match | None:
    """The match of ``a * 2 * b + a * factor``, or with another value for the second ``a``."""
    ir = popxl.Ir()
    with ir.main_graph:
        a, b, c = (popxl.variable(np.ones(3, np.float32), name=name) for name in "abc")
        product = ops.mul(ops.mul(a, popxl.constant(2.0)), b)
        total = ops.add(product, ops.mul(a if is_same else c, popxl.constant(factor)))
        ops.host_store(popxl.d2h_stream(total.shape, total.dtype), total)
    rewriter = Rewriter(compiler.compile(ir, passes=()).block)
    ((index, _),) = rewriter.ops("add")
    scaled = pattern("mul", lhs="x", rhs=ScalarPattern("factor"))
    return rewriter.match(index, lhs=pattern("mul", lhs=scaled, rhs="y"), rhs=scaled)


def test_operands_are_found_by_their_names() -> None:
    found = match(factor=2.0, is_same=True)
    assert found is not None and len(found.absorbed) == 3
    assert found.arguments["factor"] == 2.0
    assert {n: found.arguments[n].name[0] for n in "xy"} == {"x": "a", "y": "b"}


@pytest.mark.parametrize("factor, is_same", [(2.0, False), (3.0, True)])
def test_what_has_one_name_in_a_pattern_is_one_thing(factor: float, is_same: bool) -> None:
    assert match(factor, is_same) is None
