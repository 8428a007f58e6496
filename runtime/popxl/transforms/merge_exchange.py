"""Grouping host and remote transfers. An executor may overlap them anyway: results never change."""

from collections.abc import Iterator
from contextlib import contextmanager

from popxl.context import get_current_graph, in_sequence, io_tiles
from popxl.opdef import Op
from popxl.transforms.storage import TRANSFERS


def _exchanges(ops: list[Op]) -> int:
    """How many exchanges the transfers among ``ops`` need: those that do not depend on each other
    share one.
    """
    depth: dict[Op, int] = {}
    for op in ops:
        before = max((depth.get(t._op, 0) for t in op.inputs if t._op is not None), default=0)
        depth[op] = before + bool(op.definition.effects & TRANSFERS)
    return max(depth.values(), default=0)


@contextmanager
def _recorded() -> Iterator[list[Op]]:
    graph = get_current_graph()
    made: list[Op] = []
    handle = graph.register_op_created_hook(made.append)
    try:
        yield made
    finally:
        graph.remove_op_created_hook(handle)


@contextmanager
def merge_exchange() -> Iterator[None]:
    """Treat the host and remote transfers made inside as one exchange, as far as they do not depend
    on each other.

    Accepted for PopXL programs: transfers run as early as their operands allow with or without it.
    """
    get_current_graph()
    yield


@contextmanager
def io_tile_exchange(verify_overlap: bool = True) -> Iterator[None]:
    """`io_tiles`, `merge_exchange` and ``in_sequence(False)`` together.

    Raises:
        RuntimeError: with ``verify_overlap``, transfers made inside depend on each other and cannot
            be one exchange.
    """
    with _recorded() as made, io_tiles(), merge_exchange(), in_sequence(False):
        yield
    exchanges = _exchanges(made)
    if verify_overlap and exchanges > 1:
        raise RuntimeError(
            f"io_tile_exchange: got transfers that need {exchanges} exchanges, because some "
            "depend on others; expected one. Move the dependent ones out of the context, or pass "
            "verify_overlap=False."
        )
