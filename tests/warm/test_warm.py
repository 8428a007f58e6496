"""A program that a warm Python runs finds, prints and leaves what it does with one of its own."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import warm
from tests.faults import hear_signals, limited, obey_permissions

pytestmark = pytest.mark.slow

TELL = """
import json, os, resource, signal, sys
limits = {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")}
umask = os.umask(0)
streams = [[s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.newlines, s.isatty(), s.fileno()]
           for s in (sys.stdin, sys.stdout, sys.stderr)]
handlers = [str(signal.getsignal(n)) for n in sorted(signal.valid_signals())]
tests = [name for name in sys.modules if name.startswith(("tests", "helpers", "client"))]
variables = {n: v for n, v in os.environ.items() if n != "_"}
print(json.dumps([
    sys.argv, sys.path, sys.executable, sys.flags, __name__, globals().get("__file__"), os.getcwd(), variables, umask,
    limits, streams, handlers, tests, os.listdir("/proc/self/fd"), sys.stdin.read(), dir(sys.modules["__main__"]),
]))
print("of errors", file=sys.stderr)
"""
"""All that a program can see of how it was started, but what its docstring leaves out."""
FAILS = "import sys\nprint('before')\ndef fail():\n    raise ValueError('bad luck')\nfail()\n"
SPAWNS = """
import multiprocessing, os, tempfile
def work(queue):
    queue.put([__name__, os.getcwd(), tempfile.gettempdir()])
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print(queue.get(), process.join(), process.exitcode)
"""
NOTED = """
import os, signal, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)
open("started", "w").write(str(os.getpid()))
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "tell.py").write_text(TELL)
    (tmp_path / "below").mkdir()
    (tmp_path / "below/tell.py").write_text(TELL)
    (tmp_path / "fails.py").write_text(FAILS)
    (tmp_path / "fails_not.py").touch()
    (tmp_path / "spawns.py").write_text(SPAWNS)
    (tmp_path / "long.py").write_text(NOTED)
    return tmp_path


def run(
    python: str, words: "list[str]", folder: Path, ignored: "tuple[int, ...]" = (), **variables: str
):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}

    def before() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12345, 23456))
        os.umask(0o27)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    done = subprocess.run(
        [python, *words], cwd=folder, env=environment, input="a line", capture_output=True, text=True, preexec_fn=before
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "words",
    [
        ["tell.py", "a", "--b=c d"],
        ["below/tell.py"],
        ["-c", TELL, "a"],
        ["-m", "tell", "a"],
        ["-m", "below.tell"],
        ["fails.py"],
        ["spawns.py"],
        ["-c", FAILS],
        ["-c", "import sys; sys.exit(3)"],
        ["-c", "import sys; sys.exit('in words')"],
        ["-c", "import os; os.abort()"],
        ["-c", "import sys; print('said'); sys.stdout.close()"],
        ["-c", "import os, sys; print('said'); os.close(1)"],
        ["-c", "import sys; sys.exit(300)"],
        [
            "-c",
            "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
        ],
        ["-c", "import atexit; atexit.register(print, 'at its end'); print('first')"],
        ["-W", "error", "-c", "import warnings; warnings.warn('said')"],
        ["-c", "not Python"],
        ["absent.py"],
    ],
    ids=lambda words: " ".join(words).partition("\n")[0][:40],
)
def test_a_program_finds_prints_and_ends_the_same(words, folder):
    assert run(warm.python(), words, folder) == run(sys.executable, words, folder)


def test_our_modules_are_there_unless_the_program_has_others(folder):
    text = "import sys; print('popxl' in sys.modules, len([n for n in sys.modules if n.startswith('popxl')]) > 100)"
    text += "; import popxl; print(popxl.__file__)"
    ours = f"{warm.ROOT}/runtime/popxl/__init__.py"
    paths = {"PYTHONPATH": os.pathsep.join(warm.OURS)}
    found = run(warm.python(), ["-c", text], folder, **paths)
    assert found[1].split() == ["True", "True", ours]
    (folder / "links").symlink_to(warm.ROOT)
    linked = os.pathsep.join([str(folder / "links"), str(folder / "links/runtime")])
    assert run(warm.python(), ["-c", text], folder, PYTHONPATH=linked) == found
    (folder / "popxl.py").touch()
    theirs = str(folder / "popxl.py")
    assert run(warm.python(), ["-c", text], folder)[1].split() == ["False", "False", theirs]
    (folder / "below/script.py").write_text(
        f"import sys; sys.path.insert(0, {str(folder)!r}); {text}"
    )
    found = run(warm.python(), ["below/script.py"], folder, **paths)
    assert found[1].split() == ["False", "False", theirs]
    paths = {"PYTHONPATH": os.pathsep.join([str(folder), *warm.OURS])}
    found = run(warm.python(), ["-c", text], folder / "below", **paths)
    assert found[1].split() == ["False", "False", theirs]


def test_its_environment_is_the_commands(folder):
    given = {
        "PYTHONPATH": os.pathsep.join([str(folder / "below"), "elsewhere"]),
        "TMPDIR": str(folder),
    }
    for script in ("tell.py", "spawns.py"):
        found = run(warm.python(), [script], folder, **given)
        assert found == run(sys.executable, [script], folder, **given)
        assert str(folder) in found[1]


def test_signals_that_the_command_ignores_are_ignored(folder):
    ignored = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)
    found = run(warm.python(), ["tell.py"], folder, ignored)
    assert found == run(sys.executable, ["tell.py"], folder, ignored)
    assert found != run(warm.python(), ["tell.py"], folder)


@pytest.mark.parametrize(
    "given", [{}, {"PYTHONFAULTHANDLER": "1"}], ids=["not asked for", "asked for"]
)
def test_faults_are_told_of_where_the_environment_asks_for_it(given, folder):
    words = ["-c", "import faulthandler; print(faulthandler.is_enabled())"]
    assert run(warm.python(), words, folder, **given)[1] == f"{bool(given)}\n"


def test_torch_is_there_and_gives_the_same_numbers(folder):
    text = "import sys; print('torch' in sys.modules); import numpy as np, torch; torch.manual_seed(1)\n"
    text += (
        "print((torch.randn(64, 64) @ torch.randn(64, 64)).sum().item(), torch.get_num_threads())"
    )
    (is_there, *numbers), (is_not, *expected) = (
        run(python, ["-c", text], folder)[1].split() for python in (warm.python(), sys.executable)
    )
    assert (is_there, is_not) == ("True", "False")
    assert numbers == expected and len(numbers) == 2


def test_two_programs_draw_different_random_numbers(folder):
    text = "import numpy, random; print(numpy.random.random(), random.random())"
    one, other = (run(warm.python(), ["-c", text], folder)[1].split() for _ in range(2))
    assert not {*one} & {*other}


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTHONUNBUFFERED", "LC_ALL"])
def test_what_is_read_at_a_start_gives_a_program_an_interpreter_of_its_own(name, folder):
    words = ["-c", "import sys; print('torch' in sys.modules)"]
    assert run(warm.python(), words, folder)[1] == "True\n"
    assert run(warm.python(), words, folder, **{name: "2"})[1] == "False\n"


def test_a_command_with_fewer_rights_gets_an_interpreter_of_its_own(folder):
    words = [
        warm.python(),
        "-c",
        "import os, sys; print('torch' in sys.modules, os.access('shut', os.W_OK))",
    ]
    (folder / "shut").mkdir(0o555)
    done = subprocess.run(
        words, cwd=folder, env={**os.environ, **warm.ONE_THREAD}, preexec_fn=limited(None), capture_output=True, text=True
    )  # fmt: skip
    assert done.stdout.split() == [str(os.geteuid() != 0), "False"], done.stderr


def test_a_server_of_fewer_rights_serves_those_commands_and_finds_other_packages(folder):
    python = warm.python(("yaml", str(folder), "fails_not"), before=obey_permissions)
    assert python == warm.python(("yaml", str(folder), "fails_not"), before=obey_permissions)
    (folder / "shut").mkdir(0o555)
    text = "import os, sys; print('yaml' in sys.modules, 'torch' in sys.modules, os.access('shut', os.W_OK))"
    done = subprocess.run(
        [python, "-c", text], cwd=folder, env={**os.environ, **warm.ONE_THREAD}, preexec_fn=limited(None), capture_output=True, text=True
    )  # fmt: skip
    assert done.stdout.split() == ["True", "False", str(os.geteuid() != 0)], done.stderr


def started(folder: Path) -> "tuple[subprocess.Popen, int]":
    """A command, and the process of its program."""
    process = subprocess.Popen(
        [warm.python(), "long.py"],
        cwd=folder,
        env={**os.environ, **warm.ONE_THREAD},
        preexec_fn=hear_signals,
    )
    until = time.monotonic() + 20
    while not (folder / "started").exists() or not (folder / "started").read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
    return process, int((folder / "started").read_text())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGABRT, signal.SIGKILL])
def test_signals_to_the_command_are_for_the_program(number, folder):
    process, program = started(folder)
    assert program != process.pid
    process.send_signal(number)
    assert process.wait(20) == -number
    until = time.monotonic() + 20
    while os.path.exists(f"/proc/{program}"):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_program_starts_others_as_it_was_started(folder):
    text = "import subprocess, sys; print('torch' in sys.modules, flush=True)\n"
    words = ["-c", f"{text}subprocess.run([sys.executable, '-c', {text!r}], check=True)"]
    assert run(warm.python(), words, folder)[1].split() == ["True", "False"]
    assert run(warm.python(), words, folder, **warm.with_children())[1].split() == ["True", "True"]
