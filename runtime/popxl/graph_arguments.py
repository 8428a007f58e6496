"""What `Ir.create_graph` makes of a function's arguments and results."""

import inspect
from collections.abc import Callable
from typing import Any

from popxl.module import Module
from popxl.sharing import Sharing, set_sharing, sharing_of
from popxl.spec import TensorSpec
from popxl.tensor_methods import TensorMethods

AddInput = Callable[[TensorSpec, str, bool], Any]
"""`Graph._add_input` of the new graph: takes spec, name, and whether it is by reference."""


def name_of(fn: Any) -> str:
    """What a graph of a function or Module is called: the qualified name, without the mark of local
    definitions.
    """
    named = fn if hasattr(fn, "__qualname__") and not isinstance(fn, Module) else type(fn)
    qualified: str = named.__qualname__
    return qualified.replace(".<locals>", "")


def bind(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], inspect.BoundArguments]:
    """The function that builds the graph, and the arguments by its parameters."""
    if not callable(fn):
        raise TypeError(
            f"create_graph: got {type(fn).__name__}; expected a function or a popxl.Module. "
            "Pass the function first, then its arguments."
        )
    build = fn.build if isinstance(fn, Module) else fn
    signature = inspect.signature(build)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        given = [type(a).__name__ for a in args] + [
            f"{n}={type(a).__name__}" for n, a in kwargs.items()
        ]
        raise ValueError(
            f"create_graph: got arguments ({', '.join(given)}); expected those of "
            f"{name_of(fn)}{signature}: {error}. Pass a tensor, a spec or another value for "
            "each parameter without a default."
        ) from None
    bound.apply_defaults()
    return build, bound


def make_inputs(add_input: AddInput, name: str, value: Any, kind: Any, by_ref: bool) -> Any:
    """An argument with a new input of the graph for each tensor or spec in it."""
    if kind is inspect.Parameter.VAR_KEYWORD:
        if _all_tensors(list(value.values()), name):
            return {k: _input_like(add_input, k, v, by_ref) for k, v in value.items()}
        return {k: _make_input(add_input, k, v, by_ref) for k, v in value.items()}
    return _make_input(add_input, name, value, by_ref)


def _make_input(add_input: AddInput, name: str, value: Any, by_ref: bool) -> Any:
    if isinstance(value, (TensorMethods, TensorSpec)):
        return _input_like(add_input, name, value, by_ref)
    if isinstance(value, (list, tuple)) and _all_tensors(value, name):
        inputs = [_input_like(add_input, f"{name}_{i}", v, by_ref) for i, v in enumerate(value)]
        make = getattr(type(value), "_make", type(value))  # a named tuple takes them one by one
        return make(inputs)
    return value


def _all_tensors(values: Any, name: str) -> bool:
    found = [isinstance(v, (TensorMethods, TensorSpec)) for v in values]
    if any(found) and not all(found):
        raise TypeError(
            f"create_graph: got {name} with tensors and other values; expected only tensors or "
            "none. Pass the others as parameters of their own."
        )
    return any(found)


def _input_like(
    add_input: AddInput, name: str, value: TensorMethods[Any] | TensorSpec, by_ref: bool
) -> Any:
    if isinstance(value, TensorSpec):
        return add_input(value, name, by_ref)
    made = add_input(value.spec, name, by_ref)
    set_sharing(made, Sharing(shard_over=sharing_of(value).shard_over))
    return made


def as_outputs(result: Any, name: str) -> list[Any]:
    """What a function returned, as a list of tensors."""
    if result is None:
        return []
    outputs = [result] if isinstance(result, TensorMethods) else result
    try:
        outputs = list(outputs)
    except TypeError:
        outputs = [result]
    for item in outputs:
        if not isinstance(item, TensorMethods):
            raise ValueError(
                f"create_graph: got {type(item).__name__} from {name}; expected None, a tensor or "
                "tensors. Return what ops gave, and keep other values outside the graph."
            )
    return outputs
