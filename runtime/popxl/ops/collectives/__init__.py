"""Communication between replicas, and between the virtual devices of one replica.

May import the core and `popxl.ops`'s other families. To add a collective: declare it with a
parameter ``group`` and ``effects=("collective",)``; its kernel gets every member's operand and
returns every member's result.
"""

from popart import CommGroup, CommGroupType

from popxl.ops.collectives.reductions import CollectiveOperator, CollectiveOps, to_collective_op
from popxl.ops.collectives.replicated import (
    replica_sharded_slice,
    replicated_all_gather,
    replicated_all_reduce,
    replicated_all_reduce_,
    replicated_reduce_scatter,
    replicated_slice,
)
from popxl.ops.collectives.virtual_devices import (
    all_reduce,
    all_reduce_identical_grad_inputs,
    all_reduce_identical_inputs,
)
