"""A folder for state in files is one process's at a time."""

import gc

import pytest

from popxl_gpt.config import UserError, override
from popxl_gpt.execution.inference import evaluation, generation
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.utils.folder_lock import FolderLock
from tests.integration.runs import TRAINED

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


def test_programs_of_one_process_have_a_folder_until_the_last_goes(tmp_path):
    config, others = override(TRAINED, memmap_dir=str(tmp_path)), FolderLock(tmp_path)
    programs = [make(config) for make in (*PROGRAMS.values(), pretraining)]
    assert {path.name for path in tmp_path.iterdir()} == set(PROGRAMS)
    while programs:
        assert not others.take()
        programs.pop(0)
        gc.collect()
    assert others.take()
