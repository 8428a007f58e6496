"""Large models on one GPU: speed, idleness, traffic and memory of a step, case by case.

    python benchmarks/gpu.py --list                 # the cases, and what has been measured
    python benchmarks/gpu.py                        # those not measured yet, as many as 450 s hold
    python benchmarks/gpu.py 7b-22GiB --again
    python benchmarks/gpu.py --plan 14b-22GiB       # what a case takes; needs no GPU
    python benchmarks/gpu.py --device cpu --small   # the same code on small shapes

A group is 65,536 tokens, 64 sequences of 1,024, which go through all layers by themselves. Each
case runs with a global batch of one group, and some with two: CASE/1 and CASE/2, each in a process
of its own. After a warm-up come the timed
steps, then one that is recorded, for the timeline and for idleness. Results are appended to a file
of JSON lines; what is there is not run again.

All is recomputed in the backward pass: a step does 4/3 of the model's FLOPs, which shares do not
count. "Products" is what a product of the model's own shape reaches alone, in the same process. Of
models that the host's memory does not hold, some layers run; what is said of the whole model, or of
a step of 524,288 tokens, is extrapolated, and called so.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "runtime")]  # nothing need be installed

from benchmarks.harness import (  # noqa: E402
    BenchmarkError,
    Figures,
    Flags,
    Variant,
    VariantProcess,
    Workload,
    flag,
    machine,
    main_or_worker,
    make_parser,
    table,
)
from popxl_gpt.utils.errors import UserError  # noqa: E402
from popxl_gpt.utils.runtime import session_device  # noqa: E402
from popxl_gpt.utils.units import bytes_text  # noqa: E402

GROUP, SEQUENCE = 65_536, 1024
"""Tokens of a group, and of a sequence."""
FULL_STEP = 524_288
"""Tokens of the step that others publish."""
PEAKS = {"H200": 989e12, "H100 80GB HBM3": 989e12, "A100": 312e12, "RTX 4090": 165e12}
"""FLOP/s of dense bfloat16 products by the makers' data sheets, of cards whose name has this."""
RESULTS = ROOT / "benchmarks" / "gpu.jsonl"
LEAST_SECONDS = 75
"""Left of a call's time, without which no run starts."""


def shape(
    layers: int, hidden: int, heads: int, key_value: int, wide: int, words: int, tied: bool = False
) -> Figures:
    """A model of the Llama family, as settings."""
    names = "layers hidden_size heads key_value_heads feed_forward_size vocabulary_size tied_head"
    sizes = dict(zip(names.split(), (layers, hidden, heads, key_value, wide, words, tied)))
    forms = {"norm": "rms_norm", "position_embedding": "rotary", "activation": "swiglu"}
    return {**sizes, **forms, "sequence_length": SEQUENCE, "biases": False, "dropout": 0.0}


SHAPES = {
    "7b": shape(28, 3584, 28, 4, 18944, 152_064),
    "14b": shape(48, 5120, 40, 8, 13824, 152_064),
    "8b": shape(32, 4096, 32, 8, 14336, 128_256),
    "0.6b": shape(28, 1024, 16, 8, 3072, 151_936, tied=True),
    "32b": shape(64, 5120, 40, 8, 27648, 152_064),
}
"""Qwen2.5-7B, 14B and 32B without biases of query, key and value, Llama-3-8B, and Qwen3-0.6B with
heads of hidden_size / heads and no norms of theirs.
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured."""

    name: str
    model: str
    """One of `SHAPES`, or a preset."""
    memory: str | None = None
    """The device's: a limit, "one layer" (what the plan needs at least, and a tenth), or all."""
    kind: Literal["phased", "plain", "FSDP2"] = "phased"
    groups: tuple[int, ...] = (1, 2)
    layers: int | None = None
    """That run, of the model's."""
    settings: Figures = field(default_factory=dict)


def both(model: str, **options: Any) -> tuple[Case, ...]:
    """A model with all of the device, and with one layer of it there."""
    return (
        Case(name=f"{model}-all", model=model, **options),
        Case(name=f"{model}-one-layer", model=model, memory="one layer", **options),
    )


EIGHT_BITS = {"products": "fp8"}
CASES = (
    Case(name="7b-22GiB", model="7b", memory="22GiB"),
    Case(name="14b-22GiB", model="14b", memory="22GiB", layers=20),
    Case(name="14b-all", model="14b", layers=20),
    Case(name="7b-all", model="7b"),
    Case(name="plain-4-layers", model="7b", kind="plain", groups=(1,), layers=4),
    Case(name="plain-8-layers", model="7b", kind="plain", groups=(1,), layers=8),
    Case(name="FSDP2-8-layers", model="7b", kind="FSDP2", groups=(1,), layers=8),
    Case(
        name="32b-adapters-22GiB",
        model="32b",
        memory="22GiB",
        groups=(1,),
        layers=32,
        settings={"lora_rank": 16},
    ),
    *both("7b")[1:],
    *both("14b", layers=20)[1:],
    Case(name="8b-22GiB", model="8b", memory="22GiB", groups=(1,)),
    *both("8b", groups=(1,)),
    *both("0.6b"),
    Case(name="demo", model="demo", groups=(1,)),
    Case(name="7b-22GiB-whole-step", model="7b", memory="22GiB", groups=(FULL_STEP // GROUP,)),
    Case(
        name="14b-22GiB-whole",
        model="14b",
        memory="22GiB",
        groups=(1,),
        settings={"micro_batch_group": 4},
    ),
    Case(name="7b-fp8-22GiB", model="7b", memory="22GiB", settings=EIGHT_BITS),
    Case(name="7b-fp8-all", model="7b", settings=EIGHT_BITS),
    Case(name="14b-fp8-22GiB", model="14b", memory="22GiB", layers=20, settings=EIGHT_BITS),
)


@dataclass(frozen=True)
class Run:
    """A case with so many groups."""

    case: Case
    groups: int
    small: bool = False

    @property
    def name(self) -> str:
        """As results have it."""
        return f"{self.case.name}/{self.groups}" + " small" * self.small

    def options(self, arguments: argparse.Namespace) -> Figures:
        """What its process is told."""
        case, batch, micro_batch = self.case, GROUP // SEQUENCE, 4
        if is_preset := case.model not in SHAPES:
            model = {}
        else:
            model = {**SHAPES[case.model], **({"layers": case.layers} if case.layers else {})}
        if self.small and not is_preset:
            batch, micro_batch = 4, 2
            heads = {"heads": 4, "key_value_heads": 2, "hidden_size": 32, "feed_forward_size": 48}
            least = 3 if case.settings == EIGHT_BITS else 2  # one of them multiplies 8 bits
            model |= heads | {"layers": min(least, model["layers"]), "vocabulary_size": 96}
            model["sequence_length"] = 16
        settings = dict(case.settings)
        if self.groups > 1:
            settings["micro_batch_group"] = batch // micro_batch
        timeline = f"timeline-{case.name}.json.gz" if self.groups == 1 else None
        return {
            **{"kind": case.kind, "model": model, "preset": case.model if is_preset else None},
            **{"batch": self.groups * batch, "micro_batch": micro_batch, "small": self.small},
            **{"device": arguments.device, "dtype": "bfloat16", "memory": case.memory},
            **{"settings": settings, "layers": SHAPES.get(case.model, model).get("layers")},
            "timeline": str(arguments.timelines.resolve() / timeline) if timeline else None,
        }


def build(options: Figures) -> Workload:
    """A run's workload."""
    from benchmarks.gpu_steps import PhasedWorkload, PlainWorkload

    return (PhasedWorkload if options["kind"] == "phased" else PlainWorkload)(options)


# Running


def measured(run: Run, arguments: argparse.Namespace, deadline: float) -> Figures:
    """A run's figures; with an `error` where it failed or ran out of time."""
    found: Figures = {"run": run.name, "groups": run.groups, "seconds": []}
    variant = Variant(name=run.name, options=run.options(arguments))
    process = VariantProcess(Path(__file__), variant, 0)

    def ask(command: str, **more: int) -> Figures:
        process.timeout = max(1.0, deadline - time.monotonic())
        return process.ask(command, **more)

    begin = time.monotonic()
    try:
        ask("build")
        found["start_up_seconds"] = time.monotonic() - begin
        for number in range(1 + arguments.steps):
            reply = ask("step", count=1)
            found |= reply["figures"]
            if number:
                found["seconds"].append(reply["seconds"])
            else:
                found["warm_up_seconds"] = reply["seconds"]
        reply = ask("finish")
        found |= reply["finish"] | {"host_peak_bytes": reply["peak_bytes"]}
    except BenchmarkError as error:
        found["error"] = str(error)
    finally:
        process.stop()
    return found | rates(found) if found["seconds"] else found


def rates(found: Figures) -> Figures:
    """Speed from a run's seconds and what it told of itself."""
    seconds = statistics.median(found["seconds"])
    flops = found["flops"] / seconds
    card = found["card"] or "" if found["dtype"] == "bfloat16" else ""
    peak = next((peak for name, peak in PEAKS.items() if name in card), None)
    return {
        "tokens_per_s": found["tokens"] / seconds,
        "flops_per_s": flops,
        "of_peak": flops / peak if peak else None,
        "of_products": flops / found["products"]["up"],
        "to_device_bytes_per_s": found.get("to_device_bytes", 0) / seconds,
        "from_device_bytes_per_s": found.get("from_device_bytes", 0) / seconds,
        "host_bytes_a_parameter": found.get("host_peak_bytes", 0) / found["parameters"],
    }


def driver() -> str | None:
    """The version of NVIDIA's driver, where there is one."""
    try:
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.split("\n")[0].strip()


def read_results(path: Path) -> list[Figures]:
    """What has been measured, the newest of each run last."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_there(record: Figures) -> bool:
    """Whether a result has a speed."""
    return "tokens_per_s" in record


def due(runs: Sequence[Run], results: Sequence[Figures], again: bool) -> list[Run]:
    """The runs to do: those never tried first, then those that failed."""
    there = {record["run"] for record in results if is_there(record)}
    tried = {record["run"] for record in results}
    left = [run for run in runs if again or run.name not in there]
    return sorted(left, key=lambda run: run.name in tried)


# Telling


def extrapolated(results: Iterable[Figures]) -> list[tuple[str, float]]:
    """Tokens/s of what did not run: names that say how, and values."""
    newest = {record["run"]: record for record in results if is_there(record)}
    second = {name: statistics.median(record["seconds"]) for name, record in newest.items()}
    found = []
    for case in CASES:
        one, two = (f"{case.name}/{groups}" for groups in (1, 2))
        if one in second and two in second:
            count = FULL_STEP / newest[one]["tokens"]
            whole = second[one] + (count - 1) * (second[two] - second[one])
            name = f"{case.name}, a step of {FULL_STEP:,} tokens, linearly from one and two groups"
            found.append((name, FULL_STEP / whole))
        if case.kind == "phased" and case.layers and one in newest:
            rate, share = newest[one]["tokens_per_s"], newest[one]["flops_share"]
            found.append((f"{case.name}, all layers, by their FLOPs", rate * share))
    few, many = "plain-4-layers/1", "plain-8-layers/1"
    if few in second and many in second:
        layers = SHAPES["7b"]["layers"]
        whole = second[few] + (layers - 4) / 4 * (second[many] - second[few])
        name = f"plain PyTorch, 7b, {layers} layers, linearly from 4 and 8"
        found.append((name, newest[few]["tokens"] / whole))
    return found


def share(value: float | None) -> str:
    """A share for the table."""
    return "-" if value is None else f"{value:.2f}"


def told(results: Sequence[Figures]) -> str:
    """The results for people."""
    lines = []
    for name, r in {record["run"]: record for record in results if is_there(record)}.items():
        moved = [
            f"{bytes_text(r.get(f'{way}_device_bytes', 0))} "
            f"{r.get(f'{way}_device_bytes_per_s', 0) / 1e9:.1f} GB/s"
            for way in ("to", "from")
        ]
        plan = r.get("plan", {})
        memory = [
            f"{bytes_text(r.get('device_peak_bytes', 0))} / {bytes_text(plan.get('device', 0))}",
            f"{bytes_text(r.get('pinned_bytes', 0))} / {bytes_text(plan.get('pinned', 0))}",
            bytes_text(r.get("host_peak_bytes", 0)),
            f"{r['host_bytes_a_parameter']:.1f}",
        ]
        speed = [f"{r['tokens_per_s']:.0f}", f"{statistics.median(r['seconds']):.2f}"]
        shares = [share(r.get(key)) for key in ("of_peak", "of_products", "idle")]
        start = f"{r['start_up_seconds']:.0f}"
        lines.append([name, *speed, *shares, *moved, *memory, start])
    heads = "run,tokens/s,s/step,of peak,of products,idle,to device,from device,device / plan"
    heads += ",pinned / plan,host,B/param,start-up s"
    parts = [table(heads.split(","), lines)]
    parts += [f"extrapolated: {name}: {rate:.0f} tokens/s" for name, rate in extrapolated(results)]
    newest = {record["run"]: record for record in results}
    parts += [f"{name}: {r['error']}" for name, r in newest.items() if "error" in r]
    return "\n".join(parts)


def listed(results: Sequence[Figures]) -> str:
    """The cases."""
    there = {record["run"] for record in results if is_there(record)}
    lines = []
    for case in CASES:
        runs = [Run(case, groups).name for groups in case.groups]
        state = f"{sum(r in there for r in runs)} of {len(runs)} measured"
        layers = SHAPES.get(case.model, {}).get("layers", "")
        few = f"{case.layers} of {layers}" if case.layers else str(layers)
        lines.append([case.name, case.kind, case.model, few, case.memory or "all", state])
    return table(["case", "kind", "model", "layers", "device memory", "state"], lines)


def planned(runs: Sequence[Run], arguments: argparse.Namespace) -> str:
    """What the phased runs take, by the plan."""
    from benchmarks.gpu_steps import config_of, plan_of

    lines = []
    for run in runs:
        if run.case.kind != "phased":
            continue
        plan = plan_of(config_of(run.options(arguments)), run.options(arguments))
        sizes = [bytes_text(plan[key]) for key in ("least", "resident", "device", "pinned")]
        lines.append([run.name, f"{plan['parameters'] / 1e9:.2f} G", *sizes])
    heads = ["run", "parameters", "device, least", "device, all rows", "limit", "pinned"]
    return table(heads, lines)


FLAGS: Flags = {
    "cases": {"nargs": "*", "metavar": "CASE", "help": "default: all, in order"},
    "--list": {"action": "store_true", "help": "show the cases"},
    "--plan": {"action": "store_true", "help": "show what cases take, and run none"},
    "--again": {"action": "store_true", "help": "run what is measured already, too"},
    "--device": {"default": "cuda"},
    "--small": {"action": "store_true", "help": "small shapes: the code, no figures"},
    "--seconds": flag(450.0, "that the call may take"),
    "--steps": flag(2, "timed, after one to warm up"),
    "--results": flag(RESULTS, "JSON lines", type=Path),
    "--timelines": flag(Path(), "folder", type=Path),
}


def parsed() -> argparse.Namespace:
    """The arguments; exit code 2 for cases that there are not, or cannot be yet."""
    parser = make_parser(__doc__, FLAGS)
    arguments = parser.parse_args()
    names = [case.name for case in CASES]
    for name in arguments.cases:
        if name not in names:
            parser.error(f"CASE: got {name}; expected some of {', '.join(names)}.")
    return arguments


def main() -> int:
    """Measure and print; exit code 2 where there is no such device, 1 where a run failed."""
    arguments = parsed()
    deadline, results = time.monotonic() + arguments.seconds, read_results(arguments.results)
    if arguments.list:
        print(listed(results))
        return 0
    names = arguments.cases or [case.name for case in CASES]
    chosen = [case for case in CASES if case.name in names]
    runs = [Run(case, groups, arguments.small) for case in chosen for groups in case.groups]
    if arguments.plan:
        print(planned(runs, arguments))
        return 0
    try:
        session_device(arguments.device)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    arguments.timelines.mkdir(parents=True, exist_ok=True)
    here = {"machine": machine(), "driver": driver(), "command": shlex.join(["python", *sys.argv])}
    failed = False
    for run in due(runs, results, arguments.again):
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            print(f"{run.name}: not begun, as {max(0, left):.0f} s are left", flush=True)
            break
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        record = measured(run, arguments, deadline) | here | {"when": when}
        failed |= not is_there(record)
        results.append(record)
        with arguments.results.open("a") as file:
            file.write(json.dumps(record, sort_keys=True) + "\n")
        print(f"{told([record])}\n", flush=True)
    print(told(results))
    return int(failed)


if __name__ == "__main__":
    main_or_worker(build, main)
