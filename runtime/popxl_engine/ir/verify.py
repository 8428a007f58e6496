"""What must hold of every program between passes."""

from collections.abc import Callable

from popxl_engine.ir.block import (
    Block,
    Instr,
    Value,
    aliased,
    blocks_of,
    may_alias_or_write,
)
from popxl_engine.ir.text import instr_text


class VerificationError(AssertionError):
    """A pass has made a program that is none. This is a mistake in the compiler."""


def verify(program: Block, after: str, is_graph: bool) -> None:
    """Check a program: names, scopes, types, effects and aliases. A block that a pass leaves as it
    was is not checked again.

    Args:
        after: the pass that made it, for the message.
        is_graph: it is the block of a single graph, whose constants are copied where it is called.
    Raises:
        VerificationError: it is not as it must be.
    """
    for block in blocks_of(program):
        for rule in _RULES[:3] if is_graph else _RULES:
            for what, wrong in block.find(rule):
                shown = what if isinstance(what, str) else instr_text(what)
                raise VerificationError(
                    f"after {after}, in block {block.name or 'main'}: {shown}: {wrong}"
                )


Wrong = list[tuple[Instr | str, str]]
"""Instructions, or what else is named, and what is wrong with them."""


def _scopes(block: Block) -> Wrong:
    """Each value is made once, before it is used, and under its own name."""
    known: dict[Value, str] = {}
    wrong: Wrong = []
    for value in (*block.inputs, *block.state.values(), *block.constants.values()):
        known.setdefault(value, value.name)
    for instr in block.instrs:
        unknown = [v for v in instr.inputs() if v not in known]
        wrong += [(instr, f"uses {v}, which is not made before it") for v in unknown]
        for value in instr.outputs:
            if value in known:
                wrong.append((instr, f"makes {value}, which is made already"))
            known[value] = value.name
    wrong += [("return", f"uses {v}, which is not made") for v in block.outputs if v not in known]
    if len(set(known.values())) < len(known):
        names = list(known.values())
        wrong += [(n, "is the name of several values") for n in names if names.count(n) > 1]
    return wrong


def _types(block: Block) -> Wrong:
    """Results that are an operand's storage have its type; copies their operand's; bodies take and
    return what they are given and give.
    """
    wrong: Wrong = []
    for instr in block.instrs:
        definition = instr.definition
        if instr.kind == "op" and not instr.bodies and not (definition and definition.writes):
            continue
        if instr.kind == "copy" and _type(instr.arguments["t"]) != _type(instr.outputs[0]):
            wrong.append((instr, "copies to another type"))
        if definition is not None and definition.writes and instr.outputs:
            (first, *_) = aliased(instr)
            if _type(first) != _type(instr.outputs[0]):
                wrong.append((instr, f"writes {first} and gives another type"))
        for body, inputs in instr.calls():
            given = [(_type(v), v.host) for v in inputs]
            taken = [(_type(v), v.host) for v in body.inputs]
            if given != taken:
                wrong.append((instr, f"gives {given} to a body that takes {taken}"))
            if list(map(_type, instr.outputs)) != list(map(_type, body.outputs)):
                wrong.append((instr, "has results of other types than its body"))
    return wrong


def _type(value: Value) -> tuple[object, object]:
    return value.spec.shape, value.spec.dtype


def _effects(block: Block) -> Wrong:
    """Constants are never written, nor inputs that are not taken by reference; what runs on the
    host has its operands there.
    """
    fixed = {*block.constants.values()}
    fixed |= {v for i, v in enumerate(block.inputs) if i not in block.by_ref}
    fixed -= {v for i, v in enumerate(block.inputs) if i in block.by_ref}
    wrong: Wrong = []
    for instr in block.instrs:
        if not (instr.bodies or instr.host or may_alias_or_write(instr.definition)):
            continue
        if any(v in fixed for v in aliased(instr)):
            fixed.update(instr.outputs)
        for value in _written(instr):
            if value in fixed:
                wrong.append((instr, f"writes {value}, which is a constant or another's"))
        if (
            instr.kind != "copy"
            and instr.host
            and not all(v.host for v in (*instr.inputs(), *instr.outputs))
        ):
            wrong.append((instr, "runs on the host with operands or results that are not there"))
    return wrong


def _written(instr: Instr) -> list[Value]:
    """What an instruction writes, itself or by what it runs."""
    if not instr.bodies:
        return list(instr.written())
    return [inputs[i] for body, inputs in instr.calls() for i in body.find(_written_inputs)]


def _written_inputs(block: Block) -> list[int]:
    same: dict[Value, Value] = {}
    for instr in block.instrs:
        for source in aliased(instr)[:1]:
            same.update(dict.fromkeys(instr.outputs, same.get(source, source)))
    written = {same.get(v, v) for instr in block.instrs for v in _written(instr)}
    return [i for i in sorted(block.by_ref) if block.inputs[i] in written]


def _bodies(block: Block) -> Wrong:
    """Instructions have the bodies of their kind."""
    count = {"call": 1, "repeat": 1, "conditional": 2}
    return [
        (instr, f"has {len(instr.bodies)} bodies")
        for instr in block.instrs
        if len(instr.bodies) != count.get(instr.kind, 0)
    ]


_RULES: tuple[Callable[[Block], Wrong], ...] = (_bodies, _scopes, _types, _effects)
