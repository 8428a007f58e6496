"""What a CPU cannot honour is accepted, can be read back, changes nothing, and is said once, at DEBUG."""

import logging

import numpy as np
import popxl
import pytest
from popxl import ops


def product(hints: bool):
    """(program, its output stream): a product, with every kind of hint or with none."""
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.arange(6, dtype=np.float32).reshape(2, 3))
        if hints:
            options = ir._pb_ir.getSessionOptions()
            options.partialsTypeMatMuls, options.useHostCopyOps = "half", True
            with popxl.ipu(1), popxl.io_tiles():
                y = ops.matmul(x, x.T, available_memory_proportion=0.2, partials_type=popxl.float16)
            assert y.ipu == 1 and y.tile_set == "io" and options.partialsTypeMatMuls == "half"
        else:
            y = x @ x.T
        out = popxl.d2h_stream(y.shape, y.dtype)
        ops.host_store(out, y)
    return ir, out


@pytest.mark.parametrize("hints", [True, False])
def test_hints_are_reported_once_and_change_no_bit(hints, caplog):
    ir, out = product(hints)
    with caplog.at_level(logging.DEBUG, "popxl"):
        with popxl.Session(ir) as session:
            result = session.run()[out]
    said = [r.message for r in caplog.records if "without effect" in r.message]
    assert (
        said
        == [
            "without effect on this runtime: available_memory_proportion=, partials_type=, popxl.io_tiles, popxl.ipu, "
            "session option partialsTypeMatMuls, session option useHostCopyOps"
        ]
        * hints
    )
    np.testing.assert_array_equal(result, np.array([[5, 14], [14, 50]], np.float32))


def test_nothing_is_said_above_debug(caplog):
    ir, _ = product(hints=True)
    with caplog.at_level(logging.INFO, "popxl"), popxl.Session(ir):
        pass
    assert "without effect" not in caplog.text
