"""What is known about an op wherever it is used: the record of its declaration, by name."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_origin

from popxl.spec import TensorSpec

Specs = TensorSpec | Sequence[TensorSpec] | None
EFFECTS = frozenset({"host", "remote", "collective", "control", "print", "clock"})


@dataclass(frozen=True)
class Cost:
    """Work of one execution on one replica. Bytes default to operands read plus results written."""

    flops: int = 0
    bytes: int | None = None
    parts: Mapping[str, int] | None = None
    """FLOPs by op, of one that does what several others do: they count as those ops'."""


@dataclass(eq=False)
class OpDefinition:
    """Everything that is known about an op, in one record.

    writes: parameters whose storage the op changes; the result is the first of them, by its new
    value.
    views: parameters whose elements the result only rearranges, so that a kernel may return a view
    of them.
    alias: the result *is* storage of `views`, and writing to it writes to them (``reshape_`` and
    its like).
    host: ``(arrays as the op's arguments) -> array(s)``, evaluation on numpy for small integers;
    None if there is none.
    effects: what it does beyond its results: "host", "remote", "collective", "control", "print",
        "clock".
    random: whether the result depends on a seed operand.
    across: whether its operands may be on different virtual devices and tile sets.
    residuals: whether its results but the last are there for its gradient rule alone, and have no
    gradient themselves.
    rounds: whether what it writes is rounded stochastically, where that is asked for, though it is
    not of 16 bits.
    """

    name: str
    infer: Callable[..., Specs]
    signature: inspect.Signature
    writes: tuple[str, ...] = ()
    views: tuple[str, ...] = ()
    alias: bool = False
    host: Callable[..., Any] | None = None
    effects: frozenset[str] = frozenset()
    random: bool = False
    across: bool = False
    residuals: bool = False
    rounds: bool = False
    differentiable: bool = True
    vjp: Callable[..., Any] | None = None
    cost: Callable[..., Cost] | None = None
    base: "OpDefinition | None" = None
    """The op that a derived in-place or alias form comes from."""
    names: None | str | Callable[..., Sequence[str]] = None
    """Names of the results, where they are not the op's: ``(op's arguments) -> names``, or a
    pattern such as "{t}_T".

    In a pattern operands stand for their names, a list of operands for the one of the result's
    position, ``{i}`` for that position; other arguments stand for themselves.
    """
    file: str = ""
    module: str = field(default="")

    def __repr__(self) -> str:
        return f"OpDefinition({self.name})"

    @property
    def result_type(self) -> Any:
        """What the rule returns, and so what the public function hands back: a `TensorSpec` or
        tensor, a list or a tuple of them, or None.
        """
        annotation = self.signature.return_annotation
        return get_origin(annotation) or annotation


OPS: dict[str, OpDefinition] = {}
"""Every declared op by name."""


def as_specs(result: Specs) -> tuple[TensorSpec, ...]:
    """What a rule returned, as a tuple with one spec per result."""
    if result is None:
        return ()
    return (result,) if isinstance(result, TensorSpec) else tuple(result)


def call_arguments(
    definition: OpDefinition, arguments: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments as ``(args, kwargs)`` of the definition's rules and kernels: variadic parameters
    are spread.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, kind in _kinds_of_parameters(definition):
        if kind is inspect.Parameter.VAR_POSITIONAL:
            args.extend(arguments[name])
        elif kind is inspect.Parameter.KEYWORD_ONLY:
            kwargs[name] = arguments[name]
        else:
            args.append(arguments[name])
    return args, kwargs


@cache
def _kinds_of_parameters(definition: OpDefinition) -> tuple[tuple[str, Any], ...]:
    return tuple((name, p.kind) for name, p in definition.signature.parameters.items())
