"""What loss a recipe has after so many minutes: the phased GPT, nanoGPT's recipe, and a modern one
in plain PyTorch, on the same text, the same held-out bytes and the same cores.

    python benchmarks/time_to_loss.py                       # 1, 5 and 20 minutes; takes hours
    python benchmarks/time_to_loss.py --minutes 1 --seeds 1 --trials 4
    python benchmarks/time_to_loss.py --ours "--config mini" --start size=4x192x3

Loss is bits per byte of the whole held-out text. The clock begins with the process: start-up and
compiling count, measuring does not. Time drives each schedule. Every recipe is tuned by the same
number of short runs, on the points of its axes, one axis after the other. Baselines run eagerly or
compiled, and all recipes in float32 or bfloat16: in what takes most steps in their minutes. Each
result is a file in the folder: the same command, given again, runs what has none yet. Steps stand
beside what this CPU multiplies at most in their type (`ceilings.py`).
"""

import hashlib
import json
import math
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tokenizers import Tokenizer  # noqa: E402

from benchmarks.harness import (  # noqa: E402
    CHECK,
    ROOT,
    Arguments,
    BenchmarkError,
    Figures,
    Flags,
    ended,
    flag,
    make_parser,
    outcome,
    output_of,
    percent,
    require_file,
    script,
    table,
)
from popxl_gpt.config.command_line import parse_command_line  # noqa: E402
from popxl_gpt.config.presets import from_mapping, override  # noqa: E402
from popxl_gpt.config.saving import to_mapping  # noqa: E402
from popxl_gpt.config.schema import Model  # noqa: E402
from popxl_gpt.data.tokenisation import token_bytes  # noqa: E402
from popxl_gpt.execution.planning.model_size import flops_per_token  # noqa: E402

TEXT = ROOT / "data" / "files" / "stdlib"
RESULTS = ROOT / "build" / "time_to_loss"
OURS = "--config modern"
"""What the application is given, as flags; the axes of its search are settings, too."""
MODES = ("eager-float32", "eager-bfloat16", "compiled-float32", "compiled-bfloat16")
"""How a baseline may run; without instructions for bfloat16, float32 is faster."""
RUN = (
    "from benchmarks.timed_{} import RECIPES; from benchmarks.timed_runs import main; main(RECIPES)"
)
"""What a run's process does: modules of other recipes, and this one, would cost it start-up."""
PROBE_STEPS, PROBE_MINUTES = 12, 10.0
"""The length of a probe, which tells start-up and speed of a mode: steps, or minutes at most."""
BASELINES = ("nanogpt", "modern")
RATES = (0.25, 0.5, 1.0, 2.0, 4.0)
SIZES = ("2x128x2", "2x192x3", "2x256x4", "4x192x3", "4x192x6", "4x256x4", "6x256x4", "6x384x6")
"""layers x hidden_size x heads."""

Settings = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Search:
    """Where a recipe's search begins, and the points along its axes."""

    start: Settings
    axes: Mapping[str, Sequence[Any]]


SEARCHES = {
    "ours": Search(
        start={"schedule": "wsd", "warmup": 0.02, "decay": 0.4, "lowest": 0.0},
        axes={
            "learning_rate": (1e-3, 2e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2),
            "global_batch_size": (4, 8, 16, 32),
            "size": SIZES,
        },
    ),
    "nanogpt": Search(
        start={"schedule": "cosine", "warmup": 0.05, "lowest": 0.1}
        | {"rate": 2e-3, "batch": 8, "size": "4x256x4"},
        axes={"rate": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3), "batch": (4, 8, 16, 32), "size": SIZES},
    ),
    "modern": Search(
        start={"schedule": "wsd", "warmup": 0.0, "decay": 0.5, "lowest": 0.0}
        | {"rate": 1.0, "batch": 8, "size": "4x256x4", "bigrams": 0},
        axes={"rate": RATES, "batch": (4, 8, 16, 32), "size": SIZES, "bigrams": (0, 4, 16)},
    ),
}

POINTS = sorted(
    {
        f"{name}={point}"
        for kind in BASELINES
        for name, axis in SEARCHES[kind].axes.items()
        for point in axis
    }
)


def started(words: Sequence[str], kind: str) -> Settings:
    """Those points of a recipe's axes that words tell, such as `size=4x192x3`."""
    return {
        name: point
        for name, axis in SEARCHES[kind].axes.items()
        for point in axis
        if f"{name}={point}" in words
    }


def neighbours(axis: Sequence[Any], value: Any) -> list[Any]:
    """The points next to one of an axis, the later one first."""
    place = axis.index(value)
    return [axis[i] for i in (place + 1, place - 1) if 0 <= i < len(axis)]


def tuned(search: Search, measure: Callable[[Settings], float], trials: int) -> Settings:
    """The best settings that so many measurements find: from the start along one axis after the
    other, as far as the loss falls.
    """
    best, lowest, tried = search.start, measure(search.start), [search.start]
    names, exhausted = cycle(search.axes), 0
    name = next(names)
    while len(tried) < trials and exhausted < len(search.axes):
        points = [{**best, name: value} for value in neighbours(search.axes[name], best[name])]
        untried = [point for point in points if point not in tried]
        if not untried:
            name, exhausted = next(names), exhausted + 1
            continue
        tried.append(untried[0])
        loss = measure(untried[0])
        if loss < lowest:
            best, lowest, exhausted = untried[0], loss, 0
    return best


class Bench:
    """Runs and their results, in a folder."""

    def __init__(self, arguments: Arguments):
        self.arguments, self.folder = arguments, arguments.results
        self.folder.mkdir(parents=True, exist_ok=True)
        info = json.loads((arguments.text / "dataset.json").read_text())
        tokenizer = Tokenizer.from_file(str(arguments.text / "tokenizer.json"))
        sizes = token_bytes(tokenizer)
        if sizes is None or math.isnan(sizes.sum()):
            raise BenchmarkError(
                f"{arguments.text}: got a tokenizer whose tokens' bytes are not known; expected "
                "one of data/prepare.py. Prepare the text with it."
            )
        self.config = parse_command_line(shlex.split(arguments.ours), program="--ours").config
        self.common = {
            "text": str(arguments.text.resolve()),
            "sequence_length": arguments.sequence_length,
            "vocabulary_size": info["vocabulary_size"],
            "token_bytes": sizes.tolist(),
        }
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends the run's process, too

    def search(self, kind: str) -> Search:
        """A recipe's search; ours begins with what its flags say, a baseline with `--start`."""
        search = SEARCHES[kind]
        if kind != "ours":
            return replace(search, start=search.start | started(self.arguments.start, kind))
        model, training = self.config.model, self.config.training
        size = f"{model.layers}x{model.hidden_size}x{model.heads}"
        given = {
            "learning_rate": training.learning_rate,
            "global_batch_size": training.global_batch_size,
            "size": size,
        }
        axes = {  # what the flags say is a point, wherever it lies
            name: axis if given[name] in axis else sorted([*axis, given[name]])
            for name, axis in search.axes.items()
        }
        return Search(start={**search.start, **given}, axes=axes)

    def tuned(self, kind: str) -> Settings:
        """The best settings that a recipe's trials find."""
        minutes, trials = self.arguments.trial_minutes, self.arguments.trials

        def measure(settings: Settings) -> float:
            return loss_of(self.run(kind, self.with_mode(kind, settings, minutes), minutes))

        search = self.search(kind)
        return tuned(search, measure, trials) if trials else search.start

    def with_mode(self, kind: str, settings: Settings, minutes: float) -> Settings:
        """Settings with the mode that takes most steps in so many minutes, by probes."""
        wanted = self.arguments.modes
        if kind == "ours":  # has one way to run, in either precision
            wanted = list(dict.fromkeys(f"phased-{mode.partition('-')[2]}" for mode in wanted))
        modes = [{**settings, "mode": mode} for mode in wanted]
        if len(modes) == 1:
            return modes[0]
        probes = [self.run(kind, mode, PROBE_MINUTES, is_probe=True) for mode in modes]
        return max(zip(modes, probes), key=lambda pair: steps_in(pair[1], minutes))[0]

    def run(
        self, kind: str, settings: Settings, minutes: float, seed: int = 0, is_probe: bool = False
    ) -> Figures:
        """The figures of a run: from its file, or made now. A probe is not evaluated."""
        options = {**self.common, "kind": kind, "settings": settings, "seed": seed}
        steps = PROBE_STEPS if is_probe else self.arguments.steps
        options |= {"seconds": 60.0 * minutes, "steps": steps, "is_probe": is_probe}
        if kind == "ours":
            options["config"] = self._own_config(settings)
        text = json.dumps(options, sort_keys=True)
        name = f"{kind}-{minutes:g}min-seed{seed}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
        result = self.folder / f"{name}.json"
        if not result.exists():
            program = RUN.format("ours" if kind == "ours" else "plain")
            given = json.dumps({**options, "started": time.monotonic()})
            *_, last = output_of([sys.executable, "-c", program], input=given).splitlines()
            result.write_text(last)
            print(told(kind, minutes, settings, json.loads(last)), flush=True)
        return json.loads(result.read_text())

    def step_share(self, kind: str, settings: Settings, runs: list[Figures]) -> float | None:
        """The share of what this CPU multiplies at most, in calls after the first: the median."""
        model, iterations = Model(**self._sizes(settings)), 1  # baselines have GPT-2's products
        if kind == "ours":
            config = from_mapping(self._own_config(settings))
            model, iterations = config.model, config.execution.device_iterations
        flops = iterations * flops_per_token(model)
        shares = [
            flops * run["tokens"] / run["step"] / run["call_seconds"] / run["ceiling"]
            for run in runs
            if run["call_seconds"] and run["ceiling"]
        ]
        return statistics.median(shares) if shares else None

    def _sizes(self, settings: Settings) -> Figures:
        layers, hidden, heads = map(int, settings["size"].split("x"))
        common = {name: self.common[name] for name in ("sequence_length", "vocabulary_size")}
        return {"layers": layers, "hidden_size": hidden, "heads": heads, **common}

    def _own_config(self, settings: Settings) -> Figures:
        batch = settings["global_batch_size"]
        micro_batch = min(batch, self.config.execution.micro_batch_size)
        config = override(
            self.config,
            **self._sizes(settings),
            precision=settings["mode"].partition("-")[2],
            learning_rate=settings["learning_rate"],
            global_batch_size=batch,
            micro_batch_size=micro_batch,
            validate_every=0,
        )
        return to_mapping(config)


def loss_of(figures: Figures) -> float:
    """Bits per byte; infinite where training diverged."""
    found = figures["bits_per_byte"]
    return math.inf if found is None else found


def steps_in(figures: Figures, minutes: float) -> float:
    """How many steps a run that starts and steps like a probe takes in so many minutes."""
    left = 60 * minutes - figures["first_seconds"]
    return left / figures["call_seconds"] if figures["call_seconds"] else min(0.0, left)


def told(kind: str, minutes: float, settings: Settings, figures: Figures) -> str:
    """A line on a run."""
    speed = 0.0 if not figures["seconds"] else figures["tokens"] / figures["seconds"]
    found = figures["bits_per_byte"]
    loss = "no loss" if found is None else f"{found:.4f} bits per byte"
    return (
        f"{kind}, {minutes:g} min: {loss}, {figures['tokens']:,} tokens, {speed:,.0f} a second, "
        f"first step after {figures['first_seconds']:.1f} s, {json.dumps(settings)}"
    )


def result_of(runs: list[Figures], settings: Settings) -> Figures:
    """A recipe's runs of the same minutes: medians, and each."""
    losses = [loss_of(run) for run in runs]
    return {
        "bits_per_byte": statistics.median(losses),
        "all_bits_per_byte": losses,
        "tokens": statistics.median(run["tokens"] for run in runs),
        "first_seconds": statistics.median(run["first_seconds"] for run in runs),
        "settings": settings,
        "seconds": [run["seconds"] for run in runs],
    }


def bars(results: Mapping[str, Mapping[float, Figures]], minutes: Sequence[float]) -> list[Figures]:
    """For each number of minutes whether ours has no more than the better baseline has after twice
    as many.
    """
    found = []
    for t in minutes:
        losses = {
            name: by_minutes[2 * t]["bits_per_byte"]
            for name, by_minutes in results.items()
            if name in BASELINES and 2 * t in by_minutes
        }
        if "ours" not in results or not losses:
            continue
        best, ours = min(losses, key=losses.__getitem__), results["ours"][t]["bits_per_byte"]
        is_met = ours <= losses[best]
        found.append(
            {"minutes": t, "ours": ours, "baseline": best, "its": losses[best], "met": is_met}
        )
    return found


FLAGS: Flags = {
    "--minutes": {"type": float, "nargs": "+", "default": [1.0, 5.0, 20.0]},
    "--seeds": {"type": int, "help": "how many; default: 3 for up to 5 minutes, else 1"},
    "--recipes": {"nargs": "+", "default": list(SEARCHES), "choices": list(SEARCHES)},
    "--modes": {"nargs": "+", "default": list(MODES), "choices": MODES},
    "--trials": flag(12, "runs to tune each recipe; 0: none"),
    "--trial_minutes": flag(1.0),
    "--steps": flag(0, "of each run at most; 0: what its minutes hold"),
    "--ours": flag(OURS, "flags of demo/pretraining.py (default: %(default)s)"),
    "--start": {
        "nargs": "+",
        "default": [],
        "choices": POINTS,
        "metavar": "NAME=VALUE",
        "help": "of the baselines' searches",
    },
    "--text": flag(TEXT, "what data/prepare.py made (default: %(default)s)", type=Path),
    "--sequence_length": flag(256),
    "--results": flag(RESULTS, "folder (default: %(default)s)", type=Path),
    **CHECK,
}


def measured(bench: Bench) -> dict[str, dict[float, Figures]]:
    """Every recipe's results by minutes: all have the minutes asked for, and baselines twice as
    many, too.
    """
    arguments = bench.arguments
    best = {kind: bench.tuned(kind) for kind in arguments.recipes}
    results: dict[str, dict[float, Figures]] = {kind: {} for kind in best}
    for minutes in arguments.minutes:
        runs = {(kind, minutes): [] for kind in best}
        runs |= {(kind, 2 * minutes): [] for kind in best if kind in BASELINES}
        settings = {(kind, t): bench.with_mode(kind, best[kind], t) for kind, t in runs}
        for seed in range(arguments.seeds or (3 if minutes <= 5 else 1)):
            for (kind, t), found in runs.items():
                found.append(bench.run(kind, settings[kind, t], t, seed))
        for (kind, t), found in runs.items():
            share = bench.step_share(kind, settings[kind, t], found)
            results[kind][t] = result_of(found, settings[kind, t]) | {"ceiling_share": share}
    return results


def show(results: Mapping[str, Mapping[float, Figures]], verdicts: list[Figures]) -> None:
    """Print the table and what came of the bars."""
    rows = [
        [f"{kind}, {minutes:g} min", f"{f['bits_per_byte']:.4f}", f"{f['tokens'] / 1e6:.2f} M"]
        + [f"{f['first_seconds']:.1f} s", percent(f["ceiling_share"])]
        for kind, by_minutes in results.items()
        for minutes, f in sorted(by_minutes.items())
    ]
    print()
    print(table(["recipe", "bits per byte", "tokens", "first step", "of ceiling"], rows))
    for bar in verdicts:
        print(
            f"bar: ours after {bar['minutes']:g} min {bar['ours']:.4f}, {bar['baseline']} after "
            f"{2 * bar['minutes']:g} min {bar['its']:.4f}: {outcome(bar['met'])}"
        )


def main() -> int:
    """Exit code 0; with `--check` 1 when a bar is missed or none was measured; 2 when the text is
    missing.
    """
    arguments = make_parser(__doc__, FLAGS).parse_args()
    remedy = "Make it: python data/prepare.py stdlib"
    require_file(arguments.text / "dataset.json", "a prepared text", remedy)
    results = measured(Bench(arguments))
    verdicts = bars(results, arguments.minutes)
    show(results, verdicts)
    met = bool(verdicts) and all(bar["met"] for bar in verdicts)
    figures = {"results": results, "ours": arguments.ours, "trials": arguments.trials}
    return ended("time_to_loss", arguments, met=met, bars=verdicts, **figures)


if __name__ == "__main__":
    script(main)
