"""How the engine's own ops are declared, and checked where a pass makes use of one.

    @fused_op(cost=gemm_bias_cost)
    def gemm_bias(lhs: TensorSpec, rhs: TensorSpec, bias: TensorSpec) -> TensorSpec:
        ...check the operands, return the spec of each result...

Rules see a `TensorSpec` for each operand. They have no public function: no program adds such an op
to a graph.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import popxl  # noqa: F401 - declares the ops whose costs are summed up
from popxl.errors import ShapeError
from popxl.op_records import OPS, Cost, OpDefinition, as_specs, call_arguments
from popxl.tensor import TensorSpec

PREFIX = "fused_"
FUSED_OPS: dict[str, OpDefinition] = {}
"""Every op of the engine's own, by name."""


class OperandSpec(TensorSpec):
    """A spec that rules of `popxl.ops` take in place of a tensor."""

    @property
    def spec(self) -> TensorSpec:
        """Itself."""
        return self


def fused_op(
    cost: Callable[..., Cost],
    writes: Sequence[str] = (),
    random: bool = False,
    host: Callable[..., Any] | None = None,
    signature: inspect.Signature | None = None,
) -> Callable[[Callable[..., Any]], OpDefinition]:
    """Declare an op by the rule that infers its results' specs.

    Args:
        cost: ``(results, *operands) -> Cost``: the work of the ops that it stands for.
        writes: parameters whose storage the op changes; its first result is the first of them.
        random: whether it depends on a seed operand.
        host: the op on numpy arrays, where it may run on the host.
        signature: its parameters, where they are not the rule's.
    """

    def declared(rule: Callable[..., Any]) -> OpDefinition:
        name = PREFIX + rule.__name__
        if name in FUSED_OPS:
            raise ValueError(f"fused_op: got a second declaration of {name!r}; expected one.")
        FUSED_OPS[name] = OpDefinition(
            name=name,
            infer=rule,
            signature=signature or inspect.signature(rule, eval_str=True),
            writes=tuple(writes),
            random=random,
            host=host,
            differentiable=False,
            cost=cost,
            file=rule.__code__.co_filename,
            module=rule.__module__,
        )
        return FUSED_OPS[name]

    return declared


def operand_specs(argument: Any) -> Any:
    """An argument with the spec of each tensor, or value of a block, in its place."""
    if isinstance(argument, (tuple, list)):
        return tuple(map(operand_specs, argument))
    spec = getattr(argument, "spec", None)
    return OperandSpec(spec.shape, spec.dtype) if isinstance(spec, TensorSpec) else argument


def takes(definition: OpDefinition, arguments: Mapping[str, Any]) -> bool:
    """Whether an op's inference accepts such operands."""
    try:
        definition.infer(**{name: operand_specs(a) for name, a in arguments.items()})
    except ShapeError:
        return False
    return True


def check_results(
    definition: OpDefinition, arguments: Mapping[str, Any], results: Iterable[Any]
) -> None:
    """ShapeError if results, tensors or values of a block, are not what an op makes of its
    operands.
    """
    if set(arguments) != set(definition.signature.parameters):
        raise TypeError(
            f"{definition.name}: got arguments {', '.join(arguments)}; expected "
            f"{', '.join(definition.signature.parameters)}."
        )
    operands = {name: operand_specs(a) for name, a in arguments.items()}
    inferred = [(s.shape, s.dtype) for s in as_specs(definition.infer(**operands))]
    given = [(r.spec.shape, r.spec.dtype) for r in results]
    if inferred != given:
        raise ShapeError(
            f"{definition.name}: got results {_shown(given)}; expected {_shown(inferred)}. Correct "
            "the pass that put it there."
        )


def declared_cost(
    definition: OpDefinition, arguments: Mapping[str, Any], results: Iterable[Any]
) -> Cost:
    """What an op's rule counts for these operands and results, with bytes filled in as `op_cost`
    does. The rule of an op with residuals gets None for a result that is not worked out.
    """
    specs = tuple(map(operand_specs, results))
    operands = {name: operand_specs(a) for name, a in arguments.items()}
    args, kwargs = call_arguments(definition, operands)
    rule = definition.cost
    cost = rule(specs[0] if len(specs) == 1 else specs, *args, **kwargs) if rule else Cost()
    if cost.bytes is not None:
        return cost
    nbytes = sum(t.nbytes for t in _specs_in((*operands.values(), *specs)))
    return Cost(cost.flops, nbytes, cost.parts)


def _specs_in(operands: Iterable[Any]) -> Iterator[TensorSpec]:
    for operand in operands:
        if isinstance(operand, TensorSpec):
            yield operand
        elif isinstance(operand, tuple):
            yield from _specs_in(operand)


def flops_of(name: str, result: TensorSpec, *operands: Any) -> int:
    """What the rule of one of `popxl.ops` counts: what an op of ours does is a sum of these."""
    rule = OPS[name].cost
    assert rule is not None, name
    flops: int = rule(result, *operands).flops
    return flops


def _shown(specs: Iterable[Any]) -> str:
    return ", ".join(str(TensorSpec(*spec)) for spec in specs)


def check(holds: bool, name: str, expected: str, **operands: Any) -> None:
    """ShapeError unless operands are what an op takes."""
    if not holds:
        given = ", ".join(f"{n} {t}" for n, t in operands.items() if t is not None)
        raise ShapeError(f"{PREFIX}{name}: got {given}; expected {expected}.")
