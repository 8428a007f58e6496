"""Text to tokens: training a byte-level BPE tokenizer, and tokenising in parallel with the results
in input order.
"""

import json
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from popxl_gpt.data.conversations import Conversation, Written, text_of
from popxl_gpt.data.encoding import Encoder
from popxl_gpt.data.masking import masked
from popxl_gpt.data.merges import MERGES, merges_tokenizer
from popxl_gpt.data.text_tokenizer import END_OF_TEXT, TextTokenizer
from popxl_gpt.utils.errors import DataError, EndedError, unreadable
from popxl_gpt.utils.files.bounded import read_bounded
from popxl_gpt.utils.files.hub import foreign_tokenizer, tokenizer_file
from popxl_gpt.utils.pools import end_with_parent

UNKNOWN = "\ufffd"
"""Stands for characters that a tokenizer of characters lacks."""
TOKENIZER_BYTES = 2**28
"""Largest size of a tokenizer.json; those of a million tokens have less."""
PIECES = (decoders.ByteLevel, decoders.Fuse)
"""Decoders of tokenizers whose tokens are pieces of the text."""
SMALLEST_VOCABULARY = 257
"""One token per byte, and the end of text."""

_BATCH_CHARACTERS = 2**20
_IN_FLIGHT = 2

Clean = Callable[[str], str] | None
Document = str | Conversation
Encoded = tuple[np.ndarray, np.ndarray]
"""All tokens of a batch of documents, uint32 [tokens], and the count of each, int64 [documents]."""


def train_tokenizer(documents: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """Train byte-level BPE as GPT-2's: `vocabulary_size` tokens, fewer if there are no more;
    `END_OF_TEXT` is 0.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def character_tokenizer(documents: Iterable[str]) -> Tokenizer:
    """Make a tokenizer with a token for each character of the documents, in their order by code.
    `END_OF_TEXT` is 0; 1 stands for every other character.
    """
    characters: set[str] = set()
    for document in documents:
        characters.update(document)
    names = [END_OF_TEXT, UNKNOWN, *sorted(characters - {UNKNOWN})]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def load_tokenizer(path: Path, end: str | None = None) -> TextTokenizer:
    """Read a tokenizer.json, or a folder's, with what stands beside it, or a list of merges (see
    `merges`).

    Args:
        end: as of `TextTokenizer`. There must be one.
    """
    path, content = tokenizer_file(path), b""
    try:
        content = read_bounded(path, TOKENIZER_BYTES)
        if content.startswith(MERGES):
            return TextTokenizer(merges_tokenizer(content, path, END_OF_TEXT), str(path), end=end)
        library = Tokenizer.from_str(content.decode("utf-8"))
        tokenizer = TextTokenizer.beside(library, path, end)
    except OSError as error:
        raise unreadable(path, error) from error
    except (KeyboardInterrupt, SystemExit, DataError):
        raise
    # the tokenizers package raises nothing narrower, and panics are no Exception
    except BaseException as error:
        told = foreign_tokenizer(content)
        told = told or f"'{error}'; expected a tokenizer.json. Check the file."
        raise DataError(f"{path}: got {told}") from error
    if tokenizer.end is None:
        raise DataError(
            f"{path}: got no token '{END_OF_TEXT}', and no eos_token in a file of its model beside "
            "it; expected a token to end documents. Name one with --eos_token."
        )
    return tokenizer


def token_bytes(tokenizer: Tokenizer | TextTokenizer) -> np.ndarray | None:
    """Return how many bytes of UTF-8 each token stands for, float64 [tokens]; those that no text
    has, such as the end of documents, stand for none, and one for all that a tokenizer of
    characters lacks for NaN. None for a tokenizer whose tokens are not pieces of the text, one
    after the other, or not all of it.
    """
    if isinstance(tokenizer, TextTokenizer):
        sizes = token_bytes(tokenizer.library)
        if sizes is not None and tokenizer.end is not None:
            sizes[tokenizer.end] = 0
        return sizes
    vocabulary = tokenizer.get_vocab()
    has_bytes = isinstance(tokenizer.decoder, decoders.ByteLevel)
    if leaves_out(tokenizer) or not isinstance(tokenizer.decoder, PIECES):
        return None
    sizes = np.zeros(max(vocabulary.values()) + 1)
    added = tokenizer.get_added_tokens_decoder()
    for text, number in vocabulary.items():
        if number not in added:
            # of bytes: one character a byte
            sizes[number] = len(text) if has_bytes else len(text.encode())
        elif not added[number].special and text != END_OF_TEXT:
            sizes[number] = len(text.encode())
    unknown = unknown_token(tokenizer)
    if unknown is not None:
        sizes[unknown] = np.nan
    return sizes


def unknown_token(tokenizer: Tokenizer) -> int | None:
    """The token that stands for all that a tokenizer lacks; None for one of bytes, which lacks
    nothing, and for one that leaves out what it lacks.
    """
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        return None
    if isinstance(tokenizer.model, models.Unigram):  # has no attribute for it
        number: int | None = json.loads(tokenizer.to_str())["model"]["unk_id"]
        return number
    name = tokenizer.model.unk_token
    found: int | None = None if name is None else tokenizer.token_to_id(name)
    return found


def leaves_out(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer leaves out what it lacks, so that its tokens do not tell."""
    model = tokenizer.model
    if isinstance(tokenizer.decoder, decoders.ByteLevel) or not isinstance(model, models.BPE):
        return False
    return model.unk_token is None and not model.byte_fallback


@dataclass(frozen=True)
class DocumentEncoder:
    """Makes tokens of documents. Another process gets it before it has read the tokenizer."""

    tokenizer: str
    name: str
    first: np.ndarray
    """Stands before each document's text."""
    last: np.ndarray
    """Stands after it: what the post-processor puts there, and the end of documents, once."""
    end: np.ndarray
    """The end of documents."""

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> "DocumentEncoder":
        """What a tokenizer makes of documents."""
        assert tokenizer.end is not None, "checked where it was read"
        end = np.array([tokenizer.end], np.uint32)
        is_ended = tokenizer.last[-1:].tolist() == [tokenizer.end]
        last = tokenizer.last if is_ended else np.append(tokenizer.last, end)
        return cls(tokenizer.library.to_str(), tokenizer.name, tokenizer.first, last, end)

    @cached_property
    def library(self) -> Encoder:
        """Makes tokens of text."""
        return Encoder(self.tokenizer, self.name)


def tokenise(
    documents: Iterable[Document], tokenizer: TextTokenizer, clean: Clean = None, workers: int = 1
) -> Iterator[np.ndarray]:
    """Yield each document's tokens, those around it and its end, uint32 [tokens], in input order,
    whatever `workers` is. Tokens of a conversation that do not count are marked (see `masking`).

    An empty document gives no tokens. Memory holds a few batches of a megabyte per worker.

    Args:
        clean: applied to each document before; a module's function.
        workers: processes that share the work; 1 means this one alone.
    """
    batches = _batches(documents)
    if workers <= 1:
        encoder = DocumentEncoder.of(tokenizer)
        results: Iterator[Encoded] = (_encode(batch, encoder, clean) for batch in batches)
    else:
        results = _ordered(batches, tokenizer, clean, workers)
    for tokens, lengths in results:
        yield from np.split(tokens, np.cumsum(lengths)[:-1])


def _ordered(
    batches: Iterator[list[Document]], tokenizer: TextTokenizer, clean: Clean, workers: int
) -> Iterator[Encoded]:
    # Fresh processes: forked ones would inherit the tokenizer's threads half-way through whatever
    # they are doing.
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(DocumentEncoder.of(tokenizer), clean),
    )
    # A thread begins processes: KeyboardInterrupt, which comes to the main one, would leave one
    # half begun. Ctrl-C, which a terminal sends to all, is blocked in them until they ignore it.
    starter = ThreadPoolExecutor(
        1, initializer=signal.pthread_sigmask, initargs=(signal.SIG_BLOCK, [signal.SIGINT])
    )
    try:
        waiting: deque[Future[Encoded]] = deque()
        for batch in batches:
            waiting.append(starter.submit(_submit, pool, batch).result())
            if len(waiting) > _IN_FLIGHT * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise EndedError(
            f"tokenisation: got a worker process that ended early; expected {workers} to finish. "
            "Perhaps memory ran out: start again with fewer --workers."
        ) from error
    finally:
        starter.shutdown()
        pool.shutdown(wait=True, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, batch: list[Document]) -> "Future[Encoded]":
    """A batch that a pool works on. Processes that begin with it do not load the user's script,
    which may have no guard against that.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        return pool.submit(_work, batch)
    finally:
        sys.modules["__main__"] = script


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(text_of(document)) + 1
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(batch: list[Document], encoder: DocumentEncoder, clean: Clean) -> Encoded:
    found: list[np.ndarray] = []
    # a source has documents of one kind
    if any(isinstance(document, tuple) for document in batch):
        conversations = [document for document in batch if isinstance(document, tuple)]
        found = _encode_conversations(conversations, encoder)
    else:
        texts = [clean(text) if clean else text for text in batch if isinstance(text, str)]
        found = [
            np.concatenate([encoder.first, ids, encoder.last]) if ids.size else ids
            for ids in encoder.library([text if text.strip() else "" for text in texts])
        ]
    return np.concatenate(found), np.array([part.size for part in found], dtype=np.int64)


def _encode_conversations(
    conversations: list[Conversation], encoder: DocumentEncoder
) -> list[np.ndarray]:
    """Parts are tokenised each by itself: where an answer begins, a token begins. What a chat
    template has written is tokenised as a whole.
    """
    if any(isinstance(conversation, Written) for conversation in conversations):
        return [_encode_written(conversation, encoder) for conversation in conversations]
    texts = [text for conversation in conversations for text, _ in conversation]
    encodings = iter(encoder.library(texts))
    found = []
    for conversation in conversations:
        parts = [(encoder.first, False)]
        parts += [(next(encodings), counts) for _, counts in conversation]
        parts.append((encoder.end, conversation[-1][1]))
        ids = np.concatenate([tokens for tokens, _ in parts]).astype(np.int64)
        counted = np.repeat([counts for _, counts in parts], [len(tokens) for tokens, _ in parts])
        found.append(masked(ids, counted).view(np.uint32))
    return found


def _encode_written(conversation: Conversation, encoder: DocumentEncoder) -> np.ndarray:
    """A token counts where one of its characters does. The end of the text, which counts after an
    answer, is added where the template writes none.
    """
    ids, places = encoder.library.whole(text_of(conversation))
    sizes = [len(text) for text, _ in conversation]
    counting = np.repeat([counts for _, counts in conversation], sizes)
    before = np.append(0, np.cumsum(counting))
    first, last = places.astype(np.int64).T
    first = np.maximum(0, first - (first == last))  # spaces may have no place of their own
    counted = before[last] > before[first]
    if ids[-1:].tolist() != encoder.end.tolist():
        said = [counts for text, counts in conversation if text.strip()]
        ids, counted = np.append(ids, encoder.end), np.append(counted, said[-1:] == [True])
    return masked(ids.astype(np.int64), counted).view(np.uint32)


_worker: tuple[DocumentEncoder, Clean]
"""What a worker process was started with."""


def _start_worker(encoder: DocumentEncoder, clean: Clean) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever gives the work decides when it ends
    end_with_parent()
    # One thread per process: there is a process per core.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = encoder, clean


def _work(batch: list[Document]) -> Encoded:
    return _encode(batch, *_worker)
