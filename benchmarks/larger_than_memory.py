"""Training with state three times larger than the memory that the process may use, from files on a
local disk.

    python benchmarks/larger_than_memory.py              # 247 M parameters, 7 GB on the disk
    python benchmarks/larger_than_memory.py --batches 1 16 --folder /another/disk

The limit is a third of weights and optimizer state: 12 bytes a parameter with moments in float32, 8
in bfloat16, for which the largest batch is measured too. The largest resident set is compared with
it, and files must go past the system's cache, which it does not count. The same steps in memory are
the compute ceiling, and their losses must be the same bits. The disk's bandwidth is measured in the
same run. A step can take no less than the larger of the two: "of the bound" is that
over what it took. The traffic of weights and optimizer is the same for every batch, so that the bar
is for the largest, where the steps come nearest to those in memory.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ceilings import disk_rates  # noqa: E402
from benchmarks.harness import (  # noqa: E402
    CHECK,
    ROOT,
    Arguments,
    BenchmarkError,
    Columns,
    Figures,
    Flags,
    Measurement,
    Variant,
    ended,
    flag,
    gib,
    main_or_worker,
    make_parser,
    measure,
    show,
)
from benchmarks.phased import MOVED, PhasedTrainer  # noqa: E402
from popxl_gpt.config.schema import Config, Execution, Model, Training  # noqa: E402
from popxl_gpt.execution.planning.model_size import parameter_count  # noqa: E402

SHARE = 3
"""State over the limit, at least."""
BAR = 0.8
"""The share of the bound, at least."""
WIDTHS = {"float32": 4, "bfloat16": 2}
"""Bytes of a number."""
PROCESS_MIB = 480
"""What a process takes beside its rows, with some to spare: Python, PyTorch, the program,
activations of a layer.
"""
SIZES = {"layers": 34, "hidden_size": 768, "heads": 12}
SIZES |= {"sequence_length": 256, "vocabulary_size": 8192}
LOOKING_AHEAD = {"in files": {}, "in files, fetched when asked for": {"POPXL_LOOK_AHEAD": "0"}}


class Larger(PhasedTrainer):
    """A training session whose rows are in files, or in memory."""

    def __init__(self, options: Figures):
        model, batch = Model(**options["model"], dropout=0.0), options["batch"]
        training = Training(
            steps=1000,
            global_batch_size=batch,
            learning_rate=1e-4,
            schedule="constant",
            moment_precision=options["moments"],
            stochastic_rounding=True,
        )
        execution = Execution(
            memmap_dir=options.get("folder"),
            host_memory=options.get("host_memory"),
            device_iterations=options["iterations"],
        )
        config = Config(
            name="larger_than_memory", model=model, training=training, execution=execution
        )
        super().__init__(config)


def variants_of(arguments: Arguments, batch: int, moments: str, limit: int) -> list[Variant]:
    """In memory, in files, and in files without looking ahead."""
    given = arguments.host_memory
    rows = limit - PROCESS_MIB * 2**20 if given is None else given * 2**20
    if rows <= 0:
        raise BenchmarkError(
            f"limit: got {gib(limit)}; expected more than the {PROCESS_MIB} MiB of a process, for "
            "rows. Measure a larger model, or give --limit and --host_memory."
        )
    model = {name: getattr(arguments, name) for name in (*SIZES, "precision")}
    common = {"model": model, "batch": batch, "moments": moments}
    common |= {"iterations": arguments.device_iterations}
    files = {"folder": arguments.folder, "host_memory": rows}
    return [
        Variant(name="in memory", options=common),
        *(
            Variant(name=name, options=common | files, environment=environment)
            for name, environment in LOOKING_AHEAD.items()
        ),
    ]


def compare(
    measured: list[Measurement], tokens_per_step: int, disk: Figures, limit: int
) -> dict[str, Figures]:
    """Figures of each variant, beside the bound that the disk and the first variant, in memory,
    give.
    """
    alone, found = measured[0], {}
    for m in measured:
        rounds = m.steps[-len(m.seconds) :]
        moved, written, waited = (
            float(np.median([step.get(name, 0.0) for step in rounds])) for name in MOVED
        )
        transfer = (moved + written) / disk["both"]
        found[m.name] = {
            **m.figures(),
            "tokens_per_s": tokens_per_step / m.median,
            "transfer_seconds": transfer,
            "of_bound": max(alone.median, transfer) / m.median,
            "of_memory": alone.median / m.median,
            "waiting": waited / m.median,
            "read_bytes": moved,
            "written_bytes": written,
            "within_limit": m is alone or m.peak_bytes <= limit,
            "losses_equal": [s["loss"] for s in m.steps] == [s["loss"] for s in alone.steps],
            "loss": m.steps[-1]["loss"],
        }
    return found


COLUMNS: Columns = {
    "sequences a step": "{batch}, {name}".format_map,
    "tokens/s": "{tokens_per_s:.1f}".format_map,
    "s/step": "{seconds:.3f}".format_map,
    "spread": "{spread:.0%}".format_map,
    "of memory": "{of_memory:.0%}".format_map,
    "of bound": "{of_bound:.0%}".format_map,
    "waiting": "{waiting:.0%}".format_map,
    "read": lambda figures: gib(figures["read_bytes"]),
    "written": lambda figures: gib(figures["written_bytes"]),
    "peak": lambda figures: gib(figures["peak_bytes"]),
    "losses": lambda figures: "same" if figures["losses_equal"] else "DIFFERENT",
}


def measured_with(
    moments: str, batches: list[int], arguments: Arguments, disk: Figures, model: Model
) -> Figures:
    """Measure some batches with moments of a type, and print them."""
    width = WIDTHS[arguments.precision] + 2 * WIDTHS[moments]
    state = parameter_count(model) * width
    limit = state // SHARE if arguments.limit is None else arguments.limit * 2**20
    print(
        f"moments in {moments}: {width} bytes of state a parameter, {gib(state)}, limit "
        f"{gib(limit)}\n",
        flush=True,
    )
    found: dict[int, dict[str, Figures]] = {}
    for batch in batches:
        measured = measure(
            Path(__file__),
            variants_of(arguments, batch, moments, limit),
            rounds=arguments.rounds,
            warmup=arguments.warmup,
            steps_per_round=arguments.device_iterations,
        )
        found[batch] = compare(measured, batch * model.sequence_length, disk, limit)
    named = [{"batch": b, "name": n, **f} for b, by in found.items() for n, f in by.items()]
    show(COLUMNS, named)
    in_limit = all(figures["in files"]["within_limit"] for figures in found.values())
    print(f"limit {gib(limit)}: {'kept' if in_limit else 'EXCEEDED'}\n", flush=True)
    met = found[max(found)]["in files"]["of_bound"] >= BAR and in_limit
    return {
        "state_bytes": state,
        "limit_bytes": limit,
        "batches": found,
        "within_limit": in_limit,
        "met": met,
    }


KINDS = list(WIDTHS)
FLAGS: Flags = {
    **{f"--{name}": flag(default) for name, default in SIZES.items()},
    "--precision": flag("float32", "of weights and activations", choices=KINDS),
    "--moments": {
        "nargs": "+",
        "default": KINDS,
        "choices": KINDS,
        "help": "the first: all batches",
    },
    "--batches": {"type": int, "nargs": "+", "default": [1, 4], "help": "sequences of a step"},
    "--device_iterations": flag(4, "steps of a run of the session"),
    "--rounds": flag(3, "measured runs of each variant"),
    "--warmup": flag(1, "runs before them"),
    "--host_memory": {
        "type": int,
        "help": f"MiB for rows; default: the limit without {PROCESS_MIB} MiB",
    },
    "--limit": {"type": int, "help": "MiB that it may use; default: a third of the state"},
    "--disk_mib": flag(1024, "moved each way to measure the disk"),
    "--folder": flag(str(ROOT / "runs/larger_than_memory"), "on the disk to use"),
    **CHECK,
}


def main() -> int:
    """Measure and print; exit code 0, or with `--check` 1 when a bar is missed."""
    arguments = make_parser(__doc__, FLAGS).parse_args()
    model = Model(**{name: getattr(arguments, name) for name in SIZES})
    rates = [
        disk_rates(Path(arguments.folder), threads, arguments.disk_mib * 2**20)
        for threads in (1, 2, 4)
    ]
    disk = {name: max(found[name] for found in rates) for name in rates[0]}
    shown = ", ".join(f"{name} {disk[name] / 1e9:.2f}" for name in ("read", "write", "both"))
    print(f"{parameter_count(model) / 1e6:.0f} M parameters in {arguments.precision}")
    print(f"disk, GB/s: {shown}\n", flush=True)
    if not disk["is_direct"]:
        raise BenchmarkError(
            f"--folder: got {arguments.folder}, whose file system goes through the system's cache; "
            "expected one with direct transfers. Choose a folder on another disk."
        )
    largest = max(arguments.batches)
    found = {
        moments: measured_with(
            moments, [largest] if number else arguments.batches, arguments, disk, model
        )
        for number, moments in enumerate(arguments.moments)
    }
    met = all(figures["met"] for figures in found.values())
    bar = f"bar: at least {100 * BAR:.0f} % of the bound at {largest}, within the limit"
    batches = [by_name for figures in found.values() for by_name in figures["batches"].values()]
    if not all(figures["losses_equal"] for by_name in batches for figures in by_name.values()):
        raise BenchmarkError("losses: got others from files than in memory; expected the same bits")
    figures = {"parameters": parameter_count(model), "disk": disk, "moments": found}
    return ended("larger_than_memory", arguments, met=met, bar_text=bar, **figures)


if __name__ == "__main__":
    main_or_worker(Larger, main)
