"""The arrows between rooms: who may import whom. Each room's arrows stand in `ROOMS`; a new room is
a line there.
"""

import ast
import inspect
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache

import pytest
from helpers.public_api import private_names
from helpers.source_tree import (
    APPLICATION_PACKAGES,
    BENCHMARKS,
    PACKAGES,
    ROOT,
    RUNTIME_PACKAGES,
    Import,
    Source,
    imports,
    package_of,
    parse,
    sources,
)
from popxl.backend import Backend
from popxl_engine.backend import BACKEND

CORE = "popxl (core)"
NOUNS = tuple(
    f"popxl.{noun}"
    for noun in (
        "dtypes",
        "errors",
        "remote_buffer",
        "host_limits",
        "remote_files",
        "replica_grouping",
        "streams",
        "tensor",
        "extensions",
        "generator",
        "utils",
    )
)
"""What memory and replicas need to know of a program: its values, no graphs and no ops."""


@dataclass(frozen=True)
class Room:
    """A package or module, the parts of the project it may import beside itself, and the
    distributions.
    """

    name: str
    ours: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


POPXL = ("popxl", "popxl.ops", "popxl.transforms", "popxl.session", "popxl.session_state")
ENGINE = ("popxl_engine", "popxl_engine.native.wheel", "popxl_engine.machine")
API = (*POPXL, "popxl_addons", "popdist")
"""What programs use."""
BELOW = ("popxl_gpt.utils", "popxl_gpt.utils.files", "poprun.cores")
UP_TO_MODELS = (
    *BELOW, "popxl_gpt.utils.runtime", "popxl_gpt.config", "popxl_gpt.data", "popxl_gpt.modelling",
)  # fmt: skip
STEP = "popxl_gpt.execution"

ROOMS = (
    Room("popart"),
    Room("poprun", ("poprun.agent",)),
    Room("poprun.agent", ("poprun", "poprun.torch_store"), ("torch",)),
    Room("poprun.torch_store", ("poprun",), ("torch",)),
    Room("popdist", ("poprun", "popart")),
    Room("popxl", (CORE, "popdist", "popart", "poprun.cgroups"), ("numpy",)),
    Room("popxl.ops", (CORE, "popdist", "popart"), ("numpy",)),
    Room("popxl.transforms", (CORE, "popxl.ops", "popdist", "popart"), ("numpy",)),
    Room("popxl.session", (*POPXL, "popdist", "popart"), ("numpy",)),
    Room("popxl.session_state", (CORE, "popxl.transforms", "popdist"), ("numpy",)),
    Room("popxl.extensions", (*POPXL, "popdist", "popart", "poprun.environment"), ("numpy",)),
    Room(
        "popxl_addons.memmap_files",
        (*POPXL, "popxl_addons", "popxl.extensions", "popdist", "poprun.private"),
        ("numpy",),
    ),
    Room(
        "popxl_addons",
        (*POPXL, "popxl.extensions", "popxl_addons.memmap_files", "popdist", "popart"),
        ("numpy",),
    ),
    Room(
        "popxl_engine",
        (*ENGINE, *POPXL, "popxl.extensions", "popdist", "poprun", "popart"),
        ("numpy", "torch"),
    ),
    Room("popxl_engine.native.wheel", ("popxl_engine",), ("setuptools",)),
    Room(
        "popxl_engine.machine",
        (
            *NOUNS,
            "popxl_engine.kernels.dtypes",
            "popxl_engine.native.build",
            "popdist",
            "poprun",
            "poprun.torch_store",
        ),
        ("numpy", "torch"),
    ),
    Room("popxl_gpt.utils"),
    Room("popxl_gpt.utils.files", ("popxl_gpt.utils",)),
    Room(
        "popxl_gpt.utils.runtime",
        ("popxl_gpt.utils", *API, "popxl.extensions", "popxl_addons.memmap_files"),
        ("numpy",),
    ),
    Room("popxl_gpt.config", BELOW, ("yaml",)),
    Room(
        "popxl_gpt.data",
        (*BELOW, "popxl_gpt.config"),
        ("numpy", "crc32c", "tokenizers", "jinja2", "tiktoken", "tqdm"),
    ),
    Room(
        "popxl_gpt.modelling",
        (*BELOW, "popxl_gpt.utils.runtime", "popxl_gpt.config", *API),
        ("numpy",),
    ),
    # What an exported model takes with it: transformers imports it, the application only copies it.
    Room("popxl_gpt.modelling.modeling_popxl_gpt", (), ("torch", "transformers")),
    Room(STEP, (*UP_TO_MODELS, *API, "popart"), ("numpy",)),
    Room(f"{STEP}.checkpoints", (STEP, *UP_TO_MODELS, *API), ("numpy",)),
    Room(f"{STEP}.exchange.families", UP_TO_MODELS, ("numpy",)),
    Room(
        f"{STEP}.exchange",
        (STEP, f"{STEP}.checkpoints", f"{STEP}.exchange.families", *UP_TO_MODELS, *API),
        ("numpy", "tokenizers", "huggingface_hub"),
    ),
    Room(
        f"{STEP}.inference",
        (STEP, f"{STEP}.checkpoints", f"{STEP}.exchange", *UP_TO_MODELS, *API),
        ("numpy", "tokenizers"),
    ),
    Room(
        f"{STEP}.planning",
        (STEP, f"{STEP}.inference", *UP_TO_MODELS, *API),
        ("numpy",),
    ),
    Room(
        f"{STEP}.reports",
        (STEP, f"{STEP}.planning", f"{STEP}.checkpoints", *UP_TO_MODELS, *API),
        ("numpy", "wandb"),
    ),
    # An entry point asks the launcher who it is, and names the session's type.
    Room(
        "popxl_gpt.demo.job",
        (
            STEP,
            *(f"{STEP}.{room}" for room in "checkpoints exchange inference planning".split()),
            f"{STEP}.reports",
            *UP_TO_MODELS,
            "popdist",
            "popxl_addons",
        ),
        ("numpy", "wandb", "tensorboard", "tokenizers", "tqdm"),
    ),
    Room(
        "popxl_gpt.demo",
        (
            "popxl_gpt.demo.job",
            STEP,
            *(f"{STEP}.{room}" for room in "checkpoints exchange inference planning".split()),
            f"{STEP}.reports",
            *UP_TO_MODELS,
            "popdist",
            "popxl_addons",
        ),
        ("numpy", "lm_eval", "tokenizers", "tqdm", "typing_extensions"),
    ),
    # What the programs do, for Python.
    Room(
        "popxl_gpt.api",
        (
            "popxl_gpt.demo",
            "popxl_gpt.data",
            "popxl_gpt.utils",
            f"{STEP}.inference",
            f"{STEP}.reports",
        ),
    ),
    # Nobody imports it: it measures all of it, beside others.
    Room(
        BENCHMARKS,
        (
            STEP,
            *(f"{STEP}.{room}" for room in "checkpoints inference planning reports".split()),
            *UP_TO_MODELS,
            *API,
            "popxl.extensions",
            *ENGINE,
        ),
        ("numpy", "torch", "transformers", "tokenizers", "matplotlib", "yaml", "bert_encoder"),
    ),
)
"""An arrow to a room means that room, and not those inside it. `popxl` stands for its core and, in
its `__init__`, for the whole package.
"""

IMPORTS_IN_FUNCTIONS = {
    (
        "poprun.launcher",
        "poprun.agent",
    ): "loads torch, which a wrong command line must not wait for",
    (
        "poprun.__main__",
        "poprun.launcher",
    ): "takes a moment, in which a signal would end the launcher",
    (
        "benchmarks.harness",
        "popxl.extensions",
    ): "processes of variants need it not, and a baseline's memory is measured",
}
"""(module, imported module) -> why it cannot stand at the top, which is never a circle. Benchmarks
import what loads torch where they need it: `--help` is answered at once, and the process of a
variant loads its own.
"""
UNDERSCORES = {
    ("benchmarks.gpu_steps", "_engine"): "draws weights on the device, for which no program asks",
}
"""(module, name) -> why it takes another package's underscore name."""


def room_of(module: str) -> Room:
    """The innermost room that a module is in."""
    rooms = [room for room in ROOMS if module == room.name or module.startswith(f"{room.name}.")]
    return max(rooms, key=lambda room: len(room.name))


def wrong_arrow(found: Import) -> str | None:
    """What is wrong with an import, or None."""
    room = room_of(found.source.module)
    where = f"{found.source.at(found.node)}: {found.source.module}"
    if (found.package, found.name) == ("popxl_gpt", "__version__"):
        return None  # the package's own, which its face has
    if found.package not in PACKAGES:
        if found.package in sys.stdlib_module_names or found.package in room.others:
            return None
        return (
            f"{where} imports {found.package}; room {room.name} may import "
            f"{room.others or 'no distribution'}"
        )
    if is_face(found):
        return None
    target = found.target
    if room_of(target) == room and not (
        room.name == "popxl" and target == "popxl" and found.name is None
    ):
        return None
    for allowed in room.ours:
        if allowed == CORE and room_of(target).name == "popxl":
            return None
        if (target == allowed or target.startswith(f"{allowed}.")) and (
            room_of(target) == room_of(allowed)
        ):
            return None
    return (
        f"{where} imports {target}; room {room.name} may import "
        f"{', '.join(room.ours) or 'nothing of ours'}"
    )


def is_face(found: Import) -> bool:
    """Whether a package's `__init__` gathers a name of one of its rooms."""
    return found.source.module == "popxl" and found.package == "popxl"


def all_imports() -> list[Import]:
    return [found for source in sources().values() for found in imports(source)]


@pytest.mark.slow
def test_imports_point_down():
    wrong = [message for message in map(wrong_arrow, all_imports()) if message]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module, text",
    [
        ("popxl.tensor", "import torch"),
        ("popxl.tensor", "def f():\n    import torch"),
        ("popxl.session", "from popxl_engine import machine"),
        ("popxl.ops.linalg", "from popxl.transforms import autodiff"),
        ("popxl.tensor", "from popxl.ops import call"),
        ("popxl_addons.module", "import popxl_engine"),
        ("popxl_engine.kernels.linalg", "import popxl_addons"),
        ("popxl_engine.machine.memory", "from popxl.graph import Graph"),
        ("popxl_gpt.config.schema", "import numpy"),
        ("popxl_gpt.data.loader", "from popxl_gpt.execution import pretraining"),
        ("popxl_gpt.utils.units", "from popxl_gpt.modelling import attention"),
        ("popxl_gpt.modelling.attention", "from popxl_gpt.execution import graphs"),
        ("popxl_gpt.modelling.attention", "import torch"),
        ("popxl_gpt.execution.pretraining", "import popxl_engine.interpreter"),
        ("popxl_gpt.demo.pretraining", "import popxl"),
    ],
)
def test_a_wrong_arrow_is_seen(module, text):
    (found,) = imports(parse(module, text))
    assert wrong_arrow(found), f"{module}: {text}"


@pytest.mark.slow
def test_nothing_of_ours_is_imported_inside_a_function():
    hidden = [
        (
            f"{found.source.at(found.node)}: {found.source.module} imports {found.target} inside "
            "a function"
        )
        for found in all_imports()
        if found.in_function
        and found.package in PACKAGES
        and (found.source.module, found.target) not in IMPORTS_IN_FUNCTIONS
        and not (found.source.package == BENCHMARKS and loads_torch(found.target))
    ]
    assert not hidden, "\n".join(hidden)


@cache
def loads_torch(module: str) -> bool:
    """Whether importing a module imports torch, by itself or by what it imports."""
    at_the_top = [found for found in imports(sources()[module]) if not found.in_function]
    return any(
        found.package == "torch"
        or (found.target in sources() and found.target != module and loads_torch(found.target))
        for found in at_the_top
    )


def test_what_loads_torch_is_known():
    assert loads_torch("popxl_engine.planner.measuring") and loads_torch("benchmarks.gpu_steps")
    assert not loads_torch("benchmarks.gpu") and not loads_torch("popxl_gpt.execution.pretraining")


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other in a circle (Tarjan's strongly connected
    components).
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in edges.get(node, ()):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in edges:
        if node not in index:
            visit(node)
    return found


def import_edges() -> dict[str, set[str]]:
    """Whom each module imports, also inside functions and where types are checked alone."""
    edges: dict[str, set[str]] = {module: set() for module in sources()}
    for found in all_imports():
        # A package's face gathers names from its own modules, which may use each other's without
        # going through it.
        if found.package in PACKAGES and found.target != found.source.module:
            edges[found.source.module].add(found.target)
    return edges


@pytest.mark.slow
def test_no_modules_import_each_other_in_a_circle():
    assert not cycles(import_edges())


@pytest.mark.slow
def test_no_room_of_the_application_imports_another_that_imports_it():
    edges: dict[str, set[str]] = {room.name: set() for room in ROOMS}
    for found in all_imports():
        if found.package in APPLICATION_PACKAGES and found.name != "__version__":
            edges[room_of(found.source.module).name].add(room_of(found.target).name)
    assert not cycles({name: targets - {name} for name, targets in edges.items()})


def test_no_package_imports_another_that_imports_it():
    edges: dict[str, set[str]] = {package: set() for package in RUNTIME_PACKAGES}
    for module, targets in import_edges().items():
        if (package := package_of(module)) in edges:
            edges[package] |= {package_of(target) for target in targets} - {package}
    assert not cycles(edges)


def test_a_circle_is_seen():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


@pytest.mark.parametrize(
    "text",
    [
        "if TYPE_CHECKING:\n    from popxl.ir import Ir",
        "def f():\n    from popxl.ir import Ir",
        "try:\n    from popxl.ir import Ir\nexcept ImportError:\n    pass",
    ],
)
def test_an_import_is_an_arrow_wherever_it_stands(text):
    (found,) = imports(parse("popxl.graph", text))
    assert found.target == "popxl.ir"


DOOR = "popxl.backend"
"""The only module outside of the engine that names it."""


def engine_names(source: Source) -> list[str]:
    """Strings that name a module of the engine, docstrings apart."""
    docstrings = {
        id(node.value)
        for node in source.nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        f"{source.at(node)}: {source.module} names {node.value}"
        for node in source.nodes
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("popxl_engine.")
        and id(node) not in docstrings
    ]


@pytest.mark.slow
def test_the_engine_has_one_door():
    others = [
        name
        for source in sources().values()
        if source.package != "popxl_engine" and source.module != DOOR
        for name in engine_names(source)
    ]
    assert not others, "\n".join(others)
    assert len(engine_names(sources()[DOOR])) == 2


def test_another_door_is_seen():
    assert engine_names(parse("popxl_gpt.utils.a", "import_module('popxl_engine.planner')"))
    assert not engine_names(parse("popxl_gpt.utils.a", "'popxl_engine.planner'"))


def test_the_engine_is_what_the_door_says():
    for name, declared in vars(Backend).items():
        if inspect.isfunction(declared) and not name.startswith("_"):
            asked = inspect.signature(declared).parameters
            found = inspect.signature(getattr(BACKEND, name)).parameters
            assert list(asked) == ["self", *found], name


def defined_names(source: Source) -> set[str]:
    """Underscore names that a module defines: functions, classes, attributes, slots, arguments of
    dataclasses.
    """
    names = set()
    for node in source.nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                names.add(node.attr)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.isidentifier()
        ):
            names.add(node.value)  # __slots__, setattr
    return {name for name in names if is_private(name)}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def foreign_private_uses(source: Source, owned: dict[str, set[str]]) -> list[str]:
    """Uses of underscore names of another package of ours, the API's own compatibility list
    apart.
    """
    others = set().union(*(names for package, names in owned.items() if package != source.package))
    foreign = others - owned.get(source.package, set()) - private_names()
    wrong = []
    for node in source.nodes:
        if (
            isinstance(node, ast.Attribute)
            and node.attr in foreign
            and (source.module, node.attr) not in UNDERSCORES
        ):
            wrong.append(
                f"{source.at(node)}: {source.module} uses {ast.unparse(node)} of another package"
            )
    for found in imports(source):
        name = found.name or ""
        private = [part for part in (*found.module.split("."), name) if is_private(part)]
        if (
            found.package in PACKAGES
            and found.package != source.package
            and set(private) - private_names()
        ):
            wrong.append(f"{source.at(found.node)}: {source.module} imports {found.module}.{name}")
    return wrong


def owned_private_names() -> dict[str, set[str]]:
    owned: dict[str, set[str]] = {package: set() for package in PACKAGES}
    for source in sources().values():
        owned[source.package] |= defined_names(source)
    return owned


@pytest.mark.slow
def test_nobody_uses_underscore_names_of_another_package():
    owned = owned_private_names()
    wrong = [
        message for source in sources().values() for message in foreign_private_uses(source, owned)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_foreign_underscore_name_is_seen():
    owned = {"popxl": {"_inner", "_pb_ir"}, "popxl_gpt.execution": {"_own"}}
    assert foreign_private_uses(parse("popxl_gpt.execution.a", "graph._inner"), owned)
    assert foreign_private_uses(
        parse("popxl_gpt.execution.a", "from popxl.graph import _thing"), owned
    )
    assert not foreign_private_uses(
        parse("popxl_gpt.execution.a", "self._own, ir._pb_ir, torch._C"), owned
    )


DURABLE = "popxl_gpt.utils.files"
"""The only part of the application that renames, locks and brings onto the disk."""
OF_DISKS = {
    "os": {
        "rename", "renames", "replace", "link", "fsync", "fdatasync", "sync", "lockf",
    },
    "shutil": {"move"},
    "fcntl": {"flock", "lockf", "fcntl"},
}  # fmt: skip
"""Functions that only it calls, by their modules."""


def disk_uses(source: Source) -> list[str]:
    """The lines where a module renames, locks or syncs: by a function, or by a path's."""
    wrong, modules = [], {}
    for statement in source.nodes:
        if isinstance(statement, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in statement.names}
    for node in source.nodes:
        name = None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id, node.value.id)
            is_one = node.attr in OF_DISKS.get(module, ())
            name = f"{module}.{node.attr}" if is_one else None
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names} & OF_DISKS.get(node.module or "", set())
            name = f"{node.module}.{min(names)}" if names else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method, given = node.func.attr, len(node.args)
            # of a text it takes two, of a record a value for each name
            is_path = method == "replace" and given == 1 and not node.keywords
            if method in ("rename", "hardlink_to") or is_path:
                name = name or f"the method {method}"
        if name is not None:
            wrong.append(f"{source.at(node)}: {source.module} uses {name}; only {DURABLE} may")
    return wrong


@pytest.mark.slow
def test_only_the_durable_files_rename_lock_and_sync():
    wrong, found = [], []
    for source in sources().values():
        if source.package in APPLICATION_PACKAGES:
            is_durable = source.module.startswith(f"{DURABLE}.")
            (found if is_durable else wrong).extend(disk_uses(source))
    assert found and not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "os.rename(a, b)",
        "f = os.replace",
        "import os as system\nsystem.fsync(1)",
        "from os import path, fsync",
        "fcntl.flock(file, fcntl.LOCK_EX)",
        "shutil.move(a, b)",
        "path.rename(b)",
        "(folder / a).replace(folder / b)",
    ],
)
def test_a_module_that_renames_locks_or_syncs_is_seen(text):
    assert disk_uses(parse("popxl_gpt.data.a", text))
    harmless = "text.replace('a', 'b'); replace(x, a=1); dataclasses.replace(x, a=1); os.open(a, 0)"
    assert not disk_uses(parse("popxl_gpt.data.a", harmless))


OF_A_TEST = re.compile(r"^\s*(?:from \S*\btest_\w+ import|import \S*\btest_)", re.MULTILINE)


def test_no_test_module_imports_another():
    paths = [p for folder in ("runtime/tests", "tests") for p in (ROOT / folder).rglob("*.py")]
    wrong = [path for path in paths if OF_A_TEST.search(path.read_text())]
    assert paths and not wrong, f"{wrong} import test modules: move what both need to a helper"


def test_an_import_of_a_test_module_is_seen():
    assert OF_A_TEST.search("    from tests.unit.test_ahead import x")
    assert OF_A_TEST.search("import a\nimport tests.test_docs")
    assert not OF_A_TEST.search("from tests.integration.runs import test_of")


FORBID = """
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {forbidden}:
            raise ImportError(f"{{name}} may not be imported here")
sys.meta_path.insert(0, Forbid())
"""


def run_python(text: str, timeout: int = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", text],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=timeout,
    )


def modules_of(*packages: str) -> str:
    names = [
        name
        for name, source in sources().items()
        if source.package in packages and "torch" not in room_of(name).others
    ]
    return "".join(f"import {name}\n" for name in names)


@pytest.mark.slow
def test_the_api_imports_where_torch_and_the_engine_are_forbidden():
    text = FORBID.format(forbidden={"torch", "popxl_engine"}) + modules_of(
        "popart", "popdist", "popxl", "popxl_addons"
    )
    done = run_python(text + "import poprun.launcher")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_application_imports_where_torch_is_forbidden():
    done = run_python(
        FORBID.format(forbidden={"torch"})
        + modules_of(*(package for package in APPLICATION_PACKAGES if package != "popxl_gpt.demo"))
    )
    assert done.returncode == 0, done.stderr


HIDDEN = """
import types
def faces():
    ours = [m for name, m in sys.modules.items() if name.split(".")[0] in {"popxl", "popxl_addons"}]
    packages = [module for module in ours if hasattr(module, "__path__")]
    return {(p.__name__, n): v for p in packages for n, v in vars(p).items() if not isinstance(v, types.ModuleType)}
import popxl, popxl_addons
before = faces()
"""


@pytest.mark.slow
def test_importing_a_module_hides_no_function_of_its_package():
    check = (
        "hidden = [key for key, value in before.items() if faces().get(key) is not "
        "value]\nassert not hidden, hidden\n"
    )
    done = run_python("import sys\n" + HIDDEN + modules_of("popxl", "popxl_addons") + check)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_importing_has_no_effect_on_environment_folders_and_threads():
    watch = (
        "import os, threading\nbefore = dict(os.environ), sorted(os.listdir('.')), "
        "threading.active_count()\n"
    )
    check = (
        "after = dict(os.environ), sorted(os.listdir('.')), threading.active_count()\nassert "
        "before == after, after\n"
    )
    done = run_python(watch + modules_of(*RUNTIME_PACKAGES[:5], *APPLICATION_PACKAGES[:3]) + check)
    assert done.returncode == 0, done.stderr
