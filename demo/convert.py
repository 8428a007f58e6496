"""Models to and from Hugging Face's format: `python demo/convert.py from_hugging_face FOLDER OUT`,
`python demo/convert.py to_hugging_face CHECKPOINT OUT`. See --help.
"""

import signal
import sys
from pathlib import Path

# run as a script: the repository's packages are beside this folder, not in it
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # while modules load, Ctrl-C ends the process without a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from popxl_gpt.config import ConfigError, UserError, exit_on_user_error, parse_options, save
from popxl_gpt.config.presets import did_you_mean
from popxl_gpt.config.schema import Config, Count, PathText, Training
from popxl_gpt.data.folders import partial_folder, publish
from popxl_gpt.execution.checkpoint import find_trained, write_weights
from popxl_gpt.execution.checkpoint_folder import TOKENIZER, folder_name
from popxl_gpt.execution.hugging_face import HuggingFaceFolder, write_hugging_face
from popxl_gpt.execution.initial_weights import with_positions
from popxl_gpt.execution.model_size import parameter_count
from popxl_gpt.utils.units import si


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What is converted, and into what."""

    paths: tuple[PathText, ...]
    """The folder to read, and the folder to make."""
    positions: Optional[Count] = None
    """Positions that the new model has: the first ones, or with fresh ones after them; none: all
    that there are.
    """
    overwrite: bool = False
    """Replace the folder to make if it is there."""

    def folders(self) -> "tuple[Path, Path]":
        """The folder to read and the folder to make. ConfigError where there are not two."""
        if len(self.paths) != 2:
            raise ConfigError(
                [f"PATHS: got {len(self.paths)}; expected two, the folder to read and OUT."]
            )
        source, out = (Path(path) for path in self.paths)
        return source, out


@dataclass(frozen=True, kw_only=True, slots=True)
class Export(Conversion):
    """What is converted, and into what."""

    file_bytes: Count = 5_000_000_000
    """Begin another file of weights after so many bytes."""


def from_hugging_face(options: Conversion) -> int:
    """Make a run's folder, with one checkpoint of weights alone, of a folder of Hugging Face's."""
    source, out = options.folders()
    theirs = HuggingFaceFolder(source)
    model, weights = with_positions(theirs.model, options.positions, theirs.weights())
    config = Config(name=out.name, model=model, training=Training(global_batch_size=1))
    with _made(out, options.overwrite) as folder:
        checkpoints = folder / "checkpoints"
        target = checkpoints / folder_name(0)
        target.mkdir(parents=True)
        write_weights(target, config, weights)
        save(config, folder / "config.yml")
        tokenizer = source / TOKENIZER
        if tokenizer.is_file():
            (checkpoints / TOKENIZER).write_bytes(tokenizer.read_bytes())
    kept = "with its tokenizer" if tokenizer.is_file() else "without a tokenizer"
    print(f"{out}: {si(parameter_count(model))} parameters, {kept}")
    print(f"Use it with --checkpoint {out}, or train it further with --init_from {out}.")
    return 0


def to_hugging_face(options: Export) -> int:
    """Make a folder of Hugging Face's of a checkpoint."""
    source, out = options.folders()
    saved = find_trained(source)
    model, weights = with_positions(saved.config.model, options.positions, saved.weights())
    tokenizer = saved.folder.parent / TOKENIZER
    with _made(out, options.overwrite) as folder:
        write_hugging_face(
            folder, model, weights, tokenizer if tokenizer.is_file() else None, options.file_bytes
        )
    kept = "with its tokenizer" if tokenizer.is_file() else "without a tokenizer"
    print(f"{out}: {si(parameter_count(model))} parameters of {saved.folder}, {kept}")
    print(f"Load it with transformers.GPT2LMHeadModel.from_pretrained({str(out)!r}).")
    return 0


@contextmanager
def _made(out: Path, overwrite: bool) -> Iterator[Path]:
    """A folder to fill, which takes its name at the end, whole."""
    if out.exists() and not overwrite:
        raise UserError(
            f"{out}: got a folder that is there; expected a new name. Choose another, or give "
            "--overwrite."
        )
    try:
        with partial_folder(out) as folder:
            yield folder
            publish(folder, out, overwrite=overwrite)
    except OSError as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"{out}: got '{reason}' while writing; expected a folder that takes files. Make room, "
            "or choose another."
        ) from error


class Command(NamedTuple):
    """One of the program's commands."""

    about: str
    options: type
    run: Callable[[Any], int]


COMMANDS = {
    "from_hugging_face": Command(
        "FOLDER OUT: make a checkpoint of Hugging Face's GPT-2", Conversion, from_hugging_face
    ),
    "to_hugging_face": Command(
        "CHECKPOINT OUT: make a GPT-2 that transformers loads", Export, to_hugging_face
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Run the command line. Returns the exit code."""
    name, *words = list(arguments) or [""]
    if name in ("--help", "-h"):
        lines = [f"  {name:<20}{command.about}" for name, command in COMMANDS.items()]
        print("\n".join(["demo/convert.py COMMAND", "", *lines]))
        print("\ndemo/convert.py COMMAND --help tells what each takes.")
        return 0
    if name not in COMMANDS:
        hint = did_you_mean(name, dict.fromkeys(COMMANDS), listed=True)
        raise ConfigError([f"command: got {name or 'none'}; expected one. {hint}"], "command line")
    command = COMMANDS[name]
    program = f"demo/convert.py {name} {command.about}"
    return command.run(
        parse_options(words, program=program, options=command.options, words="paths")
    )


if __name__ == "__main__":
    with exit_on_user_error(stopped="stopped; nothing half-made is left."):
        sys.exit(main(sys.argv[1:]))
