"""Plans of runs against the runs: what a process has resident."""

import json
import re

from tests.torture.application import Mode, Workshop, last_line
from tests.torture.judge import Broken, check_words
from tests.torture.torture import Torture

NEAR = 0.05
"""Share of what is planned that a run may be away from it."""
SPEEDS = {"device_tflops": 1, "link_gbps": 1, "remote_gbps": 1}
LARGER = {"hidden_size": 384, "heads": 6, "layers": 4, "sequence_length": 32, "vocabulary_size": 2048}  # fmt: skip
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def mode(name: str, instances: int = 1, has_rows: bool = False, **settings: object) -> Mode:
    """A mode with tokens of its own, for its vocabulary is another."""
    given = {"steps": 40, "warmup_steps": 0, "checkpoint.every": 0, "dropout": 0.0, **settings}
    return Mode(name, given, instances, has_rows=has_rows)


CASES = [
    mode("tiny"),
    mode("replicas", data_parallel=2, tensor_parallel_1=2, hidden_size=48, heads=6),
    mode("instances", instances=2, data_parallel=2, **LARGER),
    mode("larger", **LARGER),
    mode("bfloat16", precision="bfloat16", **LARGER),
    mode("dropout", **{**LARGER, "dropout": 0.1}),
    mode("activations", **{**LARGER, "sequence_length": 128, "global_batch_size": 16, "layers": 2}),
    mode("micro-batches", steps=12, **{**LARGER, "sequence_length": 128, "micro_batch_size": 8, "global_batch_size": 16}),
    mode("no recomputation", steps=6, **{**LARGER, "recomputation": "false", "sequence_length": 128}),
    mode("files", has_rows=True, host_memory="48MiB", **LARGER),
]  # fmt: skip


def trial(case: int, shop: Workshop) -> str:
    chosen, folder = CASES[case], shop.fresh()
    # random tokens: those of the shop are of another vocabulary
    given = {"input_files": None, "validation_files": None}
    with shop.start(chosen, folder, is_cold=True, plan="true", **given, **SPEEDS) as program:
        finished(program)
    plan = json.loads((folder / "runs/run-plan/plan.json").read_text())
    planned = plan["memory"]["process"]["resident"]
    with shop.start(chosen, folder, is_cold=True, **given) as program:
        output = finished(program)
    number, unit = re.search(r"memory +([\d.]+) (\w+) resident", output).groups()
    more = float(number) * UNITS[unit] / planned - 1
    told = f"{chosen.name}: {number} {unit} resident, {more:+.1%} of what was planned"
    if abs(more) > NEAR:
        raise Broken(told)
    return told


def finished(program) -> str:
    """What a run printed that has come to its end."""
    code, output = program.wait(), program.output
    check_words(code, output)
    if code != 0:
        raise Broken(f"ended with exit code {code}: {last_line(output)}")
    return output


PLANS = Torture(
    "plans",
    "The resident set of a run is within 5 % of its plan.",
    trial,
    lambda shop: len(CASES),
)
