"""Turn text into TFRecords: `python data/prepare.py --help`."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

if __name__ == "__main__":
    if not __package__:  # run by its path: the packages are beside this folder
        sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from popxl_gpt.config.programs import start

    start("popxl_gpt.data.prepare")

from popxl_gpt.config import ConfigError, parse_options
from popxl_gpt.config.errors import text_of
from popxl_gpt.config.presets import did_you_mean
from popxl_gpt.config.programs import called_as
from popxl_gpt.config.schema import PathText
from popxl_gpt.data.conversations import conversation_source
from popxl_gpt.data.dataset import find_files
from popxl_gpt.data.errors import DataError
from popxl_gpt.data.merges import gpt2_file
from popxl_gpt.data.nanogpt import FILES, read_bins, write_bins
from popxl_gpt.data.preparation import Settings, prepare
from popxl_gpt.data.records import RecordFile
from popxl_gpt.data.sources import Source, stdlib_source, text_source
from popxl_gpt.data.wikipedia import wikipedia_source

STOPPED = "stopped; the same command goes on."


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What every preparation takes."""

    trained: ClassVar[int] = 50257
    output: PathText = "data/files/text"
    """Folder to make; it appears when it is complete."""
    sequence_length: int = 1024
    """Tokens of a record, but one; a model may have another sequence length."""
    vocabulary_size: int | None = None
    """Of the tokenizer to train; none: 50257 (stdlib: 4096), or as the given tokenizer has."""
    tokenizer: PathText | None = None
    """A tokenizer.json to use instead of training one, or GPT-2's vocab.bpe; characters: a token
    for each character; gpt2: GPT-2's, from the files that tiktoken keeps.
    """
    tokenizer_bytes: int = Settings.tokenizer_bytes
    """Bytes of text to train the tokenizer on."""
    validation: float | None = None
    """Share of the tokens to hold out; long documents are cut for it; none: 0.05, or what is given
    to be held out.
    """
    seed: int = Settings.seed
    """Chooses the order of documents and which are held out."""
    max_bytes: int | None = None
    """Stop reading after this many bytes of text."""
    shard_bytes: int = Settings.shard_bytes
    """Start another file after this many bytes."""
    workers: int = field(default_factory=_cores)
    """Processes that tokenise; they do not change the result."""
    overwrite: bool = False
    """Replace an output folder prepared from something else."""

    def source(self) -> Source:
        """The documents."""
        raise NotImplementedError

    def held_out(self) -> Source | None:
        """The documents that are given to be held out."""
        return None

    def settings(self) -> Settings:
        """What shapes the files."""
        share = Settings.validation if self.validation is None else self.validation
        is_trained = self.vocabulary_size is None and self.tokenizer is None
        return Settings(
            sequence_length=self.sequence_length,
            vocabulary_size=self.trained if is_trained else self.vocabulary_size,
            tokenizer=self._tokenizer_file(),
            characters=self.tokenizer == "characters",
            tokenizer_bytes=self.tokenizer_bytes,
            validation=share,
            seed=self.seed,
            max_bytes=self.max_bytes,
            shard_bytes=self.shard_bytes,
        )

    def _tokenizer_file(self) -> Path | None:
        if self.tokenizer is None or self.tokenizer == "characters":
            return None
        return gpt2_file() if self.tokenizer == "gpt2" else Path(self.tokenizer)


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
    """Leave out JSON lines that cannot be read, and say how many."""

    def read(self, patterns: Sequence[str], without: Sequence[str] = ()) -> Source:
        """The documents of files, without those of others."""
        raise NotImplementedError

    def source(self) -> Source:
        """The documents."""
        return self.read(self.inputs, self.validation_files)

    def held_out(self) -> Source | None:
        """The documents that are given to be held out."""
        return self.read(self.validation_files) if self.validation_files else None

    def settings(self) -> Settings:
        """What shapes the files."""
        if not self.validation_files:
            return super().settings()
        if self.validation:
            raise DataError(
                f"validation: got {self.validation} and validation_files; expected one of the two. "
                "Leave one out."
            )
        return replace(super().settings(), validation=0.0)


@dataclass(frozen=True, kw_only=True)
class Text(OfFiles):
    """Text in UTF-8 or JSON lines (.jsonl, .ndjson), plain or compressed (.gz, .bz2, .xz, .zst);
    Parquet (.parquet), Arrow (.arrow), and folders that save_to_disk of Hugging Face's datasets
    wrote.
    """

    documents: Literal["file", "paragraph", "line", "json"] = "file"
    """What one document is; json: a line, of whose JSON object one field is read. So are .jsonl and
    .ndjson in any case.
    """
    text_field: str = "text"
    """The field of JSON lines, or the column of Parquet and Arrow files, that holds the text."""
    document_bytes: int = 2**20
    """Longer documents are cut at a line's end."""

    def read(self, patterns: Sequence[str], without: Sequence[str] = ()) -> Source:
        """The documents of files, without those of others."""
        if not 1 <= self.document_bytes < 2**31:
            raise DataError(
                f"document_bytes: got {self.document_bytes}; expected at least 1 and below "
                "2**31. Change it."
            )
        return text_source(
            patterns,
            documents=self.documents,
            document_bytes=self.document_bytes,
            text_field=self.text_field,
            skip_damaged=self.skip_damaged,
            without=without,
        )


@dataclass(frozen=True, kw_only=True)
class Conversations(OfFiles):
    """JSON lines with prompt and answer, or with messages of role and content. The answers count in
    the loss, the rest does not; records hold whole conversations.
    """

    output: PathText = "data/files/conversations"

    def read(self, patterns: Sequence[str], without: Sequence[str] = ()) -> Source:
        """The documents of files, without those of others."""
        return conversation_source(patterns, skip_damaged=self.skip_damaged, without=without)


@dataclass(frozen=True, kw_only=True)
class Stdlib(Preparation):
    """The source of this Python's standard library."""

    trained: ClassVar[int] = 4096
    output: PathText = "data/files/stdlib"
    sequence_length: int = 256

    def source(self) -> Source:
        """The documents."""
        return stdlib_source()


@dataclass(frozen=True, kw_only=True)
class Wikipedia(Preparation):
    """A Wikipedia XML dump, bz2 or plain."""

    dump: PathText
    """Such as enwiki-latest-pages-articles.xml.bz2."""
    output: PathText = "data/files/wikipedia"

    def source(self) -> Source:
        """The documents."""
        return wikipedia_source(Path(self.dump))


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
    """Of the tokens; none: the tokenizer's, or GPT-2's, 50257."""
    tokenizer: PathText | None = None
    """The tokenizer.json that made the tokens."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Raises:
        UserError: also where the output does not take what is written.
    """
    name, *words = list(sys.argv[1:] if arguments is None else arguments) or [""]
    if name in ("--help", "-h"):
        print(help_text())
        return 0
    if name not in COMMANDS:
        hint = did_you_mean(name, dict.fromkeys(COMMANDS), listed=True)
        raise ConfigError([f"command: got {name or 'none'}; expected one. {hint}"])
    command = COMMANDS[name]
    options: Any = parse_options(
        words,
        program=f"{_called()} {name}: {command.about}",
        options=command.options,
        words=command.words,
    )
    try:
        return command.run(options)
    except OSError as error:
        if isinstance(error, BrokenPipeError) or error.strerror is None:
            raise
        where = text_of(error.filename or getattr(options, "output", "output"))
        raise DataError(
            f"{where}: got '{error.strerror}'; expected to write there. Nothing was changed: make "
            "room, or choose another --output."
        ) from error


def _called() -> str:
    return called_as("popxl-gpt-prepare", "data/prepare.py")


def help_text() -> str:
    """What there is, one command a line."""
    lines = [f"  {name:<15}{command.about}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"{_called()} COMMAND: turn text into TFRecords for pretraining",
            "",
            *lines,
            "",
            f"{_called()} COMMAND --help tells what each takes.",
        ]
    )


def _prepare(options: Preparation) -> int:
    output = Path(options.output)
    settings = options.settings()
    info = prepare(
        options.source(),
        output,
        settings,
        validation=options.held_out(),
        workers=options.workers,
        overwrite=options.overwrite,
    )
    _show(output, info)
    return 0


def _show(output: Path, info: dict[str, Any]) -> None:
    print(
        f"{output}: sequence length {info['sequence_length']}, vocabulary {info['vocabulary_size']}"
    )
    for name, split in info["splits"].items():
        pattern = output / f"{name}-*.tfrecord"
        counts = ", ".join(f"{split[unit]} {unit}" for unit in ("documents", "tokens", "records"))
        print(f"  {name}: {counts} in {pattern}")
        if split.get("cut"):
            print(
                f"  {name}: {split['cut']} conversations are longer than a record, and cut. A "
                "larger --sequence_length keeps them whole."
            )


def _from_bins(options: FromBins) -> int:
    info = read_bins(
        Path(options.folder),
        Path(options.output),
        sequence_length=options.sequence_length,
        vocabulary_size=options.vocabulary_size,
        tokenizer=None if options.tokenizer is None else Path(options.tokenizer),
        overwrite=options.overwrite,
    )
    _show(Path(options.output), info)
    return 0


def _to_bins(options: ToBins) -> int:
    output = Path(options.output)
    counts = write_bins(Path(options.folder), output, overwrite=options.overwrite)
    for split, count in counts.items():
        print(f"{output / FILES[split]}: {count} tokens")
    return 0


def _check(options: Check) -> int:
    records = 0
    for path in find_files(options.files):
        file = RecordFile(path)
        file.verify()
        records += len(file)
        print(f"{path}: {len(file)} records, all checksums right")
    print(f"{records} records")
    return 0


class Command(NamedTuple):
    """One of the program's commands."""

    about: str
    options: type
    run: Callable[[Any], int]
    words: str | None = None
    """The option that words without a flag go to."""


COMMANDS = {
    "text": Command("prepare text files or JSON lines", Text, _prepare, "inputs"),
    "conversations": Command(
        "prepare JSON lines of prompts and answers", Conversations, _prepare, "inputs"
    ),
    "stdlib": Command("prepare the source of the standard library", Stdlib, _prepare),
    "wikipedia": Command("prepare a Wikipedia XML dump", Wikipedia, _prepare, "dump"),
    "from_bins": Command("turn nanoGPT's files into token files", FromBins, _from_bins, "folder"),
    "to_bins": Command("turn token files into nanoGPT's", ToBins, _to_bins, "folder"),
    "check": Command("check every checksum of TFRecord files", Check, _check, "files"),
}
