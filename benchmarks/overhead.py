"""What the runtime itself costs: per op of a compiled program beyond PyTorch, and before the first
step.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --check

Chains of small ops run as a program and as the same calls of PyTorch in a loop; the difference
between a long and a short chain leaves out what a run costs once. Building is the graph of a
96-layer GPT (preset gpt3_175B_pod256); starting is preset demo in a process of its own, from
nothing to the end of its first step: cold, and with the cache folder that the cold start left.
Starting is in seconds by the clock, with the time of all processors beside it: kernels are compiled
while the program is built. Of a cold start it is also said how long its first step waited for the
compiler. All else is processor time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks.harness import Figures, machine, print_json, table  # noqa: E402

BARS = {"µs per op": 5.0, "build, s": 0.5, "cold start, s": 4.0, "cached start, s": 2.0}
SHORT, LONG = 200, 2200
"""Ops of the chains."""
START = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
from popxl_gpt.config.presets import preset
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.pretraining import pretraining
import numpy as np
config = preset("demo")
shape = (config.training.global_batch_size, config.model.sequence_length + 1)
tokens = np.random.default_rng(0).integers(0, config.model.vocabulary_size, shape)
with pretraining(config) as session:
    from popxl_engine.native import library as native
    begin = time.time()
    native.library()  # the first step would wait for it
    waited = time.time() - begin
    run_steps(session, config, tokens[:, :-1], tokens[:, 1:], [1e-4])
    print(json.dumps([time.time() - float(sys.argv[2]), sum(os.times()[:4]), waited]))
"""
BUILD = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from popxl_gpt.config.presets import preset
from popxl_gpt.execution.pretraining import training_program
config = preset("gpt3_175B_pod256")
begin = time.process_time()
training_program(config)
print(json.dumps([time.process_time() - begin]))
"""


def chain(name: str, count: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """(a run of a program with `count` ops one after the other, the same calls of PyTorch)."""
    import popxl
    import torch
    from popxl import ops

    program_op = {"add": ops.add, "mul": ops.mul, "matmul": ops.matmul}[name]
    torch_op = {"add": torch.add, "mul": torch.mul, "matmul": torch.mm}[name]
    array = np.eye(8, dtype=np.float32)
    ir = popxl.Ir()
    with ir.main_graph:
        x = y = popxl.variable(array)
        for _ in range(count):
            y = program_op(y, x)
        stream = popxl.d2h_stream(y.shape, y.dtype)
        ops.host_store(stream, y)
    session = popxl.Session(ir, "cpu")
    session.__enter__()  # the process ends with the benchmark

    def plainly() -> object:
        a = b = torch.from_numpy(array)
        for _ in range(count):
            b = torch_op(b, a)
        return b

    return session.run, plainly


def microseconds_per_op(name: str, rounds: int) -> Figures:
    """Processor time of one more op, in a program and in plain PyTorch."""
    import torch

    seconds: dict[tuple[int, int], list[float]] = {}
    chains = {count: chain(name, count) for count in (SHORT, LONG)}
    with torch.no_grad():
        for number in range(rounds + 2):
            for count, works in chains.items():
                for kind, work in enumerate(works):
                    begin = time.process_time()
                    work()
                    if number >= 2:
                        seconds.setdefault((count, kind), []).append(time.process_time() - begin)
    program, plain = (
        1e6
        * (statistics.median(seconds[LONG, kind]) - statistics.median(seconds[SHORT, kind]))
        / (LONG - SHORT)
        for kind in (0, 1)
    )
    return {"program": program, "plain": plain, "overhead": program - plain}


def seconds(program: str, cache: Path) -> list[float]:
    """What a program that is run in a fresh process prints."""
    environment = {**os.environ, "POPXL_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", program, str(ROOT), repr(time.time())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"overhead: a measured program failed with exit code {done.returncode}:\n{done.stderr}"
        )
    return [float(number) for number in json.loads(done.stdout.splitlines()[-1])]


def main() -> int:
    """Measure and print; exit code 0, or with `--check` 1 when a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="measured runs of each chain")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    arguments = parser.parse_args()

    per_op = {
        name: microseconds_per_op(name, arguments.rounds) for name in ("add", "mul", "matmul")
    }
    rows = [
        [name, *(f"{figures[key]:.2f}" for key in ("program", "plain", "overhead"))]
        for name, figures in per_op.items()
    ]
    print(table(["op, 8 x 8", "program, µs", "PyTorch, µs", "overhead, µs"], rows), end="\n\n")

    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        found = {"µs per op": max(figures["overhead"] for figures in per_op.values())}
        (found["build, s"],) = seconds(BUILD, cache)
        for name in ("cold start, s", "cached start, s"):
            found[name], found[f"{name} of processors"], found[f"{name} of waiting for kernels"] = (
                seconds(START, cache)
            )
    figures = [
        [name, f"{value:.2f}", f"{BARS[name]:g}" if name in BARS else ""]
        for name, value in found.items()
    ]
    print(table(["", "measured", "bar"], figures))
    met = all(found[name] <= bar for name, bar in BARS.items())
    print(f"\nbars: {'met' if met else 'missed'}")
    print_json(
        {
            "benchmark": "overhead",
            "machine": machine(),
            "ops": per_op,
            "found": found,
            "bars": BARS,
            "met": met,
        }
    )
    return 1 if arguments.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
