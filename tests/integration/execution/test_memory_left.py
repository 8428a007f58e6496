"""A run that takes more memory than is left is refused in words before it takes it: the system would
end it without any.
"""

import re
from pathlib import Path

import pytest

from popxl_gpt.config.presets import override
from popxl_gpt.demo.job import run_memory
from popxl_gpt.execution.inference.inference import evaluation_program
from popxl_gpt.execution.planning import memory
from popxl_gpt.execution.planning.memory import ProcessMemory, check_fits, without_files
from popxl_gpt.execution.pretraining import training_program
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.runtime import planner
from popxl_gpt.utils.units import bytes_text
from tests.integration.runs import TRAINED

MIB = 2**20
SAID = "/sys/fs/cgroup/job/memory.max"


def leave(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(memory, "host_bytes", lambda: (2**40, nbytes, SAID))


def test_with_ample_memory_nothing_is_planned(monkeypatch):
    leave(monkeypatch, 2**33)
    assert not check_fits(TRAINED, None, None)


@pytest.mark.slow
def test_too_little_is_refused_with_the_limit_and_the_number_that_suffices(monkeypatch):
    config = override(TRAINED, hidden_size=192, heads=6)
    leave(monkeypatch, 2 * MIB)
    with pytest.raises(
        UserError, match=f"got 2.00 MiB left, .* of {SAID}; expected at least"
    ) as told:
        check_fits(config, training_program, evaluation_program)
    needed = float(re.search(r"at least ([\d.]+) MiB", str(told.value))[1])
    leave(monkeypatch, int((needed + 0.1) * MIB))
    assert check_fits(config, training_program, evaluation_program)
    assert needed > 2


@pytest.mark.slow
def test_rows_in_files_need_the_memory_that_they_are_given(tmp_path: Path, monkeypatch):
    config = override(TRAINED, hidden_size=192, heads=6, memmap_dir=str(tmp_path))
    leave(monkeypatch, MIB)
    found = []
    for rows in (None, 4 * MIB, 5 * MIB):
        with pytest.raises(UserError) as told:
            check_fits(override(config, host_memory=rows), training_program, None)
        found.append(re.search(r": ([\d.]+ \w+) of rows", str(told.value))[1])
    program = training_program(without_files(config))[0]
    beside = planner().host_needs(program, mapped=True).rows
    assert 0 < beside < planner().host_needs(program).rows
    assert found == [bytes_text(beside), "4.00 MiB", "5.00 MiB"]


def test_what_is_planned_is_not_planned_again(monkeypatch):
    planned = ProcessMemory(itself=0, rows=3 * MIB, tensors=5 * MIB, saving=MIB, copy=MIB)
    leave(monkeypatch, 2**40)
    assert check_fits(TRAINED, None, None, planned) is planned
    leave(monkeypatch, MIB)
    with pytest.raises(UserError, match="for .*: 3.00 MiB of rows and .* of tensors. Choose"):
        check_fits(TRAINED, None, None, planned)

    monkeypatch.setattr(run_memory, "training_program", None)
    told = run_memory.RunMemory(TRAINED, planned)
    told.end(2**30)
    assert re.search(r"resident, [\d.]+ [MG]iB planned \([-+]\d+\.\d%\);", told.text())


def test_what_does_not_fit_one_process_ends_all(monkeypatch):
    leave(monkeypatch, 2**33)
    monkeypatch.setattr(memory, "gather", lambda mine, *_, **__: [mine, "memory: got 1 MiB left"])
    with pytest.raises(UserError, match="got 1 MiB left"):
        check_fits(TRAINED, None, None)


@pytest.mark.slow
def test_all_processes_of_a_machine_are_counted(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    leave(monkeypatch, MIB)
    with pytest.raises(UserError, match="for each of 3 processes"):
        check_fits(TRAINED, training_program, None)
