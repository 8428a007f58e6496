"""Runs that cannot fit are refused; those of which a machine holds only a part are judged by that part."""

import pytest

from config import UserError, preset
from execution import memory


@pytest.mark.parametrize("instances, here, fits", [(1, 1, False), (2, 1, True), (2, 2, False), (4, 2, True)])
def test_the_processes_of_one_machine_share_its_memory(
    instances: int, here: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = preset("test")
    monkeypatch.setattr(memory, "machine_bytes", lambda: memory.state_bytes(config) * 3 // 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    if fits:
        memory.check_memory(config, instances)
    else:
        with pytest.raises(UserError, match="start more processes on other machines"):
            memory.check_memory(config, instances)
