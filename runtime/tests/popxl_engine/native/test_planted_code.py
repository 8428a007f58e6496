"""Compiled kernels and generated sources that another user has put, or could put, where ours are
kept.
"""

import logging
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import popxl
import pytest
from poprun import private
from popxl import ops
from popxl_engine.kernels import compiled
from popxl_engine.native import build
from popxl_engine.native import library as native

OTHER = 65534
"""The user number of nobody."""
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user")
needs_compiler = pytest.mark.skipif(
    native.library() is None, reason="no C++ compiler: the plain kernels run"
)
COMPILER = [
    "sh",
    "-c",
    'for word; do [ "$before" = -o ] && echo code > "$word"; before=$word; done',
    "compiler",
]
"""Writes some text."""
COPYING = 'for word; do [ "$before" = -o ] && cp "$COPIED" "$word"; before=$word; done'
"""A compiler that quickly makes the library that COPIED names."""


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A whole library, in a folder in a folder, all of this user alone."""
    path = tmp_path / "above" / "cache" / "kernels.so"
    path.parent.mkdir(mode=0o700, parents=True)
    build.make(path, build.KERNEL_SOURCES, COMPILER)
    path.parent.parent.chmod(0o700)
    assert is_taken(path)
    return path


def is_taken(path: Path) -> bool:
    """Whether a library would be loaded from there; raises where it is another user's."""
    return build.is_there(private.make_folder(path.parent) / path.name)


def give_away(path: Path) -> None:
    os.chown(path, OTHER, OTHER)


def replaced_by(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.rename(path.with_name("elsewhere"))
        make(path)

    return replace


def link_to_it(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))


DOORS: dict[str, Callable[[Path], None]] = {
    "a folder that the group may write to": lambda path: path.parent.chmod(0o775),
    "a folder that all may write to": lambda path: path.parent.chmod(0o707),
    "a sticky folder that all may write to": lambda path: path.parent.chmod(0o1777),
    "a folder in one that the group may write to": lambda path: path.parent.parent.chmod(0o770),
    "a folder in one that all may write to": lambda path: path.parent.parent.chmod(0o777),
    "a file that the group may write to": lambda path: path.chmod(0o660),
    "a file that all may write to": lambda path: path.chmod(0o602),
    "a link": replaced_by(link_to_it),
    "a pipe": replaced_by(os.mkfifo),
    "a folder in the file's place": replaced_by(Path.mkdir),
}
OTHERS: dict[str, Callable[[Path], None]] = {
    "a folder of another user": lambda path: give_away(path.parent),
    "a folder in another user's": lambda path: give_away(path.parent.parent),
    "a file of another user in a folder of ours": give_away,
}


def check_refused(path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(private.NotPrivate, match=str(path.parent.parent)):
        is_taken(path)
    assert time.monotonic() - begin < 1


@pytest.mark.quick_every(4)
@pytest.mark.parametrize("door", DOORS)
def test_a_library_is_not_taken_from(door: str, kept: Path) -> None:
    DOORS[door](kept)
    check_refused(kept)


@needs_root
@pytest.mark.parametrize("door", OTHERS)
def test_a_library_is_not_taken_from_what_others_own(door: str, kept: Path) -> None:
    OTHERS[door](kept)
    check_refused(kept)


@needs_root
def test_a_sticky_folder_above_is_trusted_where_it_is_roots(kept: Path) -> None:
    kept.parent.parent.chmod(0o1777)
    assert is_taken(kept)
    give_away(kept.parent.parent)
    check_refused(kept)


def test_a_folder_is_looked_at_where_links_lead(kept: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(kept.parent)
    assert is_taken(tmp_path / "link" / kept.name)
    kept.parent.chmod(0o770)
    with pytest.raises(
        private.NotPrivate,
        match=f"other users may write to {kept.parent}; chmod go-w {kept.parent}",
    ):
        is_taken(tmp_path / "link" / kept.name)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has not chosen its folder yet, with a quick compiler."""
    monkeypatch.setattr(build, "find_compiler", lambda: COMPILER)
    build.private_folder.cache_clear()
    yield
    build.private_folder.cache_clear()


def test_whatever_the_umask_is_what_is_made_can_be_taken(
    fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPXL_CACHE_DIR", str(tmp_path / "new" / "cache"))
    before = os.umask(0)
    try:
        path = build.library()
    finally:
        os.umask(before)
    assert path.parent == tmp_path / "new" / "cache" and build.library() == path
    assert [p.stat().st_mode & 0o777 for p in (path, path.parent, path.parent.parent)] == [
        0o600,
        0o700,
        0o700,
    ]


def test_where_no_folder_is_private_one_warning_says_so_and_the_process_has_its_own(
    kept: Path,
    fresh: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept.parent.chmod(0o775)
    folders = [kept.parent, tmp_path / "above"]
    (tmp_path / "above").chmod(0o775)
    monkeypatch.setattr(build, "_folders", lambda: folders)
    with caplog.at_level(logging.WARNING, "popxl"):
        folder = build.library().parent
    assert folder.stat().st_mode & 0o777 == 0o700 and folder not in folders
    (told,) = caplog.messages
    assert told.startswith(f"native kernels: not kept in {kept.parent} (other users may write to ")


def test_a_folder_that_cannot_be_written_is_passed_over(
    fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / "full", tmp_path / "next"]
    monkeypatch.setattr(build, "_folders", lambda: folders)
    monkeypatch.setattr(build.os, "access", lambda path, _: path != folders[0])
    assert build.private_folder() == folders[1]


PLANTED = """
#include <cstdio>
__attribute__((constructor)) static void run() { std::fclose(std::fopen(MARK, "w")); }
"""
PROGRAM = """
import logging
logging.basicConfig()
from popxl_engine.native import library as native
print(native.library() is not None)
"""


def plant(path: Path, mark: Path) -> None:
    """Compile a library that leaves a mark where it is loaded, with the hash that ours have."""
    source = path.with_suffix(".cpp")
    source.write_text(f'#define MARK "{mark}"\n{PLANTED}')
    compiler = build.find_compiler()
    assert compiler is not None
    subprocess.run([*compiler, "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    path.write_bytes(build.sealed(path.read_bytes()))
    path.chmod(0o600)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("is_private", [True, False])
def test_a_constructor_that_another_user_can_have_planted_does_not_run(
    is_private: bool, tmp_path: Path
) -> None:
    library: Any = native.library()
    script, cache, mark = (tmp_path / name for name in ("compiler", "cache", "mark"))
    script.write_text(COPYING)
    cache.mkdir(mode=0o700)
    plant(cache / build._path(build.KERNEL_SOURCES, ["sh", str(script)]).name, mark)
    if not is_private:
        cache.chmod(0o775)
    folders = {"POPXL_CACHE_DIR": str(cache), "HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": ""}
    folders |= {"CXX": f"sh {script}", "COPIED": os.path.realpath(library._name)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **folders},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "True\n", done.stderr
    # what is planted does run where nobody but the user can have done it
    assert mark.exists() == is_private
    assert done.stderr.count("WARNING") == (0 if is_private else 1)


def test_a_stack_trace_shows_what_ran_and_reads_nothing_from_the_cache(tmp_path: Path) -> None:
    ir = popxl.Ir()
    options = ir._pb_ir.getSessionOptions()
    options.enableEngineCaching, options.cachePath = True, str(tmp_path)
    with ir.main_graph:
        zeros = popxl.variable(np.zeros(2, np.float32))
        index = ops.host_load(popxl.h2d_stream((1,), popxl.uint32, "index"))
        ops.host_store(
            popxl.d2h_stream((1,), popxl.float32, "y"),
            ops.dynamic_slice(zeros, index, [0], [1], False),
        )
    lines: list[str] = []
    with popxl.Session(ir, "cpu") as session:
        (source,) = tmp_path.glob("program_*.py")
        source.unlink()
        os.mkfifo(source)
        try:
            session.run({next(iter(session.expected_inputs())): np.array([7], np.uint32)})
        except Exception:
            lines = traceback.format_exc().splitlines()
    at = next(i for i, line in enumerate(lines) if f'File "{source}"' in line)
    assert "dynamic_slice" in lines[at + 1]


@pytest.mark.parametrize("mode, is_taken", [(0o700, True), (0o770, False)])
def test_what_torch_compiles_is_kept_in_a_private_folder(
    mode: int, is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compiled.TORCH_CACHE, "set back at the end")
    monkeypatch.delenv(compiled.TORCH_CACHE)
    monkeypatch.setattr(build, "_folders", lambda: [tmp_path])
    tmp_path.chmod(mode)
    for function in (build.private_folder, compiled._keep_code_private):
        function.cache_clear()
    compiled._keep_code_private()
    build.private_folder.cache_clear()
    kept = Path(os.environ[compiled.TORCH_CACHE])
    assert (kept == tmp_path / "torch") == is_taken
    assert kept.parent.stat().st_mode & 0o777 == 0o700
