"""A disk, or a network, that does not answer: nothing is taken for absent, empty or unlocked."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from popxl_gpt.config.command_line import parse_command_line
from popxl_gpt.data import preparation
from popxl_gpt.data.dataset_info import implied_settings
from popxl_gpt.data.sources import stdlib_source
from popxl_gpt.data.token_files import find_files
from popxl_gpt.utils.errors import DataError, EndedError, UserError, failure_number
from popxl_gpt.utils.files.folder_lock import FolderLock
from popxl_gpt.utils.files.folders import (
    partial_folder,
    publish,
    resumable_folder,
)


def fail(patch: pytest.MonkeyPatch, name: str, path: Path, number: int = errno.EIO) -> None:
    """Let a function of `os` fail for a path."""
    works = getattr(os, name)

    def failing(given=".", *arguments, **keywords):
        if not isinstance(given, int) and Path(given) == path:
            raise OSError(number, os.strerror(number), str(given))
        return works(given, *arguments, **keywords)

    patch.setattr(os, name, failing)


def test_a_folder_that_is_not_listed_has_no_fewer_token_files(tmp_path, monkeypatch):
    (tmp_path / "train-0.tfrecord").touch()
    assert find_files(tmp_path) == [tmp_path / "train-0.tfrecord"]
    fail(monkeypatch, "listdir", tmp_path)
    fail(monkeypatch, "scandir", tmp_path)
    with pytest.raises(OSError, match="Input/output error"):
        find_files(tmp_path)


def test_a_folder_of_sources_that_is_not_listed_has_no_fewer(tmp_path, monkeypatch):
    (tmp_path / "below").mkdir()
    (tmp_path / "above.py").write_text("1")
    (tmp_path / "below/below.py").write_text("2")
    assert len(list(stdlib_source(tmp_path).documents())) == 2
    fail(monkeypatch, "scandir", tmp_path / "below")
    with pytest.raises(UserError, match="below: got 'Input/output error' while reading") as told:
        stdlib_source(tmp_path)
    assert failure_number(told.value) == errno.EIO


def test_a_configuration_or_a_folder_that_is_not_told_of_is_not_absent(tmp_path, monkeypatch):
    (tmp_path / "config.yml").touch()
    fail(monkeypatch, "stat", tmp_path / "config.yml")
    with pytest.raises(OSError, match="Input/output error"):
        parse_command_line(["--config", str(tmp_path)], program="p", default="tiny")
    fail(monkeypatch, "stat", tmp_path)
    with pytest.raises(OSError, match="Input/output error"):
        implied_settings({"input_files": (str(tmp_path),)}, {})


@pytest.mark.parametrize("number, is_taken", [(errno.ENOLCK, True), (errno.EIO, False)])
def test_a_file_system_that_fails_is_not_one_without_locks(number, is_taken, tmp_path, monkeypatch):
    def failing(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", failing)
    if is_taken:
        assert FolderLock(tmp_path).take()
        left = tmp_path / ".made.partial-1-2"  # somebody may be at work in it
        left.mkdir()
        for overwrite in (False, True):
            with partial_folder(tmp_path / "made") as folder:
                (folder / str(overwrite)).touch()
                publish(folder, tmp_path / "made", overwrite=overwrite)
        assert {*tmp_path.iterdir()} == {left, tmp_path / "made"}
        assert os.listdir(tmp_path / "made") == ["True"]
    else:
        with pytest.raises(OSError, match="Input/output error.*") as told:
            FolderLock(tmp_path).take()
        assert told.value.filename == str(tmp_path)
        with pytest.raises(OSError, match="Input/output error"), partial_folder(tmp_path / "made"):
            pass


STAYS = {
    "a full disk": (OSError(errno.ENOSPC, "full"), False),
    "a failing disk": (OSError(errno.EIO, "failing"), True),
    "what is given": (DataError("wrong"), False),
    "memory": (MemoryError(), True),
    "a killed process": (EndedError("killed"), True),
}


@pytest.mark.parametrize("case", STAYS)
def test_work_stays_where_something_outside_ends_it(case, tmp_path):
    error, is_kept = STAYS[case]

    def work() -> "list[str]":
        with resumable_folder(tmp_path / "made", "work") as folder:
            found = os.listdir(folder)
            (folder / "part").touch()
            if not found:
                raise error
        return found

    with pytest.raises(type(error)):
        work()
    if is_kept:
        assert work() == ["part"]
    else:
        assert not list(tmp_path.iterdir())


def test_prepared_data_whose_description_is_not_given_are_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "dataset.json").write_text("{")
    assert preparation._existing(tmp_path, {}, overwrite=True) is None  # damaged
    fail(monkeypatch, "open", tmp_path / "dataset.json")
    with pytest.raises(UserError, match="dataset.json: got 'Input/output error' while reading"):
        preparation._existing(tmp_path, {}, overwrite=True)
