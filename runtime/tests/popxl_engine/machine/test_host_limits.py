"""What of the host's memory a process may use, as systems with cgroups of every kind show it."""

from pathlib import Path

import pytest
from helpers import system_files
from popxl.errors import RemoteMemoryError
from popxl.extensions import HostMemory, host_memory
from popxl_engine.machine import device as device_module
from popxl_engine.machine.device import Pages

GIB = 2**30
NO_LIMIT_V1 = 9223372036854771712
MACHINE = {
    "proc/meminfo": (
        "MemTotal: 67108864 kB\nMemFree: 1024 kB\nMemAvailable: 50331648 kB\nSwapFree: "
        "9999999999 kB\n"
    )
}
V2 = "30 23 0:26 {root} {point} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 {root} {point} rw,relatime - cgroup cgroup rw,memory\n"
OTHER = (
    "22 1 0:21 / /proc rw - proc proc rw\n33 31 0:30 / /sys/fs/cgroup/cpuacct rw - cgroup cgroup "
    "rw,cpuacct\n"
)


def system(folder: Path, own: str, mounts: str, files: "dict[str, object]") -> Path:
    """A machine with cgroups."""
    return system_files.system(folder, own, OTHER + mounts, {**MACHINE, **files})


def test_a_machine_without_cgroups_has_what_it_has(tmp_path: Path) -> None:
    for name, text in MACHINE.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    assert host_memory(tmp_path) == HostMemory(64 * GIB, 48 * GIB, "this machine")


def test_a_machine_that_shows_nothing_is_asked_for_its_memory(tmp_path: Path) -> None:
    found = host_memory(tmp_path)
    assert found.total == found.available > 0


@pytest.mark.parametrize("smallest", [0, 1, 2])
def test_of_nested_cgroups_the_smallest_limit_holds(smallest: int, tmp_path: Path) -> None:
    folders = ["job_7", "job_7/step_0", "job_7/step_0/task_0"]
    limits = [20 * GIB, 20 * GIB, 20 * GIB]
    limits[smallest] = 4 * GIB
    mounts = V2.format(root="/", point="/sys/fs/cgroup")
    files = {f"sys/fs/cgroup/{name}/memory.max": limit for name, limit in zip(folders, limits)}
    root = system(tmp_path, "0::/job_7/step_0/task_0\n", mounts, files)
    said = f"/sys/fs/cgroup/{folders[smallest]}/memory.max"
    assert host_memory(root) == HostMemory(4 * GIB, 4 * GIB, said)


def test_max_is_no_limit_and_neither_is_a_file_that_is_missing(tmp_path: Path) -> None:
    mounts = V2.format(root="/", point="/sys/fs/cgroup")
    root = system(
        tmp_path,
        "0::/a/b\n",
        mounts,
        {"sys/fs/cgroup/a/memory.max": "max", "sys/fs/cgroup/a/b/cgroup.procs": 1},
    )
    assert host_memory(root) == HostMemory(64 * GIB, 48 * GIB, "this machine")


def test_where_memory_is_throttled_it_is_not_there(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/a/memory.max": 8 * GIB, "sys/fs/cgroup/a/memory.high": 6 * GIB}
    root = system(tmp_path, "0::/a\n", V2.format(root="/", point="/sys/fs/cgroup"), files)
    assert host_memory(root).total == 6 * GIB


def test_what_neighbours_in_a_cgroup_use_is_gone_but_for_pages_of_files(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/job/memory.max": 10 * GIB,
        "sys/fs/cgroup/job/memory.current": 7 * GIB,
        "sys/fs/cgroup/job/memory.swap.max": 100 * GIB,
        "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {2 * GIB}\nactive_file {GIB}\nshmem 5",
        "sys/fs/cgroup/job/mine/memory.max": 8 * GIB,
        "sys/fs/cgroup/job/mine/memory.current": GIB,
    }
    root = system(tmp_path, "0::/job/mine\n", V2.format(root="/", point="/sys/fs/cgroup"), files)
    assert host_memory(root) == HostMemory(8 * GIB, 6 * GIB, "/sys/fs/cgroup/job/mine/memory.max")


def test_more_in_use_than_a_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/a/memory.max": GIB, "sys/fs/cgroup/a/memory.current": 2 * GIB}
    root = system(tmp_path, "0::/a\n", V2.format(root="/", point="/sys/fs/cgroup"), files)
    assert host_memory(root).available == 0


def test_limits_of_version_1_are_read_at_every_height(tmp_path: Path) -> None:
    own = "5:devices:/\n4:memory,hugetlb:/slurm/uid_5/job_1/step_0\n1:name=systemd:/x\n"
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
        "sys/fs/cgroup/memory/slurm/uid_5/job_1/memory.limit_in_bytes": 3 * GIB,
        "sys/fs/cgroup/memory/slurm/uid_5/job_1/memory.usage_in_bytes": 2 * GIB,
        "sys/fs/cgroup/memory/slurm/uid_5/job_1/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}",
        "sys/fs/cgroup/memory/slurm/uid_5/job_1/step_0/memory.limit_in_bytes": NO_LIMIT_V1,
    }
    root = system(tmp_path, own, V1.format(root="/", point="/sys/fs/cgroup/memory"), files)
    said = "/sys/fs/cgroup/memory/slurm/uid_5/job_1/memory.limit_in_bytes"
    assert host_memory(root) == HostMemory(3 * GIB, 2 * GIB, said)


def test_a_limit_of_version_1_is_named_by_the_file_that_sets_it(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/memory/job"
    files = {
        f"{top}/memory.limit_in_bytes": 5 * GIB,
        f"{top}/step/memory.limit_in_bytes": NO_LIMIT_V1,
        f"{top}/step/memory.stat": f"hierarchical_memory_limit {5 * GIB}",
    }
    mounts = V1.format(root="/", point="/sys/fs/cgroup/memory")
    root = system(tmp_path, "4:memory:/job/step\n", mounts, files)
    assert host_memory(root) == HostMemory(5 * GIB, 5 * GIB, f"/{top}/memory.limit_in_bytes")


def test_a_limit_above_what_a_container_sees_is_known_from_the_kernels_own_sum(
    tmp_path: Path,
) -> None:
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
        "sys/fs/cgroup/memory/memory.stat": f"cache 0\nhierarchical_memory_limit {5 * GIB}",
    }
    mounts = V1.format(root="/docker/abc", point="/sys/fs/cgroup/memory")
    assert host_memory(system(tmp_path, "4:memory:/docker/abc\n", mounts, files)).total == 5 * GIB


@pytest.mark.parametrize(
    "own, mounted",
    [
        ("/docker/abc", "/docker/abc"),
        ("/", "/"),
        ("/docker/abc", "/"),
        ("/../other", "/"),
        ("/docker/abc", "/../.."),
    ],
)
def test_a_container_reads_the_limit_at_the_top_of_what_it_sees(
    own: str, mounted: str, tmp_path: Path
) -> None:
    mounts = V2.format(root=mounted, point="/sys/fs/cgroup")
    root = system(tmp_path, f"0::{own}\n", mounts, {"sys/fs/cgroup/memory.max": 2 * GIB})
    assert host_memory(root) == HostMemory(2 * GIB, 2 * GIB, "/sys/fs/cgroup/memory.max")


def test_a_system_with_both_versions_reads_both(tmp_path: Path) -> None:
    own = "4:memory:/a\n0::/b\n"
    mounts = V1.format(root="/", point="/sys/fs/cgroup/memory") + V2.format(
        root="/", point="/sys/fs/cgroup/unified"
    )
    first, second = (
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes",
        "sys/fs/cgroup/unified/b/memory.max",
    )
    root = system(tmp_path, own, mounts, {first: 3 * GIB, second: 9 * GIB})
    assert host_memory(root).total == 3 * GIB
    (root / second).write_text(str(GIB))
    assert host_memory(root).total == GIB


def test_a_mount_with_a_blank_in_its_name_is_found(tmp_path: Path) -> None:
    mounts = V2.format(root="/", point="/mnt/my\\040groups")
    assert (
        host_memory(system(tmp_path, "0::/\n", mounts, {"mnt/my groups/memory.max": GIB})).total
        == GIB
    )


def test_memory_beyond_a_limit_is_refused_before_any_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = HostMemory(2**20, 2**19, "/sys/fs/cgroup/job/memory.max")
    monkeypatch.setattr(device_module, "host_memory", lambda: left)
    Pages(2**19)
    with pytest.raises(
        RemoteMemoryError, match="at most the 524288 that are left of 1048576 .*job/memory.max"
    ):
        Pages(2**19 + 1)
