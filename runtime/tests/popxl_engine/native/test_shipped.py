"""Kernels that a wheel has brought: which file a CPU has, and which it has not."""

import logging
import os
import platform
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import stand_ins
from popxl_engine.native import build, instruction_sets
from popxl_engine.native import library as native
from popxl_engine.native.instruction_sets import AMX, BF16, V3, V4

COMPILER = 'echo "$@" > "$to"'
"""Writes what it was asked for."""
CPUS = {
    "amx": AMX,
    "avx512_bf16": BF16,
    "avx512": V4 | {"avx512_vnni", "amx_tile", "amx_bf16"},
    "avx2": V3 | {"avx512f"},
    "": AMX - {"fma"},
}
"""Instructions by the level of the CPU."""
needs_levels = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="no levels of this CPU: wheels hold no kernels",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where the wheel's files are; there are none yet."""
    monkeypatch.delenv(instruction_sets.VARIABLE, raising=False)
    monkeypatch.setenv("CXX", shlex.join(stand_ins.compiler(tmp_path, COMPILER)))
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "compiled")
    return build.SHIPPED


def level_for(cpu: str) -> str:
    """The level whose file a CPU has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            instruction_sets, "instructions", lambda: f"flags\t\t: fpu {' '.join(CPUS[cpu])}"
        )
        path = build.shipped(build.KERNEL_SOURCES)
    return path.name.removeprefix("kernels_").rpartition("_")[0] if path else ""


@needs_levels
def test_a_cpu_has_the_file_of_the_best_level_whose_instructions_it_has(folder: Path) -> None:
    build.ship(folder)
    assert len(list(folder.iterdir())) == len(build.LEVELS) * len(build.KERNELS)
    assert [level_for(cpu) for cpu in CPUS] == list(CPUS)


@needs_levels
def test_a_level_that_the_compiler_refuses_is_left_out_and_no_other_takes_its_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REFUSED", "-mamx-bf16")
    build.ship(folder)
    assert [level_for(cpu) for cpu in CPUS] == ["", *list(CPUS)[1:]]
    assert capsys.readouterr().out.startswith("kernels for amx: not compiled")


def test_no_file_is_compiled_for_the_building_cpu_alone() -> None:
    flags = [flag for level in build.LEVELS for flag in build.flags_for(level.flags)]
    assert build.THIS_CPU in build.OPTIONAL_FLAGS and build.THIS_CPU not in flags
    assert set(build.OPTIONAL_FLAGS) - {build.THIS_CPU} == set(flags)


@pytest.mark.parametrize("lacks", ["a compiler", "Linux", "x86-64"])
def test_there_is_no_folder_where_nothing_can_be_compiled(
    lacks: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks == "a compiler":
        monkeypatch.delenv("CXX")
        monkeypatch.setenv("PATH", str(tmp_path))
    elif lacks == "Linux":
        monkeypatch.setattr(sys, "platform", "darwin")
    else:
        monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    build.ship(folder)
    assert not folder.exists()
    assert level_for("amx") == ""


@needs_levels
def test_a_damaged_file_is_not_taken(folder: Path) -> None:
    build.ship(folder)
    (path,) = folder.glob("kernels_avx2_*")
    path.write_bytes(path.read_bytes()[:-1])
    assert [level_for(cpu) for cpu in ("avx512", "avx2")] == ["avx512", ""]


@needs_levels
@pytest.mark.parametrize("what", ["sources", "flags"])
def test_a_file_of_other_sources_or_flags_is_not_taken(
    what: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.ship(folder)
    assert level_for("avx2") == "avx2"
    if what == "sources":
        (tmp_path / "sources").mkdir()
        for path in build.FOLDER.iterdir():
            if path.is_file():
                (tmp_path / "sources" / path.name).write_bytes(path.read_bytes())
        with open(tmp_path / "sources" / "amx.h", "a") as header:
            header.write("// changed\n")
        changed = replace(build.KERNEL_SOURCES, folder=tmp_path / "sources")
        monkeypatch.setattr(build, "KERNEL_SOURCES", changed)
    else:
        monkeypatch.setattr(build, "FLAGS", ("-O1", *build.FLAGS[1:]))
    assert level_for("avx2") == ""


@needs_levels
def test_what_the_loader_refuses_is_a_warning_with_its_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build.ship(folder)
    monkeypatch.setattr(instruction_sets, "instructions", lambda: " ".join(BF16))
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    with caplog.at_level(logging.WARNING, "popxl"):
        assert build.load() is None
    (refused,) = caplog.messages
    assert "kernels_avx512_bf16_" in refused and "the plain, slower ones are used" in refused


@needs_levels
@pytest.mark.skipif(native.library() is None, reason="no C++ compiler: the plain kernels run")
def test_what_the_loader_refuses_is_compiled_where_a_compiler_is_there(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    build.ship(folder)
    library: Any = native.library()
    monkeypatch.setenv("COPIED", os.path.realpath(library._name))
    monkeypatch.setenv("CXX", shlex.join(stand_ins.compiler(tmp_path, 'cp "$COPIED" "$to"')))
    (tmp_path / "cache").mkdir(0o700)
    monkeypatch.setattr(build, "private_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(instruction_sets, "instructions", lambda: " ".join(V3))
    loaded = build.load()
    assert loaded is not None and Path(loaded._name).parent == tmp_path / "cache"
    assert not caplog.messages


@needs_levels
@pytest.mark.parametrize("is_there", [True, False])
def test_kernels_that_the_wheel_has_brought_are_not_compiled(
    is_there: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_there:
        build.ship(folder)
    begun: list[str] = []
    monkeypatch.setattr(instruction_sets, "instructions", lambda: " ".join(V3))
    monkeypatch.setattr(build, "is_there", lambda path: begun.append(path.name) or True)
    asked: list[str] = []
    monkeypatch.setattr(build, "_version", lambda *compiler: asked.extend(compiler) or b"")
    build._begin.__wrapped__(build.KERNEL_SOURCES)
    assert any(name.startswith("kernels") for name in begun) != is_there
    assert bool(asked) != is_there
    monkeypatch.setenv("POPXL_NATIVE", "0")
    assert build.load() is None
