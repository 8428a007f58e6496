"""Speed of preparing text beside `map` of Hugging Face's `datasets`: text to tokens on the disk,
with the same tokenizer and as many processes; and beside the library `tokenizers` alone.

    python benchmarks/preparing.py     # the source of Python's standard library, three rounds
    python benchmarks/preparing.py --text FILES --rounds 1 --workers 1

`prepare` is `data/prepare.py text`. `datasets` is `load_dataset("json")` and a batched `map` that
tokenises, as nanoGPT's preparation does it. `tokenizers` encodes batches of a megabyte, with a
thread for each worker, and keeps nothing. All read the same JSON lines and are whole processes;
`prepare` also shuffles documents, holds some out, and writes records with checksums. `datasets` may
be installed elsewhere: `--datasets_python` names the Python that has it. On a machine that others
use too, `--processor_time` counts what all processes of a run work, and not what they wait for.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import ROOT, Figures, machine, print_json, table  # noqa: E402
from popxl_gpt.data.preparation import Settings, prepare  # noqa: E402
from popxl_gpt.data.sources import stdlib_source, text_source  # noqa: E402

SPEED_BAR = 1.0
"""Speed of `prepare` over that of `datasets`, at least."""
LIBRARY_BAR = 0.9
"""The same over that of `tokenizers` alone."""
MAP = """
import sys
import datasets
from tokenizers import Tokenizer

lines, tokenizer_file, workers, folder = sys.argv[1:]
tokenizer = Tokenizer.from_file(tokenizer_file)
end = tokenizer.token_to_id("<|endoftext|>")


def tokens(rows):
    found = tokenizer.encode_batch_fast(rows["text"], add_special_tokens=False)
    return {"ids": [[*encoding.ids, end] for encoding in found]}


if __name__ == "__main__":
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


def documents(patterns: list[str]) -> Iterator[str]:
    """Texts to prepare; none given: the standard library."""
    return (text_source(patterns) if patterns else stdlib_source()).documents()


def write_lines(texts: Iterator[str], path: Path) -> int:
    """Write texts as JSON lines. Returns their bytes in UTF-8."""
    size = 0
    with open(path, "w", encoding="utf-8") as file:
        for text in texts:
            size += len(text.encode())
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return size


def processor_time() -> float:
    """Seconds that processes which have ended, and theirs, have worked."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


CLOCKS = {False: time.perf_counter, True: processor_time}
"""By whether processor time is asked for."""


def run(
    command: list[str], folder: Path, clock: Callable[[], float], **more: str
) -> tuple[float, str]:
    """Seconds of a process, and what it printed; `more` are variables of its environment."""
    environment = {**os.environ, **NO_NETWORK, "HF_HOME": str(folder / "cache"), **more}
    start = clock()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    seconds = clock() - start
    if done.returncode:
        sys.exit(f"{' '.join(command[:3])} failed:\n{done.stderr[-2000:]}")
    return seconds, done.stdout


def by_prepare(
    lines: Path, tokenizer: Path, workers: int, clock: Callable[[], float], folder: Path
) -> tuple[float, int]:
    """Seconds and tokens of `data/prepare.py`."""
    command = [sys.executable, str(ROOT / "data/prepare.py"), "text", str(lines)]
    command += ["--tokenizer", str(tokenizer), "--workers", str(workers)]
    seconds, _ = run([*command, "--output", str(folder / "prepared")], folder, clock)
    info = json.loads((folder / "prepared/dataset.json").read_text())
    # a document that is cut has two ends
    cut = sum(split["documents"] for split in info["splits"].values()) - line_count(lines)
    return seconds, sum(split["tokens"] for split in info["splits"].values()) - cut


def line_count(path: Path) -> int:
    """Lines of a file."""
    with open(path, "rb") as file:
        return sum(1 for _ in file)


def by_datasets(
    python: str,
    lines: Path,
    tokenizer: Path,
    workers: int,
    clock: Callable[[], float],
    folder: Path,
) -> tuple[float, int]:
    """Seconds and tokens of `datasets`."""
    (folder / "by_map.py").write_text(MAP)
    words = ["by_map.py", str(lines), str(tokenizer), str(workers), str(folder / "cache")]
    seconds, printed = run([python, *words], folder, clock)
    return seconds, int(printed.split()[-1])


def by_tokenizers(
    lines: Path, tokenizer: Path, workers: int, clock: Callable[[], float], folder: Path
) -> tuple[float, int]:
    """Seconds and tokens of the library alone."""
    (folder / "by_library.py").write_text(LIBRARY)
    command = [sys.executable, "by_library.py", str(lines), str(tokenizer)]
    seconds, printed = run(command, folder, clock, RAYON_NUM_THREADS=str(workers))
    return seconds, int(printed)


def has_datasets(python: str) -> bool:
    """Whether a Python has what is measured."""
    done = subprocess.run([python, "-c", "import datasets, tokenizers"], capture_output=True)
    return done.returncode == 0


def measure(arguments: argparse.Namespace, folder: Path) -> Figures:
    """All in turn, each in an empty folder. Returns the seconds of each, and the text's sizes."""
    lines, tokenizer = folder / "text.jsonl", folder / "made/tokenizer.json"
    size = write_lines(documents(arguments.text), lines)
    prepare(
        text_source([str(lines)]),
        folder / "made",
        Settings(vocabulary_size=arguments.vocabulary_size),
        workers=arguments.workers,
        report=lambda line: None,
    )
    ways: dict[str, Callable[..., tuple[float, int]]] = {
        "prepare": by_prepare,
        "datasets": partial(by_datasets, arguments.datasets_python),
        "tokenizers": by_tokenizers,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    counts = set()
    for number in range(arguments.rounds):
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            with tempfile.TemporaryDirectory(dir=folder) as empty:
                clock = CLOCKS[arguments.processor_time]
                found = ways[name](lines, tokenizer, arguments.workers, clock, Path(empty))
            seconds[name].append(found[0])
            counts.add(found[1])
            print(f"{name}: {found[0]:.1f} s, {size / found[0] / 1e6:.2f} MB/s", flush=True)
    if len(counts) != 1:
        sys.exit(f"got {sorted(counts)} tokens; expected the same of all")
    return {"seconds": seconds, "bytes": size, "tokens": counts.pop()}


def main() -> int:
    """Measure, print; exit code 0, with `--check` 1 when the bar is missed, 2 without
    `datasets`.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", nargs="+", default=[], help="files, folders or globs")
    parser.add_argument("--vocabulary_size", type=int, default=4096, help="of the tokenizer")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--datasets_python", default=sys.executable, help="a Python that has datasets, tokenizers"
    )
    parser.add_argument("--processor_time", action="store_true", help="in place of the clock's")
    parser.add_argument("--check", action="store_true", help="exit with 1 when the bar is missed")
    arguments = parser.parse_args()
    if not has_datasets(arguments.datasets_python):
        print(
            f"{arguments.datasets_python}: got no package datasets; expected it and tokenizers. "
            "Install them (pip install datasets tokenizers), or name a Python that has them: "
            "--datasets_python.",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments, Path(folder))
    seconds = {name: statistics.median(values) for name, values in found["seconds"].items()}
    speeds = {name: time / seconds["prepare"] for name, time in seconds.items()}
    rows = [
        [name, f"{time:.2f}", f"{found['bytes'] / time / 1e6:.2f}"]
        + [f"{found['tokens'] / time / 1e3:.0f}", f"{speeds[name]:.2f}x"]
        for name, time in seconds.items()
    ]
    print(f"\n{found['tokens']} tokens, {found['bytes'] / 1e6:.1f} MB, {arguments.workers} workers")
    print(table(["by", "seconds", "MB/s", "ktokens/s", "speed of prepare"], rows))
    met = speeds["datasets"] >= SPEED_BAR and speeds["tokenizers"] >= LIBRARY_BAR
    print(
        f"\nbars: at least {SPEED_BAR}x the speed of datasets, {LIBRARY_BAR}x that of tokenizers "
        f"alone: {'met' if met else 'missed'}"
    )
    result = {"speed": speeds["datasets"], "library_speed": speeds["tokenizers"]}
    print_json({"benchmark": "preparing", "machine": machine(), **found, **result})
    return 1 if arguments.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
