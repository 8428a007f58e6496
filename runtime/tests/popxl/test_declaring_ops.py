"""What a rule says that it returns is what its op's public function hands back."""

import inspect
import typing
from collections.abc import Sequence
from typing import Any

import popxl
import pytest
from popxl import opdef
from popxl.opdef import OPS, op
from popxl.tensor import Tensor, TensorSpec


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """Ops that tests declare end with them."""
    monkeypatch.setattr("popxl.opdef.OPS", dict(OPS))


def declared(returns: Any, count: int) -> Any:
    def rule(t: Tensor) -> Any:
        specs = [t.spec] * count
        kind = typing.get_origin(returns) or returns
        return specs[0] if kind is TensorSpec else kind(specs) if kind else None

    rule.__annotations__["return"] = returns
    return op(rule, name="for_this_test")


@pytest.mark.parametrize(
    "returns, count, kind",
    [
        (TensorSpec, 1, Tensor),
        (list[TensorSpec], 2, list),
        (list[TensorSpec], 1, list),
        (tuple[TensorSpec, ...], 1, tuple),
        (tuple[TensorSpec, TensorSpec], 2, tuple),
        (None, 0, type(None)),
    ],
)
def test_results_come_back_as_the_rule_returns_them(returns, count, kind):
    rule = declared(returns, count)
    with popxl.Ir().main_graph:
        found = rule(popxl.constant(1.0))
    assert isinstance(found, kind)
    if count and kind is not Tensor:
        assert len(found) == count
    public = inspect.signature(rule).return_annotation
    assert (typing.get_origin(public) or public or type(None)) is kind


POSTPONED = """
from __future__ import annotations
def rule(t: Tensor, n: int) -> list[TensorSpec]:
    return [t.spec] * n
"""


def test_annotations_that_are_read_later_are_read():
    names = {"Tensor": Tensor, "TensorSpec": TensorSpec, "__name__": __name__}
    exec(compile(POSTPONED, "rules.py", "exec", dont_inherit=True), names)
    rule = op(names["rule"], name="for_this_test")
    with popxl.Ir().main_graph:
        assert len(rule(popxl.constant(1.0), 1)) == 1
        with pytest.raises(TypeError, match="got t = float; expected a popxl.Tensor"):
            rule(1.0, 1)


@pytest.mark.parametrize("returns", [Sequence[TensorSpec], TensorSpec | None, Any])
def test_a_rule_that_does_not_say_how_many_it_returns_is_refused(returns):
    with pytest.raises(TypeError, match="for_this_test: got a rule that returns .*; expected Ten"):
        declared(returns, 1)
    assert "for_this_test" not in opdef.OPS
