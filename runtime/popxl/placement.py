"""Where tensors are, as far as that is known: their virtual device and tile set. Placement never
changes a number.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from popxl.values import Tensor

TileSet = Literal["compute", "io"]
DEFAULT_IPU = 0
"""Virtual device of ops that are built outside `popxl.ipu`."""


class Place(NamedTuple):
    """A tensor's virtual device and tile set, None where no op decides it: variables, constants and
    inputs.
    """

    ipu: int | None
    tile_set: TileSet | None


def place_of(t: "Tensor", known: "dict[Tensor, Place] | None" = None) -> Place:
    """Where the op that made a tensor put it; what a call returns is where the call, or the called
    graph, put it.

    Args:
        known: of tensors that were asked for on the way here; it gains more.
    """
    known = {} if known is None else known
    if t not in known:
        known[t] = _place_of(t, known)
    return known[t]


def _place_of(t: "Tensor", known: "dict[Tensor, Place]") -> Place:
    op = t._op
    if op is None:
        return Place(None, None)
    index = op.outputs.index(t)
    if not op.called():
        chosen = op.arguments["ipus"][index] if "ipus" in op.arguments else op.ipu
        return Place(DEFAULT_IPU if chosen is None else chosen, "io" if op.io_tiles else "compute")
    inner = {place_of(graph.outputs[index], known) for graph, _ in op.called()}
    ipu, tile_set = inner.pop() if len(inner) == 1 else Place(None, None)
    return Place(ipu if op.ipu is None else op.ipu, tile_set)


def device_of(t: "Tensor") -> int | None:
    """A tensor's virtual device: where it is made, else where the first op that uses it takes it.
    None if neither.
    """
    if t._op is not None:
        return place_of(t).ipu
    user = next((op for op in t._graph._ops if t in op.inputs), None)
    if user is None:
        return None
    if user.definition.name == "ipu_copy":
        return int(user.arguments["source"])
    return DEFAULT_IPU if user.ipu is None else user.ipu


def check_one_place(where: str, tensors: Mapping[str, "Tensor"]) -> None:
    """ValueError if tensors are known to be on different virtual devices or tile sets."""
    found = {name: place_of(t) for name, t in tensors.items()}
    devices = {name: f"virtual device {at.ipu}" for name, at in found.items() if at.ipu is not None}
    tiles = {name: f"{at.tile_set} tiles" for name, at in found.items() if at.tile_set is not None}
    _check_equal(where, devices, "virtual device", "ops.ipu_copy")
    _check_equal(where, tiles, "tile set", "ops.io_tile_copy")


def _check_equal(where: str, known: dict[str, str], what: str, copy: str) -> None:
    if len(set(known.values())) > 1:
        given = ", ".join(f"{name} on {value}" for name, value in known.items())
        raise ValueError(f"{where}: got {given}; expected one {what}. Move operands with {copy}.")
