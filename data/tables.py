"""Tables: Parquet files, Arrow files, and the folders that `save_to_disk` of Hugging Face's
`datasets` writes. A document of each row, in one column of text.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from popxl_gpt.config.bounded import read_bounded
from popxl_gpt.config.errors import unreadable
from popxl_gpt.data.compression import optional_package
from popxl_gpt.data.errors import DataError

PARQUET, ARROW = ".parquet", ".arrow"
ROWS = 1000
"""That are in memory at a time, beside the row group of a Parquet file or the batch of an Arrow
file.
"""
STATE, SPLITS = "state.json", "dataset_dict.json"
"""What `save_to_disk` leaves in the folder of a data set, and in that of several splits."""
JSON_BYTES = 2**24
MAGIC = b"ARROW1"
"""First bytes of an Arrow file that is no stream."""
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""Last bytes of a stream. One that was cut off between two batches reads as whole otherwise.
Source: arrow.apache.org/docs/format/Columnar.html, IPC streaming format.
"""


def is_table(path: Path) -> bool:
    """Whether a file's name says so."""
    return path.suffix in (PARQUET, ARROW)


def read_table(path: Path, column: str) -> Iterator[str]:
    """Yield the texts of a column; rows without one count for nothing.

    Raises:
        DataError: there is no such column of text, the file cannot be read, or pyarrow is missing.
    """
    arrow = optional_package("pyarrow", path)
    batches = _parquet_batches if path.suffix == PARQUET else _arrow_batches

    def check(schema: Any) -> None:
        kind = schema.field(column).type if column in schema.names else None
        if kind not in (arrow.string(), arrow.large_string()):
            found = ", ".join(f"'{field.name}' ({field.type})" for field in schema) or "none"
            raise DataError(
                f"{path}: got no text in '{column}' (columns: {found}); expected a column of "
                "text. Name another --text_field."
            )

    try:
        with open(path, "rb") as file:
            for batch in batches(file, path, column, check):
                for start in range(0, len(batch), ROWS):
                    yield from filter(None, batch.slice(start, ROWS).to_pylist())
    except arrow.ArrowException as error:
        raise _damaged(path, str(error).splitlines()[0]) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: got text in '{column}' that is not UTF-8 ({error.reason}); expected UTF-8. "
            "Write the table again with its text in UTF-8, or leave the file out."
        ) from error
    except OSError as error:
        if error.errno is None:  # of pyarrow
            raise _damaged(path, str(error)) from error
        raise unreadable(path, error) from error


def _parquet_batches(
    file: BinaryIO, path: Path, column: str, check: Callable[[Any], None]
) -> Iterator[Any]:
    package = optional_package("pyarrow.parquet", path)
    with package.ParquetFile(file) as opened:
        check(opened.schema_arrow)
        for batch in opened.iter_batches(batch_size=ROWS, columns=[column]):
            yield batch.column(0)


def _arrow_batches(
    file: BinaryIO, path: Path, column: str, check: Callable[[Any], None]
) -> Iterator[Any]:
    package = optional_package("pyarrow.ipc", path)
    is_stream = file.read(len(MAGIC)) != MAGIC
    if is_stream:
        file.seek(-min(len(END_OF_STREAM), path.stat().st_size), 2)
        if file.read() != END_OF_STREAM:
            raise _damaged(path, "no end of the stream")
    file.seek(0)
    with (package.open_stream if is_stream else package.open_file)(file) as opened:
        check(opened.schema)
        if is_stream:
            yield from (batch.column(column) for batch in opened)
            return
        for number in range(opened.num_record_batches):
            yield opened.get_batch(number).column(column)


def _damaged(path: Path, found: str) -> DataError:
    kind = "Parquet" if path.suffix == PARQUET else "Arrow"
    return DataError(
        f"{path}: got '{found}'; expected a whole {kind} file. Restore it from a copy."
    )


def saved_files(folder: Path) -> list[Path] | None:
    """The files of a folder that `save_to_disk` wrote, in their order; None where it is none.

    Raises:
        DataError: it holds several splits, or what it says of itself cannot be used.
    """
    if (folder / SPLITS).is_file():
        splits = _read(folder / SPLITS).get("splits")
        names = [name for name in splits or () if isinstance(name, str)]
        first = next(iter(names), "train")
        raise DataError(
            f"{folder}: got a data set of splits {', '.join(names)}; expected one of them. Give "
            f"{folder / first}, and another as --validation_files."
        )
    if not (folder / STATE).is_file():
        return None
    state = _read(folder / STATE)
    try:
        if state.get("_indices_data_files"):
            raise DataError(
                f"{folder}: got a data set with indices beside its rows, of an old version of "
                "datasets; expected rows in their order. Save it again with a newer one."
            )
        files = [folder / Path(str(file["filename"])).name for file in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise _no_state(folder / STATE) from error
    return files


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_bounded(path, JSON_BYTES))
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise _no_state(path) from error
    if not isinstance(found, dict):
        raise _no_state(path)
    return found


def _no_state(path: Path) -> DataError:
    return DataError(
        f"{path}: got no description of a data set; expected the JSON that save_to_disk of "
        "Hugging Face's datasets writes. Save it again."
    )
