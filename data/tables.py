"""Tables: Parquet files, Arrow files, and the folders that `save_to_disk` of Hugging Face's
`datasets` writes. A document of each row.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from popxl_gpt.data.compression import optional_package
from popxl_gpt.data.errors import NoTextError
from popxl_gpt.data.rows import Documents, Rows, chosen_columns
from popxl_gpt.utils.errors import DataError, unreadable
from popxl_gpt.utils.files.bounded import read_object
from popxl_gpt.utils.texts import shown_text

PARQUET, ARROW = ".parquet", ".arrow"
ROWS = 1000
"""Rows that are in memory at a time, beside the row group of a Parquet file or the batch of an
Arrow file.
"""
TEXT_TYPES = (
    "string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null",
)  # fmt: skip
"""Types of columns that may be text: bytes of UTF-8 are, and a shard may have nothing but nulls."""
STATE, SPLITS = "state.json", "dataset_dict.json"
"""What `save_to_disk` leaves in the folder of a data set, and in that of several splits."""
JSON_BYTES = 2**24
NO_STATE = (
    "got no description of a data set; expected the JSON that save_to_disk of Hugging Face's "
    "datasets writes. Save it again."
)
MAGIC = b"ARROW1"
"""First bytes of an Arrow file that is no stream."""
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""Last bytes of a stream. One that was cut off between two batches reads as whole otherwise.
Source: arrow.apache.org/docs/format/Columnar.html, IPC streaming format.
"""


def is_table(path: Path) -> bool:
    """Whether a file's name says so."""
    return path.suffix.lower() in (PARQUET, ARROW)


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == PARQUET


def table_rows(path: Path, documents: Documents[Any]) -> Rows:
    """Yield a file's rows, with the columns that are needed. Each batch is validated before: what
    Arrow reads from a damaged one may be another memory's bytes, or end the process.

    Raises:
        NoTextError: it lacks them, or is damaged.
        DataError: it cannot be read, or pyarrow is missing.
    """
    arrow = optional_package("pyarrow", path)
    batches = _parquet_batches if _is_parquet(path) else _arrow_batches

    def columns(schema: Any) -> Sequence[str]:
        kinds = [field.type for field in schema]
        texts = {name: _may_be_text(arrow, kind) for name, kind in zip(schema.names, kinds)}
        return chosen_columns(path, schema.names, documents, texts, [str(kind) for kind in kinds])

    number = 0
    try:
        with arrow.OSFile(os.fspath(path)) as file:
            for batch, names in batches(file, path, columns):
                _validate(arrow, path, batch)
                for start in range(0, batch.num_rows, ROWS):
                    part = batch.slice(start, ROWS)
                    lists = [_values(path, name, part.column(name)) for name in names]
                    for values in zip(*lists):
                        number += 1
                        yield f"row {number}", dict(zip(names, values))
    except DataError:
        raise
    # pyarrow finds damage as errors of these kinds; one of memory is a size that none has
    except (arrow.ArrowException, MemoryError, ValueError) as error:
        raise _damaged(path, (str(error).splitlines() or [type(error).__name__])[0]) from error
    except OSError as error:
        if error.errno is None:  # of pyarrow
            raise _damaged(path, str(error).splitlines()[0]) from error
        raise unreadable(path, error) from error


def _may_be_text(arrow: Any, kind: Any) -> bool:
    """Whether a column of a type has text, or nothing but nulls, as in a shard without any."""
    if isinstance(kind, arrow.BaseExtensionType):
        return _may_be_text(arrow, kind.storage_type)
    if isinstance(kind, (arrow.DictionaryType, arrow.RunEndEncodedType)):
        return _may_be_text(arrow, kind.value_type)
    return str(kind) in TEXT_TYPES


def _validate(arrow: Any, path: Path, batch: Any) -> None:
    batch.validate()
    for name, column in zip(batch.schema.names, batch.columns):
        try:
            column.validate(full=True)
        except arrow.ArrowInvalid as error:
            if "UTF8" not in str(error):
                raise
            raise _no_utf8(path, name, "invalid bytes") from error


def _values(path: Path, name: str, column: Any) -> list[Any]:
    """A column's values; bytes are text."""
    try:
        return [
            value.decode() if isinstance(value, bytes) else value for value in column.to_pylist()
        ]
    except UnicodeDecodeError as error:
        raise _no_utf8(path, name, error.reason) from error


def _no_utf8(path: Path, name: str, reason: str) -> NoTextError:
    return NoTextError(
        f"{path}: got text in {shown_text(name)} that is not UTF-8 ({reason}); expected UTF-8. "
        "Write the table again with its text in UTF-8, or leave the file out."
    )


def _parquet_batches(
    file: Any, path: Path, columns: Callable[[Any], Sequence[str]]
) -> Iterator[tuple[Any, Sequence[str]]]:
    package = optional_package("pyarrow.parquet", path)
    with package.ParquetFile(file, page_checksum_verification=True) as opened:
        names = columns(opened.schema_arrow)
        for batch in opened.iter_batches(batch_size=ROWS, columns=list(names)):
            yield batch, names


def _arrow_batches(
    file: Any, path: Path, columns: Callable[[Any], Sequence[str]]
) -> Iterator[tuple[Any, Sequence[str]]]:
    package = optional_package("pyarrow.ipc", path)
    is_stream = file.read(len(MAGIC)) != MAGIC
    if is_stream:
        file.seek(file.size() - min(len(END_OF_STREAM), file.size()))
        if file.read() != END_OF_STREAM:
            raise _damaged(path, "no end of the stream")
    file.seek(0)
    with (package.open_stream if is_stream else package.open_file)(file) as opened:
        names = columns(opened.schema)
        if is_stream:
            yield from ((batch, names) for batch in opened)
            return
        for number in range(opened.num_record_batches):
            yield opened.get_batch(number), names


def _damaged(path: Path, found: str) -> NoTextError:
    kind = "Parquet" if _is_parquet(path) else "Arrow"
    return NoTextError(
        f"{path}: got {found!r}; expected a whole {kind} file. Restore it from a copy."
    )


def saved_files(folder: Path) -> list[Path] | None:
    """The files of a folder that `save_to_disk` wrote, in their order; None where it is none.

    Raises:
        DataError: it holds several splits, or what it says of itself cannot be used.
    """
    if (folder / SPLITS).is_file():
        splits = (read_object(folder / SPLITS, JSON_BYTES, NO_STATE) or {}).get("splits")
        names = [name for name in splits or () if isinstance(name, str)]
        first = next(iter(names), "train")
        raise DataError(
            f"{folder}: got a data set of splits {', '.join(names)}; expected one of them. Give "
            f"{folder / first}, and another as --validation_files."
        )
    if not (folder / STATE).is_file():
        return None
    state = read_object(folder / STATE, JSON_BYTES, NO_STATE) or {}
    try:
        if state.get("_indices_data_files"):
            raise DataError(
                f"{folder}: got a data set with indices beside its rows, of an old version of "
                "datasets; expected rows in their order. Save it again with a newer one."
            )
        files = [folder / Path(str(file["filename"])).name for file in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError(f"{folder / STATE}: {NO_STATE}") from error
    return files
