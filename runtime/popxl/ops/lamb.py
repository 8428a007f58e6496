"""The squared norm that LAMB's trust ratio is made of, of whole tensors and of shards."""

import math

from popxl.errors import ShapeError
from popxl.ops import reductions
from popxl.ops.collectives import replicated_all_reduce
from popxl.replica_grouping import shard_groups
from popxl.sharing import sharing_of
from popxl.tensor import Tensor


def lamb_square(t: Tensor) -> Tensor:
    """Sum of squares in float32: the squared norm that LAMB's trust ratio is made of.

    Of a shard it is the sum over all shards, the same on every replica that has one of them.

    Shapes: t [a], floating point -> [], float32.
    Raises:
        DTypeError: from sessions, if t is not floating point.
        ShapeError: a shard of a variable that is not known, which may be one of fewer pieces than
            there are replicas: its shape does not say which replicas hold the others.
    """
    local: Tensor = reductions.lamb_square(t)
    whole, replicas = math.prod(t.meta_shape), t.ir.replication_factor
    if not t.meta_shape or t.nelms == whole:
        return local
    sharing = sharing_of(t)
    if sharing.grouping is not None and sharing.shard_over is not None:
        members = shard_groups(sharing.grouping, sharing.shard_over)
        return replicated_all_reduce(local, "add", group=members)
    pieces = [n for n in range(1, replicas + 1) if replicas % n == 0 and -(-whole // n) == t.nelms]
    if pieces != [replicas]:
        raise ShapeError(
            f"lamb_square: got %{t.name}: {t.spec}, a shard of {list(t.meta_shape)}; expected one "
            f"of {replicas} shards, one on each replica, or a whole tensor. Sum the squares of "
            "the shard with ops.sumsquare, and add them with "
            "ops.collectives.replicated_all_reduce over the group that holds the shards."
        )
    return replicated_all_reduce(local, "add")
