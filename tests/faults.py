"""Faults that are injected into files, and commands run as real processes."""

import ctypes
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from popxl_gpt.data import example
from popxl_gpt.data.records import RecordWriter
from popxl_gpt.execution.checkpoints.manifest import manifest_text
from tests import warm

ROOT = Path(__file__).parents[1]
RECORDS = "tokens/train-00000.tfrecord"
Fault = Callable[[Path], object]
"""Changes the folder that holds text, tokens and a finished run."""


def nothing(folder: Path) -> None:
    """All is well with the files; the command is at fault."""


def hear_signals() -> None:
    """As in a terminal, before a program starts: what a shell starts in the background or under
    nohup ignores some, as does all it starts.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def damaged(name: str, change: Callable[[bytes], bytes]) -> Fault:
    """A file whose bytes were changed."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def flipped(place: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


def cut_off(content: bytes) -> bytes:
    return content[:-5]


def emptied(content: bytes) -> bytes:
    return b""


def written(name: str, text: str) -> Fault:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


def missing(name: str) -> Fault:
    return lambda folder: (folder / name).unlink()


def without_index(fault: Fault) -> Fault:
    return lambda folder: (missing("tokens/train-00000.tfindex")(folder), fault(folder))


def records(payloads: "list[bytes]") -> Fault:
    """Token files of these records, each with right checksums."""

    def inject(folder: Path) -> None:
        with RecordWriter(folder / RECORDS) as writer:
            for payload in payloads:
                writer.write(payload)

    return inject


def tokens(*ids: int) -> "list[bytes]":
    return example.encode(np.array([ids]))


def of_floats() -> bytes:
    """A record whose feature is a list of floats: field 2 of a Feature, not 3."""
    (payload,) = tokens(*range(12))
    assert payload.count(b"\x1a") == 1
    return payload.replace(b"\x1a", b"\x12")


def below_zero() -> bytes:
    """A record whose last token is -1, in protobuf a varint of ten bytes."""
    minus_one = b"\xff" * 9 + b"\x01"
    (payload,) = tokens(*range(8), *[127] * 10)
    return payload.replace(b"\x7f" * 10, minus_one)


def json_changed(name: str, **values: object) -> Fault:
    """Other values in a JSON file; a checkpoint's description gets the checksum that these have."""

    def inject(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        content.pop("sha256", None)
        (folder / name).write_text(manifest_text({**content, **values}))

    return inject


def json_entry(name: str, place: str, *value: object) -> Fault:
    """Another value at a place (`config.model.layers`) in a JSON file, or none, with a right
    checksum.
    """

    def inject(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        content.pop("sha256", None)
        *outer, last = place.split("/")
        found = content
        for key in outer:
            found = found[key]
        if value:
            found[last] = value[0]
        else:
            del found[last]
        (folder / name).write_text(manifest_text(content))

    return inject


def renamed(name: str, to: str) -> Fault:
    return lambda folder: (folder / name).rename(folder / to)


def replaced(name: str, old: bytes, new: bytes) -> Fault:
    """Some bytes of a file in place of others that stand there once."""

    def change(content: bytes) -> bytes:
        assert content.count(old) == 1
        return content.replace(old, new)

    return damaged(name, change)


def tensors_changed(name: str, **tensors: np.ndarray) -> Fault:
    """Other tensors in a checkpoint's file, with right checksums of everything."""

    def inject(folder: Path) -> None:
        path = folder / name
        save_file({**load_file(path), **tensors}, path)
        manifest = path.with_name("checkpoint.json")
        content = json.loads(manifest.read_text())
        content.pop("sha256")
        entry = content["files"][path.name]
        entry |= {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "tensors": {},
        }
        manifest.write_text(manifest_text(content))

    return inject


def folder_in_place_of(name: str) -> Fault:
    """A folder where a file is expected."""

    def inject(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return inject


def pipe_in_place_of(name: str) -> Fault:
    """A pipe where a file is expected."""

    def inject(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return inject


def read_only(name: str) -> Fault:
    return lambda folder: (folder / name).chmod(0o555)


def run(
    folder: Path, command: str, largest_file: int | None = None, python: str = sys.executable
) -> "tuple[subprocess.CompletedProcess, float]":
    """Run a command of the table in a folder. Returns what it left and the processor time it took,
    in seconds.

    Args:
        python: or a command of `tests.warm`, made with `obey_permissions`; what its server has
            imported counts, as if the program had done that.
    """
    before, of_programs = resource.getrusage(resource.RUSAGE_CHILDREN), 0.0
    if python != sys.executable:
        imports, of_programs = warm.seconds(python)
    words, environment = read(command, python)
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=limited(largest_file),
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if python != sys.executable and (more := warm.seconds(python)[1] - of_programs):
        seconds += imports + more
    return done, seconds


def read(command: str, python: str = sys.executable) -> "tuple[list[str], dict[str, str]]":
    """The words and the environment of a command."""
    files = {
        "{train}": "demo/pretraining.py",
        "{bench}": "execution/pretraining.py",
        "{prepare}": "data/prepare.py",
    }
    programs = {name: ROOT / file for name, file in files.items()}
    environment, words = {**os.environ, "OMP_NUM_THREADS": "1"}, []
    for word in command.split():
        name, is_setting, value = word.partition("=")
        if word in programs:
            words += [python, str(programs[word])]
        elif is_setting and not words:
            environment[name] = value
        else:
            words.append(word)
    return words, environment


def obey_permissions() -> None:
    """Even as root, from the next command on."""
    if os.geteuid() == 0:
        # linux/prctl.h, capability.h
        drop_from_bounding_set, override_permissions, search_permissions = 24, 1, 2
        for capability in (override_permissions, search_permissions):
            if ctypes.CDLL(None).prctl(drop_from_bounding_set, capability, 0, 0, 0):
                raise OSError(
                    "root without CAP_SETPCAP cannot give up its rights; run the tests "
                    "as another user"
                )


def limited(largest_file: int | None) -> Callable[[], None]:
    """What a new process does before its command: obey permissions even if it is root, and have a
    small disk.
    """

    def apply() -> None:
        obey_permissions()
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    return apply


def hashes(folder: Path, below: str = "") -> "dict[str, str]":
    """Every file below a folder with the hash of its content, and every folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in sorted((folder / below).rglob("*"))
    }
