"""Turn text into TFRecords: `python data/prepare.py --help`."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

if __name__ == "__main__":
    if not __package__:  # run by its path: the packages are beside this folder
        sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from popxl_gpt.config.preparing import parse_preparation
    from popxl_gpt.utils.programs import start

    start("popxl_gpt.data.prepare", parse_preparation)

from poprun.cores import usable_cores

from popxl_gpt.config.preparing import (
    CHARACTERS,
    GPT2,
    Check,
    Conversations,
    FromBins,
    OfFiles,
    Preparation,
    Stdlib,
    Text,
    ToBins,
    Wikipedia,
    parse_preparation,
    vocabulary_for,
)
from popxl_gpt.data.conversations import conversation_source
from popxl_gpt.data.merges import gpt2_file
from popxl_gpt.data.nanogpt import FILES, read_bins, write_bins
from popxl_gpt.data.preparation import Settings, prepare
from popxl_gpt.data.records import RecordFile
from popxl_gpt.data.sources import Source, stdlib_source, text_source
from popxl_gpt.data.token_files import find_files
from popxl_gpt.data.tokenisation import load_tokenizer
from popxl_gpt.data.wikipedia import wikipedia_source
from popxl_gpt.utils.errors import DataError, text_of
from popxl_gpt.utils.escaping import one_line
from popxl_gpt.utils.files.hub import hub_hint, tokenizer_file
from popxl_gpt.utils.programs import typed_as
from popxl_gpt.utils.texts import did_you_mean
from popxl_gpt.utils.units import counted

STOPPED = "stopped; the same command goes on."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    return run(parse_preparation(sys.argv[1:] if arguments is None else arguments))


def run(options: Any) -> int:
    """Prepare as asked. Returns the exit code.

    Raises:
        UserError: also where the output does not take what is written.
    """
    command = next(RUN[kind] for kind in type(options).__mro__ if kind in RUN)
    try:
        command(options)
    except OSError as error:
        if isinstance(error, BrokenPipeError) or error.strerror is None:
            raise
        where = text_of(error.filename or getattr(options, "output", "output"))
        raise DataError(
            f"{where}: got '{error.strerror}'; expected to write there. Nothing was changed: make "
            "room, or choose another --output."
        ) from error
    return 0


def _prepare(options: Preparation) -> None:
    settings, output = _settings(options), Path(options.output)
    source, held_out = _sources(options)
    info = prepare(
        source,
        output,
        settings,
        validation=held_out,
        workers=options.workers,
        overwrite=options.overwrite,
    )
    _show(output, info)


def _settings(options: Preparation) -> Settings:
    """What shapes the files."""
    share = Settings.validation if options.validation is None else options.validation
    if isinstance(options, OfFiles) and options.validation_files:
        if options.validation:
            raise DataError(
                f"validation: got {options.validation} and validation_files; expected one of the "
                "two. Leave one out."
            )
        share = 0.0
    vocabulary_size = options.vocabulary_size
    if vocabulary_size is None and options.tokenizer is None:
        vocabulary_size = options.trained
        if options.minutes is not None:
            vocabulary_size = vocabulary_for(options.minutes)
            print(
                f"A vocabulary of {vocabulary_size}, for {options.minutes:g} minutes on "
                f"{counted(usable_cores(), 'core')} (--vocabulary_size {vocabulary_size} keeps it)."
            )
    return Settings(
        sequence_length=options.sequence_length,
        vocabulary_size=vocabulary_size,
        tokenizer=_tokenizer_file(options.tokenizer),
        characters=options.tokenizer == CHARACTERS,
        eos_token=options.eos_token,
        min_tokens=options.min_tokens,
        stride=options.stride,
        tokenizer_bytes=options.tokenizer_bytes,
        validation=share,
        seed=options.seed,
        max_bytes=options.max_bytes,
        shard_bytes=options.shard_bytes,
    )


def _tokenizer_file(named: str | None) -> Path | None:
    if named is None or named == CHARACTERS:
        return None
    if named == GPT2:
        return gpt2_file()
    if not Path(named).exists():
        hint = did_you_mean(named, {CHARACTERS: None, GPT2: None})
        raise DataError(
            f"--tokenizer: got {named}: no such file; expected {CHARACTERS}, {GPT2} or the path of "
            f"a tokenizer.json. {hint or 'Check the path, or leave it out to train one.'}"
            f"{hub_hint(Path(named))}"
        )
    return tokenizer_file(Path(named))


def _sources(options: Preparation) -> tuple[Source, Source | None]:
    """The documents, and those that are given to be held out."""
    if isinstance(options, OfFiles):
        held_out = options.validation_files
        source = _files(options, options.inputs, without=held_out)
        return source, _files(options, held_out) if held_out else None
    if isinstance(options, Wikipedia):
        return wikipedia_source(Path(options.dump)), None
    assert isinstance(options, Stdlib), options
    return stdlib_source(), None


def _files(options: OfFiles, patterns: Sequence[str], without: Sequence[str] = ()) -> Source:
    """The documents of files, without those of others."""
    if isinstance(options, Conversations):
        path = _tokenizer_file(options.tokenizer) if options.chat_template else None
        return conversation_source(
            patterns,
            skip_damaged=options.skip_damaged,
            without=without,
            tokenizer=None if path is None else load_tokenizer(path, options.eos_token),
        )
    assert isinstance(options, Text), options
    if not 1 <= options.document_bytes < 2**31:
        raise DataError(
            f"document_bytes: got {options.document_bytes}; expected at least 1 and below "
            "2**31. Change it."
        )
    if options.plain_text and options.documents == "json":
        raise DataError(
            "plain_text: got true and --documents json; expected one of the two. Leave one out."
        )
    return text_source(
        patterns,
        documents=options.documents,
        document_bytes=options.document_bytes,
        text_field=options.text_field,
        plain_text=options.plain_text,
        skip_damaged=options.skip_damaged,
        without=without,
    )


def _show(output: Path, info: dict[str, Any]) -> None:
    """Print what was prepared, and a command that trains on it."""
    print(
        f"{output}: sequence length {info['sequence_length']}, vocabulary {info['vocabulary_size']}"
    )
    for name, split in info["splits"].items():
        pattern = output / f"{name}-*.tfrecord"
        units = ("document", "token", "record")
        counts = ", ".join(counted(split[f"{unit}s"], unit) for unit in units)
        print(f"  {name}: {counts} in {pattern}")
        if split.get("cut"):
            print(
                f"  {name}: {counted(split['cut'], 'conversation')} longer than a record, and cut. "
                "A larger --sequence_length keeps all whole."
            )
        if inside := split.get("ended_inside"):
            print(
                f"  {name}: {counted(inside, 'conversation')} with the token that ends documents "
                "inside, where --document_attention would part them. Name another with --eos_token."
            )
    program = typed_as("popxl-gpt-train", "python demo/pretraining.py")
    is_parted = any("ended_inside" in split for split in info["splits"].values())
    apart = "" if is_parted else "--document_attention "
    begin = (
        "--config RUN/config.yml --init_from RUN --masked_labels "
        f"{apart}--sequence_length {info['sequence_length']}"
        if info.get("masked")
        else "--config demo"
    )
    validation = [] if "validation" in info["splits"] else ["--validate_every 0"]
    data = f"--input_files {quote(str(output))}"
    print(f"Train on it: {' '.join([program, begin, data, *validation])}")


def _from_bins(options: FromBins) -> None:
    info = read_bins(
        Path(options.folder),
        Path(options.output),
        sequence_length=options.sequence_length,
        vocabulary_size=options.vocabulary_size,
        tokenizer=None if options.tokenizer is None else Path(options.tokenizer),
        eos_token=options.eos_token,
        overwrite=options.overwrite,
    )
    _show(Path(options.output), info)


def _to_bins(options: ToBins) -> None:
    output = Path(options.output)
    counts = write_bins(Path(options.folder), output, overwrite=options.overwrite)
    for split, count in counts.items():
        print(f"{output / FILES[split]}: {counted(count, 'token')}")


def _check(options: Check) -> None:
    records, damaged = 0, 0
    first: DataError | None = None
    for path in find_files(options.files, of_all_splits=True):
        file, here = RecordFile(path), 0
        for error in file.damaged():
            first, here = first or error, here + 1
        told = f"{here} damaged" if here else "all checksums right"
        print(one_line(f"{path}: {counted(len(file), 'record')}, {told}"))
        records, damaged = records + len(file), damaged + here
    print(counted(records, "record"))
    if first is not None:
        more = f" It is the first of {damaged} damaged records." if damaged > 1 else ""
        raise DataError(f"{first}{more}")


RUN: dict[type, Callable[[Any], None]] = {
    Preparation: _prepare,
    FromBins: _from_bins,
    ToBins: _to_bins,
    Check: _check,
}
"""What a command does, by what it takes."""
