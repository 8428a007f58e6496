"""Step time of the training program against the number of its replicas, in one process and in
several.

    python benchmarks/replicas.py                     # the `test` model, a global batch of 32
    python benchmarks/replicas.py --batch 8 --rounds 5

Every layout does the same work on the same machine, so that whatever a step takes beyond the single
replica's is what splitting costs. Data-parallel replicas of one process are held to a bar. The
share of collectives is the time of the first process in meeting, exchanging and combining, over
that of its steps; that of the ceiling is what all processes multiply over what their threads could
(`ceilings.py`).
"""

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.harness import (  # noqa: E402
    Figures,
    Measurement,
    Variant,
    ceiling_share,
    gib,
    machine,
    main_or_worker,
    measure,
    percent,
    print_json,
    table,
)
from popxl_gpt.config.presets import preset  # noqa: E402
from popxl_gpt.config.schema import Config  # noqa: E402

OVERHEAD_BAR = 1.3
"""Step time of eight data-parallel replicas in one process over the single replica's, at most."""
BAR = "8 x 1 x 1"
ONE_PROCESS = ((2, 1, 1), (4, 1, 1), (8, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2))
"""dp, tp1, tp2."""
SEVERAL = (((2, 1, 1), 2), ((4, 1, 1), 2), ((4, 1, 1), 4), ((1, 2, 1), 2), ((1, 1, 2), 2))
"""Layout and number of processes."""


class Collectives:
    """The time that this process spends in collectives. It stands in the engine's own functions'
    places.
    """

    def __init__(self) -> None:
        from popxl_engine.machine import fabric, lockstep

        self.seconds = 0.0
        lockstep._complete = self._timed(lockstep._complete)  # meeting, and combining what is here
        lockstep._fold = self._timed(lockstep._fold)  # combining what is large as it comes
        # waiting for other processes, and combining
        fabric.Fabric.finish = self._timed(fabric.Fabric.finish)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


class Replicas:
    """One layout; over several processes this is the first, which starts the others and tells them
    to step.
    """

    def __init__(self, options: Figures):
        self.instances = options["instances"]
        self.others = start_others(options)
        self.collectives = Collectives()
        self.trainer = trainer(options)

    def step(self, count: int) -> Figures:
        """Optimizer steps; the loss of the last, and seconds in collectives."""
        before = self.collectives.seconds
        tell(count, self.instances)
        figures = self.trainer.step(count)
        return {**figures, "collectives": (self.collectives.seconds - before) / count}

    def finish(self) -> Figures:
        """End the other processes."""
        tell(0, self.instances)
        codes = [other.wait() for other in self.others]
        assert not any(codes), codes
        return {}


def configuration(options: Mapping[str, Any]) -> Config:
    """Of one layout's run."""
    dp, tp1, tp2 = options["layout"]
    layout = {"data_parallel": dp, "tensor_parallel_1": tp1, "tensor_parallel_2": tp2}
    return preset(
        "test", **options["model"], **layout, global_batch_size=options["batch"], warmup_steps=0
    )


def step_share(variant: Variant, seconds: float) -> float | None:
    """What a layout multiplies in a step, over what all its threads could in so many seconds."""
    from popxl_gpt.execution.planning.model_size import flops_per_step

    config = configuration(variant.options)
    threads = variant.options["instances"] * int(variant.environment["OMP_NUM_THREADS"])
    return ceiling_share(flops_per_step(config), seconds, config.model.precision, threads)


def trainer(options: Figures) -> Any:
    """This process's part of the training session."""
    from benchmarks.phased import PhasedTrainer
    from popxl_gpt.execution.host import own_samples

    config = configuration(options)

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        random = np.random.default_rng(0)
        shape = (options["batch"], config.model.sequence_length + 1)
        while True:
            tokens = own_samples(random.integers(0, config.model.vocabulary_size, shape), config)
            yield tokens[:, :-1], tokens[:, 1:]

    return PhasedTrainer(config, batches())


def start_others(options: Figures) -> list[subprocess.Popen]:
    """Make this process the first of a run, and start the others."""
    instances = options["instances"]
    if instances == 1:
        return []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": instances, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared["POPDIST_NUM_TOTAL_REPLICAS"] = math.prod(options["layout"])
    os.environ.update({name: str(value) for name, value in shared.items()}, RANK="0")
    command = [sys.executable, str(Path(__file__)), "--follow", json.dumps(options)]
    return [
        subprocess.Popen(
            command,
            stdout=sys.stderr,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "RANK": str(number)},
        )
        for number in range(1, instances)
    ]


def tell(count: int, instances: int) -> None:
    """Say to all processes of a run how many steps come next; 0 ends them."""
    from popxl_gpt.utils.runtime import gather

    gather(count, instances, patiently=True)


def follow(options: Figures) -> None:
    """Be one of the other processes: step when the first one does."""
    from popxl_gpt.utils.runtime import gather

    own = trainer(options)
    while count := gather(None, options["instances"], patiently=True)[0]:
        own.step(count)


def layout_name(layout: Sequence[int], instances: int = 1) -> str:
    """How the table calls it."""
    name = " x ".join(map(str, layout))
    return name if instances == 1 else f"{name} in {instances} processes"


def variants_of(arguments: argparse.Namespace) -> list[Variant]:
    """The single replica first."""
    model = {
        name: getattr(arguments, name) for name in SIZES if getattr(arguments, name) is not None
    }
    cores = len(os.sched_getaffinity(0))
    found = []
    for layout, instances in [((1, 1, 1), 1), *((layout, 1) for layout in ONE_PROCESS), *SEVERAL]:
        name = layout_name(layout, instances)
        if arguments.layouts and name not in (layout_name((1, 1, 1)), *arguments.layouts):
            continue
        options = {
            "layout": layout,
            "instances": instances,
            "model": model,
            "batch": arguments.batch,
        }
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // instances)))
        # the latter as demo/pretraining.py has it
        environment = {"OMP_NUM_THREADS": threads, "GOMP_SPINCOUNT": "1000"}
        found.append(Variant(name=name, options=options, environment=environment))
    return found


def compare(alone: Measurement, measurements: Sequence[Measurement]) -> dict[str, Figures]:
    """Figures of each layout, with its ratio to the single replica in the same rounds."""
    found = {}
    for m in measurements:
        rounds = m.steps[-len(m.seconds) :]
        share = float(np.median([figures["collectives"] for figures in rounds])) / m.median
        ratio = {"ratio": m.median / alone.median, "cpu_ratio": m.cpu_median / alone.cpu_median}
        found[m.name] = {
            **m.figures(),
            **ratio,
            "collectives_share": share,
            "loss": m.steps[-1]["loss"],
        }
    return found


def row(name: str, figures: Figures) -> list[str]:
    """A line of the table. Processor time and memory are the first process's."""
    return [
        name,
        f"{figures['seconds']:.3f}",
        f"{figures['cpu_seconds']:.3f}",
        f"{100 * figures['spread']:.0f} %",
        f"{figures['ratio']:.2f}x",
        f"{100 * figures['collectives_share']:.1f} %",
        percent(figures["ceiling_share"]),
        gib(figures["peak_bytes"]),
        f"{figures['loss']:.4f}",
    ]


SIZES = ("layers", "hidden_size", "heads", "sequence_length", "vocabulary_size")


def main() -> int:
    """Measure and print; exit code 0, or with `--check` 1 when the bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--batch", type=int, default=32, help="samples of a step, over all replicas"
    )
    parser.add_argument("--rounds", type=int, default=2, help="measured steps of each layout")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument(
        "--together",
        type=int,
        default=2,
        help="layouts in memory at a time, beside the single replica",
    )
    parser.add_argument("--layouts", nargs="+", help="only these, by the names in the table")
    parser.add_argument("--check", action="store_true", help="exit with 1 when the bar is missed")
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, help="default: the preset's")
    arguments = parser.parse_args()

    alone, *others = variants_of(arguments)
    figures: dict[str, Figures] = {}
    print(
        f"step time of the test model, {arguments.batch} samples a step, by layout (dp x tp1 "
        "x tp2)\n"
    )
    for first in range(0, max(len(others), 1), arguments.together):
        group = [alone, *others[first : first + arguments.together]]
        measured = measure(Path(__file__), group, rounds=arguments.rounds, warmup=arguments.warmup)
        figures = {**compare(measured[0], measured), **figures}
    for variant in (alone, *others):
        own = figures[variant.name]
        own["ceiling_share"] = step_share(variant, own["seconds"])
    headers = [
        "layout",
        "s/step",
        "cpu s/step",
        "spread",
        "ratio",
        "in collectives",
        "of ceiling",
        "peak memory",
        "loss",
    ]
    print(
        table(headers, [row(variant.name, figures[variant.name]) for variant in (alone, *others)])
    )
    overhead = figures[BAR]["ratio"] if BAR in figures else None
    met = overhead is not None and overhead <= OVERHEAD_BAR
    if overhead is not None:
        print(
            f"\nbar: {BAR} in one process at most {OVERHEAD_BAR}x the single replica: "
            f"{'met' if met else 'missed'}"
        )
    print_json(
        {
            "benchmark": "replicas",
            "machine": machine(),
            "batch": arguments.batch,
            "layouts": figures,
            "overhead": overhead,
            "met": met,
        }
    )
    return 1 if arguments.check and not met else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--follow"]:
        follow(json.loads(sys.argv[2]))
    else:
        main_or_worker(Replicas, main)
