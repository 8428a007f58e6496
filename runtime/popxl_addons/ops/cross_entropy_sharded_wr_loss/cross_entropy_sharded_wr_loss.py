"""Cross entropy of logits whose classes are split over the virtual devices of one replica."""

from collections.abc import Iterable

import popxl
from popxl import Tensor, ops
from popxl.errors import GraphError, ShapeError, UndefinedValue
from popxl.ops.utils import cast_if_needed

from popxl_addons.ops.cross_entropy_sharded_loss.cross_entropy_sharded_loss import (
    logsumexp_and_pick,
)


def handle_ipus(ts: list[Tensor], ipus: Iterable[int] | None) -> list[int]:
    """The virtual device of each tensor: ``ipus``, or by default those of the ops that made them.

    Raises:
        ValueError: another number of devices than tensors, or a tensor whose device is not known.
    """
    try:
        devices = [t.ipu for t in ts] if ipus is None else list(ipus)
    except UndefinedValue as error:
        raise GraphError(
            "handle_ipus: got no ipus, and a tensor whose device is not known; expected "
            f"ipus=[..]. ({error})"
        ) from None
    if len(devices) != len(ts):
        raise ShapeError(
            f"handle_ipus: got {len(devices)} ipus for {len(ts)} tensors; expected one for "
            "each tensor."
        )
    return devices


def cross_entropy_sharded_wr_loss(
    logits: list[Tensor], indices: list[Tensor], ipus: Iterable[int] | None = None
) -> Tensor:
    """Negative log-softmax at each row's class, over classes that lie on several virtual devices.

    Shapes: for each device logits [n, its classes] and indices [n] -> [n], the logits' dtype.
        Computed in float32.
    Args:
        indices: class of each row, counted over the classes of all devices in their order; the same
            on every device.
        ipus: the devices; default: those of the ops that made the logits. The loss is on the first.
    Raises:
        ValueError: no logits, another number of indices or devices than logits, a device that is
            not known, or shapes that do not fit.
    """
    if not logits or len(indices) != len(logits):
        raise ShapeError(
            f"cross_entropy_sharded_wr_loss: got {len(logits)} logits and {len(indices)} indices; "
            "expected one of each for every device."
        )
    devices = handle_ipus(logits, ipus)
    normalisers, picked = [], []  # [n] float32 each, of one device's classes
    first = 0  # class of the device
    for device, t, index in zip(devices, logits, indices):
        with popxl.ipu(device):
            own = cast_if_needed(index, popxl.int32) - first if first else index
            normaliser, pick = logsumexp_and_pick(t, own)
        first += t.shape[-1]
        normalisers.append(normaliser)
        picked.append(pick)
    tops = ops.collectives.all_reduce([ops.detach(t) for t in normalisers], devices, "max")
    parts = []
    for device, normaliser, top in zip(devices, normalisers, tops):
        with popxl.ipu(device):
            parts.append(ops.exp(normaliser - ops.detach(top)))
    total = ops.collectives.all_reduce(parts, devices)[0]
    pick = ops.collectives.all_reduce(picked, devices)[0]
    with popxl.ipu(devices[0]):
        return cast_if_needed(ops.detach(tops[0]) + ops.log(total) - pick, logits[0].dtype)
