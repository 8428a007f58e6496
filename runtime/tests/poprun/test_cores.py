"""How many cores a process may keep busy, by its binding and its cgroups' quotas."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.processes import environment
from helpers.system_files import system
from poprun import cores

V2 = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 {root} /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"


def test_a_machine_without_cgroups_has_no_quota(tmp_path: Path) -> None:
    assert list(cores.quotas(tmp_path)) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max 100000", []),
        ("200000 100000", [2]),
        ("150000 100000", [2]),
        ("20000 50000", [1]),
        ("", []),
    ],
)
def test_a_quota_of_version_2_is_worth_whole_cores(
    text: str, expected: "list[int]", tmp_path: Path
):
    files = {"sys/fs/cgroup/a/cpu.max": text}
    root = system(tmp_path, "0::/a", V2.format(root="/"), files)
    assert list(cores.quotas(root)) == expected


def test_a_quota_of_version_1_holds_for_what_is_below_it(tmp_path: Path) -> None:
    above, own = "sys/fs/cgroup/cpu/job", "sys/fs/cgroup/cpu/job/step"
    files = {f"{above}/cpu.cfs_quota_us": "300000", f"{above}/cpu.cfs_period_us": "100000"}
    files |= {f"{own}/cpu.cfs_quota_us": "-1", f"{own}/cpu.cfs_period_us": "100000"}
    root = system(tmp_path, "3:cpuacct,cpu:/job/step\n5:memory:/x", V1.format(root="/"), files)
    assert list(cores.quotas(root)) == [3]


def test_a_container_reads_the_quota_at_the_top_of_what_it_sees(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/cpu.max": "400000 100000"}
    root = system(tmp_path, "0::/docker/abc", V2.format(root="/docker/abc"), files)
    assert list(cores.quotas(root)) == [4]


@pytest.mark.parametrize(("bound", "quotas", "expected"), [(8, [], 8), (8, [4, 2], 2), (2, [4], 2)])
def test_the_smallest_of_binding_and_quotas_counts(
    bound: int, quotas: "list[int]", expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "bound_cores", lambda _: bound)
    monkeypatch.setattr(cores, "quotas", lambda: iter(quotas))
    assert cores.usable_cores() == expected


def test_names_with_unusual_characters_are_names(tmp_path: Path) -> None:
    name, files = "a\x85b\u2028c", {"sys/fs/cgroup/a\x85b\u2028c/cpu.max": "300000 100000"}
    mounts = "29 23 0:25 / /mnt/x\f\u2028y rw - tmpfs tmpfs rw\n" + V2.format(root="/")
    assert list(cores.quotas(system(tmp_path, f"0::/{name}", mounts, files))) == [3]


PROGRAM = """
import os
from poprun import cores
cores.quotas = lambda: iter([1])
os.sched_getaffinity = lambda _: {0, 1, 2}
from popxl.backend import backend
backend()
import torch
print(torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])
"""


def test_a_program_has_the_threads_of_its_quota() -> None:
    variables = {name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"}
    words = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"], done.stderr
    told = {**variables, "OMP_NUM_THREADS": str(min(2, len(os.sched_getaffinity(0))))}
    done = subprocess.run(words, env=told, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [told["OMP_NUM_THREADS"]] * 2
