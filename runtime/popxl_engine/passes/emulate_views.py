"""Views that memory cannot give: tensors that lie apart as one (``concat_``), a reshaped transpose,
a reversed slice.

torch's views are strides over one piece of memory. Where an alias form needs more, its result is a
copy, and both sides are kept equal: what is written to one is copied to the other at once.
`dead_code` then drops the copies that nobody reads.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from popxl.errors import GraphError
from popxl.opdef import OpDefinition

from popxl_engine.ir import Block, Instr, Value, values_in
from popxl_engine.kernels.registry import kernel_for
from popxl_engine.ops.views import Rearrangement, refresh_view_, write_back_

RULES = frozenset({"views_back", "views_again"})
"""What is written to a view is copied to what it views, and the other way round."""

Allocation = Value
"""The first value whose memory others are views of, by contract and in torch."""


@dataclass(eq=False)
class EmulatedView:
    """An alias form that is computed as its out-of-place form, and what it views."""

    instr: Instr
    parts: list[Value]
    copies: int = 0
    """Instructions that keep both sides equal, so far."""

    @property
    def view(self) -> Value:
        """Its result."""
        return self.instr.outputs[0]

    @property
    def definition(self) -> OpDefinition:
        """The out-of-place form."""
        assert self.instr.definition is not None
        return self.instr.definition

    @cached_property
    def rearrangement(self) -> Rearrangement:
        """How its elements come from those of the parts."""
        return Rearrangement(self.definition, self.instr.arguments)

    def again(self) -> Instr:
        """The instruction that makes the view equal to what it views."""
        arguments = {"t": self.view, "parts": tuple(self.parts), "view": self.rearrangement}
        return self._writing(refresh_view_, arguments, self.parts)

    def back(self, index: int) -> Instr:
        """The instruction that makes a part equal to the view."""
        arguments = {
            "t": self.parts[index],
            "y": self.view,
            "view": self.rearrangement,
            "index": index,
        }
        return self._writing(write_back_, arguments, [self.view])

    def _writing(
        self, definition: OpDefinition, arguments: dict[str, Any], sources: Iterable[Value]
    ) -> Instr:
        target = arguments["t"]
        host = target.host and all(v.host for v in sources)
        self.copies += 1
        name = f"{target.name}_equal_to_{self.view.name}_{self.copies}"
        result = replace(target, name=name)
        return replace(
            self.instr, definition=definition, arguments=arguments, outputs=(result,), host=host
        )


def emulate_views(program: Block, rules: frozenset[str] = RULES) -> Block:
    """Make copies of the alias forms in a program that torch has no view for, and keep them equal.

    Args:
        rules: what keeps them equal. Tests take one away.
    Raises:
        GraphError: a write through a view that shows an element twice, or to two sides of a view at
            once.
    """
    return _Emulation(program, rules, {}, {}).run().block


@dataclass(frozen=True)
class _Emulated:
    """A block that is done."""

    block: Block
    written: frozenset[int]
    """The by-reference inputs that it writes."""


class _Emulation:
    """Goes through one block in order.

    Args:
        layouts: tensors without data that lie as the block's inputs do, where that is not plainly
            in order.
        done: the blocks before; all instructions that run one give it the same layouts.
    """

    def __init__(
        self,
        block: Block,
        rules: frozenset[str],
        layouts: Mapping[Value, torch.Tensor],
        done: dict[Block, _Emulated],
    ):
        self.block, self.rules, self.done = block, rules, done
        self.layouts: dict[Value, torch.Tensor] = dict(layouts)
        self.allocations: dict[Value, Allocation] = {}
        self.views: list[EmulatedView] = []
        """So far; each after those that it views."""
        self.changed: set[Allocation] = set()
        self._numbers: dict[Allocation, torch.Tensor] = {}

    def run(self) -> _Emulated:
        """The block with copies in place of views, kept equal."""
        instrs: list[Instr] = []
        for instr in self.block.instrs:
            if instr.bodies:
                instr, changed = self._in_bodies(instr)
            else:
                changed = [self.allocation(v) for v in instr.written()]
            instrs.append(self._viewed(instr))
            if changed:
                self._check_apart(instr, changed)
                instrs += self._updates(dict.fromkeys(changed))
        written = (
            i for i in self.block.by_ref if self.allocation(self.block.inputs[i]) in self.changed
        )
        return _Emulated(self.block.with_instrs(instrs), frozenset(written))

    def allocation(self, value: Value) -> Allocation:
        """What a value is a view of."""
        return self.allocations.get(value, value)

    def layout(self, value: Value) -> torch.Tensor:
        """A tensor without data that lies in memory as a value does."""
        if value not in self.layouts:
            self.layouts[value] = torch.empty(value.spec.shape, device="meta")
        return self.layouts[value]

    def _in_bodies(self, instr: Instr) -> tuple[Instr, list[Allocation]]:
        """An instruction with bodies that are done, and what they change."""
        changed: list[Allocation] = []
        bodies: list[Block] = []
        for body, inputs in instr.calls():
            if body not in self.done:
                layouts = {body.inputs[i]: self.layout(inputs[i]) for i in body.by_ref}
                self.done[body] = _Emulation(body, self.rules, layouts, self.done).run()
            bodies.append(self.done[body].block)
            changed += [self.allocation(inputs[i]) for i in sorted(self.done[body].written)]
        if tuple(bodies) != instr.bodies:
            instr = replace(instr, bodies=tuple(bodies))
        return instr, changed

    def _viewed(self, instr: Instr) -> Instr:
        """The instruction, or the copy that it has to be; its result has the memory of what it
        views or writes.
        """
        definition = instr.definition
        if definition is None or not instr.outputs:
            return instr
        result = instr.outputs[0]
        if definition.writes:
            target = instr.arguments[definition.writes[0]]
            self.allocations[result], self.layouts[result] = (
                self.allocation(target),
                self.layout(target),
            )
        elif definition.alias:
            parts = list(values_in([instr.arguments[p] for p in definition.views]))
            layout = self._view(definition, instr) if len(parts) == 1 else None
            if layout is None:
                assert definition.base is not None
                copy = replace(instr, definition=definition.base)
                self.views.append(EmulatedView(copy, parts))
                return copy
            self.allocations[result], self.layouts[result] = self.allocation(parts[0]), layout
        return instr

    def _view(self, definition: OpDefinition, instr: Instr) -> torch.Tensor | None:
        """How torch's view would lie; None where torch copies."""
        (source,) = instr.inputs()
        operand = self.layout(source)
        found = Rearrangement(definition, instr.arguments)(kernel_for(definition), [operand])
        shares = found.untyped_storage()._cdata == operand.untyped_storage()._cdata
        return found if shares else None

    # Keeping both sides equal

    def _updates(self, changed: dict[Allocation, None]) -> Iterator[Instr]:
        """What has to be copied after these allocations were written: first down to where views
        come from, then up again.
        """
        pending = list(changed)
        while pending:
            allocation = pending.pop(0)
            for view in self.views:
                if view.view is not allocation or "views_back" not in self.rules:
                    continue
                self._check_distinct(view)
                for index, part in enumerate(view.parts):
                    yield view.back(index)
                    if self.allocation(part) not in changed:
                        pending.append(self.allocation(part))
                    changed[self.allocation(part)] = None
        equal = set(changed)
        for view in self.views if "views_again" in self.rules else ():
            if view.view not in equal and any(
                self.allocation(part) in changed for part in view.parts
            ):
                yield view.again()
                changed[view.view] = None
        self.changed.update(changed)

    def _memory(self, allocation: Allocation) -> torch.Tensor:
        """A number for each element of an allocation's memory. Views have the numbers of what they
        view.
        """
        if allocation not in self._numbers:
            view = next((v for v in self.views if v.view is allocation), None)
            if view is None:
                first = sum(known.numel() for known in self._numbers.values())
                size = (
                    self.layout(allocation).untyped_storage().nbytes()
                    // self.layout(allocation).itemsize
                )
                self._numbers[allocation] = torch.arange(first, first + size)
            else:
                parts = []
                for part in view.parts:
                    layout = self.layout(part)
                    where = (layout.size(), layout.stride(), layout.storage_offset())
                    parts.append(self._memory(self.allocation(part)).as_strided(*where))
                self._numbers[allocation] = view.rearrangement(
                    kernel_for(view.definition), parts
                ).reshape(-1)
        return self._numbers[allocation]

    def _check_distinct(self, view: EmulatedView) -> None:
        """GraphError if a view that is written shows an element twice: which write
        wins would be undefined.
        """
        numbers, op = self._memory(view.view), view.instr.source
        if numbers.unique().numel() < numbers.numel():
            raise GraphError(
                f"Inplacing ambiguity detected. {op} built at {op.where if op else '?'}: got a "
                "write to a view that shows an element more than once; expected each once. Write "
                "to what it views, or join copies with ops.concat."
            )

    def _check_apart(self, instr: Instr, changed: Iterable[Allocation]) -> None:
        """GraphError if an instruction writes to two sides of an emulated view at the same time."""
        for allocation in dict.fromkeys(changed) if self.views else ():
            equal = self._kept_equal(allocation)
            for other in changed:
                if other is not allocation and other in equal and self._overlap(allocation, other):
                    raise GraphError(
                        f"{instr.source} built at {instr.source.where if instr.source else '?'}: "
                        f"got writes to {allocation} and {other}, which are views of the same "
                        "elements; expected one of them. Write to one after the other."
                    )

    def _overlap(self, allocation: Allocation, other: Allocation) -> bool:
        """Whether an element of one is also one of the other's: parts of a join are linked, and yet
        apart.
        """
        return bool(torch.isin(self._memory(allocation), self._memory(other)).any())

    def _kept_equal(self, allocation: Allocation) -> set[Allocation]:
        """Everything that is written when an allocation is, and what that comes from."""
        found: set[Allocation] = {allocation}
        while True:
            linked: list[tuple[Allocation, ...]] = [
                (v.view, *map(self.allocation, v.parts)) for v in self.views
            ]
            more = {
                h
                for allocations in linked
                if not found.isdisjoint(allocations)
                for h in allocations
            } - found
            if not more:
                return found
            found |= more
