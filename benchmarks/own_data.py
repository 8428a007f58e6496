"""Preparing text, and reading what is prepared."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from poprun.cores import usable_cores

from benchmarks.harness import (
    ROOT,
    Arguments,
    BenchmarkError,
    Flags,
    Missing,
    flag,
    output_of,
)
from benchmarks.own_cases import SPEED, Case, Clocks
from popxl_gpt.data.dataset import TokenDataset
from popxl_gpt.data.dataset_info import read_info
from popxl_gpt.data.encoding import PATTERN, Encoder, byte_names
from popxl_gpt.data.loader import BatchLoader
from popxl_gpt.data.preparation import Settings, prepare
from popxl_gpt.data.sources import stdlib_source, text_source

BATCHES = 400
"""That are made, and taken."""
BY_TOKENIZERS = """
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(tokenizer_file)


def encode(texts):
    found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in found]
"""
BY_TIKTOKEN = """
import json
import tiktoken
with open(tokenizer_file + ".ranks") as file:
    pattern, *tokens_by_rank = json.load(file)
ranks = {bytes.fromhex(token): rank for rank, token in enumerate(tokens_by_rank)}
encoding = tiktoken.Encoding("text", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def encode(texts):
    return map(encoding.encode_ordinary, texts)
"""
MAP = """
import sys
import datasets

lines, tokenizer_file, workers, folder = sys.argv[1:]
ENCODE

def tokens(rows):
    return {"ids": [[*ids, 0] for ids in encode(rows["text"])]}


if __name__ == '__main__':
    datasets.disable_progress_bars()
    data = datasets.load_dataset("json", data_files=lines, split="train", cache_dir=folder)
    data = data.map(tokens, batched=True, remove_columns=["text"], num_proc=int(workers))
    print(sum(map(len, data.with_format("numpy")["ids"])))
"""
LIBRARY = """
import json
import sys
from tokenizers import Tokenizer

lines, tokenizer_file = sys.argv[1:]
tokenizer = Tokenizer.from_file(tokenizer_file)
tokens = size = 0
texts = []
with open(lines, encoding="utf-8") as file:
    for line in file:
        texts.append(json.loads(line)["text"])
        size += len(texts[-1])
        if size >= 2**20:
            found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            tokens += sum(len(encoding.ids) + 1 for encoding in found)
            texts, size = [], 0
found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
print(tokens + sum(len(encoding.ids) + 1 for encoding in found))
"""
NO_NETWORK = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


FLAGS: Flags = {
    "--data": flag(ROOT / "data/files/stdlib", "loading: a prepared text", type=Path),
    "--batch": flag(16, "loading: samples of a step"),
    "--rate": flag(1e6, "loading: tokens a second that are taken"),
    "--text": {
        "nargs": "+",
        "help": "preparing: files; default: the source of Python's library",
    },
    "--vocabulary_size": flag(4096, "preparing: of the tokenizer"),
    "--workers": flag(usable_cores(), "preparing: processes"),
    "--datasets_python": flag(sys.executable, "preparing: a Python that has datasets"),
}


# Loading


def loading(flags: Arguments, _: Path) -> tuple[TokenDataset, Arguments]:
    """What is prepared, and how it is taken."""
    info = read_info(flags.data) if flags.data.is_dir() else None
    if info is None:
        raise Missing(
            f"loading: got no prepared text at {flags.data}; expected one. Make it: python "
            "data/prepare.py stdlib"
        )
    files = str(flags.data / "train-*.tfrecord")
    dataset = TokenDataset(files, info["sequence_length"], info["vocabulary_size"])
    return dataset, flags


def waits(ready: tuple[TokenDataset, Arguments]) -> tuple[float, float]:
    """What a consumer of so many tokens a second waits: its share of the time, and the longest
    wait.
    """
    (dataset, flags), found = ready, []
    with BatchLoader(dataset, flags.batch) as loader:
        loader.batch(0)  # nothing is made ahead of it
        begin = time.perf_counter()
        for step in range(1, BATCHES + 1):
            time.sleep(flags.batch * dataset.sequence_length / flags.rate)
            asked = time.perf_counter()
            loader.batch(step)
            found.append(time.perf_counter() - asked)
        return sum(found) / (time.perf_counter() - begin), max(found)


# Preparing


class Preparing(NamedTuple):
    """A text as JSON lines, its tokenizer, and where each way works."""

    lines: Path
    tokenizer: Path
    folder: Path
    flags: Arguments
    encode: str
    """How the peer makes tokens of texts: as `data/prepare.py` does."""
    counts: set[int]
    """The numbers of tokens that the ways make: one, if they make the same."""


def encoding(tokenizer: Path) -> str:
    """`BY_TIKTOKEN`, whose ranks are written beside the tokenizer, where `data/prepare.py` uses
    tiktoken; else `BY_TOKENIZERS`.
    """
    content = tokenizer.read_text(encoding="utf-8")
    if not Encoder(content).is_fast:
        return BY_TOKENIZERS
    bytes_of = {name: byte for byte, name in enumerate(byte_names())}
    names = [*byte_names(), *map("".join, json.loads(content)["model"]["merges"])]
    tokens = [bytes(bytes_of[c] for c in name).hex() for name in names]
    Path(f"{tokenizer}.ranks").write_text(json.dumps([PATTERN, *tokens]))
    return BY_TIKTOKEN


def preparing(flags: Arguments, folder: Path) -> Preparing:
    """The text; a tokenizer is trained on it."""
    try:
        output_of([flags.datasets_python, "-c", "import datasets, tiktoken, tokenizers"])
    except BenchmarkError:
        raise Missing(
            f"{flags.datasets_python}: got no package datasets; expected it, tiktoken and "
            "tokenizers. Install them (pip install datasets tiktoken tokenizers), or name a Python "
            "that has them: --datasets_python."
        ) from None
    lines = folder / "text.jsonl"
    texts = (text_source(flags.text) if flags.text else stdlib_source()).documents()
    with open(lines, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    settings = Settings(vocabulary_size=flags.vocabulary_size)
    source, made = text_source([str(lines)]), folder / "made"
    prepare(source, made, settings, workers=flags.workers, report=lambda line: None)
    tokenizer = made / "tokenizer.json"
    return Preparing(lines, tokenizer, folder, flags, encoding(tokenizer), set())


def of_process(ready: Preparing, command: list[str], **more: str) -> tuple[Clocks, str]:
    """The seconds of a process and its own, and what it printed; `more` are variables of its
    environment.
    """
    environment = {**os.environ, **NO_NETWORK, "HF_HOME": str(ready.folder / "cache"), **more}
    begin = children()
    printed = output_of(command, env=environment, cwd=ready.folder)
    return children() - begin, printed


def children() -> Clocks:
    """The clocks of the processes that have ended."""
    used = os.times()
    return np.array([used.elapsed, used.children_user + used.children_system])


def by_prepare(ready: Preparing) -> tuple[Clocks, int]:
    """The seconds and tokens of `data/prepare.py`."""
    output = Path(tempfile.mkdtemp(dir=ready.folder))
    command = [sys.executable, str(ROOT / "data/prepare.py"), "text", str(ready.lines)]
    command += ["--tokenizer", str(ready.tokenizer), "--workers", str(ready.flags.workers)]
    seconds, _ = of_process(ready, [*command, "--output", str(output / "prepared")])
    splits = json.loads((output / "prepared/dataset.json").read_text())["splits"].values()
    # a document that is cut has two ends
    cut = sum(split["documents"] for split in splits) - ready.lines.read_bytes().count(b"\n")
    return seconds, sum(split["tokens"] for split in splits) - cut


def by_datasets(ready: Preparing) -> tuple[Clocks, int]:
    """The seconds and tokens of `datasets`, as nanoGPT's preparation has it."""
    cache = tempfile.mkdtemp(dir=ready.folder)
    (ready.folder / "by_map.py").write_text(MAP.replace("ENCODE", ready.encode))
    words = ["by_map.py", str(ready.lines), str(ready.tokenizer), str(ready.flags.workers), cache]
    seconds, text = of_process(ready, [ready.flags.datasets_python, *words], HF_HOME=cache)
    return seconds, int(text)


def by_library(ready: Preparing) -> tuple[Clocks, int]:
    """The seconds and tokens of the library alone, with a thread for each worker."""
    command = [sys.executable, "-c", LIBRARY, str(ready.lines), str(ready.tokenizer)]
    seconds, text = of_process(ready, command, RAYON_NUM_THREADS=str(ready.flags.workers))
    return seconds, int(text)


def same_tokens(way: Callable[[Preparing], tuple[Clocks, int]], ready: Preparing) -> Clocks:
    """The seconds of a way that makes the tokens that the others make."""
    seconds, count = way(ready)
    ready.counts.add(count)
    if len(ready.counts) > 1:
        raise BenchmarkError(f"got {sorted(ready.counts)} tokens; expected the same of all")
    return seconds


CASES = (
    Case(
        name="loading, waiting", ready=loading, timed=lambda ready: waits(ready)[0],
        unit=("% of the time", 100.0), clock=0, bar=(-np.inf, 1.0),
    ),
    Case(
        name="loading, longest wait", ready=loading, timed=lambda ready: waits(ready)[1],
        unit=("ms", 1e3), clock=0,
    ),
    *(
        Case(
            name=f"preparing, beside {name}", ready=preparing,
            timed=partial(same_tokens, by_prepare), beside=partial(same_tokens, way),
            compared=SPEED, bar=(least, np.inf),
        )
        for name, way, least in (("datasets", by_datasets, 1.0), ("tokenizers", by_library, 0.9))
    ),
)  # fmt: skip
