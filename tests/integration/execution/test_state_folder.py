"""A folder for state in files is one process's at a time."""

import gc
import os
from pathlib import Path

import pytest

from popxl_gpt.config.presets import override
from popxl_gpt.execution.inference.inference import evaluation, generation
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.files.folder_lock import FolderLock
from tests.integration.runs import TRAINED

OTHER = 65534
"""The user number of nobody."""
PROGRAMS = {
    "training": pretraining,
    "evaluation": evaluation,
    "generation": lambda config: generation(config, 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_refused_the_folder_that_another_process_has(name, tmp_path):
    others = FolderLock(tmp_path / "rows")  # a lock is one's own, in the same process, too
    assert others.take()
    (tmp_path / "rows" / name).mkdir()
    (tmp_path / "rows" / name / "weights.head.ln_f.weight.npy").write_text("theirs")
    before = sorted(tmp_path.rglob("*"))
    config = override(TRAINED, memmap_dir=str(tmp_path / "rows"))
    with pytest.raises(UserError, match="^--memmap_dir: got .*/rows, which another program has"):
        PROGRAMS[name](config)
    assert sorted(tmp_path.rglob("*")) == before
    others.release()
    PROGRAMS[name](config)


def folder_of_theirs(program: Path, victim: Path) -> None:
    program.mkdir()
    os.chown(program, OTHER, OTHER)


def link_to_a_folder(program: Path, victim: Path) -> None:
    program.symlink_to(victim.parent)
    os.chown(program, OTHER, OTHER, follow_symlinks=False)


def open_folder(program: Path, victim: Path) -> None:
    program.mkdir()
    program.chmod(0o777)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user")
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("put", [folder_of_theirs, link_to_a_folder, open_folder])
def test_nothing_is_read_or_removed_where_another_user_can_write(put, name, tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "private").mkdir()
    victim = tmp_path / "private/weights.head.ln_f.weight.npy"
    victim.write_text("ours")
    put(tmp_path / "rows" / name, victim)
    os.chown(tmp_path / "rows", OTHER, OTHER)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="memmap_dir: got '.*another user|other users may write"):
        PROGRAMS[name](override(TRAINED, memmap_dir=str(tmp_path / "rows")))
    assert sorted(tmp_path.rglob("*")) == before and victim.read_text() == "ours"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user")
def test_a_folder_of_ones_own_is_made_in_another_users(tmp_path):
    os.chown(tmp_path, OTHER, OTHER)
    program = pretraining(override(TRAINED, memmap_dir=str(tmp_path)))
    status = (tmp_path / "training").stat()
    assert (status.st_uid, status.st_mode & 0o777) == (0, 0o700)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "training").iterdir()} == {0o600}
    del program


def test_programs_of_one_process_have_a_folder_until_the_last_goes(tmp_path):
    config, others = override(TRAINED, memmap_dir=str(tmp_path)), FolderLock(tmp_path)
    programs = [make(config) for make in (*PROGRAMS.values(), pretraining)]
    assert {path.name for path in tmp_path.iterdir()} == set(PROGRAMS)
    while programs:
        assert not others.take()
        programs.pop(0)
        gc.collect()
    assert others.take()
