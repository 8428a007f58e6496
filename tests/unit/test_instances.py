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
    told = [("step_00000010", "a"), ("step_00000020", "b")]
    monkeypatch.setattr(instances, "gather", lambda own, patiently: told)
    with pytest.raises(UserError, match="got step_00000020 in instance 1 and step_00000010 in"):
        instances.check_same_checkpoint(Path("run/checkpoints/step_00000020"))


@pytest.mark.parametrize("name", ["checkpoint.json", "model.safetensors"])
def test_processes_with_other_contents_of_one_checkpoint_are_refused(monkeypatch, tmp_path, name):
    copies = [tmp_path / copy / "step_00000020" for copy in ("0", "1", "2")]
    for folder, weights in zip(copies, ("a", "a", "b")):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / name).write_text(f"{'as long ' * 20_000}{weights}")
    own = [(folder.name, instances._contents_of(folder)) for folder in copies]
    monkeypatch.setattr(instances, "gather", lambda own, patiently: told)
    told = own[:2]
    instances.check_same_checkpoint(copies[0])
    told = own
    with pytest.raises(UserError, match="got another step_00000020 in instance 2 than in instance"):
        instances.check_same_checkpoint(copies[0])


def test_processes_that_read_other_data_are_refused(monkeypatch):
    told = [{"--input_files": "a"}, {"--input_files": "a"}]
    monkeypatch.setattr(instances, "gather", lambda own, patiently: told)
    instances.check_same_data(told[0])
    told[1] = {"--input_files": "b"}
    with pytest.raises(UserError, match="--input_files: got other data in instance 1 than in"):
        instances.check_same_data(told[0])
