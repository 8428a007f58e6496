"""Parquet files: a document of each row, in one column of text."""

from collections.abc import Iterator
from pathlib import Path

from popxl_gpt.data.compression import optional_package
from popxl_gpt.data.errors import DataError
from popxl_gpt.data.records import unreadable

SUFFIX = ".parquet"
ROWS = 1000
"""That are in memory at a time, beside the file's row group."""


def is_parquet(path: Path) -> bool:
    """Whether a file's name says so."""
    return path.suffix == SUFFIX


def read_parquet(path: Path, column: str) -> Iterator[str]:
    """Yield the texts of a column; rows without one count for nothing.

    Raises:
        DataError: there is no such column of text, the file cannot be read, or pyarrow is missing.
    """
    arrow, parquet = (optional_package(name, path) for name in ("pyarrow", "pyarrow.parquet"))
    try:
        with open(path, "rb") as opened, parquet.ParquetFile(opened) as file:
            schema = file.schema_arrow
            kind = schema.field(column).type if column in schema.names else None
            if kind not in (arrow.string(), arrow.large_string()):
                found = ", ".join(f"'{field.name}' ({field.type})" for field in schema) or "none"
                raise DataError(
                    f"{path}: got no text in '{column}' (columns: {found}); expected a column of "
                    "text. Name another --text_field."
                )
            for batch in file.iter_batches(batch_size=ROWS, columns=[column]):
                yield from filter(None, batch.column(0).to_pylist())
    except arrow.ArrowException as error:
        raise DataError(
            f"{path}: got '{str(error).splitlines()[0]}'; expected a whole Parquet file. Restore "
            "it from a copy."
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error
