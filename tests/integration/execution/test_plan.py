"""Plans of training runs: against formulas, and against the counters and allocations of runs in
other processes.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.quick import cases
from popxl import extensions
from popxl.plan import PhaseTime
from popxl_engine.machine.arrival import Arrival
from popxl_engine.machine.memory import Rows
from popxl_engine.machine.replica import Replica

from popxl_gpt.config.command_line import parse_command_line
from popxl_gpt.config.presets import override, preset, preset_names
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.inference.inference import evaluation_program
from popxl_gpt.execution.planning import machine
from popxl_gpt.execution.planning.model_size import flops_per_step
from popxl_gpt.execution.planning.options import PlanOptions
from popxl_gpt.execution.planning.plan_report import group_name, plan_text, plan_values
from popxl_gpt.execution.planning.run_plan import make_run_plan
from popxl_gpt.execution.pretraining import pretraining, training_program
from popxl_gpt.execution.reports.benchmark.options import Options
from popxl_gpt.utils.errors import UserError
from tests import warm
from tests.integration.execution.plan_cases import (
    GRIDS,
    as_flags,
    configuration,
    options_of,
    planned,
    planned_work,
    step_arrays,
)

ROOT = Path(__file__).parents[3]


# Work


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("recomputation", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("grid", cases(GRIDS, lambda grid: grid == (1, 3, 2)))
def test_matrix_products_are_those_of_the_formula(grid, recomputation):
    config = configuration(grid, recomputation=recomputation)
    dp, tp1, tp2 = grid
    model, tokens = config.model, config.tokens_per_step
    hidden, wide, padded = (
        model.hidden_size,
        model.feed_forward,
        -(-model.vocabulary_size // tp1) * tp1,
    )
    scores = 2 * hidden * model.sequence_length * tp2
    block = 2 * (4 * hidden**2 + 2 * hidden * wide) + 2 * scores
    # no gradient needs the block's last product
    again = block - 2 * hidden * wide if recomputation else scores
    expected = tokens * (model.layers * (3 * block + again) + 3 * 2 * hidden * padded)
    found = planned_work(config).program
    assert found.replicas * sum(phase.product_flops for phase in found.phases) == expected


@pytest.mark.slow
def test_without_splits_and_recomputation_that_formula_is_six_per_weight_and_token_plus_attention():
    config = configuration(recomputation=False)
    found, model = planned_work(config), config.model
    scores_again = (
        2 * model.hidden_size * model.sequence_length * model.layers * config.tokens_per_step
    )
    assert (
        sum(phase.product_flops for phase in found.program.phases)
        == flops_per_step(config) + scores_again
    )


# Traffic


PLANNED: "list[tuple[tuple[int, int, int], dict[str, Any]]]" = [
    ((1, 1, 1), {"dropout": 0.1}),
    ((2, 2, 2), {"dropout": 0.1}),
    ((1, 3, 2), {"precision": "bfloat16", "device_iterations": 2, "master_weights": True}),
    (
        (2, 1, 1),
        {
            "moment_precision": "bfloat16",
            "gradient_precision": "bfloat16",
            "stochastic_rounding": "true",
        },
    ),
    ((2, 1, 1), {"moment_precision": "8bit", "stochastic_rounding": "true"}),
    ((2, 2, 1), {"recomputation": "false", "replicated_tensor_sharding": "false"}),
    ((2, 2, 1), {"layers": 3, "products": "fp8"}),
    ((2, 2, 1), {"reduce_precision": "bfloat16"}),
]
PLANS = """
import json, sys
from popxl_gpt.demo.pretraining import main
for arguments in json.loads(sys.argv[1]):
    assert main(arguments) == 0
"""


@pytest.fixture(scope="module")
def plans(tmp_path_factory) -> "list[dict[str, Any]]":
    """The plans of `PLANNED`, all made in one other process."""
    folders = [tmp_path_factory.mktemp("plan") for _ in PLANNED]
    lines = [
        ["--plan", "--plan_folder", str(f), *as_flags(*case)] for f, case in zip(folders, PLANNED)
    ]
    command = [warm.python(), "-c", PLANS, json.dumps(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / "plan.json").read_text()) for folder in folders]


@pytest.mark.sampled(3)
@pytest.mark.multi
@pytest.mark.parametrize("number", range(len(PLANNED)), ids=[str(case) for case in PLANNED])
def test_bytes_and_calls_equal_the_counters_of_a_run_in_another_process(number, plans, monkeypatch):
    # every row that is used has memory in the end
    monkeypatch.setattr(Rows, "release", lambda *row: None)
    plan, (grid, changes) = plans[number], PLANNED[number]
    config = configuration(
        grid, **{k: v == "true" if v in ("true", "false") else v for k, v in changes.items()}
    )
    session = pretraining(config)
    with session:
        run_steps(session, config, *step_arrays(config))
    for replica in session._engine.machine.replicas:
        traffic = replica.traffic
        for ours, theirs in (
            ("loads", "loads"),
            ("loaded_bytes", "loaded_bytes"),
            ("stores", "stores"),
        ):
            assert getattr(traffic, ours) == sum(phase[theirs] for phase in plan["phases"])
        assert traffic.stored_bytes == sum(phase["stored_bytes"] for phase in plan["phases"])
        assert by_group(traffic.collectives) == planned_groups(plan)
        held = sum(rows.held_bytes for rows in replica.rows.values())
        assert held == plan["memory"]["remote_bytes_per_replica"]
    assert plan["memory"]["remote_bytes_total"] == len(session._engine.machine.replicas) * held


def by_group(collectives: "dict[Any, tuple[int, int]]") -> "dict[Any, tuple[int, int]]":
    """Counters by op, size and stride of the group."""
    found: dict[Any, tuple[int, int]] = {}
    for (op, members), counts in collectives.items():
        found[op, len(members), members[1] - members[0]] = counts
    return found


def planned_groups(plan: "dict[str, Any]") -> "dict[Any, tuple[int, int]]":
    found: dict[Any, tuple[int, int]] = {}
    for phase in plan["phases"]:
        for c in phase["collectives"]:
            key = (c["op"], c["group_size"], c["stride"])
            calls, brought = found.get(key, (0, 0))
            found[key] = calls + c["calls"], brought + c["brought_bytes"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(1, 3, 2), (2, 2, 2)], ids=str)
def test_bytes_are_those_of_the_rows_that_move_and_of_the_tensors_that_meet(grid, monkeypatch):
    """Counted from outside: what the machine hands out and takes, and what arrives where replicas
    wait.
    """
    config, rows, met = configuration(grid), {"load": 0, "store": 0}, {}
    load, store, arrive = Replica.remote_load, Replica.remote_store, Arrival.__init__

    def noted_load(replica, *arguments):
        found = load(replica, *arguments)
        rows["load"] += found.numel() * found.element_size()
        return found

    def noted_store(replica, buffer, row, held):
        rows["store"] += held[0].numel() * held[0].element_size()
        store(replica, buffer, row, held)

    def noted_arrival(arrival, place, members, operands, *rest):
        key = place.op.definition.name, len(members), members[1] - members[0]
        calls, brought = met.get(key, (0, 0))
        met[key] = calls + 1, brought + sum(t.numel() * t.element_size() for t in operands)
        arrive(arrival, place, members, operands, *rest)

    monkeypatch.setattr(Replica, "remote_load", noted_load)
    monkeypatch.setattr(Replica, "remote_store", noted_store)
    monkeypatch.setattr(Arrival, "__init__", noted_arrival)
    session = pretraining(config)
    with session:
        run_steps(session, config, *step_arrays(config))
    monkeypatch.undo()  # plans of a process run its replicas on tensors without memory
    plan = plan_values(planned(config))
    # bring nothing to others
    replicas, slices = plan["replicas"], ("replica_sharded_slice", "replicated_slice")
    assert rows["load"] == replicas * sum(phase["loaded_bytes"] for phase in plan["phases"])
    assert rows["store"] == replicas * sum(phase["stored_bytes"] for phase in plan["phases"])
    assert {key: counts for key, counts in met.items() if key[0] not in slices} == {
        key: (replicas * calls, replicas * brought)
        for key, (calls, brought) in planned_groups(plan).items()
    }


@pytest.mark.slow
def test_a_ring_sends_its_share_of_what_it_moves():
    for phase in planned_work(configuration((2, 2, 2))).program.phases:
        for c in phase.collectives:
            n = c.group_size
            if c.op == "replicated_all_gather":
                # (n - 1) / n of the result, and padding of shards
                assert c.sent_bytes == (n - 1) * c.brought_bytes
            elif c.op == "replicated_reduce_scatter":
                padding = c.calls * (n - 1) * 4  # less than an element for each shard
                assert 0 <= c.sent_bytes - (n - 1) / n * c.brought_bytes <= padding
            else:
                assert c.op == "replicated_all_reduce"
                assert c.sent_bytes == pytest.approx(2 * (n - 1) / n * c.brought_bytes, abs=c.calls)


@pytest.mark.slow
def test_the_sequence_of_rows_is_that_of_a_run(monkeypatch):
    config, seen = configuration((1, 2, 1), device_iterations=2), []
    for kind in ("load", "store"):
        original = getattr(Replica, f"remote_{kind}")

        def noted(replica, buffer, row, *rest, kind=kind, original=original):
            if replica.index == 1:
                seen.append((kind, str(buffer.remote_buffer_id), row))
            return original(replica, buffer, row, *rest)

        monkeypatch.setattr(Replica, f"remote_{kind}", noted)
    session = pretraining(config)
    with session:
        run_steps(session, config, *step_arrays(config))
    events = extensions.sequence(training_program(config)[0], replica=1)
    assert [(e.kind, e.name, e.row) for e in events if e.kind != "collective"] == seen


# Time, and what the user sees


@pytest.mark.slow
def test_a_step_takes_the_time_of_what_bounds_it():
    config = configuration((2, 2, 1))
    alone = planned_work(config, device_tflops=1e-6, link_gbps=1e9, remote_gbps=1e9)
    flops = sum(phase.flops for phase in alone.program.phases)
    assert alone.seconds == pytest.approx(flops / 1e6, rel=1e-3)
    assert alone.bound == "compute" and alone.limit == pytest.approx(alone.seconds, rel=1e-3)
    assert alone.tokens_per_second == pytest.approx(config.tokens_per_step / alone.seconds)
    assert planned_work(config, link_gbps=1e-6).bound == "links"
    slow = planned_work(config, remote_gbps=1e-6)
    assert slow.bound == "remote" and slow.limit == pytest.approx(slow.seconds, rel=1e-3)
    meanwhile = replace(alone, times=(PhaseTime(3.0, link=2.0, remote=4.0, exposed=2.0),))
    assert meanwhile.bound == "compute", "rows come while it computes"


@pytest.mark.slow
def test_links_work_for_one_run_of_a_layer_while_another_is_computed():
    config = configuration((2, 2, 2), global_batch_size=8)
    speeds = {"device_tflops": 3e-6, "link_gbps": 1e-4, "remote_gbps": 1.0}
    alone, two = (planned_work(override(config, interleaving=n), **speeds) for n in (1, 2))
    for one, other in zip(alone.program.phases, two.program.phases):
        assert one == replace(other, peak_bytes=one.peak_bytes, timeline=one.timeline)
    for time in alone.times:
        assert time.exposed <= time.link * (1 + 1e-9)
    exposed, less = (sum(time.exposed for time in found.times) for found in (alone, two))
    assert less < 0.8 * exposed
    assert two.seconds == pytest.approx(alone.seconds - exposed + less)


@pytest.mark.slow
def test_updates_of_all_but_the_last_step_of_a_run_are_planned_with_the_next_forward_pass():
    one, three = (
        planned(configuration(device_iterations=n, steps=6), device_tflops=1e-3) for n in (1, 3)
    )
    assert (one.program.steps, three.program.steps) == (1, 3)
    single, phases = ({p.name: p for p in found.program.phases} for found in (one, three))
    layers = one.config.model.layers
    runs = {name: p.runs for name, p in phases.items() if name.startswith("decoder")}
    assert runs.pop("decoder_optim_fwd_phase") == 2 * layers
    assert runs == {
        "decoder_fwd_phase": layers,
        "decoder_bwd_phase": 3 * layers,
        "decoder_optim_phase": layers,
    }
    for amount in ("flops", "loads", "loaded_bytes", "stores", "stored_bytes", "host_bytes"):
        both, update, forward = (
            getattr(found[name], amount)
            for found, name in (
                (phases, "decoder_optim_fwd_phase"),
                (single, "decoder_optim_phase"),
                (single, "decoder_fwd_phase"),
            )
        )
        assert both == 2 * (update + forward)
        total, alone = (
            sum(getattr(p, amount) for p in found.values()) for found in (phases, single)
        )
        assert total == 3 * alone
    assert plan_values(three)["step"]["flops"] == plan_values(one)["step"]["flops"]
    assert three.seconds < one.seconds, "transfers of updates meet the work of forward passes"


@pytest.mark.slow
def test_a_plan_tells_of_a_validation_that_is_executed_otherwise():
    looks = {"validate_every": 1, "global_batch_size": 8}
    own = configuration(**looks, inference_data_parallel=2, inference_micro_batch_size=2)
    options = options_of({})
    same, other = (
        make_run_plan(training_program, config, options, evaluation_program)
        for config in (configuration(**looks), own)
    )
    assert "\nvalidation" not in plan_text(same)
    line = next(line for line in plan_text(other).splitlines() if line.startswith("validation"))
    assert line.endswith("at peak, on dp x tp1 x tp2 = 2 x 1 x 1, 2 micro-batches per global batch")
    memory = plan_values(other)["memory"]
    assert memory["validation_peak_bytes"] == other.validation.peak_bytes > 0
    assert "validation_peak_bytes" not in plan_values(same)["memory"]


@pytest.mark.slow
def test_speeds_that_are_not_given_are_measured_here():
    found = make_run_plan(training_program, configuration(), PlanOptions(plan=True, link_gbps=2.5))
    assert found.measured == ("device_tflops", "remote_gbps")
    assert found.machine.link == 2.5e9 and found.machine.flops > 1e8
    assert "links 2.50 GB/s," in plan_text(found) and "FLOP/s (measured here)" in plan_text(found)


def test_a_plan_for_a_gpu_that_is_not_here_says_whose_speeds_it_has(monkeypatch):
    there = override(configuration(), device="cuda:99")
    speeds = {"flops": 1e12, "link": 1e9, "remote": 1e9}
    asked = []

    def measure(data_type, device):
        asked.append(device)
        return extensions.Machine(**speeds)

    monkeypatch.setattr(extensions, "measure", measure)
    found = make_run_plan(training_program, there, PlanOptions(plan=True, link_gbps=2.5))
    assert asked == ["cpu"]
    head = plan_text(found).splitlines()[1]
    assert head == (
        "device 1.00 TFLOP/s (this CPU's: no GPU here), links 2.50 GB/s, "
        "remote memory 1.00 GB/s (this CPU's: no GPU here)"
    )


def test_a_link_that_was_measured_within_one_gpu_is_not_told_as_one_between_several(monkeypatch):
    monkeypatch.setattr(machine, "has_device", lambda device: True)
    one = override(configuration(), device="cuda")
    two = override(configuration((2, 1, 1)), device="cuda")
    measured = ("device_tflops", "link_gbps")
    assert machine.origin(two, "link_gbps", measured) == (
        " (a copy within one GPU: give --link_gbps)"
    )
    for config, flag in ((one, "link_gbps"), (two, "device_tflops")):
        assert machine.origin(config, flag, measured) == " (measured here)"
    assert machine.origin(override(two, device="cpu"), "link_gbps", measured) == " (measured here)"
    assert machine.origin(two, "remote_gbps", measured) == ""


@pytest.mark.slow
def test_the_text_has_a_line_for_each_phase_and_each_collective():
    found = planned(configuration((2, 2, 2)))
    lines = plan_text(found).splitlines()
    for phase in found.program.phases:
        assert any(line.startswith(f"{phase.name} ") for line in lines)
    for group in ("dp (2)", "tp1 (2)", "tp2 (2)", "all (8)"):
        assert any(group in line for line in lines), group
    assert any(line.startswith("remote memory") and "in total" in line for line in lines)
    assert json.loads(json.dumps(plan_values(found)))["step"]["bound"] == found.bound


def test_groups_are_named_by_what_they_are_for():
    execution = configuration((2, 3, 2)).execution
    groups = ((2, 6), (3, 2), (2, 1), (12, 1), (6, 1), (6, 2), (4, 3), (4, 0))
    assert [group_name(*group, execution) for group in groups] == [
        "dp (2)", "tp1 (3)", "tp2 (2)", "all (12)", "tp1 x tp2 (6)", "dp x tp1 (6)", "stride 3 (4)", "no one stride (4)"
    ]  # fmt: skip


@pytest.mark.multi
@pytest.mark.parametrize("script", ["demo/pretraining.py", "execution/pretraining.py"])
def test_both_entry_points_plan_and_leave_only_the_plan(script, tmp_path):
    rows = tmp_path / "rows"
    flags = (
        "--config",
        "tiny",
        "--memmap_dir",
        str(rows),
        "--device_tflops",
        "1",
        "--link_gbps",
        "1",
    )
    command = [
        warm.python(),
        str(ROOT / script),
        "--plan",
        "--plan_folder",
        str(tmp_path),
        "--remote_gbps",
        "1",
    ]
    done = subprocess.run(
        [*command, *flags], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["config"] == "tiny" and plan["machine"]["measured"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    "flags, says",
    [
        (
            ["--link_gbps", "4"],
            "--link_gbps: got a value without --plan; expected both or none. Add --plan",
        ),
        (
            ["--plan", "--device_tflops", "-3"],
            "device_tflops: got -3.0; expected a number, more than 0, or none",
        ),
        (["--plan", "--remote_gbps", "fast"], "remote_gbps: got 'fast'; expected a number"),
        (["--plan", "--link_gbps", "inf"], "link_gbps: got 'inf'; expected a number"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_that_make_no_sense_are_refused(flags, says):
    with pytest.raises(UserError) as error:
        parse_command_line(flags, program="a test", default="tiny", options=Options)[1].is_plan()
    assert says in str(error.value)


WITHOUT_COMPILER = """
import sys
from popxl_gpt.config.presets import preset
from popxl_gpt.execution.planning.model_size import flops_per_step
from popxl_gpt.execution.pretraining import pretraining, training_program
from popxl_gpt.utils.runtime import planner
config = preset("tiny", layers=1, data_parallel=1, tensor_parallel_1=1, tensor_parallel_2=1)
assert flops_per_step(config) > 0 and pretraining(config) and "torch" in sys.modules
assert "torch._dynamo" not in sys.modules and "sympy" not in sys.modules
program = training_program(config)[0]
assert planner().plan(program).peak_bytes > 0 and planner().host_needs(program).tensors > 0
assert "torch._dynamo" not in sys.modules
"""


@pytest.mark.slow
def test_neither_a_session_nor_counting_flops_nor_a_plan_loads_the_compiler_of_pytorch():
    """It takes more than a second and 25 MiB, and 70 MiB with the algebra that plans load, too."""
    subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], cwd=ROOT, check=True, timeout=120)


# Large models


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in preset_names() if "175B" not in name])
def test_every_preset_can_be_planned(name):
    """With eight micro-batches at most: more of them are more of the same."""
    whole = preset(name)
    together = whole.training.global_batch_size // whole.gradient_accumulation
    few = min(8, whole.gradient_accumulation)
    config = override(whole, global_batch_size=together * few)
    found = planned(config)
    assert found.seconds > 0 and found.program.replicas == config.execution.replication_factor
    assert (
        sum(p.product_flops for p in found.program.phases)
        >= flops_per_step(config) / found.program.replicas
    )
