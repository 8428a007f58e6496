"""Reductions between the virtual devices of one replica: ordinary ops on lists of tensors, one per
device.
"""

from collections.abc import Sequence
from typing import Any

from popxl.errors import GraphError, ShapeError, UndefinedValue
from popxl.opdef import Cost, op
from popxl.ops.checks import check_same_dtype
from popxl.ops.collectives.reductions import CollectiveOps, check_reduction
from popxl.tensor import Tensor, TensorSpec

Tensors = list[Tensor]


def _checked(name: str, ts: Sequence[Tensor], op: CollectiveOps) -> list[TensorSpec]:
    if not ts:
        raise ShapeError(f"{name}: got no tensors; expected one per virtual device.")
    for t in ts:
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: got {type(t).__name__} in ts; expected tensors.")
        check_reduction(name, t, op)
        if t.shape != ts[0].shape:
            raise ShapeError(f"{name}: got {ts[0].spec} and {t.spec}; expected equal shapes.")
    check_same_dtype(name, **{f"ts[{i}]": t for i, t in enumerate(ts)})
    return [t.spec for t in ts]


def _devices(name: str, ts: Sequence[Tensor], ipus: Sequence[int] | None) -> tuple[int, ...]:
    """The device of each tensor. ValueError if it is not known, or if there is not one per
    tensor.
    """
    if ipus is None:
        try:
            return tuple(t.ipu for t in ts)
        except UndefinedValue as error:
            raise GraphError(
                f"{name}: got no ipus, and a tensor whose device is not known; expected "
                f"ipus=[..]. ({error})"
            ) from None
    if len(ipus) != len(ts):
        raise ShapeError(
            f"{name}: got {len(ipus)} ipus for {len(ts)} tensors; expected one for each tensor."
        )
    return tuple(ipus)


def _cost(y: Any, ts: Tensors, ipus: Any, op: str) -> Cost:
    """One operation per element and device after the first; nothing travels between replicas."""
    return Cost(flops=(len(ts) - 1) * ts[0].nelms)


@op(name="all_reduce", across=True, names="{ts}_all_reduce")
def _all_reduce(ts: list[Tensor], ipus: tuple[int, ...], op: CollectiveOps) -> list[TensorSpec]:
    """Reduction both ways; `all_reduce` documents it."""
    return _checked("all_reduce", ts, op)


@op(name="all_reduce_identical_inputs", across=True, names="{ts}_all_reduce")
def _identical_inputs(
    ts: list[Tensor], ipus: tuple[int, ...], op: CollectiveOps
) -> list[TensorSpec]:
    """Reduction of the gradients only."""
    return _checked("all_reduce_identical_inputs", ts, op)


@op(name="all_reduce_identical_grad_inputs", across=True, names="{ts}_all_reduce")
def _identical_grad_inputs(
    ts: list[Tensor], ipus: tuple[int, ...], op: CollectiveOps
) -> list[TensorSpec]:
    """Reduction of the values only."""
    return _checked("all_reduce_identical_grad_inputs", ts, op)


def _only_add(name: str, op: str) -> None:
    if op != "add":
        raise GraphError(
            f"autodiff: got {name} with op {op!r}; expected 'add', the one reduction with a "
            "gradient rule here."
        )


@_all_reduce.vjp
def all_reduce_vjp(
    dy: Tensors, y: Tensors, ts: Tensors, ipus: Any, op: CollectiveOps
) -> tuple[Tensors]:
    """Every device's tensor went into every result: the gradients are reduced too."""
    _only_add("all_reduce", op)
    return (_all_reduce(dy, ipus, op),)


@_identical_inputs.vjp
def identical_inputs_vjp(
    dy: Tensors, y: Tensors, ts: Tensors, ipus: Any, op: CollectiveOps
) -> tuple[Tensors]:
    """Reduce the gradients."""
    return (_identical_grad_inputs(dy, ipus, op),)


@_identical_grad_inputs.vjp
def identical_grad_inputs_vjp(
    dy: Tensors, y: Tensors, ts: Tensors, ipus: Any, op: CollectiveOps
) -> tuple[Tensors]:
    """Pass the gradients on."""
    _only_add("all_reduce_identical_grad_inputs", op)
    return (_identical_inputs(dy, ipus, op),)


for _declared in (_all_reduce, _identical_inputs, _identical_grad_inputs):
    _declared.cost(_cost)


def all_reduce(
    ts: list[Tensor], ipus: list[int] | None = None, op: CollectiveOps = "add"
) -> list[Tensor]:
    """Reduce across the virtual devices of one replica: one tensor per device in, the same result
    on each out.

    Shapes: n times [a], one dtype -> n times [a].
    Args:
        ipus: device of each tensor; default: that of the op that made it.
    Raises:
        ValueError: a device that is not known, another number of devices than tensors, different
            shapes, or an unknown reduction.
        DTypeError: different dtypes; from sessions, for a reduction that they do not have.
    """
    devices = _devices("all_reduce", ts, ipus)
    return _all_reduce(ts, devices, op)


def all_reduce_identical_inputs(
    ts: list[Tensor], ipus: list[int] | None = None, op: CollectiveOps = "add"
) -> list[Tensor]:
    """The same tensors; backward, their gradients are reduced as `all_reduce` does.

    Shapes, arguments and errors: as for `all_reduce`.
    """
    devices = _devices("all_reduce_identical_inputs", ts, ipus)
    return _identical_inputs(ts, devices, op)


def all_reduce_identical_grad_inputs(
    ts: list[Tensor], ipus: list[int] | None = None, op: CollectiveOps = "add"
) -> list[Tensor]:
    """The same as `all_reduce`; backward, the gradients pass unchanged.

    Shapes, arguments and errors: as for `all_reduce`.
    """
    devices = _devices("all_reduce_identical_grad_inputs", ts, ipus)
    return _identical_grad_inputs(ts, devices, op)
