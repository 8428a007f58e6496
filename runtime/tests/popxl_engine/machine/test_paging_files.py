"""The files that rows are in: they give back what they took, and say what is wrong with a disk or a
folder.
"""

import errno
import fcntl
import os

import pytest
import torch
from popxl.errors import RemoteMemoryError
from popxl_engine.machine.paging import BLOCK, FileStore
from popxl_engine.machine.paging import store as store_module
from popxl_engine.machine.paging.arena import Arena


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_gives_back_what_it_took(direct, tmp_path):
    store = FileStore(str(tmp_path / "made"), 8 * BLOCK, direct)
    data = Arena(2 * BLOCK)
    data.bytes.random_(0, 256)
    store.write(3 * BLOCK, data.bytes)
    back = Arena(2 * BLOCK)
    store.read(3 * BLOCK, back.bytes)
    assert (back.bytes == data.bytes).all()
    assert not store.is_direct or direct
    assert os.listdir(tmp_path / "made") == [], "nothing that could outlive the process"
    store.close()


def test_a_folder_that_takes_no_file_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        RemoteMemoryError,
        match="below: got 'Not a directory' while making a file; expected a folder",
    ):
        FileStore(str(tmp_path / "file" / "below"), BLOCK)


def test_a_disk_without_the_space_is_an_error_before_anything_runs(tmp_path):
    statistics = os.statvfs(tmp_path)
    too_much = statistics.f_frsize * statistics.f_blocks + 2**40
    with pytest.raises(
        RemoteMemoryError,
        match="while reserving .* bytes for remote memory; expected that much space",
    ):
        FileStore(str(tmp_path), too_much)


class Refusing:
    """Functions of `os` on a file system that knows some ways only: a flag or a call fails with an
    error number.
    """

    def __init__(self, monkeypatch, **errors):
        for name, (error, applies) in errors.items():
            module = fcntl if name == "fcntl" else os
            monkeypatch.setattr(module, name, self.refusing(getattr(module, name), error, applies))

    @staticmethod
    def refusing(function, error, applies):
        def call(*arguments):
            if applies(*arguments):
                raise OSError(error, os.strerror(error))
            return function(*arguments)

        return call


def is_unnamed(path, flags, *mode):
    return flags & os.O_TMPFILE == os.O_TMPFILE


def asks_for_direct(file, command, *value):
    return command == fcntl.F_SETFL and bool(value[0] & os.O_DIRECT)


@pytest.mark.parametrize("direct_error", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_without_unnamed_files_and_direct_transfers_serves_too(
    direct_error, tmp_path, monkeypatch, caplog
):
    Refusing(
        monkeypatch, open=(errno.EOPNOTSUPP, is_unnamed), fcntl=(direct_error, asks_for_direct)
    )
    for _ in range(2):
        store = FileStore(str(tmp_path), 4 * BLOCK)
        data = torch.arange(2 * BLOCK).to(torch.uint8)
        store.write(BLOCK, data)
        back = torch.zeros_like(data)
        store.read(BLOCK, back)
        assert not store.is_direct and torch.equal(back, data) and os.listdir(tmp_path) == []
        store.close()
    assert [record.message.split("): ")[1] for record in caplog.records] == [
        "knows no direct transfers; rows go through the page cache, more slowly."
    ], "told once"


def test_a_file_system_that_is_read_only_is_an_error_in_its_words(tmp_path, monkeypatch):
    Refusing(monkeypatch, open=(errno.EROFS, lambda *_: True))
    with pytest.raises(
        RemoteMemoryError,
        match="got 'Read-only file system' while making a file; expected a folder",
    ):
        FileStore(str(tmp_path), BLOCK)


MOUNTED = r"""22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:25 / /far rw - nfs4 server:/export rw
31 30 0:26 / /far/near\040here rw master:1 - xfs /dev/vdb rw
32 22 0:27 / /far/quick rw - ext4 /dev/vdc rw
33 22 0:28 / /far/quick rw - tmpfs none rw
"""


@pytest.mark.parametrize(
    "folder, kind, words",
    [
        ("/home/rows", "ext4", None),
        ("/farther", "ext4", None),
        ("/far/rows", "nfs4", "lies on another machine (nfs4)"),
        ("/far/near here/rows", "xfs", None),
        ("/far/quick", "tmpfs", "lies in memory (tmpfs)"),
    ],
)
def test_folders_on_other_machines_and_in_memory_are_told_of(
    folder, kind, words, tmp_path, monkeypatch, caplog
):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTED)
    assert store_module.file_system(folder, mounts) == kind
    assert store_module.file_system(folder, tmp_path / "nothing") == "unknown"
    monkeypatch.setattr(store_module, "file_system", lambda folder: kind)
    store_module.tell_of_slow_ways.__wrapped__(folder, True)
    assert [record.message.startswith(f"{folder}: {words}") for record in caplog.records] == [
        True
    ] * bool(words)
