"""Tokens per second of text that GPT-2 small writes, beside transformers' `generate` with its cache
in one run, alternating, and beside the limit that the memory's speed sets.

Each round reads prompts and writes so many tokens after each, the likeliest ones. The first token
comes of reading the prompts; speed is that of the tokens after it. A token reads all weights but
the position embedding, and the keys and values of the tokens before: the limit is those bytes over
the speed at which this machine reads memory. On a machine that others use too, `OMP_NUM_THREADS=1`
with `--processor_time` counts what a thread works, and not what it waits for others.
"""

import statistics
import sys
import time
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: E402

from benchmarks.harness import (  # noqa: E402
    BenchmarkError,
    Columns,
    Figures,
    Flags,
    Variant,
    Workload,
    ended,
    flag,
    main_or_worker,
    make_parser,
    measure,
    show,
)
from popxl_gpt.config.presets import preset  # noqa: E402
from popxl_gpt.config.schema import Config  # noqa: E402
from popxl_gpt.execution.inference.generation import CachedModel  # noqa: E402
from popxl_gpt.execution.planning.model_size import parameter_count  # noqa: E402
from popxl_gpt.execution.variables import fresh_weights, write_whole_weights  # noqa: E402

CLOCKS = {False: time.perf_counter, True: time.process_time}
"""By whether processor time is asked for."""
OURS, THEIRS = "phased", "transformers"
SIZES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number."""


def configuration(options: Figures) -> Config:
    """GPT-2 small, or fewer of its layers."""
    return preset(
        "gpt2_small",
        layers=options["layers"],
        precision=options["dtype"],
        dropout=0.0,
        stochastic_rounding=False,
    )


def prompts(options: Figures) -> np.ndarray:
    """Token ids, int64 [batch, prompt]."""
    vocabulary = configuration(options).model.vocabulary_size
    shape = (options["batch"], options["prompt"])
    return np.random.default_rng(0).integers(0, vocabulary, shape)


class Phased:
    """This repository's program."""

    def __init__(self, options: Figures):
        self.clock = CLOCKS[options["processor_time"]]
        self.prompts, self.tokens = prompts(options).tolist(), options["tokens"]
        sizes = (options["batch"], options["prompt"], self.tokens)
        self.model = CachedModel(configuration(options), *sizes)
        with fresh_weights(self.model.config) as weights:
            write_whole_weights(self.model.session, self.model.config, weights)
        self.model.session.__enter__()  # the process ends with the workload

    def step(self, count: int) -> Figures:
        """Write once; when each token was there, in seconds."""
        times = [self.clock()]
        logits = self.model.start(self.prompts)
        times.append(self.clock())
        for _ in range(self.tokens - 1):
            logits = self.model.append(logits.argmax(axis=1).tolist())
            times.append(self.clock())
        return {"times": times}


class Transformers:
    """Hugging Face's GPT-2 and its `generate`."""

    def __init__(self, options: Figures):
        import torch
        import transformers

        model = configuration(options).model
        shape = {"n_layer": model.layers, "n_embd": model.hidden_size, "n_head": model.heads}
        gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
        self.gpt = gpt.to(getattr(torch, options["dtype"])).eval()
        self.clock = CLOCKS[options["processor_time"]]
        self.ids, self.tokens = torch.from_numpy(prompts(options)), options["tokens"]

    def step(self, count: int) -> Figures:
        """Write once; when each token was there, in seconds."""
        import torch
        import transformers

        clock = self.clock

        class Clock(transformers.StoppingCriteria):
            def __call__(self, ids: torch.Tensor, scores: object, **more: object) -> torch.Tensor:
                times.append(clock())
                return torch.zeros(len(ids), dtype=torch.bool)

        times = [clock()]
        self.gpt.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            max_new_tokens=self.tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=transformers.StoppingCriteriaList([Clock()]),
        )
        return {"times": times}


def build(options: Figures) -> Workload:
    """A variant's workload."""
    return Phased(options) if options["variant"] == OURS else Transformers(options)


def bytes_per_token(options: Figures) -> float:
    """Bytes that a token of every text reads at least, half way through what is written."""
    model, size = configuration(options).model, SIZES[options["dtype"]]
    weights = parameter_count(model) - model.positions * model.hidden_size
    columns = options["prompt"] + options["tokens"] / 2
    cached = 2 * options["batch"] * columns * model.layers * model.hidden_size
    return (weights + cached) * size


def read_speed() -> float:
    """Bytes per second at which this machine reads memory."""
    from popxl_engine.planner.measuring import copy_rate, read_rate  # not at the top: loads torch

    return read_rate() or 2 * copy_rate()  # without a compiler


def speeds(rounds: "list[list[float]]") -> "tuple[float, float]":
    """Seconds to the first token and seconds of a later one: medians over rounds and tokens."""
    first = statistics.median(times[1] - times[0] for times in rounds)
    later = [b - a for times in rounds for a, b in zip(times[1:], times[2:])]
    return first, statistics.median(later)


def compare(options: Figures, rounds: int) -> Figures:
    """Both in alternation, in one case."""
    variants = [Variant(name=name, options={**options, "variant": name}) for name in (OURS, THEIRS)]
    before = read_speed()
    found = measure(Path(__file__), variants, rounds=rounds, warmup=1)
    speed = max(before, read_speed())
    (first, ours), (their_first, theirs) = (
        speeds([step["times"] for step in measured.steps[1:]]) for measured in found
    )
    batch, bound = options["batch"], bytes_per_token(options) / speed
    return {
        **{key: options[key] for key in ("dtype", "prompt", "batch", "tokens", "layers")},
        "first_token_seconds": {OURS: first, THEIRS: their_first},
        "tokens_per_second": {OURS: batch / ours, THEIRS: batch / theirs, "limit": batch / bound},
        "speedup": theirs / ours,
        "share_of_limit": bound / ours,
        "read_gb_per_second": speed / 1e9,
    }


COLUMNS: Columns = {
    "case": "{dtype:<8} prompt {prompt:>3} batch {batch}".format_map,
    OURS: "{tokens_per_second[phased]:6.1f} tok/s".format_map,
    THEIRS: "{tokens_per_second[transformers]:6.1f} tok/s".format_map,
    "limit": "{tokens_per_second[limit]:6.1f} tok/s".format_map,
    "speedup": "{speedup:.2f}x".format_map,
    "of the limit": "{share_of_limit:6.0%}".format_map,
    "first token": "{first_token_seconds[phased]:7.3f} s".format_map,
    "theirs": "{first_token_seconds[transformers]:7.3f} s".format_map,
}
FLAGS: Flags = {
    "--dtypes": {"nargs": "+", "choices": SIZES, "default": list(SIZES)},
    "--prompts": {"nargs": "+", "type": int, "default": [16, 512], "help": "tokens of each"},
    "--batches": {"nargs": "+", "type": int, "default": [1, 8], "help": "texts at a time"},
    "--tokens": flag(64, "to write after each prompt"),
    "--layers": flag(12, "of GPT-2 small"),
    "--rounds": flag(3, "measured, in alternation"),
    "--processor_time": {"action": "store_true", "help": "in place of the clock's"},
}


def main() -> int:
    """Compare in every case, print a table and a line of JSON. Returns the exit code."""
    arguments = make_parser(__doc__, FLAGS).parse_args()
    if min(arguments.tokens - 2, *arguments.prompts, *arguments.batches, arguments.rounds) < 1:
        raise BenchmarkError("generate.py: expected at least 3 tokens, and 1 of everything else.")
    fixed = {name: getattr(arguments, name) for name in ("tokens", "layers", "processor_time")}
    results = []
    for case in product(arguments.dtypes, arguments.prompts, arguments.batches):
        options = fixed | dict(zip(("dtype", "prompt", "batch"), case))
        results.append(compare(options, arguments.rounds))
    show(COLUMNS, results)
    return ended("generate", arguments, met=None, cases=results)


if __name__ == "__main__":
    main_or_worker(build, main)
