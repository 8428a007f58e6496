"""Constant masks that are causal become attributes, and nothing holds them; other masks stay."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import popxl
import pytest
from helpers.attention_programs import hiding
from helpers.fake_gpu import CUDA
from helpers.fused_programs import observe
from helpers.streamed_attention import causal, training
from popxl import Tensor
from popxl.extensions import attention
from popxl_engine import compiler
from popxl_engine.passes.flash_attention import _say_what_is_plain
from popxl_engine.passes.hide_by_attributes import attributes_of

CAUSAL = {"mask": None, "causal": True, "window": None}
MASKS: dict[str, tuple[np.ndarray, Any]] = {
    "causal": (causal(6), CAUSAL),
    "by a finite number": (causal(6, -1e4), CAUSAL),
    "a piece of the queries": (causal(6)[4:], CAUSAL),
    "a step": (causal(6)[5:], CAUSAL),
    "fewer queries that see one key": (causal(6)[:1, :1], CAUSAL),
    "a piece that does not end at the last key": (causal(6)[:4], None),
    "nothing is hidden": (np.zeros((6, 6), np.float32), None),
    "faint": (causal(6, -100.0), None),
    "more is added": (causal(6) + 0.5, None),
    "more queries than keys": (causal(6)[:, :4], None),
    "every key is hidden": (np.full((4, 4), -1e4, np.float32), None),
    "every key of more": (np.full((3, 5), -1e4, np.float32), None),
    "every key of a query": (causal(6, -1e4) + np.where(np.arange(6) == 5, -1e4, 0)[:, None], None),
    "no queries": (np.zeros((0, 4), np.float32), None),
    "no keys": (np.zeros((4, 0), np.float32), None),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_causal_mask_is_known(name: str) -> None:
    mask, expected = MASKS[name]
    assert attributes_of(mask) == expected


@pytest.mark.parametrize("window", range(1, 7))
@pytest.mark.parametrize("queries", [1, 4, 6])
def test_a_window_is_known(queries: int, window: int) -> None:
    mask = hiding(queries, 6, window, popxl.float32.as_torch()).numpy()
    assert attributes_of(mask) == {**CAUSAL, "window": window if window < 6 else None}


@pytest.mark.parametrize("band", [6, 3])
def test_no_mask_is_held(band: int) -> None:
    mask = hiding(6, 6, band, popxl.float32.as_torch()).numpy()
    expected, _ = observe(training(popxl.float32, mask=mask), True)
    found, engine = observe(training(popxl.float32, mask=mask), False)
    for name, (value, _) in found.items():
        np.testing.assert_allclose(value, expected[name][0], rtol=1e-5, atol=1e-5)
    assert not any(c.shape == (6, 6) for c in engine.program.block.constants)


def test_the_log_says_once_what_a_gpu_has_no_kernel_for(caplog: Any) -> None:
    def build(query: Tensor) -> Sequence[Tensor]:
        return [attention(query, query, query, causal=True, window=n) for n in (2, 3)]

    _say_what_is_plain.cache_clear()
    for _ in range(2):
        ir = popxl.Ir()
        with ir.main_graph, popxl.in_sequence():
            for t in build(popxl.variable(np.ones((1, 1, 4, 8), np.float32))):
                popxl.ops.host_store(popxl.d2h_stream(t.shape, t.dtype), t)
        compiler.compile(ir, CUDA)
    assert caplog.text.count("attention with window takes products") == 1
