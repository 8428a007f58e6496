"""Without one of its guards a pass gives wrong programs, and the programs of `pass_programs` show it."""

import importlib
import inspect
from types import FunctionType
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple

import pytest
from helpers.pass_checks import Checker, Failure
from helpers.pass_programs import Perturbation, Scene


class Mutant(NamedTuple):
    """A guard that is taken out of the text of a module of `popxl_engine`, and the program that
    shows it: a pattern, what disturbs it, and where it stands.
    """

    where: str
    guard: str
    instead: str
    pattern: str
    kind: str
    place: int
    which: int
    wrap: str


MUTANTS: List[Mutant] = [
    Mutant('passes.rewriter', 'or len(self.uses.users.get(v, ())) != 1', '', 'bias', 'an output', 0, 0, "main"),
    Mutant('passes.rewriter', ' or v in self.uses.outputs:', ':', 'bias', 'an output', 0, 0, "call"),
    Mutant('passes.rewriter', 'self.instrs[i].written() for', 'False for', 'bias', 'operand written', 0, 1, "call"),
    Mutant('passes.rewriter', 'if instr.written() or any', 'if any', 'adam', 'operand written', 3, 2, "call"),
    Mutant('passes.rewriter', 'any(self.storage(v) in storages for v in instr.inputs())', 'False', 'adam', 'operand read', 1, 1, "call"),
    Mutant('passes.rewriter', 'and not self.writes_between(made, before)', '', 'transposed', 'operand written', 0, 1, "call"),
    Mutant('passes.rewriter', 'v not in self.uses.outputs and', '', 'adam', 'an output', 0, 0, "call"),
    Mutant('passes.rewriter', 'set(self.users(v)) <= set(users)', 'True', 'adam', 'an output', 0, 0, "main"),
    Mutant('passes.accumulate', 'or rewriter.writes_between(made, index)', '', 'accumulated product', 'operand written', 1, 1, "call"),
    Mutant('passes.adamw', 'not rewriter.used_only_by(gradient, users)', 'False', 'adam', 'an output', 0, 0, "call"),
    Mutant('passes.attention', 'or rewriter.writes_between(scoring, i)', '', 'attention', 'operand written', 2, 1, "call"),
    Mutant('passes.attention', 'if _only_after(rewriter, outputs, i, absorbed):', 'if True:', 'attention', 'another user', 2, 0, "call"),
    Mutant('passes.attention', 'not rewriter.writes_between(min(found.positions), last) and', '', 'gradients', 'operand written', 3, 0, "call"),
    Mutant('passes.attention', 'if len(users) != 1 or v in rewriter.uses.outputs or', 'if', 'gradients', 'an output', 4, 0, "call"),
    Mutant('passes.attention', 'if len(products) != 2 or scaled in', 'if scaled in', 'gradients', 'an output', 5, 0, "main"),
    Mutant('passes.attention', ' or scaled in rewriter.uses.outputs', '', 'gradients', 'an output', 5, 0, "call"),
    Mutant('passes.gemm', 'and not rewriter.writes_between(made, i)', '', 'bias', 'operand written', 0, 1, "call"),
    Mutant('passes.gemm', 'or rewriter.writes_between(made, i)', '', 'scores', 'operand written', 0, 0, "call"),
    Mutant('passes.identities', 'or rewriter.writes_between(made, i)', '', 'transposed', 'operand written', 1, 0, "call"),
    Mutant('passes.identities', 'if t.dtype is instr.outputs[0].dtype:', 'if True:', 'bias', 'another type', 0, 0, "call"),
    Mutant('passes.scalar_cse', 'elif not aliases.is_written(instr.outputs[0]):', 'else:', 'numbers', 'written', 0, 0, "call"),
    Mutant('analysis.value_numbers', 'if self._aliases.is_written(value):', 'if False:', 'numbers', 'operand written', 0, 0, "call"),
    Mutant('analysis.def_use', 'return len(self.users.get(v, ())) == 1 and', 'return', 'packed gradients', 'an output', 1, 0, "call"),
    Mutant('passes.elide_zero_init', 'unmet.pop(v, None)', 'pass', 'from zeros', 'another user', 0, 0, "call"),
    Mutant('passes.fuse_embedding_grad', 'or self._changes(mean, adding, rows)', '', 'embedding', 'operand written', 3, 0, "call"),
    Mutant('passes.fuse_embedding_grad', 'or len(self.of[sums]) != 3', '', 'embedding', 'an output', 0, 0, "call"),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.where}: {m.guard}")
def test_without_a_guard_a_program_is_wrong(mutant: Mutant, monkeypatch: Any) -> None:
    perturbation = Perturbation(mutant.kind, mutant.place, mutant.which, 1)
    checker = Checker((Scene(mutant.pattern, "float32", mutant.wrap, (perturbation,)),))
    checker.check_all()
    mutate(mutant, monkeypatch)
    with pytest.raises(Failure):
        checker.check_all()


def mutate(mutant: Mutant, monkeypatch: Any) -> None:
    """Give the functions that are in a module the code that they have without the guard."""
    module = importlib.import_module(f"popxl_engine.{mutant.where}")
    text = inspect.getsource(module)
    assert text.count(mutant.guard) == 1, f"the guard stands there {text.count(mutant.guard)} times"
    namespace: Dict[str, Any] = {"__name__": module.__name__}
    exec(compile(text.replace(mutant.guard, mutant.instead), "mutant", "exec"), namespace)
    changed = dict(functions_in(namespace, module.__name__))
    for name, function in functions_in(vars(module), module.__name__):
        monkeypatch.setattr(function, "__code__", changed[name].__code__)


def functions_in(members: Any, module: str) -> Iterator[Tuple[str, FunctionType]]:
    """Functions of a module and methods of its classes, by name."""
    for name, member in list(members.items()):
        if isinstance(member, FunctionType) and member.__module__ == module:
            yield name, member
        elif isinstance(member, type) and member.__module__ == module:
            for inner, method in functions_in(vars(member), module):
                yield f"{name}.{inner}", method
