"""One declaration per op: its public function, shapes and dtypes, gradient, cost, and what analysis
must know.

    @op
    def add(lhs: Tensor, rhs: Tensor) -> TensorSpec:
        ...validate, return the result's spec...

    @add.vjp
    def add_vjp(dy, y, lhs, rhs): ...          # one gradient or None per tensor operand

Every rule takes the op's own arguments; ``vjp`` gets ``(dy, y)`` first, ``cost`` and ``host`` see
below. Shared machinery (current graph, names, checks of operands, source lines) lives here and
nowhere else.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast, get_args, overload

import numpy as np

from popxl.context import get_current_context, get_current_graph
from popxl.errors import GraphError, ShapeError
from popxl.graph import Graph
from popxl.op_records import (
    EFFECTS,
    OPS,
    PLAIN,
    Cost,
    Op,
    OpDefinition,
    as_specs,
    call_arguments,
    flatten,
    map_tensors,
    op_cost,
    place_of,
    plain,
)
from popxl.placement import Place, check_one_place
from popxl.tensor import Tensor, TensorSpec

__all__ = [
    "EFFECTS",
    "OPS",
    "Cost",
    "Declaration",
    "Op",
    "OpDefinition",
    "OpFunction",
    "alias",
    "as_specs",
    "call_arguments",
    "check_operand",
    "declare",
    "emit",
    "flatten",
    "inplace",
    "map_tensors",
    "op",
    "op_cost",
    "result_form",
    "source_location",
]

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
LONGEST_NAME = 200
"""Characters of a name that is made from an operand's. Longer ones would make chains of ops
quadratic in size.
"""
CROSSING_EFFECTS = frozenset({"host", "remote", "control"})
"""Effects of ops whose operands may be on different virtual devices and tile sets: an offset, an
argument of a call.
"""


class OpFunction(Generic[P, R]):
    """Type of a declared op's public function. At run time it is a plain function with these
    attributes.
    """

    definition: OpDefinition
    __name__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Add the op to the current graph."""
        raise NotImplementedError

    def vjp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Declare the gradient rule: ``(dy, y, *arguments) -> gradient or None per tensor
        parameter``.
        """
        raise NotImplementedError

    def cost(self, rule: Callable[..., Cost]) -> Callable[..., Cost]:
        """Declare the cost rule: ``(y, *arguments) -> Cost``."""
        raise NotImplementedError

    def host(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Declare evaluation on numpy arrays: ``(*arguments) -> array(s)``."""
        raise NotImplementedError


class Declaration(Protocol):
    """Type of `op`: what a rule returns specs for, the public function returns tensors for."""

    @overload
    def __call__(self, fn: Callable[P, TensorSpec]) -> OpFunction[P, Tensor]: ...
    @overload
    def __call__(self, fn: Callable[P, list[TensorSpec]]) -> OpFunction[P, list[Tensor]]: ...
    @overload
    def __call__(
        self, fn: Callable[P, tuple[TensorSpec, ...]]
    ) -> OpFunction[P, tuple[Tensor, ...]]: ...
    @overload
    def __call__(self, fn: Callable[P, None]) -> OpFunction[P, None]: ...


def source_location() -> tuple[str, int]:
    """(file, line) of what a transform makes ops of, else of the innermost frame outside popxl and
    popxl_addons.
    """
    known = get_current_context().source
    if known is not None:
        return known
    frame: Any = sys._getframe(1)
    last = (frame.f_code.co_filename, frame.f_lineno)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        last = (frame.f_code.co_filename, frame.f_lineno)
        if not name.startswith(("popxl.", "popxl_addons.", "contextlib")) and name not in (
            "popxl",
            "popxl_addons",
        ):
            return last
        frame = frame.f_back
    return last


def check_operand(op_name: str, parameter: str, tensor: Tensor, graph: Graph) -> None:
    """GraphError (a ValueError) if a tensor does not belong to the current graph."""
    if tensor.ir is not graph.ir:
        raise GraphError(
            f"{op_name}: got {parameter} = %{tensor.name}: {tensor.spec} of Ir {tensor.ir.id}; "
            f"expected a tensor of Ir {graph.ir.id}, whose graph '{graph.name or 'main'}' is "
            "current. Build a program in one Ir."
        )
    if tensor._graph is not graph:
        raise GraphError(
            f"{op_name}: got {parameter} = %{tensor.name}: {tensor.spec} from graph "
            f"'{tensor._graph.name or 'main'}'; expected a tensor of the current graph "
            f"'{graph.name or 'main'}'. Pass it in as a graph input."
        )
    if getattr(tensor, "_remote", None) is not None:
        raise GraphError(
            f"{op_name}: got {parameter} = remote variable %{tensor.name}; expected a tensor on "
            "the device. Load it with ops.remote_load first."
        )


def places_of_operands(arguments: dict[str, Any]) -> dict[str, Place]:
    """Places of tensor operands by parameter, those of lists by position too."""
    named: dict[str, Place] = {}
    for parameter, value in arguments.items():
        if isinstance(value, Tensor):
            named[parameter] = place_of(value)
        elif isinstance(value, tuple):
            tensors = enumerate(flatten(value))
            named.update((f"{parameter}[{i}]", place_of(t)) for i, t in tensors)
    return named


def emit(definition: OpDefinition, arguments: dict[str, Any]) -> Op:
    """Add an op to the current graph: infer, check, name, record."""
    context, graph = get_current_context(), get_current_graph()
    graph._check_open(definition.name)
    for parameter, value in arguments.items():
        for tensor in (value,) if isinstance(value, Tensor) else flatten((value,)):
            check_operand(definition.name, parameter, tensor, graph)
    # of the ops that a transform makes of others a program cannot move the operands
    is_of_program = context.source is None
    if is_of_program and not definition.across and not definition.effects & CROSSING_EFFECTS:
        check_one_place(definition.name, places_of_operands(arguments))
    context.refusal = None
    arguments = {parameter: plain(value) for parameter, value in arguments.items()}
    specs = as_specs(definition.infer(**arguments))
    scopes = context.name_scopes
    op = Op(definition, arguments, graph, "/".join([*scopes, definition.name]), source_location())
    for spec, name in zip(specs, _result_names(definition, arguments, len(specs), scopes)):
        op.add_output(spec, name)
    graph._add_op(op)
    return op


def _result_names(
    definition: OpDefinition, arguments: dict[str, Any], count: int, scopes: list[str]
) -> Sequence[str]:
    """Names of the results, before the graph puts the open scopes in front and makes them
    unique.
    """
    rule, plain = definition.names, definition.name.rstrip("_")
    if rule is None:
        return [plain] * count
    if not isinstance(rule, str):
        return rule(**arguments)
    shown = ({n: _shown(v, i, scopes) for n, v in arguments.items()} for i in range(count))
    names = [rule.format(**values, i=i) for i, values in enumerate(shown)]
    return [name if len(name) <= LONGEST_NAME else plain for name in names]


def _shown(value: Any, i: int, scopes: list[str]) -> Any:
    """An argument in the name of the i-th result: operands by their names, without the scopes that
    are open.
    """
    if isinstance(value, tuple) and i < len(value):
        value = value[i]
    if not isinstance(value, Tensor):
        return value
    name, first = value.name, value.name.find("/")
    if not scopes or first < 0:
        return name
    head, sep, _ = name[:first].rpartition("__")
    # other ops, or autodiff, may have put words in front of the scopes
    for start in (0, len(head + sep)):
        end = start
        for scope in scopes:
            if not name.startswith(f"{scope}/", end):
                break
            end += len(scope) + 1
        if end > start:
            return name[:start] + name[end:]
    return name


def _tensor_parameters(signature: inspect.Signature) -> tuple[str, ...]:
    return tuple(n for n, p in signature.parameters.items() if p.annotation is Tensor)


def _number_parameters(signature: inspect.Signature) -> dict[str, type]:
    """Parameters that are truth values, and those that may be numbers of floating point."""
    annotations = {n: p.annotation for n, p in signature.parameters.items()}
    kinds = {n: (a, *get_args(a)) for n, a in annotations.items()}
    return {n: bool if bool in k else float for n, k in kinds.items() if bool in k or float in k}


Given = Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]
"""The arguments of a call by parameter, in the parameters' order, the defaults among them."""


def _given(signature: inspect.Signature) -> Given:
    """What `Signature.bind` gives. That takes longer than all else that adds an op, so it is asked
    of calls alone that are wrong, or of which a parameter takes several arguments.
    """
    parameters, named = dict(signature.parameters), inspect.Parameter.POSITIONAL_OR_KEYWORD
    positional = tuple(n for n, p in parameters.items() if p.kind is named)
    is_plain = all(p.kind in (named, inspect.Parameter.KEYWORD_ONLY) for p in parameters.values())
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}

    def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        first = positional[: len(args)]
        if is_plain and len(first) == len(args) and kwargs.keys().isdisjoint(first):
            found = {**defaults, **dict(zip(first, args)), **kwargs}
            if found.keys() == parameters.keys():
                return {name: found[name] for name in parameters}
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    return given


def _bind(
    definition: OpDefinition,
    given: Given,
    required: tuple[str, ...],
    numbers: dict[str, type],
    args: Any,
    kwargs: Any,
) -> dict[str, Any]:
    arguments = given(args, kwargs)
    for name in required:
        value = arguments[name]
        variadic = definition.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        for item in value if variadic else (value,):
            if not isinstance(item, Tensor):
                raise TypeError(
                    f"{definition.name}: got {name} = {type(item).__name__}; expected a "
                    "popxl.Tensor. Make a constant with popxl.constant(...) first."
                )
    for name, kind in numbers.items():  # torch takes no 1 for True, nor True for 1.0
        value = arguments[name]
        if isinstance(value, (int, np.integer) if kind is bool else (bool, np.bool_)):
            arguments[name] = kind(value)
    return {n: tuple(v) if _is_sequence(v) else v for n, v in arguments.items()}


def _is_sequence(value: Any) -> bool:
    """Whether an argument is a list, array or generator, which an op keeps as a tuple: plain and
    hashable.
    """
    if type(value) in PLAIN or isinstance(value, Tensor):
        return False
    is_scalar = isinstance(value, (str, bytes, tuple, Mapping)) or getattr(value, "ndim", 1) == 0
    return isinstance(value, Iterable) and not is_scalar


@overload
def op(fn: Callable[P, TensorSpec]) -> OpFunction[P, Tensor]: ...
@overload
def op(fn: Callable[P, list[TensorSpec]]) -> OpFunction[P, list[Tensor]]: ...
@overload
def op(fn: Callable[P, tuple[TensorSpec, ...]]) -> OpFunction[P, tuple[Tensor, ...]]: ...
@overload
def op(fn: Callable[P, None]) -> OpFunction[P, None]: ...
@overload
def op(
    *,
    name: str | None = None,
    writes: Sequence[str] = (),
    views: Sequence[str] = (),
    host: Callable[..., Any] | None = None,
    effects: Sequence[str] = (),
    random: bool = False,
    across: bool = False,
    residuals: bool = False,
    rounds: bool = False,
    differentiable: bool = True,
    names: None | str | Callable[..., Sequence[str]] = None,
) -> Declaration: ...


def op(fn: Callable[..., Any] | None = None, *, name: str | None = None, **facts: Any) -> Any:
    """Declare an op. The decorated function validates its arguments and returns the spec(s) of the
    result(s).

    The public function returns a tensor where the rule returns a spec, a list where it returns a
    list, a tuple where it returns a tuple, and None where it returns None.

    Args:
        name: the op's, if it is not the function's.
        facts: fields of OpDefinition.
    """
    if fn is None:
        return functools.partial(op, name=name, **facts)
    facts.update({field: tuple(facts[field]) for field in ("writes", "views") if field in facts})
    return declare(
        fn,
        OpDefinition(
            name=name or fn.__name__,
            infer=_infer_rule(fn),
            signature=inspect.signature(fn, eval_str=True),
            file=fn.__code__.co_filename,
            module=fn.__module__,
            effects=frozenset(facts.pop("effects", ())),
            **facts,
        ),
    )


def _infer_rule(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The rule as a function of keyword arguments only, also where it has a variadic parameter."""
    parameters = inspect.signature(fn).parameters.values()
    variadic = next(
        (p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), None
    )
    if variadic is None:
        return fn
    return lambda **arguments: fn(*arguments.pop(variadic), **arguments)


def declare(fn: Callable[..., Any], definition: OpDefinition) -> Any:
    """Register a definition and make its public function, which takes its documentation from
    ``fn``.
    """
    if definition.name in OPS:
        first = OPS[definition.name].file
        raise ValueError(
            f"op: got a second declaration of {definition.name!r}; expected one. The first is "
            f"in {first}."
        )
    if not definition.effects <= EFFECTS:
        raise ValueError(
            f"op {definition.name}: got effects {sorted(definition.effects)}; expected some "
            f"of {sorted(EFFECTS)}."
        )
    given, required = _given(definition.signature), _tensor_parameters(definition.signature)
    numbers = _number_parameters(definition.signature)
    hand_back = result_form(definition)
    OPS[definition.name] = definition

    @functools.wraps(fn)
    def public(*args: Any, **kwargs: Any) -> Any:
        return hand_back(
            emit(definition, _bind(definition, given, required, numbers, args, kwargs))._outputs
        )

    public.__name__ = public.__qualname__ = definition.name
    public.__signature__ = _public_signature(definition)  # type: ignore[attr-defined]
    public.definition = definition  # type: ignore[attr-defined]
    for rule in ("vjp", "cost", "host"):
        setattr(public, rule, functools.partial(_declare_rule, definition, rule))
    return public


def _declare_rule(
    definition: OpDefinition, rule: str, fn: Callable[..., Any]
) -> Callable[..., Any]:
    setattr(definition, rule, fn)
    return fn


def result_form(definition: OpDefinition) -> Callable[[list[Tensor]], Any]:
    """How results are handed back, from the rule's return annotation: one tensor, a list, a tuple,
    or nothing.
    """
    kind = definition.result_type
    if kind in (None, type(None)):
        return lambda outputs: None
    if kind in (list, tuple):
        return cast(Callable[[list[Tensor]], Any], kind)
    if kind is TensorSpec:
        return lambda outputs: outputs[0]
    raise TypeError(
        f"op {definition.name}: got a rule that returns {kind}; expected TensorSpec, "
        "list[TensorSpec], tuple[TensorSpec, ...] or None. Annotate what it returns."
    )


PUBLIC_RESULTS = {TensorSpec: Tensor, list: list[Tensor], tuple: tuple[Tensor, ...]}
"""What the public function returns, by what the rule does."""


def _public_signature(definition: OpDefinition) -> inspect.Signature:
    kind = definition.result_type
    return definition.signature.replace(return_annotation=PUBLIC_RESULTS.get(kind, kind))


def inplace(base: OpFunction[P, Tensor], parameter: str) -> OpFunction[P, Tensor]:
    """The in-place form ``base_`` of an op: its result is written to ``parameter``, whose spec it
    must have.
    """
    base_def = base.definition

    def infer(**arguments: Any) -> TensorSpec:
        target: Tensor = arguments[parameter]
        (spec,) = as_specs(base_def.infer(**arguments))
        if spec.shape != target.shape or spec.dtype != target.dtype:
            raise ShapeError(
                f"{base_def.name}_: got a result {spec} for {parameter} {target.spec}; expected a "
                f"result of {parameter}'s own shape and dtype, because it is written in place. "
                f"Use {base_def.name} instead."
            )
        return target.spec

    doc = f"Write the result of `{base_def.name}` to `{parameter}` and return it."
    return cast(
        "OpFunction[P, Tensor]",
        _derive(base, infer, doc, writes=(parameter,), differentiable=False),
    )


def alias(base: OpFunction[P, Tensor]) -> OpFunction[P, Tensor]:
    """The form ``base_`` of a view op whose result shares the operand's storage: writing to one
    writes to the other.
    """
    base_def = base.definition
    doc = f"As `{base_def.name}`, but a view: writing to it writes to what it came from."
    result = _derive(
        base,
        base_def.infer,
        doc,
        views=base_def.views,
        alias=True,
        differentiable=base_def.differentiable,
    )
    result.definition.vjp = lambda *args, **kwargs: base_def.vjp(*args, **kwargs)  # type: ignore[misc]
    return cast("OpFunction[P, Tensor]", result)


def _derive(base: OpFunction[P, Tensor], infer: Callable[..., Any], doc: str, **facts: Any) -> Any:
    base_def = base.definition

    def fn(*args: Any, **kwargs: Any) -> None: ...

    fn.__name__, fn.__module__ = base_def.name + "_", base_def.module
    fn.__doc__ = f"{doc}\n\n{inspect.getdoc(base) or ''}"
    return declare(
        fn,
        OpDefinition(
            name=base_def.name + "_",
            infer=infer,
            signature=base_def.signature,
            host=base_def.host,
            random=base_def.random,
            effects=base_def.effects,
            names=base_def.names,
            base=base_def,
            cost=lambda *a, **k: base_def.cost(*a, **k) if base_def.cost else Cost(),
            file=base_def.file,
            module=base_def.module,
            **facts,
        ),
    )
