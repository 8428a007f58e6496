"""What the processes of a run compare before they start. Whole runs of it are in
`test_processes.py`.
"""

from pathlib import Path

import pytest

from popxl_gpt.execution import instances
from popxl_gpt.execution.instances import code_hashes
from popxl_gpt.utils.errors import UserError


@pytest.mark.parametrize(
    "name",
    [
        "execution/phases.py",
        "popxl_engine/native/elementwise.cpp",
        "version of torch",
        "version of numpy",
    ],
)
def test_other_code_in_a_process_is_named(name, monkeypatch):
    ours = code_hashes()
    theirs = {**ours, name: "another"}
    assert name in ours
    told = [("text", ours), ("text", theirs)]
    monkeypatch.setattr(instances, "gather", lambda own, patiently: told)
    with pytest.raises(
        UserError,
        match=rf"got another {name} in instance 1 than in instance 0 \(1 files or versions",
    ):
        instances._check_same("text", ours)


def test_processes_that_found_different_checkpoints_are_refused(monkeypatch):
    told = ["step_00000010", "step_00000020"]
    monkeypatch.setattr(instances, "gather", lambda own, patiently: told)
    with pytest.raises(UserError, match="got step_00000020 in instance 1 and step_00000010 in"):
        instances.check_same_checkpoint(Path("run/checkpoints/step_00000020"))
