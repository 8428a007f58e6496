"""What users may get wrong: a table of (command, fault, exit code, words), run as real processes.

No traceback, nothing changed, and told before any training.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from data import example
from data.records import RecordWriter

pytestmark = pytest.mark.multi
ROOT = Path(__file__).parents[3]
SECONDS = 2.0
"""Limit where no training was asked for, processor time, on a machine that may be busy with other things."""


def write_records(path: Path, tokens: int = 9, highest: int = 60, count: int = 16) -> None:
    records = np.random.default_rng(0).integers(0, highest, (count, tokens))
    with RecordWriter(path) as writer:
        for payload in example.encode(records):
            writer.write(payload)


def run(folder: Path, *flags: object) -> "tuple[subprocess.CompletedProcess, float]":
    settings = {
        "config": "tiny", "name": "run", "run_folder": folder / "runs", "input_files": folder / "train.tfrecord",
        "vocabulary_size": 61, "steps": 4, "global_batch_size": 4,
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    before = os.times()
    done = subprocess.run(
        [sys.executable, str(ROOT / "demo/pretraining.py"), *words, *map(str, flags)],
        capture_output=True, text=True, env=environment, timeout=120,
    )  # fmt: skip
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return done, used


def everything_in(folder: Path) -> "dict[str, bytes]":
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with data and a finished run."""
    folder = tmp_path_factory.mktemp("trained")
    write_records(folder / "train.tfrecord")
    done, _ = run(folder)
    assert done.returncode == 0, done.stderr
    return folder


@dataclass(frozen=True)
class Fault:
    """Something wrong, and what must be said of it."""

    name: str
    says: "tuple[str, ...]"
    flags: "tuple[str, ...]" = ()
    inject: Callable[[Path], None] = field(default=lambda folder: None)


CHECKPOINT = "runs/run/checkpoints/step_00000004"


def damage(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def inject(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return inject


def flip_a_bit(content: bytes) -> bytes:
    middle = len(content) - 9
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


AUTO = ("--checkpoint.load", "auto", "--steps", "8")
FAULTS = [
    Fault("unknown flag", ("--layer: unknown flag", "--layers"), ("--layer", "3")),
    Fault("wrong type", ("--layers", "many", "whole number"), ("--layers", "many")),
    Fault("heads do not divide", ("hidden_size: got 64", "heads = 5"), ("--heads", "5")),
    Fault("unknown preset", ("unknown preset 'tyni'", "tiny"), ("--config", "tyni")),
    Fault("no such data", ("nothing*", "matches no file"), ("--input_files", "nothing*")),
    Fault("empty data", ("train.tfrecord", "empty file"), (), damage("train.tfrecord", lambda content: b"")),
    Fault("cut-off data", ("train.tfrecord", "record 15"), (), damage("train.tfrecord", lambda content: content[:-5])),
    Fault("flipped bit in data", ("train.tfrecord", "checksum"), (), damage("train.tfrecord", flip_a_bit)),
    Fault(
        "short records", ("expected at least 9", "sequence_length"), (),
        lambda folder: write_records(folder / "train.tfrecord", tokens=5),
    ),
    Fault(
        "ids beyond the vocabulary", ("token id", "0 to 60", "vocabulary_size"), (),
        lambda folder: write_records(folder / "train.tfrecord", highest=90),
    ),
    Fault("no such tokenizer", ("--tokenizer", "missing.json"), ("--tokenizer", "missing.json")),
    Fault("tokenizer that is none", ("--tokenizer", "train.tfrecord"), ("--tokenizer", "train.tfrecord")),
    Fault("no such checkpoint", ("nowhere", "no checkpoint", "--checkpoint.load"), ("--checkpoint.load", "nowhere")),
    Fault("checkpoint of another model", ("hidden_size 64, not 32", "settings"), (*AUTO, "--hidden_size", "32")),
    Fault("checkpoint of another batch", ("global_batch_size 4, not 8",), (*AUTO, "--global_batch_size", "8")),
    Fault(
        "checkpoint beyond the last step", ("steps: got 2", "at least 4"), ("--checkpoint.load", "auto", "--steps", "2")
    ),
    Fault(
        "damaged description", ("checkpoint.json", "damaged"), AUTO,
        damage(f"{CHECKPOINT}/checkpoint.json", lambda content: content[:50]),
    ),
    Fault(
        "cut-off weights", ("decoder.1.safetensors", "bytes", "older one"), AUTO,
        damage(f"{CHECKPOINT}/decoder.1.safetensors", lambda content: content[:-8]),
    ),
    Fault(
        "flipped bit in weights", ("head.safetensors", "SHA-256", "damaged"), AUTO,
        damage(f"{CHECKPOINT}/head.safetensors", flip_a_bit),
    ),
    Fault(
        "missing weights", ("embedding.safetensors", "No such file"), AUTO,
        lambda folder: (folder / CHECKPOINT / "embedding.safetensors").unlink(),
    ),
    Fault(
        "run folder that is a file", ("runs", "--run_folder"), ("--run_folder", "train.tfrecord/runs"),
    ),
    Fault(
        "folder of another run's checkpoints", ("--checkpoint.save", "another run"),
        ("--checkpoint.save", "runs/run/checkpoints", "--name", "other"),
    ),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_users_mistake_is_told_in_one_message_and_changes_nothing(fault, trained, tmp_path, monkeypatch):
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    fault.inject(folder)
    monkeypatch.chdir(folder)
    before = everything_in(folder)
    done, seconds = run(folder, *fault.flags)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("error:") == 1, done.stderr
    for words in fault.says:
        assert words in done.stderr, done.stderr
    after = everything_in(folder)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert not {name for name in changed if not name.endswith(".tfindex")}, changed
    assert seconds < SECONDS, f"{seconds:.1f} s of processor time"


def test_a_full_disk_during_a_save_keeps_what_was_saved(trained, tmp_path, monkeypatch):
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    before = everything_in(folder / CHECKPOINT)
    limited = f"ulimit -f 40; exec {sys.executable} {ROOT}/demo/pretraining.py "
    flags = f"--config tiny --name run --run_folder {folder}/runs --input_files {folder}/train.tfrecord "
    flags += "--vocabulary_size 61 --global_batch_size 4 --steps 8 --checkpoint.load auto"
    begin = time.monotonic()
    done = subprocess.run(["bash", "-c", limited + flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "step_00000008" in done.stderr and "--checkpoint.save" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert everything_in(folder / CHECKPOINT) == before
    left = [path.name for path in (folder / "runs/run/checkpoints").iterdir()]
    assert left == ["step_00000004"], left
    assert time.monotonic() - begin < 120
