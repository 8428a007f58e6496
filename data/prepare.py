"""Turn text into TFRecords: `python data/prepare.py text|stdlib|wikipedia|check --help`."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

# The repository, as this file is run by its path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # while modules load, Ctrl-C ends the process without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from config import exit_on_user_error
from config.errors import text_of
from config.texts import path_text, shown_text
from data.dataset import find_files
from data.errors import DataError
from data.preparation import Settings, prepare
from data.records import RecordFile
from data.sources import Source, stdlib_source, text_source
from data.wikipedia import wikipedia_source


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command line and return the exit code.

    Raises:
        UserError: also where the output does not take what is written.
    """
    parser, words = _parser(), list(sys.argv[1:] if arguments is None else arguments)
    for word in words:
        if word.startswith("--") and word.endswith("=--"):  # argparse takes it for an empty list
            parser.error(f"argument {word.removesuffix('=--')}: got '--'; expected a value")
    options = parser.parse_args(words)
    try:
        code: int = options.run(options)
    except OSError as error:
        if isinstance(error, BrokenPipeError) or error.strerror is None:
            raise
        where = text_of(error.filename or options.__dict__.get("output", "output"))
        raise DataError(
            f"{where}: got '{error.strerror}'; expected to write there. Nothing was changed: make "
            "room, or choose another --output."
        ) from error
    return code


def _prepare(options: argparse.Namespace) -> int:
    trained = (
        options.vocabulary_size
        if options.vocabulary_size or options.tokenizer
        else options.default_vocabulary
    )
    settings = Settings(
        sequence_length=options.sequence_length,
        vocabulary_size=trained,
        tokenizer=options.tokenizer,
        tokenizer_bytes=options.tokenizer_bytes,
        validation=options.validation,
        seed=options.seed,
        max_bytes=options.max_bytes,
        shard_bytes=options.shard_bytes,
    )
    source = options.source(options)
    info = prepare(
        source, options.output, settings, workers=options.workers, overwrite=options.overwrite
    )
    print(
        f"{options.output}: sequence length {info['sequence_length']}, vocabulary "
        f"{info['vocabulary_size']}"
    )
    for name, split in info["splits"].items():
        pattern = options.output / f"{name}-*.tfrecord"
        counts = ", ".join(f"{split[unit]} {unit}" for unit in ("documents", "tokens", "records"))
        print(f"  {name}: {counts} in {pattern}")
    return 0


def _check(options: argparse.Namespace) -> int:
    records = 0
    for path in find_files(options.files):
        file = RecordFile(path)
        file.verify()
        records += len(file)
        print(f"{path}: {len(file)} records, all checksums right")
    print(f"{records} records")
    return 0


def _text(options: argparse.Namespace) -> Source:
    if not 1 <= options.document_bytes < 2**31:
        raise DataError(
            f"document_bytes: got {options.document_bytes}; expected at least 1 and below "
            "2**31. Change it."
        )
    return text_source(
        options.inputs, documents=options.documents, document_bytes=options.document_bytes
    )


def _wikipedia(options: argparse.Namespace) -> Source:
    return wikipedia_source(options.dump)


def _path(text: str) -> Path:
    """A path of the command line."""
    return Path(_pattern(text))


def _pattern(text: str) -> str:
    """A path or glob of the command line."""
    try:
        return path_text(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}. Correct the path.") from error


def _whole_number(text: str) -> int:
    """A number of the command line; none of them needs more than 64 bits."""
    try:
        number = int(text)
    except ValueError:
        number = 2**63
    if not -(2**63) <= number < 2**63:
        raise argparse.ArgumentTypeError(
            f"got {shown_text(text)}; expected a whole number below 2**63"
        )
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="data/prepare.py", description="Turn text into TFRecords for pretraining."
    )
    commands = parser.add_subparsers(required=True, metavar="text|stdlib|wikipedia|check")

    text = _command(commands, "text", "UTF-8 text files, folders or globs", _text, (1024, 50257))
    text.add_argument("inputs", nargs="+", type=_pattern, help="files, folders or quoted globs")
    text.add_argument(
        "--documents",
        choices=("file", "paragraph", "line"),
        default="file",
        help="what one document is",
    )
    text.add_argument(
        "--document_bytes",
        type=_whole_number,
        default=2**20,
        help="longer documents are cut at a line's end",
    )

    _command(
        commands,
        "stdlib",
        "the source of the standard library",
        lambda _: stdlib_source(),
        (256, 4096),
    )

    wikipedia = _command(
        commands, "wikipedia", "a Wikipedia XML dump, bz2 or plain", _wikipedia, (1024, 50257)
    )
    wikipedia.add_argument("dump", type=_path, help="…-pages-articles.xml.bz2")

    check = commands.add_parser(
        "check", help="check every checksum of TFRecord files", allow_abbrev=False
    )
    check.add_argument(
        "files", nargs="+", type=_pattern, help="TFRecord files, folders or quoted globs"
    )
    check.set_defaults(run=_check)
    return parser


def _command(
    commands: Any,
    name: str,
    about: str,
    source: Callable[[argparse.Namespace], Source],
    defaults: tuple[int, int],
) -> argparse.ArgumentParser:
    sequence_length, vocabulary_size = defaults
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        description=f"Prepare {about}.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(run=_prepare, source=source, default_vocabulary=vocabulary_size)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add = parser.add_argument
    add(
        "--output",
        type=_path,
        default=Path("data/files") / name,
        help="folder to make; it appears when it is complete",
    )
    add(
        "--sequence_length",
        type=_whole_number,
        default=sequence_length,
        help="tokens per sample; a record has one more",
    )
    add(
        "--vocabulary_size",
        type=_whole_number,
        help=f"of the tokenizer to train, {vocabulary_size} unless there is --tokenizer",
    )
    add("--tokenizer", type=_path, help="use this tokenizer.json instead of training one")
    add(
        "--tokenizer_bytes",
        type=_whole_number,
        default=Settings.tokenizer_bytes,
        help="bytes of text to train the tokenizer on",
    )
    add(
        "--validation",
        type=float,
        default=Settings.validation,
        help="share of the documents to hold out",
    )
    add(
        "--seed",
        type=_whole_number,
        default=Settings.seed,
        help="chooses the order and the held-out documents",
    )
    add("--max_bytes", type=_whole_number, help="stop reading after this many bytes of text")
    add(
        "--shard_bytes",
        type=_whole_number,
        default=Settings.shard_bytes,
        help="start another file after this many bytes",
    )
    add(
        "--workers",
        type=_whole_number,
        default=cores,
        help="processes that tokenise; they do not change the result",
    )
    add(
        "--overwrite",
        action="store_true",
        help="replace an output folder prepared from something else",
    )
    return parser


if __name__ == "__main__":
    with exit_on_user_error(stopped="stopped; nothing half-made is left."):
        sys.exit(main())
