"""Contexts that group transfers change nothing, and say when the transfers cannot be grouped."""

import popxl
import pytest
from popxl import ops
from popxl.transforms import io_tile_exchange, merge_exchange


@pytest.fixture
def streams() -> tuple:
    return popxl.h2d_stream((2,), popxl.float32), popxl.d2h_stream((2,), popxl.float32)


@pytest.fixture(autouse=True)
def main_graph() -> object:
    with popxl.Ir().main_graph as main:
        yield main


def test_independent_transfers_are_one_exchange(streams: tuple) -> None:
    h2d, d2h = streams
    x = ops.host_load(h2d)
    with io_tile_exchange():
        y = ops.host_load(h2d)
        ops.host_store(d2h, x)
    assert y.tile_set == "io" and x.tile_set == "compute"


def test_dependent_transfers_are_an_error_unless_permitted(streams: tuple) -> None:
    h2d, d2h = streams
    with pytest.raises(RuntimeError, match="need 2 exchanges"):
        with io_tile_exchange():
            ops.host_store(d2h, ops.exp(ops.host_load(h2d)))
    with io_tile_exchange(verify_overlap=False):
        ops.host_store(d2h, ops.host_load(h2d))


def test_transfers_before_the_context_do_not_count(streams: tuple) -> None:
    h2d, d2h = streams
    x = ops.exp(ops.host_load(h2d))
    with io_tile_exchange():
        ops.host_store(d2h, x)


def test_merge_exchange_accepts_any_transfers(streams: tuple, main_graph: popxl.Graph) -> None:
    h2d, d2h = streams
    with merge_exchange():
        ops.host_store(d2h, ops.host_load(h2d))
    assert [o.definition.name for o in main_graph.ops] == ["host_load", "host_store"]


def test_an_error_inside_is_not_replaced(streams: tuple) -> None:
    h2d, d2h = streams
    with pytest.raises(KeyError):
        with io_tile_exchange():
            ops.host_store(d2h, ops.host_load(h2d))
            raise KeyError
