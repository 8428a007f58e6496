"""Validation loss and speed on a text of characters: the phased GPT and the same model in a plain
PyTorch loop.

    python benchmarks/shakespeare.py     # ../shared/data/tinyshakespeare.txt, three seeds
    python benchmarks/shakespeare.py --text FILE --steps 200 --seeds 1

The setting is that of nanoGPT's README for a CPU. `plain` is its training loop, with the optimizer
and the attention that PyTorch has fused; `phased` does the same steps; `preset` is what `make
shakespeare` trains: the same size and batches, with the architecture, optimizer, schedule and steps
of that preset. The first 90 % of the characters train, the rest validates, all of it, in windows
that follow one another. nanoGPT in this setting gave a validation loss of 1.919. Steps stand beside
what this CPU multiplies at most (`ceilings.py`).
"""

import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import (  # noqa: E402
    CHECK,
    KEEP_FREED_MEMORY,
    ROOT,
    Arguments,
    Columns,
    Figures,
    Flags,
    Measurement,
    Variant,
    Workload,
    ceiling_share,
    ended,
    flag,
    gib,
    main_or_worker,
    make_parser,
    measure,
    outcome,
    percent,
    require_file,
    show,
)
from benchmarks.phased import PhasedRun  # noqa: E402
from popxl_gpt.config.presets import override, preset  # noqa: E402
from popxl_gpt.config.schema import Config, Execution, Model, Training  # noqa: E402
from popxl_gpt.execution.planning.model_size import flops_per_step  # noqa: E402

DEFAULT_TEXT = ROOT.parent / "shared" / "data" / "tinyshakespeare.txt"
LOSS_BAR = 1.90
"""Validation loss of the phased run and of the preset's, mean over the seeds, at most."""
SPEED_BAR = 1.0
"""Speed of the phased run over the plain loop's, at least."""
TIME_BAR = 1 / 3
"""Time of the preset's run over that of the plain loop, at most."""

MODEL = {"layers": 4, "hidden_size": 128, "heads": 4, "sequence_length": 64}
BATCH = 12
TRAINING = {
    "learning_rate": 1e-3,
    "minimum_learning_rate": 1e-4,
    "schedule": "cosine",
    "warmup_steps": 100,
    "beta1": 0.9,
    "beta2": 0.99,
    "epsilon": 1e-8,
    "weight_decay": 0.1,
    "max_norm": 1.0,
}
CHUNK = 25
"""Steps that a variant takes before it is the other one's turn."""


@dataclass(frozen=True)
class Characters:
    """A text as numbers, cut in two."""

    train: np.ndarray
    validation: np.ndarray
    vocabulary_size: int

    @classmethod
    def read(cls, path: Path) -> "Characters":
        """Read a text; its distinct characters, sorted, are the vocabulary."""
        text = path.read_text(encoding="utf-8")
        vocabulary, ids = np.unique(np.array(list(text)), return_inverse=True)
        cut = int(0.9 * len(ids))
        return cls(ids[:cut], ids[cut:], len(vocabulary))

    def batches(self, seed: int, sequence: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Endless (ids, labels), each [BATCH, sequence], from random places of the training
        part.
        """
        random = np.random.default_rng(seed)
        while True:
            starts = random.integers(0, len(self.train) - sequence, BATCH)
            rows = self.train[starts[:, None] + np.arange(sequence + 1)]
            yield rows[:, :-1], rows[:, 1:]

    def validation_windows(self, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, labels), each [windows, sequence]: windows that follow one another over the whole
        validation part.

        The characters after the last whole window, fewer than `sequence`, are left out.
        """
        windows = (len(self.validation) - 1) // sequence
        ids, labels = (self.validation[n : n + windows * sequence] for n in (0, 1))
        return ids.reshape(windows, sequence), labels.reshape(windows, sequence)


def build(options: Figures) -> Workload:
    """One variant's workload."""
    text = Characters.read(Path(options["text"]))
    if options["kind"] == "plain":
        from benchmarks.plain_steps import PlainRun  # not at the top: loads torch

        return PlainRun(options, text, MODEL, TRAINING, BATCH)
    names = ("kind", "steps", "seed")
    config = config_of(**{name: options[name] for name in names}, words=text.vocabulary_size)
    return PhasedRun(config, text)


def config_of(kind: str, words: int, steps: int, seed: int) -> Config:
    """The settings of a kind of run, over so many words: those of the plain loop, or of the
    preset.
    """
    config = preset("shakespeare")
    if kind != "preset":
        model, training = Model(**MODEL), Training(**TRAINING)
        config = Config(name="shakespeare", model=model, training=training, execution=Execution())
    own = {"vocabulary_size": words, "dropout": 0.0, "steps": steps, "seed": seed}
    batch = {"global_batch_size": BATCH, "micro_batch_size": BATCH}
    return override(config, **own, **batch, recomputation=False)


def variants_of(arguments: Arguments, seed: int) -> list[Variant]:
    """The plain loop, as fast as we can make it, and ours."""
    options = {"text": str(arguments.text.resolve()), "steps": arguments.steps, "seed": seed}
    of = {
        "plain": {"kind": "plain", "compiled": False},
        "compiled": {"kind": "plain", "compiled": True},
        "phased": {"kind": "phased"},
        "preset": {"kind": "preset", "steps": preset_steps(arguments.steps)},
    }
    return [
        Variant(
            name=name,
            options={**options, **of[name]},
            environment=KEEP_FREED_MEMORY if of[name]["kind"] == "plain" else {},
        )
        for name in VARIANTS
        if name in arguments.variants
    ]


def preset_steps(steps: int) -> int:
    """Steps of the preset's run beside so many others: its own beside the whole 2,000."""
    share = preset("shakespeare").training.steps / 2000
    return max(2, round(steps * share / CHUNK)) * CHUNK  # the first are warm-up


def summarise(runs: list[Measurement], steps: int) -> Figures:
    """One variant, of so many steps, over all seeds. Later rounds are those of others."""
    losses = [run.finish["validation_loss"] for run in runs]
    rounds = steps // CHUNK - 1
    runs = [
        replace(run, seconds=run.seconds[:rounds], cpu_seconds=run.cpu_seconds[:rounds])
        for run in runs
    ]
    return {
        "steps": steps,
        "seconds": steps * statistics.fmean(second for run in runs for second in run.seconds),
        "validation_loss": statistics.fmean(losses),
        "validation_losses": losses,
        "milliseconds_per_step": 1e3
        * statistics.median(second for run in runs for second in run.seconds),
        "cpu_milliseconds_per_step": 1e3
        * statistics.median(second for run in runs for second in run.cpu_seconds),
        "spread": max(run.spread for run in runs),
        "peak_bytes": max(run.peak_bytes for run in runs),
    }


VARIANTS = ("plain", "compiled", "phased", "preset")
COLUMNS: Columns = {
    "variant": "{variant}".format_map,
    "validation loss": "{validation_loss:.4f}".format_map,
    "steps": "{steps}".format_map,
    "seconds": "{seconds:.1f}".format_map,
    "ms/step": "{milliseconds_per_step:.2f}".format_map,
    "cpu ms/step": "{cpu_milliseconds_per_step:.2f}".format_map,
    "spread": lambda figures: f"{100 * figures['spread']:.0f} %",
    "of ceiling": lambda figures: percent(figures["ceiling_share"]),
    "peak memory": lambda figures: gib(figures["peak_bytes"]),
}
TEXT: Flags = {"--text": flag(DEFAULT_TEXT, "any text file (default: %(default)s)", type=Path)}
FLAGS: Flags = {
    **TEXT,
    "--steps": flag(2000, "optimizer steps; the bar on the loss is for 2000"),
    "--seeds": flag(3, "how many; the seeds are 0, 1, ..."),
    "--variants": {
        "nargs": "+",
        "default": ["plain", "phased", "preset"],
        "choices": VARIANTS,
    },
    **CHECK,
}


def main() -> int:
    """Train, print; exit code 0, with `--check` 1 when a bar is missed, 2 when the text is
    missing.
    """
    parser = make_parser(__doc__, FLAGS)
    arguments = parser.parse_args()
    steps = arguments.steps
    require_file(arguments.text, "a text to train on", "Give one with --text FILE.")
    if steps < 2 * CHUNK or steps % CHUNK:
        parser.error(f"--steps: got {steps}; expected a multiple of {CHUNK}, at least {2 * CHUNK}.")
    runs: dict[str, list[Measurement]] = {name: [] for name in arguments.variants}
    counts = {"rounds": steps // CHUNK - 1, "warmup": 1, "steps_per_round": CHUNK}
    for seed in range(arguments.seeds):
        for run in measure(Path(__file__), variants_of(arguments, seed), **counts):
            runs[run.name].append(run)
            loss = run.finish["validation_loss"]
            print(f"seed {seed}: {run.name} ends at validation loss {loss:.4f}", flush=True)
    vocabulary, figures = Characters.read(arguments.text).vocabulary_size, {}
    for name, seeds in runs.items():
        config = config_of(name, vocabulary, preset_steps(steps) if name == "preset" else steps, 0)
        f = summarise(seeds, config.training.steps)
        seconds = f["milliseconds_per_step"] / 1e3
        share = ceiling_share(flops_per_step(config), seconds, config.model.precision)
        figures[name] = {**f, "ceiling_share": share}
    print()
    show(COLUMNS, [{"variant": name, **f} for name, f in figures.items()])
    bar = verdict(figures)
    if bar is not None:
        print(
            f"\nbars: losses at most {LOSS_BAR}, phased at no less than {SPEED_BAR}x the plain "
            f"loop's speed, the preset in no more than {TIME_BAR:.2f} of its time: "
            f"{outcome(bar['met'])}"
        )
    result = {"variants": figures, "steps": steps, "seeds": arguments.seeds, "bar": bar}
    return ended("shakespeare", arguments, met=bar and bar["met"], **result)


def verdict(figures: Figures) -> Figures | None:
    """Whether the phased runs are within their bars; None when they, or the plain loop, were not
    measured.
    """
    if not {"plain", "phased", "preset"} <= figures.keys():
        return None
    plain, phased, chosen = (figures[name] for name in ("plain", "phased", "preset"))
    loss = max(phased["validation_loss"], chosen["validation_loss"])
    speed = plain["milliseconds_per_step"] / phased["milliseconds_per_step"]
    time = chosen["seconds"] / plain["seconds"]
    return {
        "validation_loss": loss,
        "speed_ratio": speed,
        "time_ratio": time,
        "met": loss <= LOSS_BAR and speed >= SPEED_BAR and time <= TIME_BAR,
    }


if __name__ == "__main__":
    main_or_worker(build, main)
