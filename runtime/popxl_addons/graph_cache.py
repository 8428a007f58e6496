"""Graphs made once for equal arguments, and used again."""

import functools
import hashlib
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import popxl
from popxl import Tensor, TensorSpec, ops
from popxl.sharing import sharing_of

from popxl_addons.utils import flat_tensors


def bound_arguments(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> "inspect.BoundArguments":
    """The arguments of a call by name, defaults filled in."""
    build = fn.build if isinstance(fn, popxl.Module) else fn
    bound = inspect.signature(build).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound


def tensors_of_call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Tensor]:
    """The tensors of a call in the order of the inputs that `Ir.create_graph` makes for it: the
    signature's.
    """
    return flat_tensors(bound_arguments(fn, *args, **kwargs).arguments)


def tensor_hash(t: Tensor | TensorSpec) -> Hashable:
    """What a graph depends on in a tensor: shape, dtype, meta_shape, and how a shard is cut."""
    shard_over = sharing_of(t).shard_over if isinstance(t, Tensor) else None
    return (tuple(t.shape), t.dtype, tuple(t.meta_shape), shard_over)


def argument_hash(arg: Any) -> Hashable:
    """A key that is equal for arguments that make equal graphs: by spec for tensors, by content for
    containers and arrays of numbers, as they are now.
    """
    if isinstance(arg, (Tensor, TensorSpec)):
        return tensor_hash(arg)
    if isinstance(arg, popxl.Graph):
        return ("graph", arg.ir.id, arg.id)
    if isinstance(arg, Mapping):
        return tuple((key, argument_hash(value)) for key, value in arg.items())
    if isinstance(arg, (list, tuple)):
        return (type(arg).__name__, *(argument_hash(value) for value in arg))
    if isinstance(arg, np.ndarray) and not arg.dtype.hasobject:
        return ("array", arg.shape, str(arg.dtype.descr), hashlib.sha256(arg.tobytes()).digest())
    if isinstance(arg, Hashable):
        return (type(arg).__name__, arg)
    return ("object", id(arg))


def get_function_hash(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Hashable:
    """A key for a function, by its hash, the current placement, and arguments."""
    context = popxl.context.get_current_context()
    bound = bound_arguments(fn, *args, **kwargs)
    return (hash(fn), context.ipu_of_ops, context.io_tile_set, argument_hash(bound.arguments))


class GraphCache:
    """Graphs by Ir, hash of the function, and arguments: modules may say by ``__hash__`` which of
    them are one.
    """

    def __init__(self) -> None:
        self._graphs: dict[tuple[int, Hashable], tuple[popxl.Graph, Any]] = {}

    def create_graph(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> popxl.Graph:
        """`Ir.create_graph`, or the graph that it made for equal arguments before."""
        ir = popxl.gir()
        key = (ir.id, get_function_hash(fn, *args, **kwargs))
        if key not in self._graphs:
            # What the key is made of is kept beside the graph: much of it goes by identity, which
            # must not be reused.
            self._graphs[key] = (ir.create_graph(fn, *args, **kwargs), (fn, args, kwargs))
        return self._graphs[key][0]


def function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: calling the function calls a graph of it, made once for equal arguments."""
    cache = GraphCache()

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        graph = cache.create_graph(fn, *args, **kwargs)
        return ops.call(graph, *tensors_of_call(fn, *args, **kwargs))

    return call
