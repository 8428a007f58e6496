"""What takes a name is on the disk first; what it replaces goes after that is, too."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import popxl_gpt.data.shuffle
from popxl_gpt.data.shuffle import DocumentShuffle
from popxl_gpt.utils.files.folders import partial_folder, publish
from popxl_gpt.utils.files.whole import written_whole


class Disk:
    """Notes what is brought onto it; `lacks` tells what it would not have after a power failure."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._has: dict[int, Any] = {}
        self._rename = os.rename
        patch.setattr(os, "fsync", lambda number: self._keep(Path(f"/proc/self/fd/{number}")))
        patch.setattr(os, "rename", self._renamed)
        patch.setattr(os, "replace", self._renamed)

    def lacks(self, path: Path) -> list[str]:
        paths = [path, *path.rglob("*")]
        return [str(p) for p in paths if self._has.get(p.stat().st_ino) != _state(p)]

    def has_name(self, path: Path) -> bool:
        names = self._has.get(path.parent.stat().st_ino, [])
        return (path.name, path.stat().st_ino) in names

    def _keep(self, path: Path) -> None:
        self._has[path.stat().st_ino] = _state(path)

    def _renamed(self, source: Path, target: Path) -> None:
        assert not self.lacks(Path(source))
        self._rename(source, target)


def _state(path: Path) -> Any:
    if not path.is_dir():
        return path.read_bytes()
    return sorted((entry.name, entry.inode()) for entry in os.scandir(path))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_a_folder_is_on_the_disk_before_it_has_its_name_and_the_old_one_goes_after(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, remove = tmp_path / "out", shutil.rmtree
    removed: list[str] = []

    def checked(path: Path, **options: bool) -> None:
        if Path(path).exists():
            assert disk.has_name(target)
            removed.append(Path(path).name)
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", checked)
    for text in ("old", "new"):
        with partial_folder(target) as folder:
            (folder / "inner").mkdir()
            for name in ("config.yml", "inner/tokenizer.json"):
                (folder / name).write_text(text)
            publish(folder, target, overwrite=True)
        assert disk.has_name(target) and not disk.lacks(target)
    assert (target / "inner/tokenizer.json").read_text() == "new" and len(removed) == 1


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "config.yml"
    for text in ("old", "new"):
        with written_whole(path) as partial:
            partial.write_text(text)
        assert disk.has_name(path) and not disk.lacks(path)


def test_the_shuffle_goes_on_only_from_what_the_disk_has(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(popxl_gpt.data.shuffle, "BUCKET_BYTES", 1000)
    monkeypatch.setattr(popxl_gpt.data.shuffle, "_BUFFER_BYTES", 1000)
    monkeypatch.setattr(popxl_gpt.data.shuffle, "SHARE", float("inf"))
    rename, times, folder = os.replace, [], tmp_path / "buckets"

    def replace(source: Path, target: Path) -> None:
        times.append([path.name for path in folder.iterdir()])
        for path in folder.glob("*.bucket"):
            assert disk.has_name(path) and not disk.lacks(path)
        rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    shuffle = DocumentShuffle(folder, 0, 3000)
    for _ in range(50):
        shuffle.add(np.ones(20, dtype=np.uint32))
    assert sum(1 for _ in shuffle) == 50
    assert len(times) > 2 and {"0.bucket", "2.bucket"} < set(times[-1])
