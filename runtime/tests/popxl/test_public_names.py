"""Every name of the original API is there, is of the same kind, and takes the same parameters with
the same defaults.

`public_names.json` lists that API: for each module its names, for each function its parameters, for
each class its members (``__base__``: a class it derives from), null for what is no function,
`@module` for a name that is another module's. Members in ``class_level`` belong to the class, not
to its instances. A default of ``...`` is not known, and neither are parameters ``*args, **kwargs``
of a constructor or of what `popart` has.
"""

import ast
import importlib
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import popxl
import pytest
from helpers.public_api import api, as_arguments
from helpers.quick import cases
from popxl.tensorlocation import ReplicatedTensorSharding, TensorStorage

MODULES: dict[str, dict[str, Any]] = api()["modules"]
UNKNOWN = "*args, **kwargs"
EXTENSIONS = {
    "popxl_addons.autodiff_with_accumulation": ("accumulator_dtype",),
    "popxl_addons.transforms.autodiff_with_accumulation": ("accumulator_dtype",),
    "popxl_addons.transforms.autodiff.autodiff_with_accumulation": ("accumulator_dtype",),
    "popxl_addons.optimizers.adam.AdamOptimizerStep.build": (
        "keyword second_order_dtype",
        "keyword update_if",
    ),
}
"""Parameters that go beyond the API: after all others, with defaults."""
KINDS = {
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.KEYWORD_ONLY: "keyword ",
    inspect.Parameter.VAR_KEYWORD: "**",
}
NAMES_IN_DEFAULTS = {
    "popxl": popxl,
    "dtypes": popxl.dtypes,
    "float8_143": popxl.float8_143,
    "ReplicatedTensorSharding": ReplicatedTensorSharding,
    "TensorStorage": TensorStorage,
}
REQUIRED = inspect.Parameter.empty
Parameter = tuple[str, Any]
"""A parameter's kind and name, and its default."""


def declared_parameters(text: str) -> list[Parameter]:
    """The parameters that the API lists, in order."""

    def value(default: ast.expr | None) -> Any:
        return REQUIRED if default is None else eval(ast.unparse(default), dict(NAMES_IN_DEFAULTS))

    arguments = as_arguments(text)
    required = len(arguments.args) - len(arguments.defaults)
    found = [
        (a.arg, value(d)) for a, d in zip(arguments.args, [None] * required + arguments.defaults)
    ]
    if arguments.vararg:
        found.append((f"*{arguments.vararg.arg}", REQUIRED))
    found += [
        (f"keyword {a.arg}", value(d)) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults)
    ]
    if arguments.kwarg:
        found.append((f"**{arguments.kwarg.arg}", REQUIRED))
    return found


def actual_parameters(found: Callable[..., Any]) -> list[Parameter]:
    """The parameters that a function, or a class's constructor, takes from its caller."""
    parameters = inspect.signature(found).parameters.values()
    return [(f"{KINDS.get(p.kind, 'positional ')}{p.name}", p.default) for p in parameters]


def is_same_default(declared: Any, actual: Any) -> bool:
    """Whether two defaults are the same value of the same type; an unknown one only has to be
    there.
    """
    if declared is ...:
        return actual is not REQUIRED
    return declared is actual or (type(declared) is type(actual) and bool(declared == actual))


def signature_problems(
    path: str, declared: str, found: Callable[..., Any], skip: int = 0
) -> Iterator[str]:
    """How the parameters of a function, after the first few, differ from the declared ones."""
    if declared == UNKNOWN and (path.endswith(".__init__") or path.startswith("popart.")):
        return
    expected, actual = declared_parameters(declared), actual_parameters(found)[skip:]
    beyond = EXTENSIONS.get(path, ())
    extra = [
        name for name, default in actual[len(actual) - len(beyond) :] if default is not REQUIRED
    ]
    if beyond and tuple(extra) == beyond:
        actual = actual[: -len(beyond)]
    same = [name for name, _ in expected] == [name for name, _ in actual] and all(
        is_same_default(d, a) for (_, d), (_, a) in zip(expected, actual)
    )
    if not same:
        yield f"{path}: got {inspect.signature(found)}; expected ({declared})"


def assigned_attributes(cls: type) -> set[str]:
    """Names that a class's own source annotates in its body, or assigns as ``self.name``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return set()
    (definition,) = tree.body
    assert isinstance(definition, ast.ClassDef)
    fields = (node.target for node in definition.body if isinstance(node, ast.AnnAssign))
    stored = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    )
    return {target.id for target in fields if isinstance(target, ast.Name)} | {
        node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def member_problems(path: str, cls: type, name: str, declared: str | None) -> Iterator[str]:
    """How a class's member differs from what the API lists."""
    found = inspect.getattr_static(cls, name, None)
    if declared is None:
        if found is None and not any(name in assigned_attributes(base) for base in cls.__mro__):
            yield f"{path}: missing; expected a property or an attribute"
        elif inspect.isfunction(found) or isinstance(found, (classmethod, staticmethod)):
            yield f"{path}: got a method; expected a property or an attribute"
        return
    at_class = isinstance(found, (classmethod, staticmethod))
    if found is None:
        yield f"{path}: missing; expected a method ({declared})"
    elif not (inspect.isroutine(found) or at_class):
        yield f"{path}: got {type(found).__name__}; expected a method ({declared})"
    elif at_class != (path in api()["class_level"]):
        yield (
            f"{path}: got a method of the {'class' if at_class else 'instances'}; expected the "
            "other"
        )
    else:
        yield from signature_problems(path, declared, getattr(cls, name), skip=0 if at_class else 1)


def class_problems(path: str, cls: Any, members: dict[str, str | None]) -> Iterator[str]:
    """How a class differs from what the API lists."""
    if not isinstance(cls, type):
        yield f"{path}: got {type(cls).__name__}; expected a class"
        return
    for name, declared in members.items():
        if name == "__base__":
            if declared not in (base.__name__ for base in cls.__mro__):
                yield (
                    f"{path}: got bases {[base.__name__ for base in cls.__mro__[1:]]}; expected "
                    f"{declared} among them"
                )
        elif name == "__init__":
            assert declared is not None
            yield from signature_problems(f"{path}.__init__", declared, cls)
        else:
            yield from member_problems(f"{path}.{name}", cls, name, declared)


def name_problems(module: Any, path: str, declared: Any) -> Iterator[str]:
    """How a module's name differs from what the API lists."""
    where, _, name = path.rpartition(".")
    if not hasattr(module, name):
        yield f"{path}: missing"
        return
    found = getattr(module, name)
    if isinstance(declared, dict):
        yield from class_problems(path, found, declared)
    elif declared is None:
        if inspect.isfunction(found):
            yield f"{path}: got a function; expected none"
    elif declared.startswith("@"):
        if found is not getattr(importlib.import_module(declared[1:]), name, None):
            yield f"{path}: got {found!r}; expected the one of {declared[1:]}"
    elif not callable(found):
        yield f"{path}: got {type(found).__name__}; expected a function ({declared})"
    else:
        yield from signature_problems(path, declared, found)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_there_with_its_kind_and_signature(module):
    found = importlib.import_module(module)
    problems = [
        p
        for name, declared in MODULES[module].items()
        for p in name_problems(found, f"{module}.{name}", declared)
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "package", cases(["popxl", "popxl_addons"], lambda package: package == "popxl")
)
def test_one_import_reaches_everything_at_the_top_of_a_package(package):
    code = (
        f"import sys, {package}; print([name for name in sys.argv[1:] if not hasattr({package}, "
        "name)])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, *MODULES[package]], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"


def a_function(t, axis=0, *, keep=False):
    return t, axis, keep


class AClass:
    """Has a bit of everything."""

    def __init__(self, size=1):
        self.size = size

    @property
    def shape(self):
        return (self.size,)

    def method(self, x, y=None):
        return self, x, y

    @classmethod
    def make(cls):
        return cls()


A_MODULE = SimpleNamespace(function=a_function, AClass=AClass, number=1)


@pytest.mark.parametrize(
    "name, declared",
    [
        ("function", "t, axis=0, *, keep=False"),
        ("function", "t, axis=..., *, keep=False"),
        ("number", None),
        (
            "AClass",
            {
                "__init__": "size=1",
                "__base__": "object",
                "size": None,
                "shape": None,
                "method": "x, y=None",
            },
        ),
    ],
)
def test_what_is_as_declared_has_no_problem(name, declared):
    assert list(name_problems(A_MODULE, f"module.{name}", declared)) == []


@pytest.mark.parametrize(
    "name, declared, words",
    [
        ("lost", None, "module.lost: missing"),
        ("function", None, "got a function; expected none"),
        ("number", "t", "expected a function"),
        ("function", {"__init__": ""}, "expected a class"),
        ("function", "@popxl.ops", "expected the one of popxl.ops"),
        ("function", "t, axis=0, keep=False", "expected (t, axis=0, keep=False)"),
        ("function", "t, axis=1, *, keep=False", "expected (t, axis=1"),
        ("function", "t, axis=False, *, keep=False", "expected (t, axis=False"),
        ("function", "t, axis, *, keep=False", "expected (t, axis, "),
        ("function", "axis=0, t=0, *, keep=False", "expected (axis=0"),
        ("function", "t, *, keep=False", "expected (t, *"),
        ("function", UNKNOWN, "expected (*args"),
        ("AClass", {"__init__": "size"}, "AClass.__init__: got"),
        ("AClass", {"__base__": "Tensor"}, "expected Tensor among them"),
        ("AClass", {"lost": None}, "AClass.lost: missing"),
        ("AClass", {"lost": ""}, "AClass.lost: missing"),
        ("AClass", {"method": None}, "got a method"),
        ("AClass", {"shape": ""}, "got property; expected a method"),
        ("AClass", {"method": "x, y=0"}, "AClass.method: got"),
        ("AClass", {"make": ""}, "got a method of the class"),
    ],
)
def test_what_differs_from_the_declaration_is_seen(name, declared, words):
    (problem,) = name_problems(A_MODULE, f"module.{name}", declared)
    assert words in problem
