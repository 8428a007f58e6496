"""Links that others have put where a run, or a preparation, writes: nothing goes where they lead."""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import popxl
import pytest
from popxl import ops
from popxl_engine.cache import save_source

from popxl_gpt.config.saving import save
from popxl_gpt.config.schema import Config
from popxl_gpt.data.prepare import main as prepare
from popxl_gpt.data.records import RecordFile, RecordWriter, index_path
from popxl_gpt.data.shuffle import DocumentShuffle
from popxl_gpt.execution.checkpoints.tensor_files import write_tensors
from popxl_gpt.utils.files.folders import partial_folder, resumable_folder
from popxl_gpt.utils.files.plain import append_plain
from popxl_gpt.utils.files.whole import written_whole
from tests.integration.runs import run_job

OTHER = 65534
"""The user number of nobody."""
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user")
FLAGS = """
    --config tiny --name run --layers 1 --hidden_size 8 --heads 1 --dropout 0 --warmup_steps 0
    --global_batch_size 2 --micro_batch_size 2 --sequence_length 8 --data_parallel 1
    --tensor_parallel_1 1 --tensor_parallel_2 1 --steps 2 --validate_every 0 --samples 1
""".split()


def planted(path: Path, outside: Path) -> None:
    """A link that leads to no file yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(outside / f"of {path.name}")


@pytest.mark.slow
def test_a_run_writes_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("What a run writes.\n" * 500)
    words = "--sequence_length 8 --vocabulary_size 300 --workers 1 --output"
    assert prepare(["text", str(tmp_path / "a.txt"), *words.split(), str(tmp_path / "data")]) == 0
    flags = (*FLAGS, "--input_files", tmp_path / "data")
    run_job(*flags, "--run_folder", tmp_path / "first")
    first = tmp_path / "first/run"
    found = [path.relative_to(first) for path in first.rglob("*") if path.is_file()]
    files = {str(path) for path in found if "step_" not in str(path)}
    assert files >= {
        *("config.yml", "metrics.jsonl", "report.html", "run.json"),
        *("samples.jsonl", "checkpoints/tokenizer.json"),
    }
    outside, second = tmp_path / "outside", tmp_path / "second"
    outside.mkdir()
    for name in (*files, "warnings.jsonl"):
        place = second / "run" / name
        planted(place, outside)
        planted(place.with_name(f".{place.name}.{os.getpid()}"), outside)
    (second / "run").chmod(0o777)
    (tmp_path / "link").symlink_to(second)  # one's own, to the folder of runs, is followed
    run_job(*flags, "--run_folder", tmp_path / "link")
    assert not list(outside.iterdir())
    for name in files - {"samples.jsonl"}:  # what is appended to stays a link, and is not written
        assert (second / "run" / name).is_file() and not (second / "run" / name).is_symlink()


OUTSIDER = f"""
import os
os.setgroups([])
os.setgid({OTHER})
os.setuid({OTHER})
while True:
    for name in os.listdir("."):
        if name.startswith("."):
            try:
                os.unlink(name)
                os.symlink("outside/victim", name)
            except OSError:
                pass
"""
"""Puts links in the places of files that are being written, as fast as it can."""


@pytest.mark.slow
@needs_root
def test_another_user_is_never_fast_enough_to_put_a_link_there() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # others cannot enter pytest's
        folder = Path(name)
        (folder / "outside").mkdir()
        (folder / "outside/victim").write_text("old")
        folder.chmod(0o777)
        command = [sys.executable, "-I", "-S", "-c", OUTSIDER]
        with subprocess.Popen(command, cwd=folder) as outsider:
            try:
                end, links = time.monotonic() + 30, 0
                while links < 5 and time.monotonic() < end:
                    with suppress(FileNotFoundError):  # its name is just taken away
                        with written_whole(folder / "a.json", is_lasting=False) as partial:
                            time.sleep(0.001)
                            partial.write_text("new")
                    links += (folder / "a.json").is_symlink()
            finally:
                outsider.kill()
        assert links == 5 and (folder / "outside/victim").read_text() == "old"


def prepared(path: Path) -> None:
    with RecordWriter(path) as writer:
        writer.write(b"payload")


def indexed(path: Path) -> None:
    prepared(path)
    index_path(path).unlink()
    RecordFile(path).save_index()


def whole(path: Path) -> None:
    with written_whole(path) as partial:
        partial.write_text("new")


def in_place(path: Path) -> None:
    with written_whole(path) as partial:  # another user replaces what was made meanwhile
        made = path.with_name(f".{path.name}.{os.getpid()}")
        made.unlink(missing_ok=True)
        made.symlink_to(path.parent / "outside" / "raced")
        partial.write_text("new")


def drawn(path: Path) -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        ops.add(popxl.constant(1.0), popxl.constant(1.0))
    ir.dot_checkpoint(path.stem, path.parent)


WRITERS = {
    "a whole file": (whole, "a.json"),
    "a whole file, whose beginning is a link": (whole, ".a.json.{pid}"),
    "a whole file, whose beginning becomes a link": (in_place, "b.json"),
    "records": (prepared, "a.json"),
    "an index of records": (prepared, "a.tfindex"),
    "an index that was lacking": (indexed, ".a.tfindex.{pid}"),
    "tensors": (lambda path: write_tensors({"a": np.ones(2, np.float32)}, path), "a.json"),
    "a configuration": (lambda path: save(Config(), path), "a.json"),
    "a picture of a graph": (drawn, "a.dot"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_new_file_takes_the_place_of_a_link(name: str, tmp_path: Path) -> None:
    write, link = WRITERS[name]
    (tmp_path / "outside").mkdir()
    victim = tmp_path / "outside" / "victim"
    victim.write_text("old")
    (tmp_path / link.format(pid=os.getpid())).symlink_to(victim)
    write(tmp_path / "a.json")
    assert victim.read_text() == "old" and os.listdir(tmp_path / "outside") == ["victim"]


def test_nothing_is_appended_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("old")
    (tmp_path / "a").symlink_to("victim")
    (tmp_path / "b").symlink_to("made")
    for name in ("a", "b"):
        with pytest.raises(OSError, match="Not a plain file, but a link"):
            append_plain(tmp_path / name)
    assert (tmp_path / "victim").read_text() == "old" and not (tmp_path / "made").exists()


def test_work_that_goes_on_cuts_no_file_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("old")
    (tmp_path / "buckets").mkdir()
    (tmp_path / "buckets/0.bucket").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="Not a plain file, but a link"):
        DocumentShuffle(tmp_path / "buckets", 0, 3000)
    assert (tmp_path / "victim").read_text() == "old"


def left_by(target: Path, owner: int) -> Path:
    """A folder like one that a preparation leaves which was stopped."""
    left = target.with_name(f".{target.name}.partial-work")
    left.mkdir()
    (left / "theirs").touch()
    os.chown(left, owner, -1)
    return left


@pytest.mark.parametrize("owner", [pytest.param(OTHER, marks=needs_root), os.getuid()])
def test_only_ones_own_work_is_gone_on_with(tmp_path: Path, owner: int) -> None:
    left = left_by(tmp_path / "data", owner)
    with resumable_folder(tmp_path / "data", "work") as folder:
        assert ((folder / "theirs").exists(), folder == left) == (2 * (owner == os.getuid(),))


def test_work_is_not_gone_on_with_through_a_link(tmp_path: Path) -> None:
    left = left_by(tmp_path / "data", os.getuid())
    left.rename(tmp_path / "elsewhere")
    left.symlink_to("elsewhere")
    with resumable_folder(tmp_path / "data", "work") as folder:
        assert not (folder / "theirs").exists()
    assert (tmp_path / "elsewhere/theirs").exists()


@pytest.mark.parametrize("owner", [pytest.param(OTHER, marks=needs_root), os.getuid()])
def test_only_ones_own_folder_is_put_back(tmp_path: Path, owner: int) -> None:
    left_by(tmp_path / "data", owner).rename(tmp_path / ".data.partial-1-replaced")
    with partial_folder(tmp_path / "data"):
        assert (tmp_path / "data").exists() == (owner == os.getuid())


def test_a_pipe_that_looks_like_work_that_was_left_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".data.partial-1-2")
    os.mkfifo(tmp_path / ".data.partial-1-replaced")
    with partial_folder(tmp_path / "data") as folder:
        assert folder.is_dir()


def test_generated_sources_are_new_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        first = save_source(tmp_path, "program")
        assert first is not None
        first.unlink()
        first.symlink_to(tmp_path / "victim")
        assert save_source(tmp_path, "program") == first and not first.is_symlink()
    assert not (tmp_path / "victim").exists() and not caplog.messages
    shutil.rmtree(tmp_path)
