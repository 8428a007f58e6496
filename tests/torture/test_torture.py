"""A small share of each torture, and that tortures find what is broken."""

import ast
import errno
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.torture import calls
from tests.torture.application import MODES, ROOT, Workshop
from tests.torture.judge import (
    Broken,
    Undisturbed,
    check_checkpoints,
    check_end,
    check_words,
    state_of,
)
from tests.torture.kinds import KINDS
from tests.torture.of_tests import (
    CONFIGURATIONS,
    FILES,
    MPIRUN,
    OF_TESTS,
    SERVICES,
    SLURM,
    STRANGERS,
    TABLES,
    with_seeds,
)
from tests.torture.runner import report, spend
from tests.torture.soak import Sample, judge
from tests.torture.torture import Torture

SHARE = {
    "kills": [1854077756],
    "save_calls": [17],
    "flipped_bytes": range(2400, 20000, 970),  # test_mutations.py flips bits of every file
    "disks": [4176489243],
    "signals": [18, 65],
    "instances": [6],
    "same_seed": [0],
    "layouts": [15],
    "soak": [],
    "plans": [],
    "large_models": [],  # minutes, and 35 GB of a disk
}
"""Cases of each kind for `make test`; kinds that are made of tests are tests already."""
FURTHER = {"save_calls": [65], "signals": [39], "layouts": [50], "soak": [0], "plans": [0, 8]}
"""Cases for `make exhaustive`."""


SELECTED = {
    tests[0].partition("::")[0]: {test.partition("::")[2] for test in tests}
    for tests in ([*CONFIGURATIONS, *FILES, *TABLES], STRANGERS, SERVICES, SLURM, MPIRUN)
}
"""Tests of kinds that are made of some, by file."""


@pytest.fixture(scope="module")
def shop():
    with Workshop() as shop:
        yield shop


def shares():
    """Each kind with its cases: those of `make test`, and the further ones."""
    for kind in KINDS:
        if kind not in OF_TESTS:
            if cases := SHARE[kind.name]:
                yield pytest.param(kind, cases, id=kind.name)
            if cases := FURTHER.get(kind.name):
                name = f"{kind.name}, further"
                yield pytest.param(kind, cases, id=name, marks=pytest.mark.exhaustive)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("kind, cases", [*shares()])
def test_a_share_of_the_torture_breaks_no_promise(kind, cases, shop):
    for case in cases:
        kind.trial(case, shop)
        shop.sweep()


# The runner


def breaks_at(*broken):
    def trial(case, shop):
        if case in broken:
            raise Broken("the sky falls")
        return "nothing"

    return Torture("sky", "The sky stays up.", trial, lambda shop: 20)


def test_every_case_is_tried_once_and_a_broken_one_is_told_with_its_command(shop, tmp_path, capsys):
    tallies = spend(0, [breaks_at(13, 17)], 5, shop, is_full=True)
    assert report(tallies, 5, tmp_path / "found.json") == 1
    (found,) = json.loads((tmp_path / "found.json").read_text())["tortures"]
    assert (found["trials"], found["cases"]) == (20, 20)
    assert sorted(broken["case"] for broken in found["broken"]) == [13, 17]
    assert "python -m tests.torture --kind sky --case 13" in capsys.readouterr().out


def test_so_many_trials_are_done_as_are_asked_for(shop, capsys):
    done = []
    endless = Torture("endless", "", lambda case, shop: done.append(case))
    limited = Torture("limited", "", lambda case, shop: done.append(case), lambda shop: 3)
    tallies = spend(0, [endless, limited], 5, shop, is_full=False, trials=7)
    assert [tally.trials for tally in tallies] == [7, 3]
    assert len(done) == 10


def test_one_seed_gives_the_same_cases_in_the_same_order(shop, capsys):
    def tried(seed):
        order = []
        spend(
            0,
            [Torture("", "", lambda case, shop: order.append(case), lambda shop: 50)],
            seed,
            shop,
            is_full=True,
        )
        return order

    assert tried(1) == tried(1) != tried(2)
    assert sorted(tried(1)) == list(range(50))


def test_a_trial_that_fails_itself_counts_as_broken(shop, capsys):
    def trial(case, shop):
        return [][case]

    assert (
        report(spend(0, [Torture("", "", trial, lambda shop: 1)], 0, shop, is_full=True), 0, None)
        == 1
    )


def test_nothing_broken_is_exit_code_0(shop, capsys):
    assert report(spend(0, [breaks_at()], 0, shop, is_full=True), 0, None) == 0


@pytest.mark.slow
def test_the_command_of_make_torture_runs_without_anything_of_pytest(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [sys.executable, "-m", "tests.torture", "--minutes", "0", "--json", tmp_path / "found"]
    subprocess.run(words, cwd=ROOT, env=environment, check=True, timeout=60)
    found = json.loads((tmp_path / "found").read_text())["tortures"]
    assert [torture["name"] for torture in found] == [kind.name for kind in KINDS]


@pytest.mark.slow
def test_a_test_that_fails_breaks_its_promise_and_gets_the_seed(tmp_path):
    test = tmp_path / "test_seed.py"
    test.write_text("import os\ndef test_seed(): assert os.environ['MUTATION_SEED'] == '6'\n")
    kind = with_seeds("sky", "", [f"{test}::test_seed"])
    assert "250 mutations: test_seed, seed 6: 1 passed" in kind.trial(6, None)
    with pytest.raises(Broken, match="test_seed, seed 7: E .*assert '7' == '6'"):
        kind.trial(7, None)


@pytest.mark.parametrize("path", SELECTED)
def test_kinds_that_are_made_of_tests_name_some_that_are_there(path):
    functions = [
        node.name
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    assert SELECTED[path] <= set(functions)


# Calls that fail

CHANGES = """
import ctypes, os, platform
RENAMEAT, AT_FDCWD = {"x86_64": 264, "aarch64": 38}[platform.machine()], -100
c = ctypes.CDLL(None, use_errno=True)
os.mkdir("a")
with open("a/file", "wb", buffering=0) as file:
    file.write(b"0123456789")
    os.fsync(file.fileno())
with open("a/file", "rb") as file:
    file.read()
if c.syscall(RENAMEAT, AT_FDCWD, b"a/file", AT_FDCWD, b"a/third"):  # without the C library's
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
os.rename("a/third", "a/other")
os.unlink("a/other")
os.rmdir("a")
"""
NAMES = ["mkdir", "open", "write", "fsync", "rename", "rename", "unlink", "rmdir"]


def changes(shop, folder, **settings):
    below = folder / "below"
    below.mkdir(exist_ok=True)
    environment = calls.settings(shop, below, **settings)
    words = [sys.executable, "-S", "-c", CHANGES]
    return subprocess.run(words, cwd=below, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_each_call_that_changes_something_is_counted(shop, tmp_path):
    assert changes(shop, tmp_path, log=str(tmp_path / "log")).returncode == 0
    found = calls.read_log(tmp_path / "log")
    assert [call.name for call in found] == NAMES
    assert [call.path for call in found[:2]] == [
        str(tmp_path / "below/a"),
        str(tmp_path / "below/a/file"),
    ]


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("number", range(1, len(NAMES) + 1))
def test_the_nth_call_ends_the_process_before_it_is_made(number, shop, tmp_path):
    assert changes(shop, tmp_path, at=number, action="kill").returncode == -signal.SIGKILL
    there = sorted(path.name for path in (tmp_path / "below").rglob("*"))
    assert (
        there
        == [
            [],
            ["a"],
            ["a", "file"],
            ["a", "file"],
            ["a", "file"],
            ["a", "third"],
            ["a", "other"],
            ["a"],
        ][number - 1]
    )


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("number", range(1, len(NAMES) + 1))
def test_the_nth_call_fails_with_an_error(number, shop, tmp_path):
    done = changes(shop, tmp_path, at=number, action=errno.EIO)
    assert done.returncode == 1
    assert "OSError: [Errno 5] Input/output error" in done.stderr


def test_a_write_that_is_torn_leaves_its_first_half(shop, tmp_path):
    assert changes(shop, tmp_path, at=3, action="tear").returncode == -signal.SIGKILL
    assert (tmp_path / "below/a/file").read_bytes() == b"01234"


# The judges


def write_run(folder):
    checkpoint = folder / "checkpoints/step_00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "head.safetensors").write_bytes(b"weights")
    (checkpoint / "checkpoint.json").write_text(
        json.dumps({"files": {"head.safetensors": {}}, "step": 2, "seed": 1})
    )
    (folder / "metrics.jsonl").write_text("{}\n")
    return folder


@pytest.fixture
def run(tmp_path):
    """A folder of a run, and what an undisturbed one leaves."""
    checkpoint = write_run(tmp_path / "run") / "checkpoints/step_00000002"
    states = {checkpoint.name: state_of(checkpoint)}
    return tmp_path / "run", Undisturbed(
        tmp_path, "{}\n", states, {"metrics.jsonl", "checkpoints"}, 1.0, 2.0
    )


DAMAGES = {
    "another weight": lambda run, last: (last / "head.safetensors").write_bytes(b"Weights"),
    "another seed": lambda run, last: (last / "checkpoint.json").write_text(
        (last / "checkpoint.json").read_text().replace('"seed": 1', '"seed": 2')
    ),
    "a file is missing": lambda run, last: (last / "head.safetensors").unlink(),
    "no manifest": lambda run, last: (last / "checkpoint.json").unlink(),
    "no checkpoint": lambda run, last: shutil.rmtree(last),
    "other metrics": lambda run, last: (run / "metrics.jsonl").write_text("{}\n{}\n"),
    "a file left behind": lambda run, last: (run / "checkpoints/.step_00000001.partial").touch(),
}


def test_an_undisturbed_end_is_right(run):
    check_end(*run)


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_end_that_differs_from_the_undisturbed_one_is_broken(damage, run):
    folder, undisturbed = run
    DAMAGES[damage](folder, folder / "checkpoints/step_00000002")
    with pytest.raises(Broken):
        check_end(folder, undisturbed)


def test_a_checkpoint_that_the_undisturbed_run_has_not_is_broken(run):
    folder, undisturbed = run
    (folder / "checkpoints/step_00000002").rename(folder / "checkpoints/step_00000003")
    with pytest.raises(Broken, match="step_00000003 differs"):
        check_checkpoints(folder, undisturbed)


@pytest.mark.parametrize(
    "code, output", [(2, "Traceback\nerror: x"), (-11, "error: x"), (3, "step 1"), (0, "Traceback")]
)
def test_an_end_without_words_is_broken(code, output):
    with pytest.raises(Broken):
        check_words(code, output)
    check_words(2, "error: got no space")
    check_words(0, "step 1")


def samples_of(growth, steps=4000):
    """A process that has more of something with each step."""
    return [
        Sample(
            step,
            50_000_000 + step * growth.get("memory", 0),
            9 + int(step * growth.get("descriptors", 0)),
            4 + int(step * growth.get("threads", 0)),
        )
        for step in range(1, steps + 1, 7)
    ]


def test_a_process_that_stays_as_it_is_passes_and_short_peaks_do_not_matter():
    samples = samples_of({})
    samples[-3] = Sample(samples[-3].step, 90_000_000, 20, 7)
    assert judge(samples, 4000) == (
        "memory 50000000 -> 50000000, descriptors 9 -> 9, threads 4 -> 4"
    )


@pytest.mark.parametrize("what, rate", [("memory", 3000), ("descriptors", 1e-3), ("threads", 1e-3)])
def test_what_grows_by_little_in_each_step_is_found(what, rate):
    with pytest.raises(Broken, match=f"{what} grew from"):
        judge(samples_of({what: rate}), 4000)


def test_a_process_that_nobody_has_looked_at_is_no_proof():
    with pytest.raises(Broken, match="not seen"):
        judge(samples_of({})[:200], 4000)


@pytest.mark.slow
@pytest.mark.multi
def test_a_run_that_hangs_is_killed_with_all_its_processes(shop, monkeypatch):
    monkeypatch.setattr("tests.torture.application.SECONDS", 1)
    with shop.start(MODES["poprun"], shop.fresh(), steps=100000) as program:
        with pytest.raises(Broken, match="hangs"):
            program.wait()
    assert program.members() == []
