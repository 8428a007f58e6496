"""The token files of nanoGPT, in both directions: `train.bin` and `val.bin`, tokens as uint16,
little endian. Source: github.com/karpathy/nanoGPT, data/openwebtext/prepare.py.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from popxl_gpt.data.dataset import TokenDataset
from popxl_gpt.data.dataset_info import read_info
from popxl_gpt.data.preparation import FORMAT, OWN, Settings
from popxl_gpt.data.splits import write_split
from popxl_gpt.data.tokenisation import load_tokenizer
from popxl_gpt.utils.errors import DataError, unreadable
from popxl_gpt.utils.files.bounded import read_bounded
from popxl_gpt.utils.files.folders import check_replaceable, partial_folder, publish
from popxl_gpt.utils.files.plain import check_plain, create_plain, write_plain

FILES = {"validation": "val.bin", "train": "train.bin"}
"""Name of each split's file."""
TYPE = np.dtype("<u2")
BLOCK = 2**22
"""Tokens that are in memory at a time."""
GPT2_VOCABULARY = 50257
META, META_BYTES = "meta.pkl", 2**22
"""What nanoGPT keeps beside tokens that are no GPT-2's: a pickled dictionary, which is not
unpickled, for that may run what it likes.
"""
META_SIZE = re.compile(
    rb"(?:\x8c\n|X\n\0\0\0)vocab_size(?:\x94|q.|r.{4})?(?:K(.)|M(..)|J(.{4}))", re.DOTALL
)
"""Its entry of the vocabulary's size: a text, perhaps remembered, and a number of 1, 2 or 4 bytes.
Source: Lib/pickletools.py of Python, protocols 2 to 5.
"""


def read_bins(
    folder: Path,
    output: Path,
    *,
    sequence_length: int = 1024,
    vocabulary_size: int | None = None,
    tokenizer: Path | None = None,
    eos_token: str | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Turn nanoGPT's files into a folder of TFRecords; returns the content of its `dataset.json`.

    Args:
        folder: holds `train.bin`, and `val.bin` if there is one.
        vocabulary_size: of the tokens; None: the tokenizer's, that of the folder's `meta.pkl`, or
            GPT-2's, 50257, of which the last one ends documents.
        tokenizer: a tokenizer.json that made the tokens.
        eos_token: its token that ends documents; None: as of `TextTokenizer`.
    Raises:
        DataError: files that cannot be read or have other tokens, or an output that is there.
    """
    made_by = None if tokenizer is None else load_tokenizer(tokenizer, eos_token)
    known = None if made_by is None else made_by.classes
    told = None if vocabulary_size or known else _meta_size(folder / META)
    size = vocabulary_size or known or told or GPT2_VOCABULARY
    if known is not None and known > size:
        raise DataError(
            f"vocabulary_size: got {size}; expected at least the tokenizer's {known}. Raise it."
        )
    _check_output(output, "dataset.json", OWN, overwrite)
    settings = Settings(sequence_length=sequence_length, vocabulary_size=max(size, 257))
    splits: dict[str, Any] = {}
    with partial_folder(output) as partial:
        for split, name in FILES.items():
            if split == "train" or (folder / name).exists():
                tokens = _tokens(folder / name, size)
                written = write_split(split, tokens, partial, **settings.records)
                splits[split] = {**written, "documents": 1}
        info = {
            "format": FORMAT,
            "sequence_length": sequence_length,
            "vocabulary_size": size,
            "splits": splits,
        }
        if made_by is not None:
            info |= {"tokenizer": "tokenizer.json", "end_of_text": made_by.end}
            made_by.save(partial)
        elif vocabulary_size is None and told is None:
            info["end_of_text"] = GPT2_VOCABULARY - 1
        write_plain(partial / "dataset.json", json.dumps(info, indent=2) + "\n")
        publish(partial, output, overwrite=overwrite)
    return info


def write_bins(folder: Path, output: Path, *, overwrite: bool = False) -> dict[str, int]:
    """Turn a folder that preparation made into nanoGPT's files; returns the tokens of each split.

    Raises:
        DataError: it is no such folder, has tokens that 16 bits do not hold, or is damaged.
    """
    info = read_info(folder)
    if info is None or "sequence_length" not in info:
        raise DataError(
            f"{folder}: got no folder with a dataset.json; expected one that data/prepare.py made."
        )
    if info.get("masked"):
        raise DataError(
            f"{folder}: got conversations, of which only answers count; expected plain text, for "
            "nanoGPT's files have no masks. Prepare the text with data/prepare.py text."
        )
    if info["vocabulary_size"] > 2**16:
        raise DataError(
            f"{folder}: got vocabulary_size {info['vocabulary_size']}; expected at most 65536, for "
            "nanoGPT's files have 16 bits a token. Prepare with a smaller one."
        )
    own = "|".join(map(re.escape, FILES.values()))
    _check_output(output, FILES["train"], own, overwrite)
    counts = {}
    with partial_folder(output) as partial:
        for split, name in FILES.items():
            if split in info["splits"]:
                files = [folder / file["name"] for file in info["splits"][split]["files"]]
                length = info["sequence_length"]
                data = TokenDataset(files, length, info["vocabulary_size"], stride=length)
                counts[split] = _write(data, partial / name)
        publish(partial, output, overwrite=overwrite)
    return counts


def _meta_size(path: Path) -> int | None:
    """The size of the vocabulary that nanoGPT keeps beside tokens; None where it keeps nothing."""
    try:
        content = read_bounded(path, META_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from error
    found = {int.from_bytes(b"".join(sizes), "little") for sizes in META_SIZE.findall(content)}
    if len(found) != 1 or not 0 < min(found) <= 2**16:
        raise DataError(
            f"{path}: got no vocab_size that is read without unpickling; expected nanoGPT's. Give "
            "the --vocabulary_size of the tokens."
        )
    return found.pop()


def _check_output(output: Path, mark: str, own: str, overwrite: bool) -> None:
    """Refuse a folder that is there, unless it is to be replaced and holds what this makes, and
    nothing else.
    """
    if not output.exists():
        return
    if not overwrite or not (output / mark).is_file():
        raise DataError(
            f"{output}: got a folder that is there; expected a new one"
            + (f", or one with {mark}" if overwrite else "")
            + ". Change --output."
        )
    check_replaceable(output, own, "this command")


def _tokens(path: Path, vocabulary_size: int) -> Iterator[np.ndarray]:
    """Yield a file's tokens in pieces, uint32 [tokens]."""
    try:
        size = check_plain(path).st_size
        if size % TYPE.itemsize:
            raise DataError(
                f"{path}: got {size} bytes; expected two for each token. The file "
                "was cut off or is of another kind."
            )
        with open(path, "rb") as file:
            start = 0
            while content := file.read(BLOCK * TYPE.itemsize):
                tokens = np.frombuffer(content, TYPE).astype(np.uint32)
                if tokens.max() >= vocabulary_size:
                    place = int(np.argmax(tokens >= vocabulary_size))
                    raise DataError(
                        f"{path}: got token {tokens[place]} at byte {2 * (start + place)}; "
                        f"expected at most {vocabulary_size - 1}. Give the --vocabulary_size of "
                        "the tokens."
                    )
                start += tokens.size
                yield tokens
    except OSError as error:
        raise unreadable(path, error) from error


def _write(data: TokenDataset, path: Path) -> int:
    """Write every token of a split once. Returns how many."""
    count = 0
    with open(create_plain(path), "wb") as file:
        for start in range(0, len(data), 256):
            samples = np.arange(start, min(start + 256, len(data)))
            rows, counted = data.read(samples), data.counted(samples)
            parts = [row[1 + begin : 1 + end] for row, (begin, end) in zip(rows, counted)]
            if start == 0:
                parts.insert(0, rows[0][:1])
            tokens = np.concatenate(parts)
            file.write(tokens.astype(TYPE).tobytes())
            count += tokens.size
    return count
