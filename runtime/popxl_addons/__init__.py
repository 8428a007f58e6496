"""PopXL's add-ons: modules, named tensors, transforms, sharding helpers, task sessions. May import
public popxl only.

Files: trees (``dot_tree``, ``named_*``), parameters (``variable_factory``,
``memmap_files``, ``remote``, ``rts``),
graphs (``graph``, ``module``, ``graph_cache``, ``custom_grad``, ``route_tensor``), ``transforms/``,
``ops/``, ``layers/``, ``optimizers/``, host side (``array_munging``, ``streams``,
``task_session``), costs (``performance_utils``). To add a
layer, transform or optimizer: one file in its folder; an op: a folder in theirs.
"""

import subprocess
from pathlib import Path
from typing import Any

from popxl.tensor import HostTensor
from popxl.transforms.autodiff import ExpectedConnection, ExpectedConnectionType, GradGraphInfo

from popxl_addons import (
    array_munging,
    layers,
    ops,
    optimizers,
    patterns,
    rts,
    testing_utils,
    transforms,
)
from popxl_addons.array_munging import (
    handle_negative_axis,
    pad_axis,
    repeat,
    repeat_axis,
    repeat_shard,
    shard,
    shard2D,
    split2D,
    squeeze_safe,
    tensor_parallel_input,
    tensor_parallel_output,
    unshard,
    unshard2D,
    unshard_arrays,
)
from popxl_addons.debugging import print_tensor, print_text
from popxl_addons.dot_tree import DotTree
from popxl_addons.graph import BoundGraph, GraphWithNamedArgs
from popxl_addons.graph_cache import GraphCache
from popxl_addons.graph_common import CalledGraphsGradInfo, GradGraphInfoLike, GraphLike
from popxl_addons.module import Module, NameScopeMeta, create_grad_graph_info
from popxl_addons.named_replica_grouping import (
    NamedReplicaGrouping,
    fill_none_group,
    get_ild_replica_grouping,
    get_ild_size_from_popdist,
    get_instance_replica_grouping,
    is_cross_ild,
    is_cross_instance,
)
from popxl_addons.named_tensors import NamedTensorData, NamedTensors, TensorMap, print_named_tensors
from popxl_addons.ops import (
    cross_entropy,
    cross_entropy_with_grad,
    fp8_amax_scale,
    host_load,
    host_store,
)
from popxl_addons.performance_utils import (
    elementwise_binary_flops,
    evaluate_FLOPs,
    evaluate_ir_FLOPs,
    format_flops_scientific,
    print_FLOPs,
    total_FLOPs,
)
from popxl_addons.remote import (
    NamedRemoteBuffers,
    create_remote_buffer,
    load_remote,
    load_remote_graph,
    named_buffers,
    named_variable_buffers,
    store_remote,
    store_remote_graph,
)
from popxl_addons.route_tensor import is_subgraph, route_tensor_into_graph
from popxl_addons.seed_variable import seed_variable
from popxl_addons.streams import InputStreams, OutputStreams
from popxl_addons.task_session import (
    TaskSession,
    initialise_memmap_dir_from_checkpoint,
    write_variables_pb,
)
from popxl_addons.transforms import (
    BatchSerialResult,
    RemoteHandle,
    StageContext,
    autodiff,
    autodiff_with_accumulation,
    batch_serial_buffer,
    batch_serialise,
    batch_serialise_fwd_and_grad,
    batch_serialise_non_overlapped,
    batch_serialise_overlapped,
    disable_fc_pass,
    enable_fc_pass,
    pipelined_execution,
    recompute_graph,
    remap_grad_info,
    repeat_graph,
    set_available_memory_proportion_by_ipu,
    set_graph_available_memory_proportion_by_ipu,
)
from popxl_addons.utils import OrderedDict, WeightsDict, timer
from popxl_addons.variable_factory import (
    NamedVariableFactories,
    VariableFactory,
    add_variable_input,
)


def __getattr__(name: str) -> Any:
    """``GIT_COMMIT``: short hash of the working copy that this package is in, or None. Looked up
    when asked for.
    """
    if name != "GIT_COMMIT":
        raise AttributeError(f"module 'popxl_addons' has no attribute {name!r}")
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return found.stdout.strip() if found.returncode == 0 else None
