"""Folders that a program keeps other programs out of."""

from pathlib import Path

import pytest

from popxl_gpt.utils.files.folder_lock import FolderLock


def test_a_folder_that_cannot_be_looked_at_for_a_while_is_not_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock = FolderLock(tmp_path / "runs/run")
    assert lock.take() and lock.is_there()
    for times in (1, 2):
        (tmp_path / "runs").rename(tmp_path / "away")
        (tmp_path / "runs").symlink_to("runs")  # a loop of links, for which there is ELOOP
        assert lock.is_there() and lock.is_there()
        assert len(caplog.messages) == times
        (tmp_path / "runs").unlink()
        assert not lock.is_there()  # ENOENT
        (tmp_path / "runs").touch()
        assert not lock.is_there()  # ENOTDIR
        (tmp_path / "runs").unlink()
        (tmp_path / "away").rename(tmp_path / "runs")
        assert lock.is_there()
    assert "runs/run: got 'Too many levels of symbolic links'" in caplog.messages[0]
    lock.release()
    assert not lock.is_there()
