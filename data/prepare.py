"""Turn text into TFRecords: `python data/prepare.py text|stdlib|wikipedia|check --help`."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The repository, as this file is run by its path.

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while modules load, Ctrl-C ends the process without a traceback

from config import hear_ctrl_c
from data.dataset import find_files
from data.errors import DataError
from data.preparation import Settings, prepare
from data.records import RecordFile
from data.sources import Source, stdlib_source, text_source
from data.wikipedia import wikipedia_source

MISTAKE = 2
"""Exit code for what the user can put right."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = _parser().parse_args(arguments)
    hear_ctrl_c()
    try:
        code: int = options.run(options)
        return code
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        where = error.filename or options.__dict__.get("output", "preparation")
        print(
            f"error: {where}: got '{error.strerror or error}'; expected to write there. Nothing was changed: "
            "make room, or choose another --output.",
            file=sys.stderr,
        )
    except KeyboardInterrupt:
        print("stopped; nothing half-made is left.", file=sys.stderr)
        return 130
    return MISTAKE


def _prepare(options: argparse.Namespace) -> int:
    trained = options.vocabulary_size if options.vocabulary_size or options.tokenizer else options.default_vocabulary
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
    info = prepare(source, options.output, settings, workers=options.workers, overwrite=options.overwrite)
    print(f"{options.output}: sequence length {info['sequence_length']}, vocabulary {info['vocabulary_size']}")
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
    if options.document_bytes < 1:
        raise DataError(f"document_bytes: got {options.document_bytes}; expected at least 1. Raise it.")
    return text_source(options.inputs, documents=options.documents, document_bytes=options.document_bytes)


def _wikipedia(options: argparse.Namespace) -> Source:
    return wikipedia_source(options.dump)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="data/prepare.py", description="Turn text into TFRecords for pretraining.")
    commands = parser.add_subparsers(required=True, metavar="text|stdlib|wikipedia|check")

    text = _command(commands, "text", "UTF-8 text files, folders or globs", _text, (1024, 50257))
    text.add_argument("inputs", nargs="+", help="files, folders or quoted globs")
    text.add_argument("--documents", choices=("file", "paragraph", "line"), default="file", help="what one document is")
    text.add_argument("--document_bytes", type=int, default=2**20, help="longer documents are cut at a line's end")

    _command(commands, "stdlib", "the source of the standard library", lambda _: stdlib_source(), (256, 4096))

    wikipedia = _command(commands, "wikipedia", "a Wikipedia XML dump, bz2 or plain", _wikipedia, (1024, 50257))
    wikipedia.add_argument("dump", type=Path, help="…-pages-articles.xml.bz2")

    check = commands.add_parser("check", help="check every checksum of TFRecord files", allow_abbrev=False)
    check.add_argument("files", nargs="+", help="TFRecord files, folders or quoted globs")
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
    add("--output", type=Path, default=Path("data/files") / name, help="folder to make; it appears when it is complete")
    add("--sequence_length", type=int, default=sequence_length, help="tokens per sample; a record has one more")
    add(
        "--vocabulary_size",
        type=int,
        help=f"of the tokenizer to train, {vocabulary_size} unless there is --tokenizer",
    )
    add("--tokenizer", type=Path, help="use this tokenizer.json instead of training one")
    add("--tokenizer_bytes", type=int, default=Settings.tokenizer_bytes, help="bytes of text to train the tokenizer on")
    add("--validation", type=float, default=Settings.validation, help="share of the documents to hold out")
    add("--seed", type=int, default=Settings.seed, help="chooses the order and the held-out documents")
    add("--max_bytes", type=int, help="stop reading after this many bytes of text")
    add("--shard_bytes", type=int, default=Settings.shard_bytes, help="start another file after this many bytes")
    add("--workers", type=int, default=cores, help="processes that tokenise; they do not change the result")
    add("--overwrite", action="store_true", help="replace an output folder prepared from something else")
    return parser


if __name__ == "__main__":
    sys.exit(main())
