"""What remote memory in files must know of a program: the order of its rows, and how many it uses at a time."""

import os
from typing import List, Optional, Tuple

from popxl.errors import GraphError
from popxl.ir import Ir

from popxl_engine.lowering import Block
from popxl_engine.machine.tier import Tier
from popxl_engine.machine.tier.rows import RowId, in_blocks, nbytes_of
from popxl_engine.planner.lending import rows_in_use
from popxl_engine.planner.sequence import Walk


def tier_of(ir: Ir, block: Optional[Block]) -> Optional[Tier]:
    """How to keep a program's rows in files; None where they are in memory. ``POPXL_LOOK_AHEAD=0``: no look-ahead.

    Args:
        block: of the compiled program; None where it is interpreted.
    """
    if ir.remote_files is None:
        return None
    places = [v.location_info for v in ir.main_graph.variables if v.location_info is not None]
    largest = max((in_blocks(nbytes_of(b)) for b in ir.remote_buffers), default=0)
    try:
        in_use, phase = rows_in_use(ir, lambda buffer: in_blocks(nbytes_of(buffer)))
    except GraphError:  # it finds out when it runs
        in_use, phase = 0, ""
    return Tier(
        files=ir.remote_files,
        events=_events(ir, block) if block is not None else None,
        variables={(place.buffer, place.offset) for place in places},
        needed=(in_use + largest if in_use else 0, f"phase {phase}"),
        look_ahead=os.environ.get("POPXL_LOOK_AHEAD", "1") not in ("", "0"),
    )


def _events(ir: Ir, block: Block) -> Optional[List[Tuple[RowId, bool]]]:
    """The rows that every run takes, as far as they follow from constants and loop counters alone."""
    buffers = {str(b.remote_buffer_id): b for b in ir.remote_buffers}
    found = []
    try:
        for event in Walk({}).block(block, {}):
            if event.kind != "collective":
                found.append(((buffers[event.name], event.row), event.kind == "store"))
    except GraphError:  # a row whose number is in a variable, or on the device
        return None
    return found
