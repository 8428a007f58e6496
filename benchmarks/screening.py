"""What techniques of recent recipes gain in few steps: the modern recipe in plain PyTorch with each
of them, after as many tokens, from the same weights and in the same order.

    python benchmarks/screening.py                      # five seeds of each: hours
    python benchmarks/screening.py polar_express normuon --seeds 2 --tokens 500000

A line a technique: bits per byte of the held-out text less those of the recipe without it, the mean
over seeds and its 90 % interval (Student's t), and what a batch takes beside one without it;
all take turns, seed by seed. Negative is better. All compute in float32; processes share the seeds,
one thread each.
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from benchmarks.harness import (  # noqa: E402
    Arguments,
    BenchmarkError,
    Figures,
    Flags,
    ended,
    flag,
    make_parser,
    require_file,
    script,
    table,
)
from benchmarks.time_to_loss import TEXT  # noqa: E402
from benchmarks.timed_runs import bits_per_byte, factor_at  # noqa: E402
from popxl_gpt.data.dataset import TokenDataset  # noqa: E402
from popxl_gpt.data.dataset_info import read_info  # noqa: E402
from popxl_gpt.data.loader import BatchLoader  # noqa: E402
from popxl_gpt.data.tokenisation import token_bytes  # noqa: E402

SIZES = {"layers": 4, "hidden_size": 128, "heads": 2, "sequence_length": 256}
"""Of the model, as `ModernModel` names them."""
SEQUENCES = 8
"""Of a batch."""
SCHEDULE = {"schedule": "wsd", "warmup": 0.0, "decay": 0.5, "lowest": 0.0}
BLOCK = 10
"""Batches that are timed as one, as some work is done in one step of so many."""
NONE = "none"
TECHNIQUES = (
    "polar_express", "normuon", "momentum_warmup", "cautious_decay", "residual_scales", "back_out",
    "smear", "attention_gates", "value_gates", "soap", "multi_token", "short_sequences_first",
    "small_batches_first",
)  # fmt: skip
STUDENT = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132, 6: 2.015, 8: 1.895, 10: 1.833}
"""Of so many seeds, the 95 % quantile of Student's t."""


def steps_of(tokens: int) -> int:
    """Steps that see so many tokens."""
    return max(1, tokens // (SEQUENCES * SIZES["sequence_length"]))


def divided(technique: str, is_early: bool, batch: np.ndarray) -> list[np.ndarray]:
    """The batches that optimizer steps have in place of one, int [sequences, length] each.

    Args:
        batch: ids or labels, [SEQUENCES, S].
    """
    if is_early and technique == "short_sequences_first":
        return [batch.reshape(-1, batch.shape[1] // 2)]
    if is_early and technique == "small_batches_first":
        return np.split(batch, 2)
    return [batch]


def seconds_of(early: Sequence[float], late: Sequence[float]) -> float:
    """What a batch takes on average, by the median of its blocks in either part of a run.

    Args:
        early: seconds of each batch of the first part, in order.
    """
    whole = 0.0
    for part in (early, late):
        blocks = [part[begin : begin + BLOCK] for begin in range(0, len(part), BLOCK)]
        whole += len(part) * statistics.median(map(statistics.mean, blocks)) if part else 0.0
    return whole / (len(early) + len(late))


def run(technique: str, seed: int, text: Path, tokens: int) -> Figures:
    """Bits per byte of a technique's run, and what a batch took."""
    import torch  # not at the top: `--help` is answered at once

    from benchmarks.modern_gpt import ModernModel
    from benchmarks.screened_gpt import EARLY, trainer_of
    from benchmarks.timed_plain import losses_by, tensors

    torch.set_num_threads(1)
    info = read_info(text)
    assert info is not None  # `main` has asked for it
    length, vocabulary = SIZES["sequence_length"], info["vocabulary_size"]
    model = ModernModel(**SIZES, vocabulary_size=vocabulary, dtype=torch.float32)
    made, steps, seconds = trainer_of(technique, seed, model), steps_of(tokens), list[float]()
    data = TokenDataset(str(text / "train-*.tfrecord"), length, vocabulary)
    loader, early = BatchLoader(data, SEQUENCES, seed=seed), round(EARLY * steps)
    for step in range(steps):
        batch, begin = loader.batch(step), time.perf_counter()
        made.gpt.begin_step(step / steps)
        parts = [divided(technique, step < early, part) for part in batch]
        for part in zip(*parts):
            factor = factor_at(SCHEDULE, step / steps) * math.sqrt(part[0].size / batch[0].size)
            made.step(*tensors(part), factor)
        seconds.append(time.perf_counter() - begin)
    held_out = TokenDataset(str(text / "validation-*.tfrecord"), length, vocabulary, stride=length)
    sizes = token_bytes(Tokenizer.from_file(str(text / "tokenizer.json")))
    with torch.no_grad():
        found, _ = bits_per_byte(held_out, sizes, losses_by(made.gpt))
    step = seconds_of(seconds[:early], seconds[early:])
    return {"technique": technique, "seed": seed, "bits": found, "step": step}


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """The mean of paired differences, and the ends of its 90 % interval."""
    mean, count = float(np.mean(differences)), len(differences)
    if count not in STUDENT:
        return mean, -math.inf, math.inf
    half = STUDENT[count] * float(np.std(differences, ddof=1)) / math.sqrt(count)
    return mean, mean - half, mean + half


FLAGS: Flags = {
    "techniques": {"nargs": "*", "default": list(TECHNIQUES), "help": "default: all"},
    "--seeds": flag(5, "of each"),
    "--tokens": flag(1_450_000, "that a run sees"),
    "--processes": flag(2, "that share the runs"),
    "--text": flag(TEXT, "what data/prepare.py made", type=Path),
}


def main() -> int:
    """Exit code 0; 2 when the text is missing."""
    arguments: Arguments = make_parser(__doc__, FLAGS).parse_args()
    unknown = [name for name in arguments.techniques if name not in TECHNIQUES]
    if unknown:
        expected = ", ".join(TECHNIQUES)
        raise BenchmarkError(f"techniques: got {unknown}; expected some of {expected}.")
    remedy = "Make it: python data/prepare.py stdlib"
    require_file(arguments.text / "dataset.json", "a prepared text", remedy)
    names, runs = [NONE, *arguments.techniques], list[Figures]()
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        waiting = [
            pool.submit(run, name, seed, arguments.text, arguments.tokens)
            for seed in range(arguments.seeds)  # in turn: noise meets all alike
            for name in names
        ]
        for done in waiting:
            runs.append(done.result())
            print(json.dumps(runs[-1]), flush=True)
    found = {name: [each for each in runs if each["technique"] == name] for name in names}
    rows = []
    for name in arguments.techniques:
        pairs = list(zip(found[name], found[NONE]))
        mean, low, high = interval([own["bits"] - none["bits"] for own, none in pairs])
        time_share = statistics.median(own["step"] / none["step"] for own, none in pairs)
        rows.append([name, f"{mean:+.4f}", f"{low:+.4f} to {high:+.4f}", f"{time_share:.2f}"])
    print(table(["technique", "bits per byte", "90 % interval", "time"], rows))
    return ended("screening", arguments, met=None, runs=runs)


if __name__ == "__main__":
    script(main)
