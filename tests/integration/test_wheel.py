"""The wheel: what it holds, and that it runs beside files of its user's that have our names."""

import json
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

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


def pip(*words: object) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run([*command, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


USER = """
import popdist, popxl, popxl_addons
from popxl_gpt.config import preset

graph: popxl.Graph = popxl.Ir().main_graph
replicas: int = popdist.getNumTotalReplicas()
layers: str = preset("tiny").model.layers
"""
"""A user's module: a type checker finds all types, and the wrong one in the last line."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of a copy of the sources, which holds nothing that was built before."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "files", "*.egg-info", "tests")
    for name in ("popxl_gpt", *FOLDERS, *(f"runtime/{name}" for name in RUNTIME)):
        shutil.copytree(ROOT / name, folder / "copy" / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "copy")
    pip("wheel", folder / "copy", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    (built,) = folder.glob("*.whl")
    return built


def tracked() -> "set[str]":
    """Files of the sources that belong into a wheel, by their place in it."""
    found = set()
    for base, packages, above in ((ROOT, FOLDERS, "popxl_gpt/"), (ROOT / "runtime", RUNTIME, "")):
        for path in (path for name in packages for path in (base / name).rglob("*.*")):
            place = path.relative_to(base)
            if path.suffix in (".py", *READ_BY_CODE) and place.parts[:2] != ("data", "files"):
                found.add(f"{above}{place}")
    typed = {f"{package}/py.typed" for package in ("popxl_gpt", *RUNTIME)}
    return found | typed | {"popxl_gpt/__init__.py"}


@pytest.mark.slow
def test_a_wheel_holds_every_source_once_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == tracked()
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"popxl_gpt", *RUNTIME}


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
def test_a_wheel_runs_beside_files_of_the_same_names(wheel, tmp_path):
    installed, own = tmp_path / "installed", tmp_path / "own"
    pip("install", "--no-deps", "--no-compile", "--target", installed, wheel)
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
