"""The application uses only names of the original API, called as the original declares them.

`public_names.json` lists that API: for each module its names, for each function its parameters, for
each class its members, null for what is no function, `@module` for a name that is another module's.
Extensions go through `utils/runtime.py`.
"""

import ast
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.public_api import api, as_arguments
from helpers.source_tree import APPLICATION_PACKAGES, Source, imports, parse, sources_of

API_PACKAGES = ("popart", "popdist", "popxl", "popxl_addons")
DOOR = "popxl_gpt.utils.runtime"
"""The one module that may reach for extensions."""


def look_up(path: str) -> tuple[bool, Any]:
    """Whether a dotted path is in the API, and what is listed there: parameters, members, or
    None.
    """
    modules = api()["modules"]
    if path in modules or any(module.startswith(f"{path}.") for module in modules):
        return True, None
    module, _, name = path.rpartition(".")
    if module in modules and name in modules[module]:
        entry = modules[module][name]
        while isinstance(entry, str) and entry.startswith("@"):
            entry = modules[entry[1:]][name]
        return True, entry
    found, owner = look_up(module) if module else (False, None)
    while found and isinstance(owner, dict):
        if name in owner or name.startswith("__"):
            return True, owner.get(name)
        owner = class_named(owner.get("__base__"))
    return False, None


def class_named(name: str | None) -> Any:
    """The members of the class of this name, in whichever module it is."""
    found = (names.get(name) for names in api()["modules"].values())
    return next((entry for entry in found if isinstance(entry, dict)), None)


def api_names(source: Source) -> dict[str, str]:
    """Names of a module that stand for something of the API, with the dotted path of that."""
    names = {}
    for found in imports(source):
        if found.package not in API_PACKAGES:
            continue
        assert isinstance(found.node, (ast.Import, ast.ImportFrom))
        for alias in found.node.names:
            if isinstance(found.node, ast.ImportFrom):
                names[alias.asname or alias.name] = f"{found.module}.{alias.name}"
            elif alias.asname:
                names[alias.asname] = alias.name
            else:
                names[alias.name.split(".")[0]] = alias.name.split(".")[0]
    return names


def dotted(node: ast.AST) -> str | None:
    """`a.b.c` for an attribute chain that starts at a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else None
    return None


def used_paths(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Every use of the API in a module: the node and the dotted path, for the longest chain
    only.
    """
    names = api_names(source)
    inner = {node.value for node in source.nodes if isinstance(node, ast.Attribute)}
    for node in source.nodes:
        if isinstance(node, (ast.Name, ast.Attribute)) and node not in inner:
            path = dotted(node)
            head, _, rest = (path or "").partition(".")
            if head in names:
                yield node, f"{names[head]}.{rest}" if rest else names[head]
    for found in imports(source):
        if found.package in API_PACKAGES:
            yield found.node, f"{found.module}.{found.name}" if found.name else found.module


def known(path: str) -> bool:
    """Whether a path is in the API, or is an attribute of a value whose type is not listed member
    by member.
    """
    found, _ = look_up(path)
    if found:
        return True
    parent, _, name = path.rpartition(".")
    if not parent:
        return False
    inside, entry = look_up(parent)
    is_module = parent in api()["modules"] or parent in API_PACKAGES
    return inside and not is_module and not isinstance(entry, dict) and name not in api()["modules"]


def misfit(parameters: str, call: ast.Call) -> str | None:
    """Why a call does not fit declared parameters, or None."""
    arguments = as_arguments(parameters)
    if any(isinstance(argument, ast.Starred) for argument in call.args) or any(
        k.arg is None for k in call.keywords
    ):
        return None
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if len(call.args) > len(positional) and arguments.vararg is None:
        return f"{len(call.args)} positional arguments, declared are ({parameters})"
    allowed = {*positional, *(argument.arg for argument in arguments.kwonlyargs)}
    unknown = [keyword.arg for keyword in call.keywords if keyword.arg not in allowed]
    if unknown and arguments.kwarg is None:
        return f"unknown arguments {unknown}, declared are ({parameters})"
    required = positional[: len(positional) - len(arguments.defaults)]
    required += [
        a.arg for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults) if default is None
    ]
    missing = [
        name
        for name in required[len(call.args) :]
        if name not in {keyword.arg for keyword in call.keywords}
    ]
    return f"without {missing}, declared are ({parameters})" if missing else None


def problems(source: Source) -> list[str]:
    """Uses of names that are not in the API, and calls that do not fit it."""
    used = list(used_paths(source))
    paths = dict(used)
    found = [
        f"{source.at(node)}: {source.module} uses {path}, which is not in the API"
        for node, path in used
        if not known(path)
    ]
    for node in source.nodes:
        if not isinstance(node, ast.Call) or node.func not in paths:
            continue
        _, entry = look_up(paths[node.func])
        parameters = entry.get("__init__") if isinstance(entry, dict) else entry
        if isinstance(parameters, str):
            wrong = misfit(parameters, node)
            if wrong:
                found.append(
                    f"{source.at(node)}: {source.module} calls {paths[node.func]} with {wrong}"
                )
    return found


APPLICATION = [source for package in APPLICATION_PACKAGES for source in sources_of(package)]


def test_the_application_uses_only_names_and_signatures_of_the_api():
    found = [
        message for source in APPLICATION if source.module != DOOR for message in problems(source)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text, words",
    [
        ("import popxl\npopxl.bfloat16", "popxl.bfloat16, which is not in the API"),
        ("import popxl\npopxl.ops.fused_attention(x)", "popxl.ops.fused_attention, which"),
        ("from popxl import ops\nops.matmull(a, b)", "popxl.ops.matmull, which"),
        (
            "from popxl import ops as o\no.dropout(t, seed, p=0.1, mask=m)",
            "unknown arguments ['mask']",
        ),
        ("from popxl import ops\nops.dropout(t)", "without ['seed_tensor', 'p']"),
        ("from popxl import ops\nops.add(a, b, c)", "3 positional arguments"),
        ("from popxl.extensions import plan", "popxl.extensions.plan, which"),
        ("from popxl_addons.layers import Linear\nLinear(3, size=4)", "unknown arguments ['size']"),
        (
            "import popxl_addons as addons\naddons.NamedTensors.pakc(a, b)",
            "popxl_addons.NamedTensors.pakc, which",
        ),
        ("import popdist\npopdist.getRank()", "popdist.getRank, which"),
    ],
)
def test_a_name_or_call_outside_the_api_is_seen(text, words):
    assert any(words in message for message in problems(parse("popxl_gpt.execution.sample", text)))


@pytest.mark.parametrize(
    "text",
    [
        "import popxl\nfrom popxl import ops\nops.add(a, "
        "rhs=b)\npopxl.Ir(replication=4)\npopxl.dtype.from_name('x')",
        "import popxl_addons as addons\naddons.NamedTensors.pack(a, "
        "b)\naddons.Module\naddons.layers.Linear(3, False)",
        "from popxl_addons.ops.replicated_all_reduce_TP import "
        "replicated_all_reduce_identical_inputs\nreplicated_all_reduce_identical_inputs(x, "
        "group=g)",
        "import "
        "popxl\npopxl.float32.as_numpy()\npopxl.ops.remote_load(*arguments)\npopxl.ops.init(**spec, "
        "name='x')",
        "import popdist\npopdist.isPopdistEnvSet() and popdist.getInstanceIndex() == 0",
    ],
)
def test_the_api_itself_is_let_through(text):
    assert problems(parse("popxl_gpt.execution.sample", text)) == []


def application_api_paths() -> list[str]:
    """What the application uses of the API, each once."""
    used = {
        path for source in APPLICATION if source.module != DOOR for _, path in used_paths(source)
    }
    return sorted(path for path in used if look_up(path)[0])


def resolve(path: str) -> Any:
    """The object at a dotted path of the runtime."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = __import__(".".join(parts[:length]), fromlist=["_"])
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            found = getattr(found, name)
        return found
    raise AssertionError(f"no module on the path {path}")


def test_what_the_application_uses_has_the_declared_parameters_in_the_runtime():
    used = application_api_paths()
    assert len(used) > 100
    differ = {path: found for path in used if (found := other_parameters(path)) is not None}
    assert differ == {}


def other_parameters(path: str) -> "tuple[list[str], list[str]] | None":
    """What the API declares and what the runtime takes in its place, if that is not the same."""
    entry = look_up(path)[1]
    if isinstance(entry, dict):
        entry = entry.get("__init__")
    found = resolve(path)
    if not isinstance(entry, str) or not callable(found) or entry == "*args, **kwargs":
        return None
    if isinstance(found, type) and not entry:
        return None  # a class that programs never construct
    arguments = as_arguments(entry)
    declared = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    if arguments.vararg:
        declared.insert(len(arguments.args), arguments.vararg.arg)
    given = [name for name in inspect.signature(found).parameters if name != "self"]
    return None if given[: len(declared)] == declared else (declared, given)
