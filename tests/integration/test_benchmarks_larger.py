"""The benchmark of state larger than memory: it runs, rows really move, and its shares are of the
measured rounds.
"""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from benchmarks import larger_than_memory, memory_limits
from benchmarks.harness import Measurement
from tests import warm

ROOT = Path(__file__).resolve().parent.parent.parent
SIZES = {"layers": 3, "hidden_size": 64, "heads": 2, "sequence_length": 8, "vocabulary_size": 64}


@pytest.mark.multi
def test_state_in_files_is_measured_beside_the_same_steps_in_memory(tmp_path):
    flags = [part for name, value in SIZES.items() for part in (f"--{name}", str(value))]
    flags += [
        "--batches",
        "1",
        "2",
        "--rounds",
        "1",
        "--host_memory",
        "1",
        "--disk_mib",
        "1",
        "--limit",
        "4000",
    ]
    flags += ["--cgroup", "none"]
    command = [
        warm.python(),
        "benchmarks/larger_than_memory.py",
        *flags,
        "--folder",
        str(tmp_path / "rows"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=warm.with_children(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    *shown, last = done.stdout.strip().splitlines()
    assert any(line.startswith("1, in files ") for line in shown)
    figures = json.loads(last)
    wide, narrow = (figures["moments"][name] for name in ("float32", "bfloat16"))
    assert (
        wide["state_bytes"] == 12 * figures["parameters"]
        and narrow["state_bytes"] == 8 * figures["parameters"]
    )
    assert wide["batches"].keys() == {"1", "2"} and narrow["batches"].keys() == {"2"}
    for found in (wide["batches"]["1"], wide["batches"]["2"], narrow["batches"]["2"]):
        assert found.keys() == {"in memory", "in files", "in files, fetched when asked for"}
        assert found["in memory"]["read_bytes"] == 0
        for name in ("in files", "in files, fetched when asked for"):
            assert found[name]["read_bytes"] > 0 and found[name]["written_bytes"] > 0
            assert found[name]["losses_equal"] and 0 < found[name]["waiting"] < 1
            assert found[name]["cached_bytes"] == 0 or not figures["disk"]["is_direct"]
    assert narrow["batches"]["2"]["in files"]["loss"] != wide["batches"]["2"]["in files"]["loss"]
    assert wide["within_limit"] and all(
        figures["disk"][way] > 0 for way in ("read", "write", "both")
    )
    assert str(ROOT) not in last and list((tmp_path / "rows").iterdir()) == []


@pytest.mark.slow
def test_a_limit_that_leaves_nothing_for_rows_is_refused(tmp_path):
    flags = [part for name, value in SIZES.items() for part in (f"--{name}", str(value))]
    command = [
        warm.python(),
        "benchmarks/larger_than_memory.py",
        *flags,
        "--disk_mib",
        "1",
        "--folder",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=warm.with_children(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert done.stderr == (
        "limit: got 0.00 GiB; expected more than the 480 MiB of a process, for rows. Measure a "
        "larger model, or give --limit and --host_memory.\n"
    )


def measurement(name, seconds, peak=100, loss=1.0, cached=0, **moved):
    steps = tuple({"loss": loss, **moved} for _ in range(3))
    return Measurement(
        name=name, seconds=(seconds, seconds), cpu_seconds=(seconds, seconds), peak_bytes=peak, stepping_bytes=peak,
        steps=steps, finish={"cached_bytes": cached, "cgroup": False, "cgroup_peak_bytes": None},
    )  # fmt: skip


def test_the_bound_is_the_larger_of_the_steps_in_memory_and_of_the_transfers():
    alone = measurement("in memory", 2.0, peak=1000)
    files = measurement("in files", 4.0, read_bytes=20.0, written_bytes=10.0, waited=1.0)
    for rate, bound in ((30.0, 2.0), (10.0, 3.0)):
        found = larger_than_memory.compare([alone, files], 8, {"both": rate}, limit=100)
        assert found["in files"]["of_bound"] == bound / 4.0 and found["in files"]["waiting"] == 0.25
        assert (
            found["in files"]["transfer_seconds"] == 30.0 / rate
            and found["in files"]["tokens_per_s"] == 2.0
        )
        assert found["in files"]["within_limit"] and found["in files"]["losses_equal"]
        assert found["in files"]["of_memory"] == 0.5
        assert found["in memory"]["of_bound"] == found["in memory"]["of_memory"] == 1.0


def test_more_than_the_limit_and_other_losses_are_told():
    alone = measurement("in memory", 2.0)
    for peak, cached in ((101, 0), (60, 41)):
        files = measurement("in files", 4.0, peak=peak, cached=cached, loss=2.0)
        found = larger_than_memory.compare([alone, files], 8, {"both": 1.0}, limit=100)["in files"]
        assert not found["within_limit"] and not found["losses_equal"]


# Limits

KERNEL = {
    "auto": ("", "0::/mine\n", "memory.max", "memory.swap.max", "memory.peak"),
    "v1": (
        "memory", "5:cpu,cpuacct:/other\n4:memory:/mine\n0::/\n",
        "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max_usage_in_bytes",
    ),
}  # fmt: skip
both_kinds = pytest.mark.parametrize("kind", ["auto", "v1"])


@pytest.fixture
def system(kind, tmp_path, monkeypatch):
    """The files that a kernel shows a process about its cgroup; new cgroups get theirs, and go with
    them.
    """
    below, line, limit, swap, peak = KERNEL[kind]
    root, process = tmp_path / "cgroup", tmp_path / "process"
    own = root / below / "mine"
    own.mkdir(parents=True)
    process.mkdir()
    (process / "cgroup").write_text(line)
    for name, text in {
        "cgroup.procs": "1\n",
        "cgroup.controllers": "cpu memory pids\n",
        "cgroup.subtree_control": "cpu\n",
        "memory.use_hierarchy": "1\n",
    }.items():
        (own / name).write_text(text)
    mkdir = Path.mkdir

    def make(path, *arguments, **options):
        mkdir(path, *arguments, **options)
        if path.parent == own:
            for name, text in {
                limit: "max",
                swap: "max",
                peak: "123\n",
                "cgroup.procs": "",
            }.items():
                (path / name).write_text(text)

    monkeypatch.setattr(Path, "mkdir", make)
    monkeypatch.setattr(Path, "rmdir", lambda path: shutil.rmtree(path))
    return {"kind": kind, "root": root, "process": process}, own


@both_kinds
def test_a_process_is_held_by_a_cgroup_below_its_own(kind, system):
    place, own = system
    _, _, limit, swap, _ = KERNEL[kind]
    joined = memory_limits.join_cgroup("run.1", 1000, **place)
    assert joined is not None and joined.folder == own / "run.1" and joined.peak_bytes == 123
    assert (joined.folder / limit).read_text() == "1000"
    assert (joined.folder / swap).read_text().startswith("1000" if kind == "v1" else "0"), (
        "no swap beside it"
    )
    assert (joined.folder / "cgroup.procs").read_text() == str(os.getpid())
    if kind == "auto":
        assert (own / "cgroup.subtree_control").read_text().strip() == "+memory", (
            "asked of the kernel"
        )
    memory_limits.remove_cgroup("run.1", **place)
    memory_limits.remove_cgroup("run.1", **place)
    assert not joined.folder.exists() and own.is_dir()


@both_kinds
@pytest.mark.parametrize("missing", ["own", "limit", "procs", "name taken"])
def test_without_leave_no_cgroup_is_left_and_none_is_said_to_hold(
    kind, missing, system, monkeypatch
):
    place, own = system
    if missing == "own":
        (place["process"] / "cgroup").unlink()
    elif missing == "name taken":
        (own / "run.1").mkdir()
    else:
        refused = KERNEL[kind][2] if missing == "limit" else "cgroup.procs"
        make = Path.mkdir

        def without(path, *arguments, **options):
            make(path, *arguments, **options)
            (path / refused).unlink(missing_ok=True)

        monkeypatch.setattr(Path, "mkdir", without)
    assert memory_limits.join_cgroup("run.1", 1000, **place) is None
    assert (own / "run.1").exists() == (missing == "name taken")


@pytest.mark.parametrize("kind, file, text", [
    ("auto", "cgroup.controllers", "cpu pids\n"), ("v1", "memory.use_hierarchy", "0\n")
])  # fmt: skip
def test_a_cgroup_that_would_not_limit_memory_or_would_leave_that_of_its_parent_is_not_made(
    kind, file, text, system
):
    place, own = system
    (own / file).write_text(text)
    assert memory_limits.join_cgroup("run.1", 1000, **place) is None
    assert not (own / "run.1").exists()


@pytest.mark.parametrize("kind", ["auto"])
def test_no_cgroup_is_made_unasked(kind, system):
    place, own = system
    assert memory_limits.join_cgroup("run.1", 1000, **{**place, "kind": "none"}) is None
    assert memory_limits.join_cgroup("run.1", 1000, **{**place, "kind": "v1"}) is None
    assert not (own / "run.1").exists()


def test_what_the_system_caches_of_a_folders_open_files_is_counted(tmp_path):
    before = memory_limits.cached_bytes(tmp_path)
    with tempfile.TemporaryFile(dir=tmp_path) as inside, tempfile.TemporaryFile() as outside:
        for file in (inside, outside):
            file.write(bytes(5 * 4096 + 1))
            file.flush()
        assert before == 0 and memory_limits.cached_bytes(tmp_path) == 6 * 4096
