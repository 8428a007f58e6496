"""Checks and small helpers that op functions outside the package use as well."""

import math

from popxl.dtypes import dtype
from popxl.graph import Graph
from popxl.op_records import place_of
from popxl.ops.casting import cast_if_needed
from popxl.ops.checks import normalise_axis
from popxl.placement import check_one_place
from popxl.tensor import Tensor

__all__ = [
    "cast_if_needed",
    "check_in_graph",
    "check_tensor_ipu_and_tile_set",
    "dtype",
    "handle_negative_axis",
]


def check_in_graph(graph: Graph, *args: Tensor, **tensors: Tensor) -> None:
    """Check that tensors belong to a graph.

    Raises:
        TypeError: for something that is no tensor.
        ValueError: for a tensor of another graph.
    """
    given = {**{f"args[{i}]": t for i, t in enumerate(args)}, **tensors}
    for name, t in given.items():
        if not isinstance(t, Tensor):
            raise TypeError(
                f"check_in_graph: got {name} = {type(t).__name__}; expected a popxl.Tensor. "
                "Make a constant of it."
            )
        if t not in graph:
            raise ValueError(
                f"check_in_graph: got {name} = %{t.name} from graph '{t._graph.name or 'main'}'; "
                f"expected a tensor of graph '{graph.name or 'main'}'. Pass it in as a graph "
                "input."
            )


def check_tensor_ipu_and_tile_set(*args: Tensor, **tensors: Tensor) -> None:
    """Check that tensors are on one virtual device and tile set, as far as that is known.

    Raises:
        ValueError: if two differ.
    """
    given = {**{f"args[{i}]": t for i, t in enumerate(args)}, **tensors}
    places = {name: place_of(t) for name, t in given.items()}
    check_one_place("check_tensor_ipu_and_tile_set", places)


def handle_negative_axis(t: Tensor, axis: int) -> int:
    """``axis`` counted from the front. ValueError if ``t`` has no such axis."""
    return normalise_axis("handle_negative_axis", t, axis)


def multiply_tuple(tup: tuple[int, ...]) -> int:
    """Product of the entries; 1 for none."""
    return math.prod(tup)
