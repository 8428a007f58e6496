"""The command line of `data/prepare.py`: its commands, and what each takes.

It stands apart from what reads and tokenises, so that help and wrong flags are answered at once.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from poprun.cores import usable_cores

from popxl_gpt.config.bounds import PathText, Positive
from popxl_gpt.config.command_line import parse_options
from popxl_gpt.config.flags import HELP_FLAGS
from popxl_gpt.utils.errors import ConfigError
from popxl_gpt.utils.programs import typed_as, unknown_command

CHARACTERS, GPT2 = "characters", "gpt2"
"""Tokenizers that are made, or found, in place of a file."""


SMALLEST, MIDDLE, LARGEST = 512, 2048, 2**15
"""Tokens of vocabularies that are chosen by time: the least, that of ten minutes of a core, and the
most.
"""


def vocabulary_for(minutes: float) -> int:
    """The size of a vocabulary for what a model can learn in so many minutes of this machine's
    cores, a power of two.

    A head's work for a token grows with it, and what it saves in tokens hardly does. It grows with
    the cube root of the time, as the layers times the width of a model do.
    """
    size = MIDDLE * (minutes * usable_cores() / 10) ** (1 / 3)
    return int(min(LARGEST, max(SMALLEST, 2 ** round(math.log2(size)))))


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What every preparation takes."""

    trained: ClassVar[int] = 50257
    output: PathText = "data/files/text"
    """Folder to make; it appears when it is complete."""
    sequence_length: int = 1024
    """Tokens of a record, but one; a model may have another sequence length."""
    minutes: Positive | None = None
    """Minutes that a model will train on the text (demo/pretraining.py --minutes); with the cores
    of this process they choose the size of a tokenizer, unless that or a tokenizer is given.
    """
    vocabulary_size: int | None = None
    """Tokens of the tokenizer to train; none: by the minutes, or 50257 (stdlib: 4096), or as the
    given tokenizer has.
    """
    tokenizer: PathText | None = None
    """A tokenizer.json to use instead of training one, or GPT-2's vocab.bpe; characters: a token
    for each character; gpt2: GPT-2's, from the files that tiktoken keeps.
    """
    eos_token: str | None = None
    """The given tokenizer's token that ends documents; none: the one that its model's files beside
    it name, or <|endoftext|>.
    """
    min_tokens: int | None = None
    """Leave out documents of fewer tokens than this, their end among them; none: none is."""
    stride: int | None = None
    """Tokens from the beginning of a sample that is trained on to that of the next, where they are
    to overlap; none: the model's sequence length.
    """
    tokenizer_bytes: int = 64 * 2**20
    """Bytes of text to train the tokenizer on."""
    validation: float | None = None
    """Share of the tokens to hold out; long documents are cut for it; none: 0.05, or what is given
    to be held out.
    """
    seed: int = 0
    """Chooses the order of documents and which are held out."""
    max_bytes: int | None = None
    """Read this many bytes of text and no more: a text is cut there, an article of Wikipedia or a
    conversation that does not fit is left out.
    """
    shard_bytes: int = 256 * 2**20
    """Start another file after this many bytes."""
    workers: int = field(default_factory=usable_cores)
    """Processes that tokenise; they do not change the result."""
    overwrite: bool = False
    """Replace an output folder prepared from something else."""


@dataclass(frozen=True, kw_only=True)
class OfFiles(Preparation):
    """What preparations of one's own files take."""

    inputs: tuple[PathText, ...]
    """Files, folders or quoted globs."""
    validation_files: tuple[PathText, ...] = ()
    """Files, folders or quoted globs to hold out, all of them, in place of a share; those that are
    among the inputs, too, are not trained on.
    """
    skip_damaged: bool = False
    """Leave out files that are no text, and lines or rows that cannot be read, and say how many."""


@dataclass(frozen=True, kw_only=True)
class Text(OfFiles):
    """Text in UTF-8, JSON (lines, an array of objects) or CSV (.csv, .tsv), plain or compressed
    (.gz, .bz2, .xz, .zst); Parquet (.parquet), Arrow (.arrow), and folders that save_to_disk of
    Hugging Face's datasets wrote. JSON is known by what a file holds, or by its name.
    """

    documents: Literal["file", "paragraph", "line", "json"] = "file"
    """What one document is; json: a line, of whose JSON object one field is read. So are files of
    JSON in any case.
    """
    text_field: str = "text"
    """The field of JSON objects, or the column of CSV, Parquet and Arrow files, that holds the
    text; objects and rows that have null there are left out, and counted.
    """
    plain_text: bool = False
    """Take JSON and CSV files as plain text, syntax and all."""
    document_bytes: int = 2**20
    """Longer documents are cut at a line's end."""


@dataclass(frozen=True, kw_only=True)
class Conversations(OfFiles):
    """JSON, CSV, Parquet or Arrow files with prompt and answer, or with messages of role and
    content (or conversations of from and value), which are taken where there are both. The answers
    count in the loss, the rest does not; records hold whole conversations.
    """

    output: PathText = "data/files/conversations"
    chat_template: bool = True
    """Write conversations as the chat template of the given tokenizer's model says, where it has
    one beside it; its special tokens are tokens, and no message may spell one.
    """


@dataclass(frozen=True, kw_only=True)
class Stdlib(Preparation):
    """The source of this Python's standard library."""

    trained: ClassVar[int] = 4096
    output: PathText = "data/files/stdlib"
    sequence_length: int = 256


@dataclass(frozen=True, kw_only=True)
class Wikipedia(Preparation):
    """A Wikipedia XML dump, bz2 or plain."""

    dump: PathText
    """Such as enwiki-latest-pages-articles.xml.bz2."""
    output: PathText = "data/files/wikipedia"


@dataclass(frozen=True, kw_only=True)
class FromBins:
    """nanoGPT's train.bin and val.bin (uint16) as token files."""

    folder: PathText
    """The folder that holds them."""
    output: PathText = "data/files/nanogpt"
    """Folder to make."""
    sequence_length: int = 1024
    """Tokens of a record, but one; a model may have another sequence length."""
    vocabulary_size: int | None = None
    """Number of different tokens; none: the tokenizer's, that of meta.pkl beside them, or GPT-2's,
    50257.
    """
    tokenizer: PathText | None = None
    """The tokenizer.json that made the tokens."""
    eos_token: str | None = None
    """The tokenizer's token that ends documents, as for text."""
    overwrite: bool = False
    """Replace an output folder."""


@dataclass(frozen=True, kw_only=True)
class ToBins:
    """A prepared folder as nanoGPT's train.bin and val.bin (uint16)."""

    folder: PathText
    """What this program has prepared."""
    output: PathText = "data/files/bins"
    """Folder to make."""
    overwrite: bool = False
    """Replace an output folder."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Checks every checksum of TFRecord files."""

    files: tuple[PathText, ...]
    """TFRecord files, folders or quoted globs."""


class Command(NamedTuple):
    """One of the program's commands."""

    about: str
    options: type
    words: str | None = None
    """The option that words without a flag go to."""


COMMANDS = {
    "text": Command("prepare text files, JSON, CSV, Parquet or Arrow", Text, "inputs"),
    "conversations": Command("prepare prompts and answers of such files", Conversations, "inputs"),
    "stdlib": Command("prepare the source of the standard library", Stdlib),
    "wikipedia": Command("prepare a Wikipedia XML dump", Wikipedia, "dump"),
    "from_bins": Command("turn nanoGPT's files into token files", FromBins, "folder"),
    "to_bins": Command("turn token files into nanoGPT's", ToBins, "folder"),
    "check": Command("check every checksum of TFRecord files", Check, "files"),
}


def parse_preparation(arguments: Sequence[str]) -> Any:
    """What a command takes, an instance of one of the dataclasses above.

    Raises:
        ConfigError: lists every problem.
        SystemExit: with code 0 after printing the help.
    """
    program = typed_as("popxl-gpt-prepare", "data/prepare.py")
    name, *words = list(arguments) or [""]
    if name in HELP_FLAGS:
        print(_help_text(program))
        sys.exit(0)
    if name not in COMMANDS:
        raise ConfigError([unknown_command(name, COMMANDS, program)], "command line")
    about, options, named = COMMANDS[name]
    return parse_options(words, program=f"{program} {name}: {about}", options=options, words=named)


def _help_text(program: str) -> str:
    """What there is, one command a line."""
    lines = [f"  {name:<15}{command.about}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"{program} COMMAND: turn text into TFRecords for pretraining",
            "",
            *lines,
            "",
            f"{program} COMMAND --help tells what each takes.",
        ]
    )
