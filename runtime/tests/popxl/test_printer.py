"""The listing of an IR: complete, readable, the same each time."""

import numpy as np
import popxl
from popxl import TensorSpec, ops
from popxl.extensions import to_text

X = TensorSpec((2, 3), popxl.float32)


def build() -> popxl.Ir:
    ir = popxl.Ir()

    def scale(x: popxl.Tensor, total: popxl.TensorByRef) -> popxl.Tensor:
        y = ops.mul(x, popxl.constant(0.1, popxl.float32, "tenth"))
        ops.add_(total, y)
        return y

    with ir.main_graph:
        v = popxl.variable(np.zeros((2, 3), np.float32), name="v")
        popxl.remote_variable(
            np.zeros(3, np.float32), popxl.remote_buffer((3,), popxl.float32, 4), 2, name="far"
        )
        table = popxl.constant(np.arange(12, dtype=np.int32), name="table")
        graph = ir.create_graph(scale, X, X)
        (y,) = ops.call(graph, ops.host_load(popxl.h2d_stream((2, 3), popxl.float32, "data")), v)
        with popxl.name_scope("head"):
            parts = ops.split(ops.cast(table, popxl.float32), 2)
            ops.concat([*parts, ops.sum(y, axis=0)])
        ops.host_store(popxl.d2h_stream((2, 3), popxl.float32, "result"), y)
    return ir


LISTING = """\
ir on 1 replica

graph 'main' () -> ()
  %v: float32[2, 3] = variable
  %far: float32[3] = remote variable, slot 2 of RemoteBuffer(1: 4 x float32[3])
  %table: int32[12] = ...
  %data_host_load: float32[2, 3] = host_load(h2d_stream=HostToDeviceStream(data: float32[2, 3]), name=None)
  %mul: float32[2, 3] = call('build.scale_subgraph(0)', [%data_host_load, %v])
  %head/table_float32: float32[12] = cast(%table, data_type=float32)
  %head/table_float32_split_0: float32[6], %head/table_float32_split_1: float32[6] = \
split(%head/table_float32, splits=2, axis=0)
  %head/sum: float32[3] = sum(%mul, axis=0, keepdims=False)
  %head/concat: float32[15] = concat([%head/table_float32_split_0, %head/table_float32_split_1, %head/sum], axis=0)
  host_store(d2h_stream=DeviceToHostStream(result: float32[2, 3]), %mul)

graph 'build.scale_subgraph(0)' (%x: float32[2, 3], %total: float32[2, 3] by ref) -> (%mul)
  %tenth: float32[] = 0.1
  %mul: float32[2, 3] = mul(%x, %tenth)
  %add: float32[2, 3] = add_(%total, %mul)
"""


def test_a_listing_shows_values_inputs_ops_attributes_and_outputs() -> None:
    assert to_text(build()) == LISTING


def test_the_same_program_gives_the_same_text() -> None:
    assert to_text(build()) == to_text(build())


def test_one_graph_can_be_listed() -> None:
    graph = build().main_graph.called_graphs[0]
    assert to_text(graph) == "\n".join(LISTING.splitlines()[-4:]) + "\n"


def test_shards_say_where_their_pieces_are() -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        popxl.replica_sharded_variable(np.zeros(5, np.float32), name="w")
        buffer = popxl.replica_sharded_buffer((5,), popxl.float32)
        popxl.remote_replica_sharded_variable(np.zeros(5, np.float32), buffer, name="r")
    assert to_text(ir).splitlines() == [
        "ir on 2 replicas",
        "",
        "graph 'main' () -> ()",
        "  %w: float32[5] = variable, 1/2 each in %w_shard: float32[3] of [5]",
        "  %r: float32[5] = remote variable, slot 0 of RemoteBuffer(1: 1 x float32[3]), 1/2 each",
    ]
