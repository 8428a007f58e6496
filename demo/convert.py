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

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from shlex import quote
from typing import Any

from popxl_gpt.config.command_line import RUN_CONFIG
from popxl_gpt.config.saving import save
from popxl_gpt.config.schema import Config, Training
from popxl_gpt.data.chat_template import TEMPLATE
from popxl_gpt.data.text_tokenizer import CONFIG as TOKENIZER_CONFIG
from popxl_gpt.data.text_tokenizer import GENERATION, special_tokens_beside
from popxl_gpt.data.tokenisation import TOKENIZER_BYTES
from popxl_gpt.demo.commands import Conversion, Export, parse_conversion
from popxl_gpt.execution.checkpoints.checkpoint_folder import TOKENIZER, folder_name
from popxl_gpt.execution.checkpoints.finding import find_trained
from popxl_gpt.execution.checkpoints.saving import write_weights
from popxl_gpt.execution.exchange.hugging_face import (
    OWN_FILES,
    HuggingFaceFolder,
    write_hugging_face,
)
from popxl_gpt.execution.exchange.initial_weights import with_positions
from popxl_gpt.execution.planning.model_size import parameter_count
from popxl_gpt.utils.errors import UserError, reason_of, unreadable
from popxl_gpt.utils.files.bounded import read_bounded
from popxl_gpt.utils.files.folders import check_replaceable, partial_folder, publish
from popxl_gpt.utils.files.hub import MAKE_TOKENIZER, SENTENCEPIECE
from popxl_gpt.utils.files.plain import real_path, write_plain
from popxl_gpt.utils.units import si

STOPPED = "stopped; nothing half-made is left."


@dataclass(frozen=True)
class Made:
    """What a command makes, by which a folder of its own is known.

    Attributes:
        own: pattern of the paths in it; `marks`: those that it has in any case.
    """

    own: str
    marks: "tuple[str, ...]"


CHECKPOINT = Made(
    r"config\.yml|checkpoints/(tokenizer(_config)?\.json|step_0+/(checkpoint\.json|[\w.]+\.safetensors)?)?",
    (r"config\.yml", r"checkpoints/step_0+/checkpoint\.json"),
)
HUGGING_FACE = Made(OWN_FILES, (r"config\.json", r"model.*\.safetensors"))


def from_hugging_face(options: Conversion) -> int:
    """Make a run's folder, with one checkpoint of weights alone, of a folder of Hugging Face's."""
    source, out = options.folders()
    _check_apart(out, source)
    theirs = HuggingFaceFolder(source)
    model, weights = with_positions(theirs.model, options.positions, theirs.weights())
    config = Config(name=out.name, model=model, training=Training(global_batch_size=1))
    tokenizer = _content_of(source / TOKENIZER)
    with _made(out, CHECKPOINT, options.overwrite) as folder:
        checkpoints = folder / "checkpoints"
        target = checkpoints / folder_name(0)
        target.mkdir(parents=True)
        write_weights(target, config, weights, theirs.special_tokens)
        save(config, folder / RUN_CONFIG)
        if tokenizer is not None:
            write_plain(checkpoints / TOKENIZER, tokenizer)
            beside = special_tokens_beside(source / TOKENIZER)
            if beside:
                text = json.dumps(beside, indent=2) + "\n"
                write_plain(checkpoints / TOKENIZER_CONFIG, text)
    kept = "without a tokenizer" if tokenizer is None else "with its tokenizer"
    print(f"{out}: {si(parameter_count(model))} parameters, {kept}")
    if tokenizer is None and (source / SENTENCEPIECE).exists():
        print(f"note: {SENTENCEPIECE} is no {TOKENIZER}, which is read here. {MAKE_TOKENIZER}")
    named = quote(str(out))
    print(f"Use it with --checkpoint {named}, or train it further with --init_from {named}.")
    return 0


def to_hugging_face(options: Export) -> int:
    """Make a folder of Hugging Face's of a checkpoint."""
    source, out = options.folders()
    saved = find_trained(source, "CHECKPOINT")
    _check_apart(out, source)
    _check_apart(out, saved.folder)
    model, weights = with_positions(saved.config.model, options.positions, saved.weights())
    tokenizer = saved.folder.parent / TOKENIZER
    with _made(out, HUGGING_FACE, options.overwrite) as folder:
        family = write_hugging_face(
            folder,
            model,
            weights,
            tokenizer if tokenizer.is_file() else None,
            options.file_bytes,
            saved.special_tokens,
            options.precision,
            options.family,
        )
        _copy_chat(tokenizer.parent, folder)
    kept = "with its tokenizer" if tokenizer.is_file() else "without a tokenizer"
    print(f"{out}: {si(parameter_count(model))} parameters of {saved.folder}, {kept}")
    if saved.config.model.document_attention:
        print(
            "note: documents of one sequence attended to themselves alone (document_attention). "
            "transformers has no such setting: give the model one document in a sequence."
        )
    if family.code is None:
        print(f"Load it with transformers.{family.architecture}.from_pretrained({str(out)!r}).")
    else:
        print(
            "Load it with transformers.AutoModelForCausalLM.from_pretrained("
            f"{str(out)!r}, trust_remote_code=True), which runs {family.code.name} beside it."
        )
    return 0


def _copy_chat(source: Path, folder: Path) -> None:
    """Take along how conversations are written, and what ends an answer."""
    for name in (TEMPLATE, GENERATION):
        content = _content_of(source / name)
        if content is not None and not (folder / name).exists():
            write_plain(folder / name, content)


def _content_of(tokenizer: Path) -> bytes | None:
    """What a tokenizer's file has; None where there is none."""
    try:
        return read_bounded(tokenizer, TOKENIZER_BYTES) if tokenizer.exists() else None
    except OSError as error:
        raise unreadable(tokenizer, error) from error


def _check_apart(out: Path, source: Path) -> None:
    """Refuse to make a folder of one that it is, holds or lies in."""
    made, read = real_path(out), real_path(source)
    if made == read or made in read.parents or read in made.parents:
        raise UserError(
            f"{out}: got a folder that is, holds or lies in {source}, which is read; expected one "
            "apart from it. Choose another."
        )


@contextmanager
def _made(out: Path, kind: Made, overwrite: bool) -> Iterator[Path]:
    """A folder to fill, which takes its name at the end, whole."""
    if out.exists() and not overwrite:
        raise UserError(
            f"{out}: got a {'folder' if out.is_dir() else 'file'} that is there; expected a new "
            "name. Choose another, or give --overwrite for a folder that this command made."
        )
    try:
        if out.exists():
            check_replaceable(out, kind.own, "this command", kind.marks)
        with partial_folder(out) as folder:
            yield folder
            publish(folder, out, overwrite=overwrite)
    except OSError as error:
        raise UserError(
            f"{out}: got '{reason_of(error)}' while writing; expected a folder that takes files. "
            "Make room, or choose another."
        ) from error


COMMANDS: "dict[str, Callable[[Any], int]]" = {
    "from_hugging_face": from_hugging_face,
    "to_hugging_face": to_hugging_face,
}


def main(arguments: Sequence[str]) -> int:
    """Run the command line. Returns the exit code."""
    return run(parse_conversion(arguments))


def run(asked: "tuple[str, Conversion]") -> int:
    """Convert as asked. Returns the exit code."""
    name, options = asked
    return COMMANDS[name](options)
