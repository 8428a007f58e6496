"""Bits a byte that a program reaches in five minutes on two cores, from a fixed public text: this
project's entry, two baselines, and yours.

    apt-get download dict-gcide && dpkg -x dict-gcide_*.deb data/files/gcide
    python benchmarks/five_minutes.py                  # ours and the baselines: about 25 minutes
    python benchmarks/five_minutes.py ours --minutes 1
    python benchmarks/five_minutes.py --runs 3 --record   # and adds lines to the docs' table

The rules are in docs/five-minutes.md. An entry prepares the text, which has no limit of time;
trains, from the start of its process to its end, start-up, compiling and choosing included; and
tells the bits of the whole held-out text, which has no limit either.
"""

import argparse
import gzip
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import yaml  # noqa: E402

from benchmarks import time_to_loss  # noqa: E402
from benchmarks.harness import (  # noqa: E402
    ROOT,
    BenchmarkError,
    Figures,
    Flags,
    ended,
    flag,
    machine,
    make_parser,
    output_of,
    require_file,
    script,
    table,
)

TEXT = ROOT / "data" / "files" / "gcide" / "usr" / "share" / "dictd" / "gcide.dict.dz"
SHA256 = "3e6b2cdcbc1b3664c2f1466e3c8e44012e815c4c67fa83fa61f39777cd6e8517"
"""Of that file of Debian's package dict-gcide, version 0.48.5+nmu2."""
FOLDER = ROOT / "build" / "five_minutes"
RECORDS = ROOT / "benchmarks" / "five_minutes.jsonl"
PIECE, HELD_OUT = 1 << 16, 40
"""Bytes of a document, and of how many documents the last one is held out."""
MOST = 0.9999
"""Share of the held-out bytes that a score is of at least; the first token may have none."""
MARGIN = 1.01
"""Of the time, for the noise of a machine."""
CORES = 2
"""Of the machine's, whichever: the first ones that this process may use."""
MISSING = (
    f"Get it, in {ROOT}: apt-get download dict-gcide && dpkg -x dict-gcide_*.deb data/files/gcide"
)


def split(text: bytes) -> "tuple[list[bytes], list[bytes]]":
    """Documents to train on, and those held out: pieces of a text that end with the first line that
    ends after so many bytes.

    Args:
        text: UTF-8; the bytes that are none are left out first.
    """
    text = text.decode("utf-8", errors="ignore").encode()
    documents, begin = [], 0
    while begin < len(text):
        end = text.find(b"\n", begin + PIECE - 1) + 1 or len(text)
        documents.append(text[begin:end])
        begin = end
    held_out = documents[HELD_OUT - 1 :: HELD_OUT]
    del documents[HELD_OUT - 1 :: HELD_OUT]
    return documents, held_out


def write_text(source: Path, folder: Path) -> int:
    """Write `train/` and `held_out/`, a file a document.

    Returns:
        Bytes held out.

    Raises:
        BenchmarkError: the source is another file than the rules name.
    """
    compressed = source.read_bytes()
    found = hashlib.sha256(compressed).hexdigest()
    if found != SHA256:
        raise BenchmarkError(
            f"{source}: got SHA-256 {found}; expected {SHA256}, version 0.48.5+nmu2 of dict-gcide. "
            f"{MISSING}"
        )
    parts = dict(zip(("train", "held_out"), split(gzip.decompress(compressed)), strict=True))
    for name, documents in parts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number, document in enumerate(documents):
            (folder / name / f"{number:03}.txt").write_bytes(document)
    return sum(map(len, parts["held_out"]))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A program that learns the text. Its commands are templates of the `folder`, which has
    `train/` and `held_out/`, and of the `minutes`; {python} is this one.
    """

    prepare: str
    train: str
    score: str
    """Leaves `score.json` in the folder: `bits_per_byte`, and the `bytes` that it is of."""

    settings: Callable[[Path], Figures] = lambda _: {}
    """The `size`, `batch` and `vocabulary` that it trained with, of the folder."""

    def run(self, folder: Path, minutes: float) -> Figures:
        """Seconds of training, the score, and the settings."""
        self.call("prepare", folder, minutes)
        seconds = self.call("train", folder, minutes)
        self.call("score", folder)
        score = json.loads((folder / "score.json").read_text())
        kept = {name: score[name] for name in ("bits_per_byte", "bytes")}
        return {**kept, "seconds": seconds, "settings": self.settings(folder)}

    def call(self, name: str, folder: Path, minutes: float = 0.0) -> float:
        """Run one of its commands to its end; what it prints is in `NAME.log`.

        Returns:
            Seconds from the start of its process to its end.

        Raises:
            BenchmarkError: it failed.
        """
        values = {"python": sys.executable, "folder": folder, "minutes": f"{minutes:g}"}
        command = [word.format(**values) for word in getattr(self, name).split()]
        log, begin = folder / f"{name}.log", time.monotonic()
        with log.open("w") as output:
            done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        seconds = time.monotonic() - begin
        if done.returncode:
            last = "\n".join(log.read_text().splitlines()[-15:])
            raise BenchmarkError(
                f"{' '.join(command)}: ended with exit code {done.returncode}:\n{last}"
            )
        return seconds


def chosen(folder: Path) -> Figures:
    """The size and batch that our entry chose, and the vocabulary."""
    config = yaml.safe_load((folder / "run" / "config.yml").read_text())
    model = config["model"]
    size = "x".join(str(model[name]) for name in ("layers", "hidden_size", "heads"))
    batch, vocabulary = config["training"]["global_batch_size"], model["vocabulary_size"]
    return {"size": size, "batch": batch, "vocabulary": vocabulary}


OURS = Entry(
    prepare="{python} data/prepare.py text {folder}/train --validation_files {folder}/held_out "
    "--output {folder}/tokens --minutes {minutes} --sequence_length 256 --overwrite",
    train="{python} demo/pretraining.py --minutes {minutes} --input_files {folder}/tokens "
    "--run_folder {folder} --name run",
    score="{python} demo/evaluate.py --checkpoint {folder}/run --json {folder}/score.json "
    "--input_files {folder}/tokens/validation-*.tfrecord",
    settings=chosen,
)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A recipe in plain PyTorch of `time_to_loss.py`, on the tokens of our entry. It looks at the
    clock itself, and its process scores after it.
    """

    kind: str
    start: str
    """Its settings, as that script's `--start` takes them."""

    def run(self, folder: Path, minutes: float) -> Figures:
        """Seconds of training, the score, and the settings."""
        OURS.call("prepare", folder, minutes)
        words = f"--text {folder}/tokens --results {folder} --recipes {self.kind} --trials 0"
        flags = [*words.split(), "--start", *self.start.split()]
        bench = time_to_loss.Bench(make_parser(None, time_to_loss.FLAGS).parse_args(flags))
        settings = bench.with_mode(self.kind, bench.tuned(self.kind), minutes)
        figures = bench.run(self.kind, settings, minutes)
        kept = {name: figures[name] for name in ("bits_per_byte", "bytes", "seconds")}
        vocabulary = bench.common["vocabulary_size"]
        return {**kept, "settings": {**settings, "vocabulary": vocabulary}}


ENTRIES: "dict[str, Entry | Baseline]" = {
    "ours": OURS,
    "modern": Baseline(kind="modern", start="size=2x128x2 batch=32 bigrams=4"),
    "nanogpt": Baseline(kind="nanogpt", start="size=4x192x3 batch=16"),
}
FLAGS: Flags = {
    "entries": {"nargs": "*", "default": list(ENTRIES), "metavar": "ENTRY", "help": "default: all"},
    "--minutes": flag(5.0, "that an entry trains; the record is of 5"),
    "--text": flag(TEXT, "the dictionary (default: %(default)s)", type=Path),
    "--folder": flag(FOLDER, "what an entry makes (default: %(default)s)", type=Path),
    "--runs": flag(1, "of each entry; a result is their median"),
    "--record": {"action": "store_true", "help": f"add the results to {RECORDS.name}"},
}


def main() -> int:
    """Exit code 0; 1 where an entry fails; 2 when the text is missing."""
    arguments = make_parser(__doc__, FLAGS).parse_args()
    unknown = [name for name in arguments.entries if name not in ENTRIES]
    if unknown:
        raise BenchmarkError(f"entries: got {unknown}; expected some of {', '.join(ENTRIES)}.")
    if arguments.record and arguments.minutes != 5.0:
        raise BenchmarkError(
            f"--record: got --minutes {arguments.minutes:g}; expected 5. Leave one of them out."
        )
    require_file(arguments.text, "the dictionary", MISSING)
    code = {"commit": commit()} if arguments.record else {}
    runs: dict[str, list[Figures]] = {name: [] for name in arguments.entries}
    try:
        with few_cores():
            for _ in range(arguments.runs):  # in turn: noise meets all alike
                for name, done in runs.items():
                    done.append(measured(name, arguments))
    finally:  # an interruption loses no run that has ended
        results = [
            {"entry": name, **result_of(done), **code} for name, done in runs.items() if done
        ]
        in_time = [r for r in results if r["seconds"] <= MARGIN * 60 * arguments.minutes]
        if arguments.record:
            with RECORDS.open("a") as file:
                file.writelines(json.dumps(result, sort_keys=True) + "\n" for result in in_time)
    rows = [
        [result["entry"], f"{result['bits_per_byte']:.4f}", f"{result['seconds']:.1f} s"]
        + ["in time" if result in in_time else "late: no entry"]
        for result in results
    ]
    print(table(["entry", "bits per byte", "longest", ""], rows))
    return ended("five_minutes", arguments, met=None, results=results)


@contextmanager
def few_cores() -> Iterator[None]:
    """Within it, this process and those that it starts have the cores that an entry may use."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:CORES])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def commit() -> str:
    """The checkout's commit, with -dirty where files differ from it."""
    return output_of(["git", "describe", "--always", "--dirty", "--exclude=*"]).strip()


def measured(name: str, arguments: argparse.Namespace) -> Figures:
    """One run of an entry, in a folder of its own that is made anew, and the machine after it.

    Raises:
        BenchmarkError: it failed, or its score is not of the whole text.
    """
    folder = arguments.folder.resolve() / name
    shutil.rmtree(folder, ignore_errors=True)
    size = write_text(arguments.text, folder)
    figures = ENTRIES[name].run(folder, arguments.minutes)
    if figures.pop("bytes") < MOST * size:
        raise BenchmarkError(f"{name}: got a score of fewer bytes; expected all {size} held out.")
    print(f"{name}: {json.dumps(figures)}", file=sys.stderr, flush=True)
    return {**figures, "machine": machine()}


def result_of(runs: "list[Figures]") -> Figures:
    """The result of an entry's runs: the median of their scores, the seconds of the longest, the
    settings of each, and the machine after the last.
    """
    scores = [run["bits_per_byte"] for run in runs]
    return {
        "bits_per_byte": statistics.median(scores),
        "all_bits_per_byte": scores,
        "seconds": max(run["seconds"] for run in runs),
        "all_settings": [run["settings"] for run in runs],
        "machine": runs[-1]["machine"],
    }


if __name__ == "__main__":
    script(main)
