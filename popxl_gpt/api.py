"""What the commands do, for programs and notebooks: `from popxl_gpt import api`.

Settings are those of the commands, by keyword: `--learning_rate 1e-3` is `learning_rate=1e-3`. One
that is wrong raises UserError with the words of the command. `demo/keywords.pyi` tells editors and
type checkers which there are.
"""

import io
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from popxl_gpt.data import prepare as preparation
from popxl_gpt.data.dataset_info import read_info
from popxl_gpt.demo import convert as conversion
from popxl_gpt.demo import pretraining
from popxl_gpt.demo.commands import check_training, parse_conversion, parse_preparation
from popxl_gpt.demo.evaluate import Result, evaluate
from popxl_gpt.demo.generate import generate
from popxl_gpt.execution.inference.sampling import Sampling
from popxl_gpt.execution.reports.metrics import read_metrics
from popxl_gpt.utils import program_clock
from popxl_gpt.utils.errors import UserError

if TYPE_CHECKING:
    from popxl_gpt.demo.keywords import ConvertSettings, PrepareSettings, TrainSettings, Unpack

__all__ = [
    "Result",
    "Run",
    "Sampling",
    "UserError",
    "convert",
    "evaluate",
    "generate",
    "prepare",
    "train",
]


@dataclass(frozen=True)
class Run:
    """A run that has trained."""

    folder: Path
    """What the other functions take as a checkpoint."""
    metrics: "list[dict[str, Any]]"
    """What metrics.jsonl says of each step."""

    @property
    def losses(self) -> "list[float]":
        """The loss of each step that had one."""
        return [each["loss"] for each in self.metrics if each.get("loss") is not None]

    @property
    def evaluation(self) -> float | None:
        """The last validation loss; None where nothing was validated."""
        found = [each["validation_loss"] for each in self.metrics if "validation_loss" in each]
        return found[-1] if found else None


def prepare(
    kind: str, *inputs: "str | Path", **settings: "Unpack[PrepareSettings]"
) -> "dict[str, Any]":
    """Prepare text, as `data/prepare.py KIND INPUTS` does. Returns what dataset.json says.

    Raises:
        UserError: something given cannot be used.
    """
    options = parse_preparation([kind, *map(str, inputs), *_words(settings)])
    preparation.run(options)
    return read_info(Path(options.output)) or {} if hasattr(options, "output") else {}


def train(**settings: "Unpack[TrainSettings]") -> Run:
    """Train, as `demo/pretraining.py` does; `config` names a preset or a file. Call it on the main
    thread.

    Raises:
        UserError: something given cannot be used.
        KeyboardInterrupt: Ctrl-C, or another signal, has ended the run, which is saved.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UserError(
            "train: got a call on another thread; expected one on the main thread, which hears "
            "signals. Call it there, or start the command as a process."
        )
    program_clock.begin()
    line = check_training(_words(settings))
    if line.options.is_plan():
        raise UserError("plan: got it for train; expected a run. Use the command for plans.")
    folders: list[Path] = []
    with _signals_as_they_were(), _output_of_cells():
        code = pretraining.run(line, folders.append)
    if code:
        raise KeyboardInterrupt(f"the run in {folders[0]} was stopped, and is saved")
    (folder,) = folders
    return Run(folder, read_metrics(folder / "metrics.jsonl"))


def convert(
    kind: str, source: "str | Path", out: "str | Path", **settings: "Unpack[ConvertSettings]"
) -> Path:
    """Convert a model, as `demo/convert.py KIND SOURCE OUT` does. Returns the folder made.

    Raises:
        UserError: something given cannot be used.
    """
    conversion.run(parse_conversion([kind, str(source), str(out), *_words(settings)]))
    return Path(out)


def _words(settings: "Mapping[str, Any]") -> "list[str]":
    """Settings as a command line has them."""
    return [word for name, value in settings.items() for word in _flag(name, value)]


def _flag(name: str, value: Any) -> "Sequence[str]":
    if value is False:
        return [f"--{name}=false"]
    if isinstance(value, (list, tuple)):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={'none' if value is None else value}"]


@contextmanager
def _signals_as_they_were() -> Iterator[None]:
    """A block after which signals do what they did: a process that goes on is told to end as
    before.
    """
    known = [*signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}]
    before = {number: signal.getsignal(number) for number in known}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


class _Cell(io.TextIOBase):
    """An output that is no file, as that of a notebook's cell: its descriptor is another's."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write to it."""
        return self._stream.write(text)

    def flush(self) -> None:
        """Write the rest, too."""
        self._stream.flush()


@contextmanager
def _output_of_cells() -> Iterator[None]:
    """A block that prints where Python's own output was put, not past it."""
    stream = sys.stdout
    if stream is sys.__stdout__:
        yield
        return
    with redirect_stdout(_Cell(stream)):
        yield
