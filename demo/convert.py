"""Models from and to the formats of others: `python demo/convert.py from_hugging_face FOLDER OUT`,
`python demo/convert.py to_hugging_face CHECKPOINT OUT` and more. See --help.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    if not __package__:  # run by its path: the packages are beside this folder
        sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from popxl_gpt.demo import commands

    commands.convert()

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from shlex import quote
from types import MappingProxyType
from typing import Any

import numpy as np

from popxl_gpt.config.command_line import RUN_CONFIG
from popxl_gpt.config.ipu_config import write_ipu_config
from popxl_gpt.config.saving import load, save
from popxl_gpt.config.schema import Config, Model, Training
from popxl_gpt.data.chat_template import KEPT, TEMPLATE, TOKENIZER_CONFIG
from popxl_gpt.data.special_tokens import END
from popxl_gpt.data.text_tokenizer import GENERATION, special_tokens_beside
from popxl_gpt.data.tokenisation import TOKENIZER_BYTES
from popxl_gpt.demo.commands import Conversion, Export, GgufExport, parse_conversion
from popxl_gpt.demo.job.text import read_tokenizer
from popxl_gpt.execution.checkpoints.checkpoint_folder import TOKENIZER, folder_name
from popxl_gpt.execution.checkpoints.finding import find_trained
from popxl_gpt.execution.checkpoints.saving import write_weights
from popxl_gpt.execution.exchange.gguf_files import MAGIC, gguf_family, write_gguf
from popxl_gpt.execution.exchange.gguf_tokenizer import ENDS, chat_template, tokenizer_values
from popxl_gpt.execution.exchange.hub import model_folder
from popxl_gpt.execution.exchange.hugging_face import (
    OWN_FILES,
    HuggingFaceFolder,
    Weights,
    is_hugging_face,
    write_hugging_face,
)
from popxl_gpt.execution.exchange.initial_weights import with_positions
from popxl_gpt.execution.exchange.kept_files import keep
from popxl_gpt.execution.exchange.modelfile import MARK, modelfile
from popxl_gpt.execution.exchange.modelfile import NAME as MODELFILE
from popxl_gpt.execution.exchange.nanogpt import NanoGPTFile
from popxl_gpt.execution.exchange.peft import BASE, write_peft
from popxl_gpt.execution.exchange.peft import CONFIG as PEFT_CONFIG
from popxl_gpt.execution.planning.model_size import parameter_count
from popxl_gpt.utils.errors import UserError, reason_of, unreadable
from popxl_gpt.utils.files.bounded import read_bounded
from popxl_gpt.utils.files.folders import check_replaceable, partial_folder, publish
from popxl_gpt.utils.files.hub import MAKE_TOKENIZER, SENTENCEPIECE
from popxl_gpt.utils.files.plain import is_folder, open_plain, real_path, write_plain
from popxl_gpt.utils.files.whole import write_whole
from popxl_gpt.utils.units import counted, si

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
    r"config\.yml|checkpoints/(tokenizer(_config)?\.json|hugging_face/([\w.]+)?|step_0+/(checkpoint\.json|[\w.]+\.safetensors)?)?",
    (r"config\.yml", r"checkpoints/step_0+/checkpoint\.json"),
)
PEFT = Made(r"adapter_(config\.json|model\.safetensors)", (r"adapter_config\.json",))
IPU_CONFIG = Made(r"ipu_config\.json", (r"ipu_config\.json",))
HUGGING_FACE = Made(OWN_FILES, (r"config\.json", r"model.*\.safetensors"))


def from_hugging_face(options: Conversion) -> int:
    """Make a run's folder, with one checkpoint of weights alone, of a folder of Hugging Face's."""
    named, out = options.folders()
    source = model_folder(named, "FOLDER")
    _check_apart(out, source)
    theirs = HuggingFaceFolder(source)
    tokenizer = _content_of(source / TOKENIZER)
    with _made(out, CHECKPOINT, options.overwrite) as folder:
        checkpoints = folder / "checkpoints"
        narrow = [name for name, kind in theirs.types.items() if kind == "bfloat16"]
        model = _write_run(
            folder, out.name, options, theirs.model, theirs.weights(), theirs.special_tokens, narrow
        )
        keep(source, checkpoints / KEPT)
        if tokenizer is not None:
            write_plain(checkpoints / TOKENIZER, tokenizer)
            beside = special_tokens_beside(source / TOKENIZER)
            if beside:
                text = json.dumps(beside, indent=2) + "\n"
                write_plain(checkpoints / TOKENIZER_CONFIG, text)
    with_it = "without a tokenizer" if tokenizer is None else "with its tokenizer"
    print(f"{out}: {si(parameter_count(model))} parameters, {with_it}")
    if tokenizer is None and (source / SENTENCEPIECE).exists():
        print(f"note: {SENTENCEPIECE} is no {TOKENIZER}, which is read here. {MAKE_TOKENIZER}")
    _tell_use(out)
    return 0


def from_nanogpt(options: Conversion) -> int:
    """Make a run's folder, with one checkpoint of weights alone, of nanoGPT's ckpt.pt."""
    source, out = options.folders()
    _check_apart(out, source)
    theirs = NanoGPTFile(source)
    with _made(out, CHECKPOINT, options.overwrite) as folder:
        model = _write_run(folder, out.name, options, theirs.model, theirs.weights())
    print(f"{out}: {si(parameter_count(model))} parameters, without a tokenizer")
    print(
        "note: nanoGPT saves no tokenizer. Its models of 50304 words are mostly of GPT-2's: give "
        "that as --tokenizer. GELU is taken to be exact, as nanoGPT's is since 2023."
    )
    _tell_use(out)
    return 0


def _tell_use(out: Path) -> None:
    quoted = quote(str(out))
    print(f"Use it with --checkpoint {quoted}, or train it further with --init_from {quoted}.")


def _write_run(
    folder: Path,
    name: str,
    options: Conversion,
    model: Model,
    weights: Weights,
    special_tokens: "Mapping[str, int | list[int]]" = MappingProxyType({}),
    bfloat16: Sequence[str] = (),
) -> Model:
    """Fill a run's folder, with one checkpoint of weights alone. Returns the model that it has."""
    model, weights = with_positions(model, options.positions, weights)
    config = Config(name=name, model=model, training=Training(global_batch_size=1))
    target = folder / "checkpoints" / folder_name(0)
    target.mkdir(parents=True)
    write_weights(target, config, weights, special_tokens, bfloat16)
    save(config, folder / RUN_CONFIG)
    return model


def to_hugging_face(options: Export) -> int:
    """Make a folder of Hugging Face's of a checkpoint."""
    source, out = options.folders()
    saved = find_trained(source, "CHECKPOINT")
    _check_apart(out, source)
    _check_apart(out, saved.folder)
    model, weights = with_positions(saved.config.model, options.positions, saved.weights())
    tokenizer, kept = (saved.beside[0] / name for name in (TOKENIZER, KEPT))
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
            saved.types,
            kept if kept.is_dir() else None,
        )
        _copy_chat(tokenizer.parent, folder)
    with_it = "with its tokenizer" if tokenizer.is_file() else "without a tokenizer"
    print(f"{out}: {si(parameter_count(model))} parameters of {saved.folder}, {with_it}")
    _tell_of_documents(model, "transformers")
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


def to_peft(options: Conversion) -> int:
    """Make a folder of peft's of the adapters of a checkpoint."""
    source, out = options.folders()
    saved = find_trained(source, "CHECKPOINT")
    _check_apart(out, source)
    _check_apart(out, saved.folder)
    if not saved.adapted.lora_rank:
        raise UserError(
            f"CHECKPOINT: got {saved.folder}, which has no adapters; expected those of a run with "
            "--lora_rank. Export the whole model: to_hugging_face."
        )
    base = saved.config.checkpoint.init_from
    with _made(out, PEFT, options.overwrite) as folder:
        write_peft(folder, saved.adapted, saved.adapters(), base)
    print(f"{out}: adapters of rank {saved.adapted.lora_rank} of {saved.folder}")
    if base is not None and is_folder(Path(base)) and not is_hugging_face(Path(base)):
        print(
            f"note: they are for {base}, which peft does not load. Export it, to_hugging_face "
            f"{quote(base)} OUT, and write the path of OUT into {out / PEFT_CONFIG} as {BASE}."
        )
    print(f"Load it with peft.AutoPeftModelForCausalLM.from_pretrained({str(out)!r}).")
    return 0


def to_ipu_config(options: Conversion) -> int:
    """Make a folder with what optimum-graphcore reads of how a run is executed."""
    source, out = options.folders()
    config = load(source / RUN_CONFIG if is_folder(source) else source)
    with _made(out, IPU_CONFIG, options.overwrite) as folder:
        file = write_ipu_config(config, folder)
    print(f"{out / file.name}: how {config.name} is executed")
    return 0


def to_gguf(options: GgufExport) -> int:
    """Make a GGUF file of a checkpoint, and a Modelfile beside it."""
    source, out = options.folders()
    saved = find_trained(source, "CHECKPOINT")
    model, weights = with_positions(saved.config.model, options.positions, saved.weights())
    family, beside = gguf_family(model, options.family), saved.beside[0]
    if not (beside / TOKENIZER).is_file():
        raise UserError(
            f"{beside}: got no {TOKENIZER}; expected one, for a GGUF file holds it. Copy that of "
            "the training data there."
        )
    tokenizer = read_tokenizer(beside / TOKENIZER)
    ending = {END: model.end_of_text} if model.end_of_text else {}  # 0: the model does not tell
    special_tokens = {**ending, **saved.special_tokens}
    values, notes = tokenizer_values(tokenizer, model.vocabulary_size, special_tokens)
    places = (beside, beside / KEPT)
    template = next(filter(None, map(chat_template, places)), None)
    if template is not None:
        values["chat_template"] = template
    stops = [values["token_list"][values[name]] for name in ENDS if name in values]
    first = next(weights)
    kind = options.type or ("f16" if first[1].dtype == np.float16 else "f32")
    text = modelfile(out.name, model.positions, stops, places)
    with _written(out, {out: MAGIC, out.with_name(MODELFILE): MARK.encode()}, options.overwrite):
        rest = write_gguf(
            out, model, family, chain([first], weights), kind, {"name": out.stem, **values}
        )
        write_whole(out.with_name(MODELFILE), text)
    kept = "without a chat template" if template is None else "with its chat template"
    print(f"{out}: {si(parameter_count(model))} parameters of {saved.folder}, {kind}, {kept}")
    for note in notes:
        print(f"note: {note}")
    if rest:
        print(f"note: {counted(rest, 'tensor')} in f16, whose rows are no multiple of 32.")
    _tell_of_documents(model, "llama.cpp")
    print(f"Use it with llama.cpp, or: ollama create {quote(out.stem)} -f {MODELFILE}.")
    return 0


def _tell_of_documents(model: Model, program: str) -> None:
    """Say so where the program that runs the model sees more of a sequence than training did."""
    if model.document_attention:
        print(
            "note: documents of one sequence attended to themselves alone (document_attention). "
            f"{program} has no such setting: give the model one document in a sequence."
        )


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


@contextmanager
def _written(out: Path, begins: "dict[Path, bytes]", overwrite: bool) -> Iterator[None]:
    """A block that writes files; those that are there are replaced if they begin so."""
    for path, begin in begins.items():
        if path.exists() and not overwrite:
            raise UserError(
                f"{path}: got a {'folder' if path.is_dir() else 'file'} that is there; expected a "
                "new name. Choose another, or give --overwrite for a file that this command made."
            )
        if path.exists() and not (path.is_file() and _begins(path, begin)):
            raise UserError(
                f"{path}: got what this command has not made; expected a file that it may replace. "
                "Move it away, or choose another folder."
            )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(
            f"{out}: got '{reason_of(error)}' while writing; expected a folder that takes files. "
            "Make room, or choose another."
        ) from error


def _begins(path: Path, begin: bytes) -> bool:
    with open(open_plain(path), "rb") as file:
        return file.read(len(begin)) == begin


COMMANDS: "dict[str, Callable[[Any], int]]" = {
    "from_hugging_face": from_hugging_face,
    "from_nanogpt": from_nanogpt,
    "to_hugging_face": to_hugging_face,
    "to_peft": to_peft,
    "to_ipu_config": to_ipu_config,
    "to_gguf": to_gguf,
}


def main(arguments: Sequence[str]) -> int:
    """Run the command line. Returns the exit code."""
    return run(parse_conversion(arguments))


def run(asked: "tuple[str, Conversion]") -> int:
    """Convert as asked. Returns the exit code."""
    name, options = asked
    return COMMANDS[name](options)
