"""Runs that cannot fit are refused; those of which a machine holds only a part are judged by that
part.
"""

from pathlib import Path

import pytest

from popxl_gpt.config.presets import preset
from popxl_gpt.execution.planning import memory
from popxl_gpt.utils.errors import UserError

MIB = 2**20


@pytest.mark.parametrize(
    "instances, here, fits", [(1, 1, False), (2, 1, True), (2, 2, False), (4, 2, True)]
)
def test_the_processes_of_one_machine_share_its_memory(
    instances: int, here: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = preset("test")
    left = memory.state_bytes(config) * 3 // 4
    monkeypatch.setattr(memory, "host_bytes", lambda: (10 * left, left, "this machine"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    if fits:
        memory.check_memory(config, instances)
    else:
        with pytest.raises(UserError, match="start more processes on other machines"):
            memory.check_memory(config, instances)


@pytest.mark.parametrize("text", ["x", "", "0", "-1", "1.5"])
def test_what_is_no_number_of_processes_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    with pytest.raises(
        UserError, match=f"LOCAL_WORLD_SIZE: got '{text}'; expected a whole number of at least 1"
    ):
        memory.check_memory(preset("test"), 1)


@pytest.mark.parametrize("here, fits", [(1, True), (2, False)])
def test_the_files_memory_of_all_processes_of_a_machine_is_judged_together(
    here: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = preset("test", memmap_dir=str(tmp_path), host_memory=600 * MIB)
    found = (1000 * MIB, 900 * MIB, "/sys/fs/cgroup/job/memory.max")
    monkeypatch.setattr(memory, "host_bytes", lambda: found)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    if fits:
        memory.check_memory(config, here)
    else:
        with pytest.raises(
            UserError, match="of /sys/fs/cgroup/job/memory.max, over 2 processes here"
        ):
            memory.check_memory(config, here)


@pytest.mark.parametrize("has_files", [False, True])
def test_what_trains_a_state_needs_memory_beside_it(
    has_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = preset("tiny", memmap_dir=str(tmp_path) if has_files else None)
    least = memory.PROCESS + (0 if has_files else memory.state_bytes(config))
    monkeypatch.setattr(memory, "host_bytes", lambda: (2**34, least, "this machine"))
    memory.check_memory(config, 1)
    monkeypatch.setattr(
        memory, "host_bytes", lambda: (2**34, least - 1, "/sys/fs/cgroup/a/memory.max")
    )
    with pytest.raises(
        UserError, match="of /sys/fs/cgroup/a/memory.max; .* 200 MiB for what trains it"
    ):
        memory.check_memory(config, 1)
