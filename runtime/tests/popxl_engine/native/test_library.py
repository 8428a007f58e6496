"""The file of compiled kernels: made beside the program, waited for where it is needed, given up
with the program.
"""

import contextlib
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers import stand_ins
from helpers.quick import cases
from popxl_engine.native import build, instruction_sets
from popxl_engine.native import library as native

from tests import warm

needs_compiler = pytest.mark.skipif(
    native.library() is None, reason="no C++ compiler: the plain kernels run"
)

COMPILER = """
[ "$*" = --version ] && { echo "version $VERSION"; exit; }
echo "$@" >> "$(dirname "$0")/calls"
$SLOWLY
case "$*" in *-DBFLOAT16_LIBRARY*) COPIED=$COPIED_BFLOAT16 ;; esac
[ -z "$FAILS" ] || { echo "cannot do this" >&2; exit 1; }
if [ -n "$COPIED" ]; then cp "$COPIED" "$to"; else echo code > "$to"; sleep 0.05; echo more >> "$to"; fi
"""
"""Does SLOWLY, then writes some text or the library that COPIED or COPIED_BFLOAT16 names."""
KERNELS = build.KERNEL_SOURCES
UNITS = KERNELS.units
CALLS = len(build.OPTIONAL_FLAGS) + len(UNITS) + 1
"""Calls that ask whether the compiler knows a flag, that compile a unit, and that links them."""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.delenv(instruction_sets.VARIABLE, raising=False)
    return stand_ins.compiler(tmp_path, COMPILER)


def calls(tmp_path: Path) -> list[list[str]]:
    """What the compiler was asked for so far, for the kernels."""
    log = tmp_path / "calls"
    lines = log.read_text().splitlines() if log.exists() else []
    return [line.split() for line in lines if "allocator" not in line]


def folder_in(tmp_path: Path) -> Path:
    """A folder for libraries."""
    (tmp_path / "cache").mkdir(exist_ok=True)
    return tmp_path / "cache"


# One file


@pytest.mark.slow
@pytest.mark.parametrize("refused", build.OPTIONAL_FLAGS)
def test_a_flag_that_a_compiler_refuses_costs_no_other_flag(
    compiler: list[str], refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSED", refused)
    build.make(folder_in(tmp_path) / "kernels.so", KERNELS, compiler)
    *compiled, linked = calls(tmp_path)[-len(UNITS) - 1 :]
    assert sorted(
        Path(word).name for call in compiled for word in call if word.endswith(".cpp")
    ) == sorted(unit.name for unit in UNITS)
    assert len([word for word in linked if word.endswith(".o")]) == len(UNITS)
    for call in (*compiled, linked):
        assert {flag for flag in build.OPTIONAL_FLAGS if flag not in call} == {refused}


@pytest.mark.slow
def test_of_several_programs_that_build_at_once_one_compiles_and_the_others_wait_for_it(
    compiler: list[str], tmp_path: Path
) -> None:
    path = folder_in(tmp_path) / "kernels.so"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: build.make(path, KERNELS, compiler), range(4)))
    assert path.read_bytes() == build.sealed(b"code\nmore\n")
    assert list(path.parent.iterdir()) == [path]
    assert len(calls(tmp_path)) == CALLS


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "refused"])
def test_a_program_compiles_itself_where_the_one_that_it_waits_for_leaves_no_library(
    compiler: list[str], how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder_in(tmp_path) / "kernels.so"
    refused = {"FAILS": "1"} if how == "refused" else {}
    for name, value in {"SLOWLY": "sleep 1", **refused}.items():
        monkeypatch.setenv(name, value)
    with build._maker(path, KERNELS, compiler, subprocess.DEVNULL) as first:
        while not calls(tmp_path):
            time.sleep(0.01)
        for name in ("SLOWLY", "FAILS"):
            monkeypatch.delenv(name, raising=False)
        if how == "killed":
            first.kill()
        build.make(path, KERNELS, compiler)
    assert first.returncode != 0
    assert path.read_bytes() == build.sealed(b"code\nmore\n")


def test_a_folder_without_room_is_told_in_the_compilers_words(
    compiler: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COPIED", build.__file__)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))  # what it was asked for has room
    try:
        with pytest.raises(subprocess.SubprocessError, match=r"not compiled \(.*File size limit"):
            build.make(folder_in(tmp_path) / "kernels.so", KERNELS, compiler)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(
    "command, problem",
    [
        (["sh", "-c", "trap '' TERM; sleep 60; exit"], "has not ended in time"),
        (["/"], "Permission denied"),
    ],
    ids=["does not end", "does not start"],
)
def test_a_compiler_that_cannot_be_started_or_does_not_end_is_one_that_fails(
    command: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "TIME_LIMIT", 0.7)
    with pytest.raises(subprocess.SubprocessError, match=problem):
        build.make(folder_in(tmp_path) / "kernels.so", KERNELS, command)
    assert not list((tmp_path / "cache").iterdir())


def test_a_user_without_home_or_temporary_folder_has_the_named_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(kind: type[Exception]) -> Any:
        raise kind("there is none")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("POPXL_CACHE_DIR", "cache")
    monkeypatch.setattr(Path, "home", lambda: missing(RuntimeError))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: missing(FileNotFoundError))
    assert build._folders() == [Path.cwd() / "cache"]
    monkeypatch.delenv("POPXL_CACHE_DIR")
    assert build._folders() == []


def test_the_compilers_command_may_have_arguments_and_quotes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", f"env 'MY NAME=x' {sys.executable}")
    assert build.find_compiler() == ["env", "MY NAME=x", sys.executable]
    monkeypatch.setenv("CXX", "env 'never closed")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.find_compiler() is None


def test_another_version_of_the_compiler_or_the_c_library_makes_a_library_of_its_own(
    compiler: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "private_folder", lambda: tmp_path)
    paths = []
    for version, c_library in (("1", "2.36"), ("2", "2.36"), ("2", "2.31"), ("1", "2.36")):
        monkeypatch.setenv("VERSION", version)
        monkeypatch.setattr(build.platform, "libc_ver", lambda: ("glibc", c_library))
        build._version.cache_clear()
        paths.append(build._path(KERNELS, compiler))
    build._version.cache_clear()
    assert len(set(paths)) == 3 and paths[0] == paths[3]


def test_a_compiler_is_asked_for_its_version_once(
    compiler: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "private_folder", lambda: tmp_path)
    first = build._path(KERNELS, compiler)
    monkeypatch.setenv("VERSION", "another one")
    assert build._path(KERNELS, compiler) == first


# Programs that run

GELU = """
import logging
logging.basicConfig()
import numpy as np
import popxl
from popxl import ops
ir = popxl.Ir()
with ir.main_graph:
    x = popxl.variable(np.linspace(-3, 3, 50, dtype=np.float32))
    stream = popxl.d2h_stream(x.shape, x.dtype)
    ops.host_store(stream, ops.gelu(ops.gelu(x)))
"""
RUN = """
with popxl.Session(ir, "cpu") as session:
    for _ in range(2):
        found = session.run()[stream]
print(found.tobytes().hex())
"""
WAIT = """
import os, sys, time
begin = time.monotonic()
while not os.path.exists(os.environ["CALLS"]):
    assert time.monotonic() - begin < 60
    time.sleep(0.01)
print("compiling", flush=True)
sys.stdin.readline()
"""
WAIT_FOR_KERNELS = """
import os, pathlib, time
calls, begin = pathlib.Path(os.environ["CALLS"]), time.monotonic()
while not calls.exists() or all("allocator" in line for line in calls.read_text().splitlines()):
    assert time.monotonic() - begin < 60
    time.sleep(0.01)
"""
"""The allocator may be compiled first: the folder's lock lets one at a time."""


def start(
    program: str, tmp_path: Path, python: str = sys.executable, **environment: str
) -> "subprocess.Popen[str]":
    """A program with folders of its own for what it keeps."""
    folders = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "temporary")}
    (tmp_path / "temporary").mkdir(exist_ok=True)
    variables = {**os.environ, **folders, **environment}
    for name in ("XDG_CACHE_HOME", "POPXL_CACHE_DIR", "POPXL_NATIVE"):
        variables.pop(name, None) if name not in environment else None
    command = [python, "-c", program]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
        start_new_session=True,
        # As in a terminal: what a shell starts in the background or under nohup ignores Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def run(program: str, tmp_path: Path, **environment: str) -> tuple[str, str]:
    python = warm.python() if GELU in program else sys.executable
    with start(program, tmp_path, python, **environment) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    return out, err


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the program prints without the library."""
    return run(GELU + RUN, tmp_path_factory.mktemp("plain"), POPXL_NATIVE="0")[0]


@pytest.fixture
def copying(compiler: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler of programs that quickly makes this process's libraries."""
    both: list[Any] = [native.library(dtype) for dtype in native.SOURCES]
    for name, library in zip(("COPIED", "COPIED_BFLOAT16"), both):
        monkeypatch.setenv(name, os.path.realpath(library._name))
    monkeypatch.setenv("CXX", shlex.join(compiler))


def kept(tmp_path: Path) -> list[Path]:
    """Libraries of kernels and parts of them."""
    return list(tmp_path.rglob("*kernels_*"))


def parts(tmp_path: Path) -> list[Path]:
    """The same, and those of the allocator, which is made first at times."""
    return [*kept(tmp_path), *tmp_path.rglob("allocator_*")]


@pytest.mark.slow
def test_without_a_compiler_the_plain_kernels_run_and_the_log_says_so_once(
    tmp_path: Path, plain: str
) -> None:
    out, err = run(GELU + RUN, tmp_path, PATH=str(tmp_path), CXX="no-such-compiler")
    assert out == plain
    assert err.count("no C++ compiler") == 1


@pytest.mark.slow
def test_a_compiler_that_fails_late_is_reported_once_with_its_words(
    compiler: list[str], tmp_path: Path, plain: str
) -> None:
    out, err = run(GELU + RUN, tmp_path, CXX=shlex.join(compiler), FAILS="1", SLOWLY="sleep 0.3")
    assert out == plain
    assert err.count("not compiled") == 1 and "cannot do this" in err
    assert not kept(tmp_path)


@pytest.mark.slow
def test_a_compiler_that_writes_garbage_is_reported_once(
    compiler: list[str], tmp_path: Path, plain: str
) -> None:
    out, err = run(GELU + RUN, tmp_path, CXX=shlex.join(compiler))
    assert out == plain
    assert err.count("native kernels") == 1


@pytest.mark.slow
def test_the_library_is_switched_off_by_name(copying: None, tmp_path: Path, plain: str) -> None:
    assert run(GELU + RUN, tmp_path, POPXL_NATIVE="0") == (plain, "")
    assert not calls(tmp_path)


@pytest.mark.slow
@needs_compiler
def test_the_library_is_built_once_and_found_again(
    copying: None, tmp_path: Path, plain: str
) -> None:
    cache = tmp_path / "cache"
    out, err = run(GELU + RUN, tmp_path, POPXL_CACHE_DIR=str(cache))
    (built,) = cache.glob("kernels*")
    assert out != plain and not err and built.suffix == ".so"
    when = built.stat().st_mtime_ns
    assert run(GELU + RUN, tmp_path, POPXL_CACHE_DIR=str(cache)) == (out, "")
    assert built.stat().st_mtime_ns == when


BFLOAT16_GELU = GELU.replace("dtype=np.float32)", "dtype=np.float32), popxl.bfloat16")


@pytest.mark.slow
@needs_compiler
def test_a_program_of_bfloat16_has_a_library_more(copying: None, tmp_path: Path) -> None:
    first, second = (run(BFLOAT16_GELU + RUN, tmp_path) for _ in range(2))
    assert first == second and not first[1]
    names = sorted(path.name.rpartition("_")[0] for path in kept(tmp_path))
    assert names == ["bfloat16_kernels", "kernels"]


@pytest.mark.slow
@needs_compiler
def test_a_compiler_that_fails_for_bfloat16_alone_is_reported_once(
    copying: None, tmp_path: Path
) -> None:
    (tmp_path / "plain").mkdir()
    plain, _ = run(BFLOAT16_GELU + RUN, tmp_path / "plain", POPXL_NATIVE="0")
    out, err = run(BFLOAT16_GELU + RUN, tmp_path, REFUSED="-DBFLOAT16_LIBRARY")
    assert out == plain
    assert err.count("WARNING") == err.count("native bfloat16_kernels: not compiled") == 1


@pytest.mark.slow
@needs_compiler
def test_numbers_do_not_depend_on_when_the_compiler_ends(
    copying: None, tmp_path: Path, plain: str
) -> None:
    slow = run(GELU + RUN, tmp_path, SLOWLY="sleep 1")
    cached = run(GELU + RUN, tmp_path, SLOWLY="sleep 60")
    assert slow == cached and slow[0] != plain
    assert len(calls(tmp_path)) == CALLS


@pytest.mark.slow
@needs_compiler
def test_where_no_cache_can_be_written_another_folder_serves(
    copying: None, tmp_path: Path, plain: str
) -> None:
    (tmp_path / "home").write_text("a file where the home folder should be")
    cache = str(tmp_path / "home" / "cache")
    out, err = run(GELU + RUN, tmp_path, POPXL_CACHE_DIR=cache)
    assert out != plain and "native kernels" not in err
    assert list(tmp_path.glob("temporary/popxl-*/kernels_*.so"))


@pytest.mark.slow
@needs_compiler
def test_a_damaged_library_is_built_again(copying: None, tmp_path: Path) -> None:
    first = run(GELU + RUN, tmp_path)
    (built,) = kept(tmp_path)
    whole = built.read_bytes()
    built.write_bytes(whole[:1000])
    assert run(GELU + RUN, tmp_path) == first
    assert built.read_bytes() == whole and len(calls(tmp_path)) == 2 * CALLS


# In the background


@pytest.mark.slow
def test_compiling_begins_before_torch_is_there(copying: None, tmp_path: Path) -> None:
    program = (
        "import sys, popxl.extensions as e; e.expect_session(); print('torch' in sys.modules, "
        "flush=True)\n"
    )
    out, _ = run(program + WAIT, tmp_path, SLOWLY="sleep 60", CALLS=str(tmp_path / "calls"))
    assert out == "False\ncompiling\n"


@pytest.mark.slow
def test_a_session_begins_to_compile_and_a_program_that_is_only_built_does_not(
    copying: None, tmp_path: Path
) -> None:
    assert run(GELU + "print(len(ir.main_graph.ops) > 0)", tmp_path)[0] == "True\n"
    assert not calls(tmp_path)
    run(
        GELU + "popxl.Session(ir, 'cpu')\n" + WAIT_FOR_KERNELS,
        tmp_path,
        SLOWLY="sleep 1",
        CALLS=str(tmp_path / "calls"),
    )
    assert calls(tmp_path)


def test_a_session_on_a_gpu_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    import popxl.extensions

    begun: list[bool] = []
    monkeypatch.setattr(build, "begin", begun.append)
    for name in ("cuda", "cuda:1"):
        popxl.extensions.expect_session(name)
    monkeypatch.setenv("POPXL_DEVICE", "cuda")
    popxl.extensions.expect_session("cpu")
    assert not begun
    monkeypatch.delenv("POPXL_DEVICE")
    popxl.extensions.expect_session("ipu_hw")
    popxl.extensions.expect_session("cpu", bfloat16=True)
    assert begun == [False, True]


@pytest.mark.slow
def test_a_program_that_changes_its_folder_waits_for_what_has_begun(
    copying: None, tmp_path: Path
) -> None:
    program = (
        "import os; from popxl_engine.native import build; build.begin(); os.chdir('/'); "
        "print(build.library())"
    )
    folder = os.path.relpath(tmp_path / "cache")
    assert Path(run(program, tmp_path, POPXL_CACHE_DIR=folder)[0]).parent.samefile(
        tmp_path / "cache"
    )
    assert len(calls(tmp_path)) == CALLS


FORK = """
import os, sys
from popxl_engine.native import build
build.begin()
child = os.fork()
if not child:
    CHILD
assert build.library().exists()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_left_early", [False, True], ids=["needs it, too", "ends early"])
def test_a_fork_leaves_its_parents_library_alone(
    copying: None, is_left_early: bool, tmp_path: Path
) -> None:
    program = FORK.replace("CHILD", "sys.exit()" if is_left_early else "pass")
    assert run(program, tmp_path, SLOWLY="sleep 0.3") == ("", "")
    assert len(calls(tmp_path)) == CALLS
    assert [path.suffix for path in kept(tmp_path)] == [".so"]


@pytest.mark.slow
def test_threads_that_need_the_library_at_once_hear_once_that_there_is_none(
    compiler: list[str], tmp_path: Path
) -> None:
    program = """
import logging
logging.basicConfig()
from concurrent.futures import ThreadPoolExecutor
from popxl_engine.native import build
from popxl_engine.native import library as native
with ThreadPoolExecutor(5) as pool:
    pool.submit(build.begin)
    print(set(pool.map(lambda _: native.library(), range(5))))
"""
    out, err = run(program, tmp_path, CXX=shlex.join(compiler), FAILS="1", SLOWLY="sleep 0.1")
    assert out == "{None}\n" and err.count("native kernels") == 1


@pytest.mark.slow
def test_a_program_that_goes_on_after_ctrl_c_has_its_kernels(copying: None, tmp_path: Path) -> None:
    begin = (
        "import signal; signal.signal(signal.SIGINT, lambda *_: None)\nfrom popxl_engine.native import "
        "build; build.begin()"
    )
    program = f"{begin}\n{WAIT}print(build.library().exists())"
    with start(program, tmp_path, SLOWLY="sleep 0.5", CALLS=str(tmp_path / "calls")) as process:
        assert process.stdout is not None and process.stdout.readline() == "compiling\n"
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate("\n") == ("True\n", "")
    assert len(calls(tmp_path)) == CALLS


SLEEP = "time.sleep(60)"
ENDS = {
    "the end": "",
    "an exception": "raise ValueError",
    "Ctrl-C": SLEEP,
    "Ctrl-C in a run": f"{GELU}popxl.Session(ir, 'cpu').__enter__().run()",
    "SIGTERM": SLEEP,
    "SIGKILL": SLEEP,
    "an end without cleaning up": "os._exit(0)",
    "another program": "os.execlp('true', 'true')",
}
PATIENCE = 5
"""Seconds in which what the program has started has ended, too."""


def processes(tmp_path: Path) -> list[str]:
    """Commands of programs with the folder, and of all that they have started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(tmp_path).encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_text())
    return found


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("end", cases(ENDS, lambda end: end in ("the end", "SIGKILL")))
def test_a_program_that_ends_early_leaves_no_compiler_and_no_parts(
    compiler: list[str], end: str, tmp_path: Path
) -> None:
    program = f"import popxl.extensions as e; e.expect_session()\n{WAIT}{ENDS[end]}"
    environment = {
        "CXX": shlex.join(compiler),
        "SLOWLY": "sleep 60",
        "CALLS": str(tmp_path / "calls"),
    }
    with start(program, tmp_path, **environment) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "compiling\n"
        assert processes(tmp_path) and parts(tmp_path)
        process.stdin.write("\n")
        process.stdin.flush()
        if end.startswith("Ctrl-C"):
            time.sleep(3 if "run" in end else 0.1)
            os.killpg(process.pid, signal.SIGINT)
        elif end.startswith("SIG"):
            process.send_signal(signal.Signals[end])
        process.wait()
        until = time.monotonic() + PATIENCE
        while (processes(tmp_path) or parts(tmp_path)) and time.monotonic() < until:
            time.sleep(0.01)
        assert not processes(tmp_path) and not parts(tmp_path)


@pytest.mark.slow
def test_a_maker_that_hears_one_signal_after_another_still_ends_its_compiler(
    compiler: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOWLY", "sleep 60")
    path = folder_in(tmp_path) / "kernels.so"
    with build._maker(path, KERNELS, compiler, subprocess.DEVNULL) as maker:
        while not calls(tmp_path):
            pass
        while maker.poll() is None:
            maker.send_signal(signal.SIGTERM)
    assert not processes(tmp_path) and not list(path.parent.iterdir())
