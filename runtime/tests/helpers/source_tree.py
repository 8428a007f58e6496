"""The project's Python sources as syntax trees, and the imports in them."""

import ast
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

RUNTIME = Path(__file__).parents[2]
ROOT = RUNTIME.parent
RUNTIME_PACKAGES = ("popart", "poprun", "popdist", "popxl", "popxl_addons", "popxl_engine")
APPLICATION = "popxl_gpt"
"""The application's import name; its packages are folders of the root."""
APPLICATION_PACKAGES = tuple(
    f"{APPLICATION}.{folder}"
    for folder in ("config", "data", "utils", "modelling", "execution", "demo")
)
BENCHMARKS = "benchmarks"
"""A folder of the root, too, that is no part of what is installed."""
PACKAGES = (*RUNTIME_PACKAGES, *APPLICATION_PACKAGES, BENCHMARKS)


@dataclass(frozen=True)
class Source:
    """One module."""

    module: str
    """Dotted name; a package's `__init__` has the package's name."""
    path: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        """The package that the module belongs to."""
        return package_of(self.module)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree."""
        return list(ast.walk(self.tree))

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    def at(self, node: ast.AST) -> str:
        """The place where a node stands, as `path:line`."""
        return f"{self.path.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Import:
    """One imported module or name."""

    source: Source
    node: ast.AST
    module: str
    """The module that the statement names: `a.b` in `from a.b import c`."""
    name: str | None
    """`c` in `from a.b import c`; None in `import a.b`."""
    in_function: bool

    @property
    def target(self) -> str:
        """The module that is imported: `a.b.c` where `c` is a module, else `a.b`."""
        inner = f"{self.module}.{self.name}"
        return inner if self.name and inner in sources() else self.module

    @property
    def package(self) -> str:
        return package_of(self.module)


def package_of(module: str) -> str:
    """The first part of a module's name, of the application's the first two: `popxl_gpt.config`."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == APPLICATION else 1])


@cache
def sources() -> dict[str, Source]:
    """Every module of the runtime, the application and the benchmarks, by dotted name."""
    return {source.module: source for package in PACKAGES for source in sources_of(package)}


@cache
def sources_of(package: str) -> tuple[Source, ...]:
    """Every module of a package."""
    found = []
    above, _, folder = package.rpartition(".")
    base = ROOT if above or package == BENCHMARKS else RUNTIME
    for path in sorted((base / folder).rglob("*.py")):
        parts = (*filter(None, [above]), *path.relative_to(base).with_suffix("").parts)
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Source(module, path, ast.parse(path.read_text(encoding="utf-8"), str(path))))
    return tuple(found)


@cache
def imports(source: Source) -> tuple[Import, ...]:
    """Every import of a module, wherever it stands."""
    return tuple(_imports(source, source.tree, in_function=False))


def _imports(source: Source, node: ast.AST, *, in_function: bool) -> Iterator[Import]:
    for child in _statements(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(source, child, alias.name, None, in_function)
        elif isinstance(child, ast.ImportFrom):
            module = _absolute(source, child)
            for alias in child.names:
                yield Import(source, child, module, alias.name, in_function)
        else:
            inside = in_function or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from _imports(source, child, in_function=inside)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements and branches of a statement, which hold all its imports."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
        return  # what a script does is no import of its module
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        yield from getattr(node, block, ())


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = source.module.split(".")
    parts = parts[: len(parts) - node.level + (1 if source.is_package else 0)]
    return ".".join([*parts, node.module] if node.module else parts)


def parse(module: str, text: str) -> Source:
    """A module from text, to see a check fail."""
    path = module.removeprefix(f"{APPLICATION}.").replace(".", "/")
    return Source(module, ROOT / f"{path}.py", ast.parse(text))


def left_out(*patterns: str) -> Callable[[str, Collection[str]], set[str]]:
    """What `shutil.copytree` leaves out of a copy of the sources: some patterns, and prepared
    text.
    """
    ignored = shutil.ignore_patterns(*patterns)

    def names_left_out(folder: str, names: Collection[str]) -> set[str]:
        prepared = {"files"} if Path(folder).name == "data" else set()
        return {*ignored(folder, list(names)), *(prepared & set(names))}

    return names_left_out
