"""PopXL's API: builds the IR. May import numpy and popdist; never torch.

The nouns are files here; ops are in ``ops/``, graph transforms in ``transforms/``. `Session` loads
the engine by name.
"""

from popxl import fp8_utils, ops, streams, tensor, utils
from popxl.context import (
    ExecutionContext,
    gcg,
    get_current_graph,
    get_ir,
    get_main_graph,
    gir,
    gmg,
    in_sequence,
    io_tiles,
    ipu,
    name_scope,
)
from popxl.dtypes import (
    bfloat16,
    bool,
    complex64,
    complex128,
    double,
    dtype,
    float,
    float8_143,
    float8_152,
    float16,
    float32,
    float64,
    half,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
)
from popxl.graph import Graph
from popxl.ir import Ir
from popxl.module import Module
from popxl.random_seed import create_seeds
from popxl.remote_buffer import RemoteBuffer, remote_buffer
from popxl.replica_grouping import ReplicaGrouping
from popxl.session import Session
from popxl.streams import DeviceToHostStream, HostToDeviceStream, d2h_stream, h2d_stream
from popxl.tensor import (
    Tensor,
    TensorByRef,
    TensorSpec,
    constant,
    graph_input,
    graph_output,
    remote_replica_sharded_variable,
    remote_variable,
    replica_sharded_buffer,
    replica_sharded_variable,
    variable,
)
from popxl.tensorlocation import ReplicatedTensorSharding, TensorLocation, TensorStorage, TileSet

from popxl import transforms  # noqa: E402 - needs the ops
