"""One declaration per op: its public function, shapes and dtypes, gradient, cost, and what analysis must know.

    @op
    def add(lhs: Tensor, rhs: Tensor) -> TensorSpec:
        ...validate, return the result's spec...

    @add.vjp
    def add_vjp(dy, y, lhs, rhs): ...          # one gradient or None per tensor operand

Every rule takes the op's own arguments; ``vjp`` gets ``(dy, y)`` first, ``cost`` and ``host`` see below. Shared machinery
(current graph, names, checks of operands, source lines) lives here and nowhere else.
"""

import functools
import inspect
import sys
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING, Any, Callable, Dict, FrozenSet, Generic, Iterable, Iterator, List, Mapping, Optional, ParamSpec, Sequence, Tuple,
    Union, cast,
)  # fmt: skip

from popxl.context import get_current_context
from popxl.errors import GraphError, ShapeError
from popxl.tensor import Tensor, TensorSpec

if TYPE_CHECKING:
    from popxl.graph import Graph

P = ParamSpec("P")
Specs = Union[None, TensorSpec, Sequence[TensorSpec]]
EFFECTS = frozenset({"host", "remote", "collective", "control", "print"})


@dataclass(frozen=True)
class Cost:
    """Work of one execution on one replica. Bytes default to operands read plus results written."""

    flops: int = 0
    bytes: Optional[int] = None


@dataclass(eq=False)
class OpDefinition:
    """Everything that is known about an op, in one record.

    writes: parameters whose storage the op changes; the result is the first of them, by its new value.
    views: parameters whose elements the result only rearranges, so that a kernel may return a view of them.
    alias: the result *is* storage of `views`, and writing to it writes to them (``reshape_`` and its like).
    host: ``(arrays as the op's arguments) -> array(s)``, evaluation on numpy for small integers; None if there is none.
    effects: what it does beyond its results: "host", "remote", "collective", "control", "print".
    random: whether the result depends on a seed operand.
    """

    name: str
    infer: Callable[..., Specs]
    signature: inspect.Signature
    writes: Tuple[str, ...] = ()
    views: Tuple[str, ...] = ()
    alias: bool = False
    host: Optional[Callable[..., Any]] = None
    effects: FrozenSet[str] = frozenset()
    random: bool = False
    differentiable: bool = True
    vjp: Optional[Callable[..., Any]] = None
    cost: Optional[Callable[..., Cost]] = None
    base: Optional["OpDefinition"] = None
    """For a derived in-place or alias form: the op it was derived from."""
    names: Optional[Callable[..., Sequence[str]]] = None
    """``(op's arguments) -> names`` for the results, where they are not the op's name."""
    file: str = ""
    module: str = field(default="")

    def __repr__(self) -> str:
        return f"OpDefinition({self.name})"


OPS: Dict[str, OpDefinition] = {}
"""Every declared op by name."""


class Op:
    """One op in a graph: a definition applied to arguments."""

    __slots__ = ("definition", "arguments", "graph", "name", "source", "_inputs", "_outputs", "ipu", "io_tiles")

    def __init__(self, definition: OpDefinition, arguments: Dict[str, Any], graph: "Graph", name: str, source: Tuple[str, int]):
        self.definition = definition
        self.arguments = arguments
        self.graph = graph
        self.name = name
        self.source = source
        self._inputs = tuple(flatten(arguments.values()))
        self._outputs: List[Tensor] = []
        context = get_current_context()
        self.ipu, self.io_tiles = context.ipu_id, context.io_tile_set

    @property
    def inputs(self) -> Tuple[Tensor, ...]:
        """Tensor operands, flat, in signature order."""
        return self._inputs

    @property
    def outputs(self) -> Tuple[Tensor, ...]:
        """Results. Those of calls grow with the called graph's outputs."""
        return tuple(self._outputs)

    @property
    def written(self) -> Tuple[Tensor, ...]:
        """Operands whose storage this op changes; for calls those that the called graph takes by reference."""
        if "control" in self.definition.effects:
            return tuple(
                t for graph, inputs in self.called() for g, t in zip(graph.inputs, inputs) if g in graph._by_ref_inputs
            )
        return tuple(cast(Tensor, self.arguments[p]) for p in self.definition.writes)

    @property
    def viewed(self) -> Tuple[Tensor, ...]:
        """Operands that the results may be views of."""
        return tuple(flatten(self.arguments[p] for p in self.definition.views))

    def called(self) -> List[Tuple["Graph", Tuple[Tensor, ...]]]:
        """(graph, its inputs here) for each graph that this op calls."""
        a = self.arguments
        if "then_branch" in a:
            return [(a["then_branch"], a["then_inputs"]), (a["else_branch"], a["else_inputs"])]
        return [(a["graph"], a["inputs"])] if isinstance(a.get("inputs"), tuple) and "graph" in a else []

    def set_argument(self, name: str, value: Any) -> None:
        """Replace one argument (calls gain inputs this way while a program is being built)."""
        self.arguments[name] = value
        self._inputs = tuple(flatten(self.arguments.values()))

    def add_output(self, spec: TensorSpec, name: str) -> Tensor:
        """Append a result."""
        tensor = self.graph._new_tensor(spec, name, op=self)
        self._outputs.append(tensor)
        return tensor

    @property
    def where(self) -> str:
        """Where the user made it: ``file:line``."""
        return f"{self.source[0]}:{self.source[1]}"

    def __repr__(self) -> str:
        results = ", ".join(f"%{t.name}" for t in self._outputs)
        return f"{results} = {self.definition.name}({', '.join(f'%{t.name}' for t in self._inputs)})"


def flatten(values: Any) -> Iterator[Tensor]:
    """The tensors among values and their lists and tuples, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from flatten(value)


def map_tensors(value: Any, fn: Callable[[Tensor], Any]) -> Any:
    """``value`` with every tensor in it (also inside lists and tuples) replaced by ``fn(tensor)``."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, (list, tuple)):
        return tuple(map_tensors(v, fn) for v in value)
    return value


class OpFunction(Generic[P]):
    """Type of a declared op's public function. At run time it is a plain function with these attributes."""

    definition: OpDefinition
    __name__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Add the op to the current graph."""
        raise NotImplementedError

    def vjp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Declare the gradient rule: ``(dy, y, *arguments) -> gradient or None per tensor parameter``."""
        raise NotImplementedError

    def cost(self, rule: Callable[..., Cost]) -> Callable[..., Cost]:
        """Declare the cost rule: ``(y, *arguments) -> Cost``."""
        raise NotImplementedError

    def host(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Declare evaluation on numpy arrays: ``(*arguments) -> array(s)``."""
        raise NotImplementedError


def source_location() -> Tuple[str, int]:
    """(file, line) of the innermost frame outside popxl and popxl_addons."""
    frame: Any = sys._getframe(1)
    last = (frame.f_code.co_filename, frame.f_lineno)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        last = (frame.f_code.co_filename, frame.f_lineno)
        if not name.startswith(("popxl.", "popxl_addons.", "contextlib")) and name not in ("popxl", "popxl_addons"):
            return last
        frame = frame.f_back
    return last


def check_operand(op_name: str, parameter: str, tensor: Tensor, graph: "Graph") -> None:
    """GraphError (a ValueError) if a tensor does not belong to the current graph."""
    if tensor._graph is not graph:
        raise GraphError(
            f"{op_name}: got {parameter} = %{tensor.name}: {tensor.spec} from graph '{tensor._graph.name or 'main'}'; expected a tensor "
            f"of the current graph '{graph.name or 'main'}'. Pass it in as a graph input."
        )
    if getattr(tensor, "_remote", None) is not None:
        raise GraphError(
            f"{op_name}: got {parameter} = remote variable %{tensor.name}; expected a tensor on the device. Load it with "
            "ops.remote_load first."
        )


def _as_specs(result: Specs) -> Tuple[TensorSpec, ...]:
    if result is None:
        return ()
    return (result,) if isinstance(result, TensorSpec) else tuple(result)


def emit(definition: OpDefinition, arguments: Dict[str, Any]) -> Op:
    """Add an op to the current graph: infer, check, name, record."""
    context = get_current_context()
    graph = context.graph
    graph._check_open(definition.name)
    for parameter, value in arguments.items():
        for tensor in flatten((value,)):
            check_operand(definition.name, parameter, tensor, graph)
    specs = _as_specs(definition.infer(**arguments))
    scopes = "".join(f"{s}/" for s in context.name_scopes)
    op = Op(definition, arguments, graph, scopes + definition.name, source_location())
    names = definition.names(**arguments) if definition.names else [definition.name] * len(specs)
    for spec, name in zip(specs, names):
        op.add_output(spec, name)
    graph._add_op(op)
    return op


def _tensor_parameters(signature: inspect.Signature) -> Tuple[str, ...]:
    return tuple(n for n, p in signature.parameters.items() if p.annotation is Tensor or p.annotation == "Tensor")


def _bind(definition: OpDefinition, required: Tuple[str, ...], args: Any, kwargs: Any) -> Dict[str, Any]:
    bound = definition.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    for name in required:
        value = arguments[name]
        variadic = definition.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        for item in value if variadic else (value,):
            if not isinstance(item, Tensor):
                raise TypeError(
                    f"{definition.name}: got {name} = {type(item).__name__}; expected a popxl.Tensor. Make a constant with "
                    "popxl.constant(...) first."
                )
    return {n: tuple(v) if _is_sequence(v) else v for n, v in arguments.items()}


def _is_sequence(value: Any) -> bool:
    """Whether an argument is a list, array or generator, which an op keeps as a tuple: plain, hashable, read more than once."""
    is_scalar = isinstance(value, (str, bytes, tuple, Mapping, Tensor)) or getattr(value, "ndim", 1) == 0
    return isinstance(value, Iterable) and not is_scalar


def call_arguments(definition: OpDefinition, arguments: Dict[str, Any]) -> Tuple[List[Any], Dict[str, Any]]:
    """Arguments as ``(args, kwargs)`` of the definition's rules and kernels: variadic parameters are spread."""
    args: List[Any] = []
    kwargs: Dict[str, Any] = {}
    for name, parameter in definition.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            args.extend(arguments[name])
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            kwargs[name] = arguments[name]
        else:
            args.append(arguments[name])
    return args, kwargs


def op(
    fn: Optional[Callable[P, Any]] = None,
    *,
    name: Optional[str] = None,
    writes: Sequence[str] = (),
    views: Sequence[str] = (),
    alias: bool = False,
    host: Optional[Callable[..., Any]] = None,
    effects: Sequence[str] = (),
    random: bool = False,
    differentiable: bool = True,
    names: Optional[Callable[..., Sequence[str]]] = None,
) -> Any:
    """Declare an op. The decorated function validates its arguments and returns the spec(s) of the result(s).

    The public function returns a tensor where the rule returns a spec, a list where it returns a list, a tuple where it
    returns a tuple, and None where it returns None.
    """
    if fn is None:
        return functools.partial(
            op, name=name, writes=writes, views=views, alias=alias, host=host, effects=effects, random=random,
            differentiable=differentiable, names=names,
        )  # fmt: skip
    return declare(fn, OpDefinition(
        name=name or fn.__name__, infer=_infer_rule(fn), signature=_plain_signature(fn), writes=tuple(writes), views=tuple(views),
       
        alias=alias, host=host, effects=frozenset(effects), random=random, differentiable=differentiable, names=names,
        file=fn.__code__.co_filename, module=fn.__module__,
    ))  # fmt: skip


def _plain_signature(fn: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(fn)


def _infer_rule(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The rule as a function of keyword arguments only, also where it has a variadic parameter."""
    parameters = inspect.signature(fn).parameters.values()
    variadic = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
    if variadic is None:
        return fn
    return lambda **arguments: fn(*arguments.pop(variadic), **arguments)


def declare(fn: Callable[..., Any], definition: OpDefinition) -> Any:
    """Register a definition and make its public function."""
    if definition.name in OPS:
        raise ValueError(f"op: got a second declaration of {definition.name!r}; the first is in {OPS[definition.name].file}.")
    if not definition.effects <= EFFECTS:
        raise ValueError(f"op {definition.name}: got effects {sorted(definition.effects)}; expected some of {sorted(EFFECTS)}.")
    OPS[definition.name] = definition
    required = _tensor_parameters(definition.signature)

    @functools.wraps(fn)
    def public(*args: Any, **kwargs: Any) -> Any:
        arguments = _bind(definition, required, args, kwargs)
        outputs = emit(definition, arguments)._outputs
        return result_shape[0](outputs)

    # One output per spec; how they are handed back follows the rule's annotation.
    result_shape = [_result_form(definition)]
    public.__name__ = public.__qualname__ = definition.name
    public.__signature__ = _public_signature(definition.signature)  # type: ignore[attr-defined]
    public.definition = definition  # type: ignore[attr-defined]
    for rule in ("vjp", "cost", "host"):
        setattr(public, rule, functools.partial(_declare_rule, definition, rule))
    return public


def _declare_rule(definition: OpDefinition, rule: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    setattr(definition, rule, fn)
    return fn


def _result_form(definition: OpDefinition) -> Callable[[List[Tensor]], Any]:
    """How results are handed back, from the rule's return annotation: one tensor, a list, a tuple, or nothing."""
    annotation = str(definition.signature.return_annotation)
    if annotation in ("None", "<class 'NoneType'>"):
        return lambda outputs: None
    if "List" in annotation or "list" in annotation:
        return list
    if "Tuple" in annotation or "tuple" in annotation:
        return tuple
    return lambda outputs: outputs[0]


def _public_signature(signature: inspect.Signature) -> inspect.Signature:
    annotation = signature.return_annotation
    text = str(annotation)
    if annotation is TensorSpec:
        annotation = Tensor
    elif "TensorSpec" in text:
        annotation = List[Tensor] if "ist[" in text else Tuple[Tensor, ...]
    return signature.replace(return_annotation=annotation)


def inplace(base: Any, parameter: str) -> Any:
    """The in-place form ``base_`` of an op: its result is written to ``parameter``, whose spec it must have."""
    base_def: OpDefinition = base.definition

    def infer(**arguments: Any) -> TensorSpec:
        target, spec = arguments[parameter], base_def.infer(**arguments)
        if spec.shape != target.shape or spec.dtype != target.dtype:
            raise ShapeError(
                f"{base_def.name}_: got a result {spec} for {parameter} {target.spec}; expected a result of {parameter}'s own shape and "
                f"dtype, because it is written in place. Use {base_def.name} instead."
            )
        return cast(TensorSpec, target.spec)

    return _derive(base, infer, writes=(parameter,), differentiable=False, verb=f"Write the result of `{base_def.name}` to `{parameter}`")


def alias(base: Any) -> Any:
    """The form ``base_`` of a view op whose result shares the operand's storage: writing to one writes to the other."""
    base_def: OpDefinition = base.definition
    result = _derive(base, base_def.infer, views=base_def.views, alias=True, differentiable=base_def.differentiable,
                     verb=f"As `{base_def.name}`, but a view of")
    result.definition.vjp = lambda *args, **kwargs: base_def.vjp(*args, **kwargs)  # type: ignore[misc]
    return result


def _derive(base: Any, infer: Callable[..., Any], verb: str, **facts: Any) -> Any:
    base_def: OpDefinition = base.definition

    def fn(*args: Any, **kwargs: Any) -> None: ...

    fn.__name__, fn.__module__ = base_def.name + "_", base_def.module
    fn.__doc__ = f"{verb} and return it.\n\n{inspect.getdoc(base) or ''}"
    return declare(fn, OpDefinition(
        name=base_def.name + "_", infer=infer, signature=base_def.signature, host=base_def.host, random=base_def.random,
        effects=base_def.effects, cost=lambda *a, **k: base_def.cost(*a, **k) if base_def.cost else Cost(), base=base_def,
        file=base_def.file, module=base_def.module, **facts,
    ))  # fmt: skip


def op_cost(op: Op) -> Cost:
    """The op's cost, with bytes filled in: operands read plus results written, on one replica."""
    rule = op.definition.cost
    y: Any = op._outputs[0] if len(op._outputs) == 1 else tuple(op._outputs)
    args, kwargs = call_arguments(op.definition, op.arguments)
    cost = rule(y, *args, **kwargs) if rule else Cost()
    if cost.bytes is not None:
        return cost
    return Cost(cost.flops, sum(t.nelms * t.dtype.itemsize for t in (*op.inputs, *op._outputs)))
