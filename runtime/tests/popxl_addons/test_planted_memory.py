"""Variables in files of a folder where another user has put something, or can."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import popxl
import pytest
from popxl.errors import RemoteMemoryError
from popxl_addons.memmap_files import remove_files
from popxl_addons.task_session import initialise_memmap_dir_from_checkpoint
from popxl_addons.variable_factory import VariableFactory

OTHER = 65534
"""The user number of nobody."""
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user")
PLANTED = np.full(4, 7, np.float32).tobytes()
"""What training would begin from, were it taken."""


def mapped(folder: Path, **options: bool) -> np.ndarray:
    with popxl.Ir().main_graph:
        factory = VariableFactory(lambda: np.ones(4), popxl.float32, "w")
        return factory.next_memmap(str(folder), "w", **options)


def give_away(path: Path) -> None:
    os.chown(path, OTHER, OTHER, follow_symlinks=False)


def plant(path: Path, mode: int) -> None:
    path.write_bytes(PLANTED)
    path.chmod(mode)


def given_away(change: Callable[[Path], None]) -> Callable[[Path], None]:
    def planted(path: Path) -> None:
        change(path)
        give_away(path)

    return planted


def link(path: Path) -> None:
    path.symlink_to(path.parents[1] / "victim")


def dangling(path: Path) -> None:
    path.symlink_to(path.parents[1] / "made by a run")


def folder_behind(path: Path) -> None:
    path.parent.rename(path.parents[1] / "private")
    path.parent.symlink_to("private")
    give_away(path.parent)


PLANTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a link": (link, "is not a plain file"),
    "a link that leads nowhere": (dangling, "is not a plain file"),
    "a pipe": (os.mkfifo, "is not a plain file"),
    "a file that all may write to": (lambda path: plant(path, 0o666), "other users may write to"),
    "a file that the group may write to": (
        lambda path: plant(path, 0o660),
        "other users may write to",
    ),
    "a folder that all may write to": (
        lambda path: path.parent.chmod(0o777),
        "other users may write to",
    ),
    "a sticky folder that all may write to": (
        lambda path: path.parent.chmod(0o1777),
        "other users may write to",
    ),
    "a folder that the group may write to": (
        lambda path: path.parent.chmod(0o770),
        "other users may write to",
    ),
}
OTHERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file of another user": (given_away(lambda path: plant(path, 0o600)), "belongs to another"),
    "a file of another user that all may write to": (
        given_away(lambda path: plant(path, 0o666)),
        "belongs to another",
    ),
    "another user's folder": (lambda path: give_away(path.parent), "belongs to another user"),
    "another user's link to a folder of ours": (folder_behind, "is a link of another user"),
}
CASES = [
    *(pytest.param(*case, id=name) for name, case in PLANTS.items()),
    *(pytest.param(*case, id=name, marks=needs_root) for name, case in OTHERS.items()),
]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "victim").write_bytes(PLANTED)
    (tmp_path / "rows").mkdir(mode=0o700)
    return tmp_path / "rows"


def unharmed(rows: Path) -> bool:
    victim = rows.parent / "victim"
    return victim.read_bytes() == PLANTED and not (rows.parent / "made by a run").exists()


@pytest.mark.parametrize("options", [{}, {"read_only_if_exists": True}], ids=["write", "read"])
@pytest.mark.parametrize(("put", "says"), CASES)
def test_what_another_user_can_have_put_there_is_no_variable(
    rows: Path, put: Callable[[Path], None], says: str, options: dict[str, bool]
) -> None:
    put(rows / "w.npy")
    with pytest.raises(RemoteMemoryError, match=says):
        mapped(rows, **options)
    assert unharmed(rows)


@pytest.mark.parametrize("put", [link, dangling])
@pytest.mark.parametrize("owner", [pytest.param(OTHER, marks=needs_root), os.getuid()])
def test_no_file_is_made_through_a_link(
    rows: Path, put: Callable[[Path], None], owner: int
) -> None:
    put(rows / "w.npy.part")
    os.chown(rows / "w.npy.part", owner, -1, follow_symlinks=False)
    assert mapped(rows).tolist() == [1] * 4
    assert unharmed(rows) and [path.name for path in rows.iterdir()] == ["w.npy"]


@pytest.mark.parametrize("put", [link, dangling])
def test_copies_of_a_checkpoint_go_through_no_link(rows: Path, put: Callable[[Path], None]) -> None:
    (rows.parent / "checkpoint/model").mkdir(parents=True)
    content = np.ones(4, np.float32).tobytes()
    (rows.parent / "checkpoint/model/w.npy").write_bytes(content)
    put(rows / "w.npy")
    initialise_memmap_dir_from_checkpoint(str(rows.parent / "checkpoint"), str(rows))
    assert unharmed(rows) and (rows / "w.npy").read_bytes() == content
    assert not (rows / "w.npy").is_symlink() and mapped(rows).tolist() == [1] * 4


@needs_root
def test_nothing_is_removed_through_another_users_link(rows: Path) -> None:
    mapped(rows)
    folder_behind(rows / "w.npy")
    with pytest.raises(PermissionError, match="is a link of another user"):
        remove_files(rows, ["w.npy"])
    assert (rows.parent / "private/w.npy").exists()


def test_ones_own_link_to_a_folder_is_followed(rows: Path) -> None:
    (rows.parent / "link").symlink_to("rows")
    assert mapped(rows.parent / "link").tolist() == [1] * 4 and (rows / "w.npy").exists()


@needs_root
def test_a_folder_of_ones_own_in_another_users_serves(rows: Path) -> None:
    give_away(rows)
    rows.chmod(0o777)
    assert mapped(rows / "training").tolist() == [1] * 4
    assert (rows / "training").stat().st_mode & 0o777 == 0o700
