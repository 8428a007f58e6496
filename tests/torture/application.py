"""Small runs of the training job, as processes: undisturbed ones to compare with, and ones to
torture.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from popxl_gpt.data import example
from popxl_gpt.data.records import RecordWriter
from tests import warm
from tests.faults import hear_signals
from tests.metrics_text import metrics_of
from tests.torture.judge import (
    Broken,
    Undisturbed,
    check_words,
    checkpoints_of,
    others_in,
    state_of,
)

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "demo/pretraining.py"
STEPS, EVERY, VALIDATE_EVERY = 12, 3, 6
SECONDS = 180
"""A run that takes longer hangs."""
SETTINGS: "dict[str, object]" = {
    "config": "tiny", "name": "run", "vocabulary_size": 61, "hidden_size": 24, "heads": 3, "dropout": 0.1,
    "steps": STEPS, "global_batch_size": 4, "micro_batch_size": 2, "schedule": "cosine", "warmup_steps": 4,
    "validate_every": VALIDATE_EVERY, "validation_batches": 8, "checkpoint.every": EVERY, "data_parallel": 1,
    "tensor_parallel_1": 1, "tensor_parallel_2": 1, "checkpoint.load": "auto",
}  # fmt: skip
MOMENTS = ("start", "training", "save", "validation", "end")


@dataclass(frozen=True)
class Mode:
    """A way to run the training job."""

    name: str
    settings: "Mapping[str, object]" = field(default_factory=dict)
    instances: int = 1
    launcher: "tuple[str, ...]" = ()
    """Flags of poprun."""
    has_rows: bool = False
    """Rows are in files, of a folder of the run's own."""


MODES = {
    mode.name: mode
    for mode in (
        Mode("single"),
        Mode("poprun", {"data_parallel": 2}, instances=2),
        Mode("memmap", has_rows=True),
        Mode("host_memory", {"host_memory": "256KiB"}, has_rows=True),
        Mode("iterations", {"device_iterations": 3}),
        Mode(
            "rounding",
            {
                "precision": "bfloat16",
                "stochastic_rounding": "true",
                "moment_precision": "bfloat16",
            },
        ),
    )
}


class Program:
    """A run of the training job, with all the processes that it starts."""

    def __init__(self, words: "list[str]", folder: Path, environment: "Mapping[str, str]"):
        self._mark = f"TORTURE_RUN={uuid.uuid4()}"
        name, value = self._mark.split("=")
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "output.txt"
        variables = {
            **os.environ,
            **warm.ONE_THREAD,
            name: value,
            **environment,
        }
        with open(self._log, "w") as log:
            self.process = subprocess.Popen(
                words, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True,
                preexec_fn=hear_signals,
            )  # fmt: skip

    @property
    def output(self) -> str:
        """What it printed up to now."""
        return self._log.read_text(errors="replace")

    def members(self) -> "list[int]":
        """Ids of its processes that are alive, the first one's first."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and self._is_member(entry):
                    found.append(int(entry.name))
        return sorted(found, key=lambda number: (number != self.process.pid, number))

    def _is_member(self, process: Path) -> bool:
        """By its environment; that of a warm Python's fork is its server's, and its output ours."""
        has_mark = self._mark.encode() in (process / "environ").read_bytes().split(b"\0")
        return has_mark or os.readlink(process / "fd/1") == str(self._log)

    def is_alive(self) -> bool:
        """Whether its first process is."""
        return self.process.poll() is None

    def kill(self, *members: int) -> None:
        """SIGKILL these processes of it."""
        for member in members:
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the end of all its processes. Returns the first one's exit code; raises Broken
        where one hangs.
        """
        until = time.monotonic() + SECONDS
        try:
            code = self.process.wait(SECONDS)
            while members := self.members():
                if time.monotonic() > until:
                    raise Broken(f"ended with {code}, and {len(members)} of its processes did not")
                time.sleep(0.05)
        except subprocess.TimeoutExpired as error:
            raise Broken(f"hangs: it has not ended after {SECONDS} seconds") from error
        finally:
            self.kill(*self.members())
            self.process.wait()
        return code

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(*self.members())
        self.process.wait()


class Workshop:
    """Where trials are done: a folder, data, and what trials share. It is gone at the end.

    Args:
        is_long: trials whose length is a choice take long.
    """

    def __init__(self, is_long: bool = False) -> None:
        self.is_long = is_long
        self.folder = Path(tempfile.mkdtemp(prefix="torture-")).resolve()
        self.tokens = self.folder / "tokens-0.tfrecord"
        with RecordWriter(self.tokens) as writer:
            for payload in example.encode(np.random.default_rng(0).integers(0, 61, (37, 9))):
                writer.write(payload)
        self._shared: dict[Any, Any] = {}
        self._trials: list[Path] = []

    def __enter__(self) -> "Workshop":
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def shared(self, key: object, make: Callable[[], Any]) -> Any:
        """What `make` returned when it was called for the first time with this key."""
        if key not in self._shared:
            before, self._trials = self._trials, []  # folders that it makes stay
            self._shared[key] = make()
            self._trials = before
        return self._shared[key]

    def fresh(self) -> Path:
        """A new empty folder for a trial."""
        self._trials.append(Path(tempfile.mkdtemp(dir=self.folder, prefix="trial-")))
        return self._trials[-1]

    def sweep(self) -> None:
        """Delete the folders of trials that are over."""
        while self._trials:
            shutil.rmtree(self._trials.pop(), ignore_errors=True)

    def start(
        self,
        mode: Mode,
        folder: Path,
        environment: "Mapping[str, str] | None" = None,
        *,
        is_cold: "bool | None" = None,
        **settings: object,
    ) -> Program:
        """Start the training job, or let it go on, in `folder`/runs/run. A setting that is None is
        left to the program.

        Args:
            is_cold: each process by an interpreter of its own, which has its memory and hears its
                signals; False: forks of one that has imported PyTorch. None: False for one process.
        """
        given = {
            **SETTINGS, "run_folder": folder / "runs", "input_files": self.tokens, "validation_files": self.tokens,
            **({"memmap_dir": folder / "rows"} if mode.has_rows else {}), **mode.settings, **settings,
        }  # fmt: skip
        flags = [
            word
            for name, value in given.items()
            if value is not None
            for word in (f"--{name.replace('__', '.')}", str(value))
        ]
        has_launcher = mode.instances > 1
        is_cold = has_launcher if is_cold is None else is_cold
        words = [sys.executable if is_cold else warm.python(), SCRIPT, *flags]
        if has_launcher:
            launcher = [sys.executable if is_cold else warm.launcher(), "-m", "poprun"]
            launcher += ["--num-replicas", mode.instances, "--num-instances", mode.instances]
            words = [*launcher, *mode.launcher, *words]
        return Program([str(word) for word in words], folder, environment or {})

    def finish(self, mode: Mode, folder: Path, **settings: object) -> None:
        """Let a run go on to its end."""
        with self.start(mode, folder, is_cold=False, **settings) as program:
            code = program.wait()
            if code != 0:
                raise Broken(f"does not go on: exit code {code}: {last_line(program.output)}")

    def undisturbed(self, mode: Mode) -> Undisturbed:
        """A mode's run that nothing disturbs, done once."""
        return self.shared(("undisturbed", mode.name), lambda: self._undisturbed(mode))

    def _undisturbed(self, mode: Mode) -> Undisturbed:
        folder, every = self.fresh(), mode.settings.get("device_iterations", 1)
        run = folder / "runs/run"
        with self.start(mode, folder, checkpoint__every=every, checkpoint__keep=1000) as program:
            begin = time.monotonic()
            while not steps_in(run) and program.is_alive():
                time.sleep(0.01)
            start = time.monotonic() - begin
            code, output = program.wait(), program.output
        check_words(code, output)
        if code != 0:
            raise Broken(f"an undisturbed run ended with exit code {code}: {last_line(output)}")
        states = {checkpoint.name: state_of(checkpoint) for checkpoint in checkpoints_of(run)}
        metrics = metrics_of(run)
        return Undisturbed(run, metrics, states, others_in(run), start, time.monotonic() - begin)

    def stopped_after(self, step: int, mode: Mode) -> Path:
        """A fresh folder with a run that stands after a step that has a checkpoint."""
        folder, source = self.fresh(), self.undisturbed(mode).folder
        run, name = folder / "runs/run", f"step_{step:08d}"
        shutil.copytree(source / "checkpoints" / name, run / "checkpoints" / name)
        shutil.copy(source / "config.yml", run)
        lines = (source / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(lines[:step]))
        return folder


def wait_for(
    moment: str, program: Program, run: Path, undisturbed: Undisturbed, choice: random.Random
) -> None:
    """Wait until a run is in the middle of something, or has ended."""
    begun, steps = time.monotonic(), steps_in(run)
    left, a_step = (
        set((run / "checkpoints").glob(".step_*")),
        0.3 * (undisturbed.seconds - undisturbed.start) / STEPS,
    )
    goal, metrics = choice.randrange(min(steps, STEPS - 1) + 1, STEPS + 1), run / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns if metrics.exists() else 0

    def is_there() -> bool:
        done = steps_in(run)
        if moment == "start":
            return time.monotonic() > begun + delay
        if not metrics.exists() or metrics.stat().st_mtime_ns == before:
            return False
        if moment == "first step":
            return True
        if moment == "save":
            return any(path not in left for path in (run / "checkpoints").glob(".step_*"))
        if moment == "validation":
            return done % VALIDATE_EVERY == VALIDATE_EVERY - 1 or done >= STEPS
        return done >= (STEPS if moment == "end" else goal)

    delay = choice.random() * undisturbed.start
    while program.is_alive() and not is_there():
        time.sleep(0.001)
    if moment != "start":
        time.sleep(choice.random() * (0.01 if moment == "save" else 2 * a_step))


def steps_in(run: Path) -> int:
    """Steps that the metrics of a run tell of."""
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def last_line(text: str) -> str:
    """The last line that is not empty, or an error's."""
    lines = [line for line in text.splitlines() if line.strip()]
    return next(
        (line for line in lines if line.startswith("error")), lines[-1] if lines else "no output"
    )[:300]
