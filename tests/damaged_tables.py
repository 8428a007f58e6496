"""Tables with random damage, read in a process of their own, which it may end:
`python -m tests.damaged_tables FOLDER SEED COUNT`. Each gives texts that its bytes hold, or is
refused in one sentence. Prints each case before it is read.
"""

import io
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from popxl_gpt.data.conversations import conversation_source
from popxl_gpt.data.sources import text_source
from popxl_gpt.utils.errors import UserError

ROWS = 46
SIZES = (-1, 0, 1, 7, 100, 5000, 2**31 - 1, -(2**31), 2**40, 2**62)
"""What offsets and lengths become."""
NAME = "data-00000-of-00001.arrow"


def table() -> Any:
    """Texts of several types with nulls, and messages, each a slice of a longer column."""
    texts = [None if n % 7 == 3 else f"text {n} of {n * n}; " * (n % 4) for n in range(ROWS)]
    chats = [
        None if n % 5 == 4 else [
            {"role": "user", "content": f"question {n}"},
            {"role": "assistant", "content": f"answer {n}"},
        ]
        for n in range(ROWS)
    ]  # fmt: skip
    columns = {
        "text": pyarrow.array(texts),
        "large": pyarrow.array(texts, pyarrow.large_string()),
        "view": pyarrow.array(texts, pyarrow.string_view()),
        "dictionary": pyarrow.array(texts).dictionary_encode(),
        "messages": pyarrow.array(chats),
        "more": pyarrow.array([[texts[n - 1], texts[n]] for n in range(ROWS)]),
    }
    return pyarrow.table(columns).slice(3, ROWS - 6)


def stream(rows: Any, **options: Any) -> bytes:
    """An Arrow stream."""
    made = io.BytesIO()
    how = pyarrow.ipc.IpcWriteOptions(**options)
    with pyarrow.ipc.new_stream(made, rows.schema, options=how) as writer:
        writer.write_table(rows, max_chunksize=11)
    return made.getvalue()


def file(rows: Any, **options: Any) -> bytes:
    """An Arrow file that is no stream."""
    made = io.BytesIO()
    how = pyarrow.ipc.IpcWriteOptions(**options)
    with pyarrow.ipc.new_file(made, rows.schema, options=how) as writer:
        writer.write_table(rows, max_chunksize=11)
    return made.getvalue()


def parquet(rows: Any, **options: Any) -> bytes:
    """A Parquet file."""
    made = io.BytesIO()
    pyarrow.parquet.write_table(rows, made, row_group_size=11, **options)
    return made.getvalue()


def whole_files() -> "list[tuple[str, bytes, bool]]":
    """Names and contents, and whether texts stand in them as they are."""
    rows = table()
    return [
        (NAME, stream(rows), True),
        (NAME, stream(rows), True),
        (NAME, stream(rows, compression="lz4"), False),
        ("a.arrow", file(rows), True),
        ("a.arrow", file(rows, compression="zstd"), False),
        ("a.parquet", parquet(rows), False),
        ("a.parquet", parquet(rows, compression="none", use_dictionary=False), False),
    ]


def offsets_in(content: bytes) -> "list[int]":
    """Places of numbers that grow a little from one to the next, as offsets do."""
    numbers = np.frombuffer(content[: len(content) // 4 * 4], np.int32).astype(np.int64)
    steps = np.diff(numbers)
    return list(4 * np.flatnonzero((numbers[:-1] > 0) & (steps > 0) & (steps < 100)))


def damaged(content: bytes, offsets: "list[int]", draw: random.Random) -> bytes:
    """Some of its bytes, or numbers, changed."""
    found = bytearray(content)
    for _ in range(draw.choice((1, 2, 20))):
        kind = draw.random()
        if kind < 0.4:
            found[draw.randrange(len(found))] = draw.randrange(256)
            continue
        size = draw.choice((4, 8))
        at = draw.randrange(len(found) // 8) * 8 + draw.choice((0, 4)) * (size == 4)
        if kind < 0.7 and offsets:
            size, at = 4, draw.choice(offsets)
        number = draw.choice(SIZES) & (1 << 8 * size) - 1
        found[at : at + size] = number.to_bytes(size, "little")
    return bytes(found)


def texts_of(path: Path, column: str) -> Iterator[str]:
    """The texts of a column."""
    if column != "messages":
        yield from text_source([str(path)], text_field=column).documents()
        return
    for chat in conversation_source([str(path)]).documents():
        yield from (text.removesuffix("\n") for text, _ in chat)


def main(folder: Path, seed: int, count: int) -> None:
    """Read so many."""
    files = whole_files()
    names = table().schema.names[:-1]
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": NAME}]}))
    for name, content, _ in files:  # undamaged, each gives something
        (folder / name).write_bytes(content)
        for column in names:
            given = folder if name == NAME else folder / name
            assert len(list(texts_of(given, column))) > 20, (name, column)
    offsets = {content: offsets_in(content) for _, content, _ in files}
    outcomes = {"refused": 0, "read": 0}
    for number in range(count):
        draw = random.Random(seed * 1_000_003 + number)
        name, content, is_plain = draw.choice(files)
        content, column = damaged(content, offsets[content], draw), draw.choice(names)
        (folder / name).write_bytes(content)
        told = f"tables, seed {seed}, number {number}: {name}, {column}"
        print(told, flush=True)
        try:
            found = list(texts_of(folder if name == NAME else folder / name, column))
        except UserError as error:
            assert str(folder / name) in str(error) and "\n" not in str(error), f"{told}: {error}"
            outcomes["refused"] += 1
        else:
            for text in found if is_plain else ():
                assert text.encode() in content, f"{told}: {text!r} is not in the file"
            outcomes["read"] += 1
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
