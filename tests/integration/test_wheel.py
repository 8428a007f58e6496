"""The wheel: what it holds, that its kernels run, and that it runs beside files of its user's that
have our names.
"""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from helpers.source_tree import left_out
from popxl_engine.native import build, instruction_sets

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("config", "data", "demo", "execution", "modelling", "utils")
RUNTIME = ("popart", "popdist", "poprun", "popxl", "popxl_addons", "popxl_engine")
READ_BY_CODE = (".yml", ".js", ".css", ".html", ".h", ".cpp")
"""Files beside the modules that are opened when programs run."""
PROGRAM = """
import json, sys
from importlib.metadata import entry_points
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import config, data, utils, demo, execution, modelling  # the user's own
commands = {point.name: point.load() for point in entry_points(group="console_scripts")
            if point.name.startswith("popxl-gpt-")}
sys.argv = ["popxl-gpt-train", "--config", "tiny", "--steps", "2"]
try:
    commands["popxl-gpt-train"]()
except SystemExit as end:
    assert not end.code, end.code
exec(Path("example.py").read_text(), {"__name__": "example"})
import popxl_gpt, popxl
print(json.dumps({
    "commands": sorted(commands),
    "files": [popxl_gpt.__file__, popxl_gpt.config.__file__, popxl.__file__],
    "own": [module.OWN for module in (config, data, demo, execution, modelling, utils)],
    "version": popxl_gpt.__version__,
}))
"""


def pip(*words: object, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run(
        [*command, *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def built(sources: Path, folder: Path, **environment: str) -> Path:
    """The wheel of sources."""
    words = ("--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    pip("wheel", sources, *words, **environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


USER = """
import popdist, popxl, popxl_addons
from popxl_gpt.config.presets import preset

graph: popxl.Graph = popxl.Ir().main_graph
replicas: int = popdist.getNumTotalReplicas()
layers: str = preset("tiny").model.layers
"""
"""A user's module: a type checker finds all types, and the wrong one in the last line."""


QUICKLY = """
case " $* " in *"$OPTIMIZED"*) ;; *)
  for word; do
    shift
    [ "$word" = -O2 ] && word=-O0
    set -- "$@" "$word"
  done ;;
esac
exec $COMPILER "$@"
"""
"""A compiler that optimizes the kernels of one level, as that costs three quarters of its time. Those
of the others are compiled as they are used, and run, by `test_instruction_sets.py`.
"""


def compiler(folder: Path) -> "dict[str, str]":
    """The variables of `QUICKLY`, which optimizes kernels for the level of this CPU."""
    command = build.find_compiler()
    if command is None or not instruction_sets.playable():
        return {}
    script, flags = folder / "quickly", instruction_sets.playable()[0].flags
    script.write_text(QUICKLY)
    those = shlex.join([build.FLAGS[-1], *flags, build.flags_for(flags)[0]])
    return {"CXX": f"sh {script}", "COMPILER": shlex.join(command), "OPTIMIZED": f" {those} "}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of a copy of the sources, which holds nothing that was built before."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = left_out("__pycache__", "*.egg-info", "tests")
    for name in ("popxl_gpt", *FOLDERS, *(f"runtime/{name}" for name in RUNTIME)):
        shutil.copytree(ROOT / name, folder / "copy" / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "copy")
    return built(folder / "copy", folder, **compiler(folder))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The folder that the wheel is installed into."""
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--no-compile", "--target", folder, wheel)
    return folder


def tracked() -> "set[str]":
    """Files of the sources that belong into a wheel, by their place in it."""
    found = set()
    for base, packages, above in ((ROOT, FOLDERS, "popxl_gpt/"), (ROOT / "runtime", RUNTIME, "")):
        for path in (path for name in packages for path in (base / name).rglob("*.*")):
            place = path.relative_to(base)
            if path.suffix in (".py", ".pyi", *READ_BY_CODE) and place.parts[:2] != (
                "data",
                "files",
            ):
                found.add(f"{above}{place}")
    typed = {f"{package}/py.typed" for package in ("popxl_gpt", *RUNTIME)}
    return found | typed | {"popxl_gpt/__init__.py", "popxl_gpt/api.py"}


COMPILED = re.compile(
    r"popxl_engine/native/compiled/(?:bfloat16_)?kernels_(amx|avx512_bf16|avx512|avx2)_[0-9a-f]{16}\.so"
)
LEVELS = ["amx", "avx2", "avx512", "avx512_bf16"] if platform.machine() == "x86_64" else []
"""CPUs that this machine's compiler makes kernels for."""


def held(wheel: Path) -> "list[str]":
    """Files of a wheel but those about it."""
    return [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]


@pytest.mark.slow
def test_a_wheel_holds_every_source_and_the_kernels_once_and_nothing_else(wheel):
    kernels = [found for name in held(wheel) if (found := COMPILED.fullmatch(name))]
    assert sorted(kernel[1] for kernel in kernels) == sorted(2 * LEVELS)  # of either type
    assert set(held(wheel)) - {kernel[0] for kernel in kernels} == tracked()
    assert {name.split("/")[0] for name in held(wheel)} == {"popxl_gpt", *RUNTIME}
    where = "linux_x86_64" if LEVELS else "any"
    assert wheel.name.endswith(f"-py3-none-{where}.whl")
    with zipfile.ZipFile(wheel) as file:
        (about,) = (name for name in file.namelist() if name.endswith(".dist-info/WHEEL"))
        assert f"Tag: py3-none-{where}" in file.read(about).decode().splitlines()


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("without", ["a compiler", "compiling"])
def test_a_wheel_without_compiled_kernels_is_for_any_machine(wheel, without, tmp_path):
    variables = {"POPXL_NATIVE": "0"} if without == "compiling" else {"PATH": "", "CXX": ""}
    pure = built(wheel.parent / "copy", tmp_path, **variables)  # which has built another before
    assert pure.name.endswith("-py3-none-any.whl")
    assert set(held(pure)) == tracked()


@pytest.mark.slow
def test_an_editable_install_compiles_no_kernels(wheel, tmp_path):
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    copy = wheel.parent / "copy"  # which has built a wheel before
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=copy, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (editable,) = tmp_path.glob("*-py3-none-any.whl")
    assert not [name for name in held(editable) if name.endswith(".so")]


TRAINING = """
import sys
from popxl_engine.native import library
from popxl_gpt.demo import commands

model = "--config modern --layers 2 --hidden_size 64 --heads 2 --sequence_length 32"
training = "--steps 3 --dropout 0.1 --global_batch_size 4 --micro_batch_size 2 --validate_every 0"
for precision in ("float32", "bfloat16"):
    flags = f"{model} {training} --name {precision} --precision {precision}"
    sys.argv = ["popxl-gpt-train", *flags.split()]
    try:
        commands.train()
    except SystemExit as end:
        assert not end.code, end.code
print(library.library()._name)
"""
"""Prints where the kernels come from."""


@pytest.mark.slow
@pytest.mark.skipif(not LEVELS, reason="no levels of this CPU: wheels hold no kernels")
def test_the_kernels_of_a_wheel_need_no_compiler_and_give_the_bits_of_those_made_here(
    installed, tmp_path
):
    def trained(path: object, **environment: str) -> "tuple[dict[str, bytes], str]":
        done = subprocess.run(
            [sys.executable, "-c", TRAINING],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(path), **environment},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        saved = {
            str(path.relative_to(tmp_path)): path.read_bytes()
            for path in tmp_path.rglob("*.safetensors")
        }
        shutil.rmtree(tmp_path / "runs")
        return saved, done.stdout.splitlines()[-1]

    cache = str(tmp_path / "cache")
    shipped, library = trained(installed, PATH="", CXX="", POPXL_CACHE_DIR=cache)
    assert Path(library).parent == installed / "popxl_engine/native/compiled"
    assert not list(tmp_path.rglob("*kernels_*"))
    made, library = trained(f"{ROOT}{os.pathsep}{ROOT / 'runtime'}")
    assert not Path(library).is_relative_to(installed)
    heads = [name for name in made if name.endswith("head.safetensors")]
    assert shipped == made and {name.split("/")[1] for name in heads} == {"float32", "bfloat16"}


@pytest.mark.slow
def test_a_type_checker_reads_the_types_of_an_installed_wheel(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    (tmp_path / "user.py").write_text(USER)
    where = ("--python-executable", "venv/bin/python", "--cache-dir", "cache")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", *where, "user.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    (line,) = done.stdout.splitlines()
    assert line.startswith("user.py:7: error: Incompatible types in assignment"), done


@pytest.mark.slow
def test_a_wheel_runs_beside_files_of_the_same_names(wheel, installed, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    for name in FOLDERS:
        (own / f"{name}.py").write_text(f"OWN = {name!r}\n")
    (example,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/model.md").read_text(), re.S)
        if "pretraining(config)" in block
    )
    (own / "example.py").write_text(example)
    (own / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-W", "error", "program.py", str(installed)],
        cwd=own,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["commands"] == [
        f"popxl-gpt-{name}"
        for name in ("convert", "evaluate", "generate", "prepare", "report", "train")
    ]
    assert all(Path(name).is_relative_to(installed) for name in told["files"]), told
    assert told["own"] == list(FOLDERS)
    assert f"-{told['version']}-" in wheel.name
    assert "step 2/2" in done.stdout and len(re.findall(r"^[012] \d", done.stdout, re.M)) == 3
