"""Models to and from Hugging Face's format: `python demo/convert.py from_hugging_face FOLDER OUT`,
`python demo/convert.py to_hugging_face CHECKPOINT OUT`. See --help.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    if not __package__:  # run by its path: the packages are beside this folder
        sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from popxl_gpt.demo import commands

    commands.convert()

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from popxl_gpt.config import UserError, save
from popxl_gpt.config.command_line import RUN_CONFIG
from popxl_gpt.config.schema import Config, Training
from popxl_gpt.data.folders import partial_folder, publish
from popxl_gpt.demo.commands import Conversion, Export, parse_conversion
from popxl_gpt.execution.checkpoint import find_trained
from popxl_gpt.execution.checkpoint_folder import TOKENIZER, folder_name
from popxl_gpt.execution.hugging_face import HuggingFaceFolder, write_hugging_face
from popxl_gpt.execution.initial_weights import with_positions
from popxl_gpt.execution.model_size import parameter_count
from popxl_gpt.execution.saving import write_weights
from popxl_gpt.utils.units import si

STOPPED = "stopped; nothing half-made is left."


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
        save(config, folder / RUN_CONFIG)
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
    saved = find_trained(source, "CHECKPOINT")
    model, weights = with_positions(saved.config.model, options.positions, saved.weights())
    tokenizer = saved.folder.parent / TOKENIZER
    with _made(out, options.overwrite) as folder:
        architecture = write_hugging_face(
            folder, model, weights, tokenizer if tokenizer.is_file() else None, options.file_bytes
        )
    kept = "with its tokenizer" if tokenizer.is_file() else "without a tokenizer"
    print(f"{out}: {si(parameter_count(model))} parameters of {saved.folder}, {kept}")
    if saved.config.model.document_attention:
        print(
            "note: documents of one sequence attended to themselves alone (document_attention). "
            "transformers has no such setting: give the model one document in a sequence."
        )
    print(f"Load it with transformers.{architecture}.from_pretrained({str(out)!r}).")
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


COMMANDS: "dict[str, Callable[[Any], int]]" = {
    "from_hugging_face": from_hugging_face,
    "to_hugging_face": to_hugging_face,
}


def main(arguments: Sequence[str]) -> int:
    """Run the command line. Returns the exit code."""
    name, options = parse_conversion(arguments)
    return COMMANDS[name](options)
