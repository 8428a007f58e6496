"""GPT-2's byte-level BPE from its list of merges: `vocab.bpe` of its release, which tiktoken keeps,
or `merges.txt` of Hugging Face's.

Tokens are numbered by the list alone: first the bytes, those that print before the others, then
what each merge makes, then the end of text. Source: github.com/openai/gpt-2, src/encoder.py, and
github.com/openai/tiktoken, tiktoken/load.py.
"""

import hashlib
import os
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from popxl_gpt.data.encoding import byte_names
from popxl_gpt.utils.errors import DataError

MERGES = b"#version"
"""How a list of merges begins."""
ADDRESS = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
"""The address from which tiktoken gets the file; it keeps it under its hash."""
CACHES = ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR")
"""Variables that name the folder in which tiktoken keeps files, the first that is set."""
FOLDER = "data-gym-cache"
"""Name of the folder in the one for temporary files, where neither is set."""
SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
"""Hash of the file, as tiktoken has it."""


def gpt2_file() -> Path:
    """The file of GPT-2's merges that tiktoken keeps.

    Raises:
        DataError: it is not there, or another file is.
    """
    named = next((os.environ[name] for name in CACHES if name in os.environ), None)
    folder = Path(tempfile.gettempdir()) / FOLDER if named is None else Path(named)
    path = folder / hashlib.sha1(ADDRESS.encode()).hexdigest()
    how = (
        "Where there is a network, python -c 'import tiktoken; tiktoken.get_encoding(\"gpt2\")' "
        "puts it there; or give --tokenizer a vocab.bpe, merges.txt or tokenizer.json."
    )
    if not path.is_file():
        raise DataError(
            f"tokenizer: got gpt2, and no file {path}; expected GPT-2's vocab.bpe, as tiktoken "
            f"keeps it. {how}"
        )
    if hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        raise DataError(f"{path}: got another file than GPT-2's vocab.bpe. Remove it. {how}")
    return path


def merges_tokenizer(content: bytes, path: Path, end_of_text: str) -> Tokenizer:
    """Make a tokenizer of a list of merges.

    Args:
        content: of the file.
        path: names it in errors.
        end_of_text: the last token.
    Raises:
        DataError: a line is no merge of two tokens before it.
    """
    # those that print stand for themselves, and come first
    names = sorted(byte_names(), key=lambda name: (ord(name) >= 256, ord(name)))
    vocabulary = {name: number for number, name in enumerate(names)}
    merges: list[tuple[str, str]] = []
    try:
        lines = content.decode("utf-8").splitlines()[1:]
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: got bytes that are not UTF-8; expected merges.") from error
    for number, line in enumerate(lines, 2):
        pair = tuple(line.split(" "))
        if not line:
            continue
        if len(pair) != 2 or not vocabulary.keys() >= set(pair):
            raise DataError(
                f"{path}, line {number}: got {line[:80]!r}; expected two tokens that are bytes or "
                "made by lines before. Get the file again."
            )
        merges.append((pair[0], pair[1]))
        vocabulary.setdefault("".join(pair), len(vocabulary))
    tokenizer = Tokenizer(models.BPE({**vocabulary, end_of_text: len(vocabulary)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(end_of_text, normalized=False, special=True)])
    return tokenizer
