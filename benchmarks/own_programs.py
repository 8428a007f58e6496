"""What the runtime costs: an op of a program, building and compiling it, and the first step."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import popxl
import popxl_addons as addons
from popxl import ops

from benchmarks.harness import ROOT, Arguments, output_of
from benchmarks.own_cases import BEYOND, RATIO, Case, Clocks, clocked, now

WIDTH = 8
"""Of the ops' matrices."""
SHORT, LONG = 200, 2200
"""Ops of the chains; the difference leaves out what a run costs once."""
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
begin = time.time(), time.process_time()
training_program(config)
print(json.dumps([time.time() - begin[0], time.process_time() - begin[1]]))
"""


def printed(program: str, cache: Path) -> Clocks:
    """The numbers that a program prints, run in a fresh process with a cache folder."""
    environment = {**os.environ, "POPXL_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", program, str(ROOT), repr(time.time())]
    return np.array(json.loads(output_of(command, env=environment).splitlines()[-1]))


def empty(_: Arguments, folder: Path) -> Path:
    """A cache folder with nothing in it."""
    return folder


def started(_: Arguments, folder: Path) -> Path:
    """A cache folder that a first start has left."""
    printed(START, folder)
    return folder


Chain = tuple[Callable[[], object], Callable[[], object]]
"""Ops one after the other: a run of a program, and the same calls of PyTorch."""


def chain(name: str, count: int) -> Chain:
    """A chain of so many ops."""
    import torch  # not at the top: `--help` is answered at once

    session = popxl.Session(built(name, count)[0], "cpu")
    session.__enter__()  # the process ends with the benchmark
    op = getattr(torch, name)

    def plainly() -> object:
        a = b = torch.eye(WIDTH)
        with torch.no_grad():
            for _ in range(count):
                b = op(b, a)
        return b

    return session.run, plainly


def chains(name: str, *_: object) -> tuple[Chain, Chain]:
    """A short and a long one."""
    return chain(name, SHORT), chain(name, LONG)


def one_more(which: int, both: tuple[Chain, Chain]) -> Clocks:
    """The seconds of another op."""
    short, long = (clocked(of[which]) for of in both)
    return (long - short) / (LONG - SHORT)


# Programs that grow

SIZES = (1_000, 10_000, 100_000)
"""Ops. The bar is for the largest: what a program costs at all weighs on the smallest."""
PARTS: Mapping[str, Callable[[popxl.Ir, addons.GraphWithNamedArgs], Callable[[], object]]] = {
    "autodiff": lambda _, graph: partial(addons.autodiff, graph),
    "recompute": lambda _, graph: partial(addons.recompute_graph, addons.autodiff(graph)),
    "compile": lambda ir, _: partial(popxl.Session, ir, "cpu"),
}
"""What is done with a program, and with a graph of it, once it is built."""
MICROSECONDS = ("µs an op", 1e6)


def built(name: str, size: int) -> tuple[popxl.Ir, popxl.Graph]:
    """A program that calls a graph of so many ops, one after the other, and that graph."""

    def chained(t: popxl.Tensor, u: popxl.Tensor) -> popxl.Tensor:
        for _ in range(size):
            t = getattr(ops, name)(t, u)
        return t

    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.eye(WIDTH, dtype=np.float32))
        graph = ir.create_graph(chained, x, x)
        (y,) = ops.call(graph, x, x)
        ops.host_store(popxl.d2h_stream(y.shape, y.dtype), y)
    return ir, graph


def per_op(size: int, part: str, _: object) -> Clocks:
    """The seconds of a part, over the ops."""
    begin = now()
    ir, graph = built("mul", size)
    seconds = now() - begin
    if part in PARTS:
        seconds = clocked(PARTS[part](ir, addons.GraphWithNamedArgs(graph)))
    return seconds / size


CASES = (
    *(
        Case(
            name=f"overhead, {name} of 8 x 8", ready=partial(chains, name), rounds=15, warmup=2,
            timed=partial(one_more, 0), beside=partial(one_more, 1), unit=MICROSECONDS,
            compared=BEYOND, bar=(-np.inf, 5.0),
        )
        for name in ("add", "mul", "matmul")
    ),
    *(
        Case(
            name=f"overhead, {name}", ready=ready, rounds=1, clock=clock, bar=(-np.inf, bar),
            timed=timed,
        )
        for name, ready, timed, clock, bar in (
            ("building 96 layers", empty, partial(printed, BUILD), 1, 0.5),
            ("cold start", empty, lambda cache: printed(START, cache)[:2], 0, 4.0),
            ("its wait for kernels", empty, lambda cache: printed(START, cache)[2], 0, np.inf),
            ("cached start", started, lambda cache: printed(START, cache)[:2], 0, 2.0),
        )
    ),
    *(
        Case(
            name=f"building, {part}: {size:,} ops", ready=empty, timed=partial(per_op, size, part),
            unit=MICROSECONDS, kept=np.min,
            **({"beside": partial(per_op, before, part), "compared": RATIO} if before else {}),
            bar=(-np.inf, 1.2 if size == SIZES[-1] else np.inf),
        )
        for part in ("build", *PARTS)
        for before, size in zip((None, *SIZES), SIZES)
    ),
)  # fmt: skip
