"""A checkpoint that its run deletes while another program reads it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from popxl_gpt.execution.checkpoints import checkpoint, saving
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.checkpoint_folder import delete_old, folder_name
from popxl_gpt.execution.checkpoints.finding import find, find_trained
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.saving import write_weights
from popxl_gpt.execution.variables import fresh_weights
from popxl_gpt.utils.errors import UserError
from tests.integration.saved_runs import BASE

GONE = "step_00000000: got a checkpoint that was deleted while it was read; .* for the newest"


def save(folder: Path, step: int, patch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of a live run that keeps one."""
    target = folder / folder_name(step)
    target.mkdir(parents=True)
    with patch.context() as context, fresh_weights(BASE) as weights:
        context.setattr(saving, "Position", lambda *_: Position(step, "", validation_loss=1.0))
        write_weights(target, BASE, weights)
    delete_old(folder, 1)
    return target


@pytest.mark.parametrize("call", ["read_manifest", "_sha256"])
@pytest.mark.parametrize(
    "newest",
    [
        lambda folder: find_trained(folder),
        lambda folder: find(str(folder), folder.parent / "own", BASE),
        lambda folder: find("auto", folder, BASE),
        lambda folder: find("best", folder, BASE),
    ],
)
def test_the_newest_of_a_run_is_taken_again(
    call: str,
    newest: Callable[[Path], SavedRun],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, read = save(tmp_path, 0, monkeypatch), getattr(checkpoint, call)

    def saved_meanwhile(path: Path) -> Any:
        if old.exists():
            save(tmp_path, 1, monkeypatch)
        return read(path)

    monkeypatch.setattr(checkpoint, call, saved_meanwhile)
    found = newest(tmp_path)
    assert found.folder == tmp_path / folder_name(1) and not found.passed_over


def test_one_that_was_named_or_is_read_already_is_told_to_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = save(tmp_path, 0, monkeypatch)
    weights = find_trained(tmp_path).weights()
    next(weights)
    hashed = checkpoint._sha256

    def saved_meanwhile(path: Path) -> str:
        if old.exists():
            save(tmp_path, 1, monkeypatch)
        return hashed(path)

    monkeypatch.setattr(checkpoint, "_sha256", saved_meanwhile)
    with pytest.raises(UserError, match=GONE):
        find_trained(old)
    with pytest.raises(UserError, match=GONE):
        list(weights)
    with pytest.raises(UserError, match="step_00000000: got no checkpoint"):
        find_trained(old)


def test_a_link_that_leads_nowhere_is_told_once(tmp_path: Path) -> None:
    (tmp_path / folder_name(3)).symlink_to("nothing")
    with pytest.raises(UserError, match="step_00000003: got no checkpoint"):
        find_trained(tmp_path)


def test_an_old_checkpoint_that_is_a_link_leaves_what_it_leads_to(tmp_path, monkeypatch):
    save(tmp_path, 1, monkeypatch)
    elsewhere = (tmp_path / folder_name(1)).rename(tmp_path / "elsewhere")
    (tmp_path / folder_name(1)).symlink_to(elsewhere)
    save(tmp_path, 2, monkeypatch)
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", folder_name(2)}
    assert list(elsewhere.iterdir())
