"""Numbers and strings of other types than Python's own are the same arguments of ops."""

from dataclasses import replace
from enum import Enum, IntEnum
from typing import Any

import numpy as np
import popxl_engine.kernels  # noqa: F401 - registers every kernel
from helpers.op_cases import build, make_case
from helpers.op_samples import SAMPLES, over
from helpers.samples.sample import Sample
from popxl.op_records import PLAIN


class Name(str, Enum):
    """Strings with names, as programs have them."""


def in_other_types(value: Any, enums: bool) -> Any:
    """The same plain values, numbers and strings in numpy's types or as members of enumerations."""
    kind = type(value)
    if kind in (list, tuple):
        return kind(in_other_types(v, enums) for v in value)
    if not enums:
        forms = {bool: np.bool_, int: np.int64, float: np.float64, str: np.str_}
        return forms.get(kind, lambda v: v)(value)
    if kind in (int, bool):
        return IntEnum("Number", {"member": int(value)}).member
    return Name("Word", {"member": value}).member if kind is str else value


def in_types(value: Any) -> Any:
    """An op's argument as plain values, each with its exact type; of other things the type."""
    if isinstance(value, tuple):
        return tuple(map(in_types, value))
    return type(value), repr(value) if type(value) in PLAIN else None


@over([s for s in SAMPLES if s.attrs and s.op != "pow"])  # it makes tensors of other types
def test_numbers_in_other_types_are_the_same_arguments(sample: Sample) -> None:
    given = build(make_case(sample))
    for enums in (False, True):
        attrs = {name: in_other_types(value, enums) for name, value in sample.attrs.items()}
        other = build(make_case(replace(sample, attrs=attrs)))
        for expected, op in zip(given.graph.ops, other.graph.ops, strict=True):
            assert in_types((*op.arguments.values(),)) == in_types((*expected.arguments.values(),))
