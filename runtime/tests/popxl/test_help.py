"""`help(popxl.ops.X)` says what X does, the shapes that go in and come out, and the errors that its
refusals raise.
"""

import builtins
import inspect
import re

import popxl
from helpers.op_samples import REFUSALS
from helpers.ops_page import function, names_of_the_api
from helpers.quick import of_each
from helpers.samples.sample import Refusal
from popxl import ops

WITHOUT_TENSORS = {
    "code_copy", "multiply_tuple", "remote_code_load", "to_collective_op", "weight_decay_is_required",
}  # fmt: skip
over_functions = of_each(names_of_the_api())


def documentation(name: str) -> str:
    return inspect.getdoc(function(name)) or ""


def raised(name: str) -> "set[type]":
    """The errors that a docstring says are raised, with those of the functions that it refers
    to.
    """
    words = documentation(name)
    section = words.partition("Raises")[2] + words.partition("errors:")[2]
    named = re.findall(r"\b\w*Error\b", section)
    found = {getattr(popxl.errors, error, None) or getattr(builtins, error) for error in named}
    others = re.findall(r"as (?:for )?`(\w+)`", section)
    return found.union(*(raised(other) for other in others if other != name))


@over_functions
def test_the_summary_is_a_paragraph_of_its_own(name):
    summary, _, _ = documentation(name).partition("\n\n")
    assert 10 < len(summary) <= 120 and summary.endswith("."), summary


@over_functions
def test_shapes_are_said(name):
    assert name in WITHOUT_TENSORS or re.search(
        r"^Shapes\b.*:", documentation(name), re.MULTILINE
    ), documentation(name)


def of_every_op(refusal: Refusal) -> bool:
    """Whether `popxl.ops` itself says that all ops refuse this."""
    return any(
        words in refusal.says for words in ("popxl.Tensor", "current graph", "as a graph input")
    )


@over_functions
def test_what_the_refusals_of_the_samples_raise_is_said(name):
    for refusal in (r for r in REFUSALS if r.op == name and not of_every_op(r)):
        said = raised(name)
        assert any(
            issubclass(refusal.error, error) or issubclass(error, refusal.error) for error in said
        ), (
            f"raises {refusal.error.__name__} ({refusal.says}), which is not "
            f"in:\n{documentation(name)}"
        )


def test_what_all_ops_refuse_is_said_once():
    words = inspect.getdoc(ops)
    assert "TypeError" in words and "GraphError" in words
