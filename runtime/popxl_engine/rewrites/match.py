"""What rules need to find patterns: who makes a tensor, who uses it, and whether steps may move."""

from dataclasses import replace
from functools import cached_property
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

from popxl.graph import Graph
from popxl.opdef import OPS, Op, OpDefinition, flatten
from popxl.values import Constant, Tensor, TensorSpec, make_temporary

from popxl_engine.blocks import Instr, Value
from popxl_engine.ops.definition import check_results
from popxl_engine.steps import Step


def fused_step(
    definition: OpDefinition,
    arguments: Dict[str, Any],
    outputs: Tuple[Tensor, ...],
    source: Op,
    writers: Tuple[Op, ...] = (),
) -> Step:
    """A step of one of the engine's own ops, whose results are what it makes of its operands."""
    check_results(definition, arguments, outputs)
    return Step(definition, arguments, outputs, source, writers)


def fused_instr(
    instr: Instr,
    definition: OpDefinition,
    arguments: Optional[Dict[str, Any]] = None,
    outputs: Optional[List[Value]] = None,
) -> Instr:
    """An instruction as one of the engine's own ops, whose results are what it makes of its
    operands.
    """
    found = replace(
        instr,
        definition=definition,
        arguments=instr.arguments if arguments is None else arguments,
        outputs=instr.outputs if outputs is None else outputs,
    )
    check_results(definition, found.arguments, found.outputs)
    return found


class Steps:
    """A graph's steps with an index of who makes and who uses each tensor, as they were at
    first.
    """

    def __init__(self, steps: Sequence[Step], graph: Graph):
        self._first, self.steps = tuple(steps), list(steps)
        self.outputs: Set[Tensor] = set(graph.outputs)
        self.removed: Set[int] = set()
        self.inserted: Dict[int, List[Step]] = {}

    @cached_property
    def maker(self) -> Dict[Tensor, int]:
        """The step that makes each tensor."""
        return {t: i for i, step in enumerate(self._first) for t in step.outputs}

    @cached_property
    def users(self) -> Dict[Tensor, List[int]]:
        """The steps that use each tensor, in order."""
        found: Dict[Tensor, List[int]] = {}
        for i, step in enumerate(self._first):
            for t in flatten(step.arguments.values()):
                found.setdefault(t, []).append(i)
        return found

    @cached_property
    def _origin(self) -> Dict[Tensor, Tensor]:
        origins: Dict[Tensor, Tensor] = {}
        for step in self._first:
            for source, result in shared_storage(step):
                _share(origins, source, result)
        return origins

    def origin(self, t: Any) -> Any:
        """The first tensor whose storage this one is by contract, through in-place results and
        views.
        """
        return self._origin.get(t, t)

    def used_only_by(self, t: Tensor, users: Iterable[int]) -> bool:
        """Whether nothing but these steps sees a tensor."""
        return t not in self.outputs and set(self.users.get(t, ())) <= set(users)

    def may_run_late(
        self, absorbed: Sequence[int], last: int, written: Iterable[Tensor], except_: Any = None
    ) -> bool:
        """Whether steps may run at ``last`` instead of where they are.

        Nothing else in between may write, or see the storage that they write; one step,
        ``except_``, may.
        """
        origins = {self.origin(t) for t in written}
        for i in range(min(absorbed), last):
            if i in absorbed or i in self.removed or i == except_:
                continue
            step = self.steps[i]
            if writes(step) or any(
                self.origin(t) in origins for t in flatten(step.arguments.values())
            ):
                return False
        return True

    def made_by(self, t: Any, name: str) -> Optional[int]:
        """Index of the step that makes a tensor, if it is an op of this name and nothing else uses
        the tensor.
        """
        index = self.maker.get(t) if isinstance(t, Tensor) else None
        if index is None or index in self.removed or self.steps[index].definition.name != name:
            return None
        return index if len(self.users.get(t, ())) == 1 and t not in self.outputs else None

    def writes_between(self, first: int, last: int) -> bool:
        """Whether any step strictly between two writes to storage."""
        return any(writes(self.steps[i]) for i in range(first + 1, last) if i not in self.removed)

    def replace(self, index: int, step: Step, *absorbed: int) -> None:
        """Put a fused step at an index; the absorbed ones go."""
        self.steps[index] = step
        self.removed.update(absorbed)

    def transposed(self, t: Tensor, before: int) -> Tensor:
        """The transpose of a matrix: what it is the transpose of, or a new view made before an
        index.
        """
        maker = self.maker.get(t)
        if (
            maker is not None
            and self.steps[maker].definition.name == "transpose"
            and not self.writes_between(maker, before)
        ):
            source: Tensor = self.steps[maker].arguments["t"]
            return source
        spec = TensorSpec(t.shape[::-1], t.dtype)
        result = make_temporary(t, f"{t.name}_transposed", spec)
        arguments = {"t": t, "permutation": (1, 0)}
        self.inserted.setdefault(before, []).append(
            Step(OPS["transpose"], arguments, (result,), self.steps[before].source)
        )
        return result

    def result(self) -> List[Step]:
        """The steps that are left, with those inserted."""
        result: List[Step] = []
        for i, step in enumerate(self.steps):
            result += self.inserted.get(i, [])
            if i not in self.removed:
                result.append(step)
        return result


def _share(origins: Dict[Tensor, Tensor], source: Tensor, result: Tensor) -> None:
    """Give both one origin. A result that has one already is a join of tensors, whose origins
    become one.
    """
    origin, other = origins.get(source, source), origins.get(result, result)
    if other is not result:
        origins.update((t, origin) for t, known in list(origins.items()) if known is other)
    origins[other] = origin


def shared_storage(step: Step) -> Iterator[Tuple[Tensor, Tensor]]:
    """(operand, result) pairs that share storage by contract."""
    definition = step.definition
    if definition.writes and step.outputs:
        yield step.arguments[definition.writes[0]], step.outputs[0]
    elif definition.alias:
        for source in flatten(step.arguments[p] for p in definition.views):
            yield from ((source, result) for result in step.outputs)


def writes(step: Step) -> bool:
    """Whether a step changes storage."""
    return bool(step.definition.writes) or bool(
        "control" in step.definition.effects and step.source.written
    )


def scalar_constant(t: Any) -> Optional[float]:
    """The value of a constant of one element."""
    return float(t.host_value.reshape(())) if isinstance(t, Constant) and t.nelms == 1 else None
