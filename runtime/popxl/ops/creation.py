"""Tensors from nothing, copies between places, and printing."""

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from popxl import dtypes
from popxl.context import get_current_graph
from popxl.errors import UndefinedValue
from popxl.graph import Graph
from popxl.opdef import Cost, op
from popxl.spec import check_dtype, check_sizes
from popxl.tensor import Tensor, TensorSpec

CODE_LOCATION = Literal["buffer", "executable"]
FloatFormat = Literal["auto", "fixed", "scientific", "none"]


def _init_on_host(
    shape: Iterable[int],
    dtype: dtypes.dtype,
    name: str | None,
    init_type: str,
    meta_shape: Iterable[int] | None,
) -> np.ndarray:
    return np.zeros(tuple(shape), dtype.as_numpy())


@op(
    differentiable=False,
    host=_init_on_host,
    names=lambda shape, dtype, name, init_type, meta_shape: [name or "init"],
)
def init(
    shape: Iterable[int],
    dtype: dtypes.dtype,
    name: str | None = None,
    init_type: Literal["zero"] | Literal["undef"] = "zero",
    meta_shape: Iterable[int] | None = None,
) -> TensorSpec:
    """A new tensor, made afresh on every execution: zeros, or undefined contents that the program
    overwrites.

    Shapes: -> shape, of dtype.
    Args:
        meta_shape: the unsharded shape, if the tensor is a shard.
    Raises:
        ValueError: for another init_type.
    """
    if init_type not in ("zero", "undef"):
        raise ValueError(f"init: got init_type {init_type!r}; expected 'zero' or 'undef'.")
    sizes = check_sizes("init: shape", shape)
    return TensorSpec(sizes, check_dtype("init: dtype", dtype), meta_shape or ())


@init.cost
def init_cost(y: Tensor, *arguments: Any) -> Cost:
    """Writes the result."""
    return Cost()


def zeros(spec: TensorSpec) -> Tensor:
    """Zeros of a spec, for gradients."""
    zero: Tensor = init(spec.shape, spec.dtype, "zeros", "zero", spec.meta_shape or None)
    return zero


@op(name="io_tile_copy", views=("t",), host=lambda t: t, names="{t}_iotilecopy")
def _io_tile_copy(t: Tensor) -> TensorSpec:
    """The same value on the other tile set."""
    return t.spec


@_io_tile_copy.vjp
def io_tile_copy_vjp(dy: Tensor, y: Tensor, t: Tensor) -> Tensor:
    """Copy the gradient back."""
    return io_tile_copy(dy)


@_io_tile_copy.cost
def io_tile_copy_cost(y: Tensor, t: Tensor) -> Cost:
    """Moves data only."""
    return Cost()


def io_tile_copy(t: Tensor) -> Tensor:
    """Copy between IO and compute tiles: here the same value, marked with the other tile set.

    Shapes: t [a], any dtype -> [a], t's dtype.
    """
    y: Tensor = _io_tile_copy(t)
    assert y._op is not None
    y._op.io_tiles = not (t._op is not None and t._op.io_tiles)
    return y


@op(
    name="ipu_copy", views=("t",), host=lambda t, destination, source: t, names="{t}_c{destination}"
)
def _ipu_copy(t: Tensor, destination: int, source: int) -> TensorSpec:
    """The same value on another virtual device."""
    return t.spec


@_ipu_copy.vjp
def ipu_copy_vjp(dy: Tensor, y: Tensor, t: Tensor, destination: int, source: int) -> Tensor:
    """Copy the gradient back."""
    return ipu_copy(dy, source, destination)


@_ipu_copy.cost
def ipu_copy_cost(y: Tensor, t: Tensor, destination: int, source: int) -> Cost:
    """Moves data only."""
    return Cost()


def ipu_copy(t: Tensor, destination: int, source: int | None = None) -> Tensor:
    """Copy to another virtual device of the replica: here the same value, marked with that device.

    Shapes: t [a], any dtype -> [a], t's dtype.
    Args:
        source: device of ``t``; default: that of the op that made it.
    Raises:
        ValueError: if no source is given and no op with a known device made ``t``, such as one in
            ``popxl.ipu(None)``.
    """
    if source is None:
        try:
            source = t.ipu
        except UndefinedValue:
            raise ValueError(
                f"ipu_copy: got %{t.name}, whose device is not known; expected source. Pass "
                "source=."
            ) from None
    y: Tensor = _ipu_copy(t, destination, source)
    assert y._op is not None
    y._op.ipu = destination
    return y


@op(name="print_tensor", effects=("print",), views=("t",))
def _print_tensor(
    t: Tensor,
    title: str,
    print_self: bool,
    print_gradient: bool,
    summarise_threshold: int,
    edge_items: int,
    max_line_width: int,
    digits: int,
    float_format: FloatFormat,
    separator: str,
    open_bracket: str,
    close_bracket: str,
) -> TensorSpec:
    """The same value, printed; `print_tensor` documents it."""
    for name, text in (
        ("separator", separator),
        ("open_bracket", open_bracket),
        ("close_bracket", close_bracket),
    ):
        if len(text) != 1:
            raise ValueError(f"print_tensor: got {name} {text!r}; expected one character.")
    if float_format not in ("auto", "fixed", "scientific", "none"):
        raise ValueError(
            f"print_tensor: got float_format {float_format!r}; expected 'auto', 'fixed', "
            "'scientific' or 'none'."
        )
    return t.spec


@_print_tensor.vjp
def print_tensor_vjp(
    dy: Tensor, y: Tensor, t: Tensor, title: str, print_self: bool, print_gradient: bool, *form: Any
) -> Tensor:
    """The gradient as it is, printed if that was asked for."""
    return print_tensor(dy, f"{title}_gradient", True, False, *form) if print_gradient else dy


@_print_tensor.cost
def print_tensor_cost(y: Tensor, *arguments: Any) -> Cost:
    """Moves data only."""
    return Cost()


def print_tensor(
    t: Tensor,
    title: str | None = None,
    print_self: bool = True,
    print_gradient: bool = False,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 75,
    digits: int = 8,
    float_format: FloatFormat = "auto",
    separator: str = " ",
    open_bracket: str = "[",
    close_bracket: str = "]",
) -> Tensor:
    """Print a value to stderr whenever it is computed, on every replica, and return it for use
    downstream.

    Shapes: t [a], any dtype -> [a], t's dtype.
    Args:
        title: what the value is called in print; default: ``print_`` and the tensor's name. The
            gradient's has ``_gradient`` at its end.
        print_self: whether to print the value.
        print_gradient: whether to print the value's gradient when that is computed.
        summarise_threshold: print only the edges of tensors with more elements than this.
        edge_items: elements at each edge of an axis then.
        max_line_width: characters.
        digits: digits after the decimal point.
    Raises:
        ValueError: unless separator and brackets are one character each, or for another
            float_format.
    """
    if title is None and isinstance(t, Tensor):
        title = f"print_{t.name}"
    result: Tensor = _print_tensor(
        t,
        title,
        print_self,
        print_gradient,
        summarise_threshold,
        edge_items,
        max_line_width,
        digits,
        float_format,
        separator,
        open_bracket,
        close_bracket,
    )
    return result


def remote_code_load(graph: Graph, destination: CODE_LOCATION) -> None:
    """Load a graph's code from off-chip memory; here code is always at hand and nothing happens.

    Raises:
        ValueError: if the graph is the current one.
        NotImplementedError: for a destination other than "executable".
    """
    if graph is get_current_graph():
        raise ValueError(
            f"remote_code_load: got the current graph '{graph.name or 'main'}'; expected a "
            "graph to be called from it."
        )
    if destination != "executable":
        raise NotImplementedError(
            f"remote_code_load: got destination {destination!r}; expected 'executable'."
        )


def code_copy(graph: Graph, source: CODE_LOCATION, destination: CODE_LOCATION) -> None:
    """Not implemented, as in PopXL."""
    raise NotImplementedError(
        "code_copy: got a call; expected none: PopXL does not implement it. Use remote_code_load."
    )
