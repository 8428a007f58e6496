"""The places of ops and tensors, as far as that is known: their virtual device and tile set.
Placement never changes a number.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

TileSet = Literal["compute", "io"]
DEFAULT_IPU = 0
"""Virtual device of ops that are built outside `popxl.ipu`."""
NO_IPU = -1
"""Stands for that of ops that are built inside ``popxl.ipu(None)``: they have none."""


class Place(NamedTuple):
    """A tensor's virtual device and tile set, None where no op decides it: variables, constants and
    inputs; and results of ops without a device.
    """

    ipu: int | None
    tile_set: TileSet | None


NOWHERE = Place(None, None)


def check_one_place(where: str, places: Mapping[str, Place]) -> None:
    """ValueError if tensors are known to be on different virtual devices or tile sets."""
    if len({at for at in places.values() if at != NOWHERE}) < 2:
        return
    devices = {
        name: f"virtual device {at.ipu}" for name, at in places.items() if at.ipu is not None
    }
    tiles = {name: f"{at.tile_set} tiles" for name, at in places.items() if at.tile_set is not None}
    _check_equal(where, devices, "virtual device", "ops.ipu_copy")
    _check_equal(where, tiles, "tile set", "ops.io_tile_copy")


def _check_equal(where: str, known: dict[str, str], what: str, copy: str) -> None:
    if len(set(known.values())) > 1:
        given = ", ".join(f"{name} on {value}" for name, value in known.items())
        raise ValueError(f"{where}: got {given}; expected one {what}. Move operands with {copy}.")
