"""The conditions of the compiler's passes, and passes without one of them.

A guard is an operand of ``and`` or ``or``, the condition of an ``if`` or of a comprehension, a
comparison that a function returns, or an argument that a pattern fixes. Without it, the others
decide.
"""

import ast
import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType
from typing import Any

MODULES = (
    "passes.rewriter", "passes.accumulate", "passes.adamw", "passes.attention",
    "passes.attention_gradients", "passes.dead_code", "passes.drop_unused_probs",
    "passes.elide_zero_init", "passes.flash_attention", "passes.fuse_cross_entropy",
    "passes.fuse_embedding_grad", "passes.fuse_grad_norm", "passes.fuse_softcap", "passes.gemm", "passes.hide_by_attributes", "passes.identities", "passes.narrow_logits",
    "passes.pack_qkv_grads", "passes.reuse_dropout", "passes.scalar_cse",
    "passes.separate_operands", "analysis.def_use", "analysis.value_numbers",
)  # fmt: skip
"""What passes decide by. The rules of `elide_copies` and `emulate_views` have a test of their own:
test_random_programs.py takes away one after the other.
"""


class _Guards(ast.NodeTransformer):
    """Visits the guards of a module; `removed` is replaced by what leaves the choice to others."""

    def __init__(self, removed: str = ""):
        self.removed, self.names = removed, []  # type: tuple[str, list[str]]
        self._counts: Counter[str] = Counter()
        self._inside: list[str] = []

    def _guard(self, node: ast.expr, neutral: bool) -> ast.expr:
        name = f"{'.'.join(self._inside)}: {ast.unparse(node)}"
        self._counts[name] += 1
        if self._counts[name] > 1:
            name += f" ({self._counts[name]})"
        self.names.append(name)
        visited = self.visit(node)
        return ast.Constant(neutral) if name == self.removed else visited

    def _condition(self, test: ast.expr, neutral: bool) -> ast.expr:
        is_one = not isinstance(test, ast.BoolOp)
        result: ast.expr = self._guard(test, neutral) if is_one else self.visit(test)
        return result

    def _within(self, node: Any) -> Any:
        self._inside.append(node.name)
        self.generic_visit(node)
        self._inside.pop()
        return node

    visit_FunctionDef = visit_ClassDef = _within

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.BoolOp:
        neutral = isinstance(node.op, ast.And)
        node.values = [self._guard(value, neutral) for value in node.values]
        return node

    def visit_If(self, node: ast.If) -> ast.If:
        refuses = all(isinstance(n, (ast.Return, ast.Continue, ast.Break)) for n in node.body)
        node.test = self._condition(node.test, not refuses)
        node.body = [self.visit(n) for n in node.body]
        node.orelse = [self.visit(n) for n in node.orelse]
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.IfExp:
        if _is_nothing(node.body) or _is_nothing(node.orelse):
            node.test = self._condition(node.test, not _is_nothing(node.body))
        else:
            node.test = self.visit(node.test)
        node.body, node.orelse = self.visit(node.body), self.visit(node.orelse)
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.comprehension:
        node.iter = self.visit(node.iter)
        node.ifs = [self._condition(test, True) for test in node.ifs]
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if ast.unparse(node.func).rpartition(".")[2] in ("match", "pattern", "kept_pattern"):
            node.keywords = [keyword for keyword in node.keywords if self._is_left(keyword)]
        return node

    def _is_left(self, keyword: ast.keyword) -> bool:
        """Whether an argument of a pattern stays; a name leaves it open what it is."""
        is_fixed = isinstance(keyword.value, ast.Constant) and not isinstance(
            keyword.value.value, str
        )
        if is_fixed:
            self.names.append(f"{'.'.join(self._inside)}: {ast.unparse(keyword)}")
        return not is_fixed or self.names[-1] != self.removed

    def visit_Return(self, node: ast.Return) -> ast.Return:
        if isinstance(node.value, ast.Compare):
            node.value = self._guard(node.value, True)
        else:
            self.generic_visit(node)
        return node


def _is_nothing(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in (None, False)


def _module(name: str) -> Any:
    return importlib.import_module(f"popxl_engine.{name}")


@cache
def guards_of(module: str) -> tuple[str, ...]:
    """The guards of a module, each as "function: condition"."""
    guards = _Guards()
    guards.visit(ast.parse(inspect.getsource(_module(module))))
    return tuple(guards.names)


def take_out(module: str, guard: str, setattr_: Callable[[Any, str, Any], None]) -> None:
    """Give the functions of a module the code that they have without a guard.

    Args:
        setattr_: that of pytest's monkeypatch, which puts it back.
    """
    original, guards = _module(module), _Guards(guard)
    tree = ast.fix_missing_locations(guards.visit(ast.parse(inspect.getsource(original))))
    assert guard in guards.names, f"{module} has no guard {guard!r}"
    namespace: dict[str, Any] = {"__name__": original.__name__}
    exec(compile(tree, f"{module} without {guard}", "exec"), namespace)
    changed = dict(_functions_in(namespace, original.__name__))
    for name, function in _functions_in(vars(original), original.__name__):
        setattr_(function, "__code__", changed[name].__code__)


def _functions_in(members: Any, module: str) -> Iterator[tuple[str, FunctionType]]:
    """Functions of a module and methods of its classes, by name."""
    for name, member in list(members.items()):
        if isinstance(member, FunctionType) and member.__module__ == module:
            yield name, member
        elif isinstance(member, type) and member.__module__ == module:
            for inner, method in _functions_in(vars(member), module):
                yield f"{name}.{inner}", method
