"""Runs, plans and helps of this checkout, as a record that two states of it have alike."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Record = dict[str, Any]
ALONE = "--data_parallel 1 --tensor_parallel_1 1 --tensor_parallel_2 1"
TEXT = "--input_files text --sequence_length 64"
RUNS = {
    "tiny": "--config tiny --steps 4 --checkpoint.every 2",
    "mini": "--config mini --steps 3",
    "demo": f"--config demo --steps 3 {TEXT} --validate_every 2 --validation_batches 1",
    "shakespeare": "--config shakespeare --steps 3 --input_files characters --validate_every 3 "
    "--validation_batches 1",
    "dp 2": f"--config tiny {ALONE} --data_parallel 2 {TEXT} --vocabulary_size 512 --steps 3",
    "tp 2 x 2": "--config tiny --data_parallel 1 --dropout 0.1 --steps 3",
    "rows in files": f"--config tiny {ALONE} --memmap_dir rows --host_memory 1MiB --steps 3",
    "killed": f"--config tiny {ALONE} --steps 400 --checkpoint.every 100 --global_batch_size 32 "
    "--rampup_batch_size 8 --rampup_tokens 20000",
}
"""Flags of each run; the last one's batch grows, it is killed, and it goes on."""
SPEEDS = "--device_tflops 62 --link_gbps 40 --remote_gbps 20"
PLANS = {
    "tiny": "--config tiny",
    "mini": "--config mini",
    "gpt2_small": "--config gpt2_small --activation_memory 1GiB",
    "gpt3_2.7B_pod64": "--config gpt3_2.7B_pod64",
    "gpt3_175B_pod256": "--config gpt3_175B_pod256",
}
PROGRAMS = {
    "demo": "pretraining evaluate generate convert report".split(),
    "data": ["prepare"],
    "execution": ["pretraining"],
}
VOLATILE = re.compile(r"(\w+_)?seconds|mfu|memory_bytes")
"""Fields of a metrics line that say how fast the machine was, and how much memory there is."""
PLACE = re.compile(r"(, \S+\.py:\d+)+$", re.M)
"""The source line of an op, in the comments of generated code."""
ITSELF = re.compile(r"\S+ \S+ resident: \S+ \S+ for itself, ")
"""What of a plan is measured: the process that plans."""
KILLED_AFTER = 100
"""Steps of the run that is killed."""


def record(work: Path) -> Record:
    """What this checkout computes and prints. `work`: a folder that keeps the files."""
    work.mkdir(parents=True, exist_ok=True)
    _prepare(work)
    return {
        "help": {
            f"{folder}/{name}": _printed(work, f"{folder}/{name}.py", "--help")
            for folder, names in PROGRAMS.items()
            for name in names
        },
        "plans": {
            name: _printed(work, "demo/pretraining.py", *flags.split(), "--plan", *SPEEDS.split())
            for name, flags in PLANS.items()
        },
        "runs": {name: run(work, name, flags) for name, flags in RUNS.items()},
    }


def differences(before: Any, after: Any, name: str = "") -> Iterator[str]:
    """Names of what two records have otherwise, a line each."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            yield from differences(before.get(key), after.get(key), f"{name}/{key}")
    elif before != after:
        yield f"{name}: {before!r:.200} -> {after!r:.200}"


def _prepare(work: Path) -> None:
    """Token files of some modules of the standard library, by words and by characters."""
    texts = work / "texts"
    texts.mkdir(exist_ok=True)
    for module in ("argparse", "ast", "heapq", "inspect", "json/decoder", "shutil", "textwrap"):
        source = Path(os.__file__).parent / f"{module}.py"
        shutil.copy(source, texts / f"{module.replace('/', '_')}.py")
    for output, flags in (
        ("text", "--vocabulary_size 512"),
        ("characters", "--tokenizer characters"),
    ):
        words = f"text texts --output {output} --sequence_length 64 --overwrite {flags}"
        _printed(work, "data/prepare.py", *words.split())


def _printed(work: Path, program: str, *words: str, python: str = sys.executable) -> str:
    """What a program prints, without the places of its files."""
    ran = subprocess.run(
        [python, ROOT / program, *words], cwd=work, env=_environment(work),
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return ITSELF.sub("", ran.stdout.replace(str(ROOT), "").replace(str(work), ""))


def _environment(work: Path) -> dict[str, str]:
    """One thread, and generated code in a folder of its own, with the kernels that are compiled."""
    cache = work / "cache"
    if not cache.is_dir():
        cache.mkdir(mode=0o700)
        for library in (Path.home() / ".cache" / "popxl").glob("*.so"):
            shutil.copy(library, cache)
    return {**os.environ, "OMP_NUM_THREADS": "1", "POPXL_CACHE_DIR": str(work / "cache")}


def run(work: Path, name: str, flags: str, python: str = sys.executable) -> Record:
    """Train, and say what came of it."""
    folder = work / "runs" / name.replace(" ", "_")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(work / "rows", ignore_errors=True)
    for path in (work / "cache").glob("program_*.py"):
        path.unlink()
    words = [*flags.split(), "--name", folder.name, "--samples", "0"]
    if name == "killed":
        _kill(work, folder, words)
        words += ["--checkpoint.load", "auto"]
    _printed(work, "demo/pretraining.py", *words, python=python)
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return {
        "metrics": {
            str(line["step"]): {key: line[key] for key in line if not VOLATILE.fullmatch(key)}
            for line in lines
        },
        "files": {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted((folder / "checkpoints").rglob("*"))
            if path.is_file()
        },
        "sources": sorted(_sources(work)),
    }


def _kill(work: Path, folder: Path, words: list[str]) -> None:
    """Train until there is a checkpoint, and kill the process."""
    saved = folder / "checkpoints" / f"step_{KILLED_AFTER:08}"
    with subprocess.Popen(
        [sys.executable, ROOT / "demo/pretraining.py", *words], cwd=work, env=_environment(work),
        stdout=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        while not saved.is_dir() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, f"got {process.returncode} before it was killed"


def _sources(work: Path) -> Iterator[str]:
    """Hashes of the generated programs."""
    for path in (work / "cache").glob("program_*.py"):
        text = PLACE.sub("", path.read_text(encoding="utf-8"))
        yield hashlib.sha256(text.encode()).hexdigest()
