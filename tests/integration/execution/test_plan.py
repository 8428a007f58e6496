"""Plans of training runs: against formulas, and against the counters and allocations of runs in other processes."""

import bisect
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from popxl import extensions
from popxl_engine.machine.lockstep import Rendezvous
from popxl_engine.machine.replica import Replica
from popxl_engine.planner import rehearsal
from torch.profiler import ProfilerActivity, profile, record_function

from config import Config, UserError, parse_command_line, preset, preset_names
from execution.benchmark import Options
from execution.host import run_steps
from execution.metrics import flops_per_step
from execution.plan_tables import group_name, plan_text
from execution.planning import PlanOptions, RunPlan, as_json, make_run_plan
from execution.pretraining import pretraining, training_program

ROOT = Path(__file__).parents[3]
SPEEDS = {"device_tflops": 1.0, "link_gbps": 1.0, "remote_gbps": 1.0}
ODD = {"hidden_size": 60, "heads": 6, "sequence_length": 11, "vocabulary_size": 97, "global_batch_size": 6}
"""With 2 x 2 replicas or 3 heads each, nothing is a power of two."""
GRIDS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 3, 2), (2, 2, 2)]


def configuration(grid: tuple[int, int, int] = (1, 1, 1), **changes: Any) -> Config:
    """A small model of odd sizes on dp x tp1 x tp2 replicas."""
    names = ("data_parallel", "tensor_parallel_1", "tensor_parallel_2")
    return preset("tiny", **{**ODD, **dict(zip(names, grid)), **changes})


def planned(config: Config, **options: Any) -> RunPlan:
    return make_run_plan(training_program, config, PlanOptions(plan=True, **{**SPEEDS, **options}))


def plan_in_another_process(folder: Path, *flags: str, script: str = "demo/pretraining.py") -> "dict[str, Any]":
    """plan.json of a command line."""
    command = [sys.executable, str(ROOT / script), "--plan", "--plan_folder", str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "plan.json").read_text())


def as_flags(grid: tuple[int, int, int], changes: "dict[str, Any]") -> "list[str]":
    names = ("data_parallel", "tensor_parallel_1", "tensor_parallel_2")
    values = {**ODD, **dict(zip(names, grid)), **changes}
    return ["--config", "tiny", *(word for name, value in values.items() for word in (f"--{name}", str(value)))]


def step_arrays(config: Config) -> "tuple[np.ndarray, np.ndarray, list[float]]":
    """Words, labels and learning rates of one run."""
    iterations, model = config.execution.device_iterations, config.model
    shape = (config.training.global_batch_size * iterations, model.sequence_length)
    words = np.random.default_rng(0).integers(0, model.vocabulary_size, shape)
    return words, np.roll(words, -1, axis=1), [1e-3] * iterations


# Work


@pytest.mark.parametrize("recomputation", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_matrix_products_are_those_of_the_formula(grid, recomputation):
    config = configuration(grid, recomputation=recomputation)
    dp, tp1, tp2 = grid
    model, tokens = config.model, config.tokens_per_step
    hidden, wide, padded = model.hidden_size, model.feed_forward, -(-model.vocabulary_size // tp1) * tp1
    block = 2 * (4 * hidden**2 + 2 * hidden * wide) + 4 * hidden * model.sequence_length * tp2
    again = block - 2 * hidden * wide if recomputation else 0  # no gradient needs the block's last product
    expected = tokens * (model.layers * (3 * block + again) + 3 * 2 * hidden * padded)
    found = planned(config).program
    assert found.replicas * sum(phase.product_flops for phase in found.phases) == expected


def test_without_splits_and_recomputation_that_formula_is_six_per_weight_and_token_plus_attention():
    config = configuration(recomputation=False)
    found = planned(config)
    assert sum(phase.product_flops for phase in found.program.phases) == flops_per_step(config)


# Traffic


@pytest.mark.multi
@pytest.mark.parametrize(
    "grid, changes",
    [
        ((1, 1, 1), {"dropout": 0.1}),
        ((2, 2, 2), {"dropout": 0.1}),
        ((1, 3, 2), {"precision": "bfloat16", "device_iterations": 2}),
        ((2, 1, 1), {"moment_precision": "bfloat16", "stochastic_rounding": "true"}),
        ((2, 2, 1), {"recomputation": "false", "replicated_tensor_sharding": "false"}),
    ],
    ids=str,
)
def test_bytes_and_calls_equal_the_counters_of_a_run_in_another_process(grid, changes, tmp_path):
    plan = plan_in_another_process(tmp_path, *as_flags(grid, changes))
    config = configuration(grid, **{k: v == "true" if v in ("true", "false") else v for k, v in changes.items()})
    session = pretraining(config)
    with session:
        run_steps(session, config, *step_arrays(config))
    iterations = config.execution.device_iterations
    for replica in session._engine.machine.replicas:
        traffic = replica.traffic
        for ours, theirs in (("loads", "loads"), ("loaded", "loaded_bytes"), ("stores", "stores")):
            assert getattr(traffic, ours) == iterations * sum(phase[theirs] for phase in plan["phases"])
        assert traffic.stored == iterations * sum(phase["stored_bytes"] for phase in plan["phases"])
        assert by_group(traffic.collectives) == {
            key: (iterations * calls, iterations * brought) for key, (calls, brought) in planned_groups(plan).items()
        }
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


@pytest.mark.parametrize("grid", [(1, 3, 2), (2, 2, 2)], ids=str)
def test_bytes_are_those_of_the_rows_that_move_and_of_the_tensors_that_meet(grid, monkeypatch):
    """Counted from outside: what the machine hands out and takes, and what arrives where replicas wait."""
    config, rows, met = configuration(grid), {"load": 0, "store": 0}, {}
    load, store, arrive = Replica.remote_load, Replica.remote_store, Rendezvous.__init__

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
    monkeypatch.setattr(Rendezvous, "__init__", noted_arrival)
    session = pretraining(config)
    with session:
        run_steps(session, config, *step_arrays(config))
    plan = as_json(planned(config))
    replicas, slices = plan["replicas"], ("replica_sharded_slice", "replicated_slice")  # bring nothing to others
    assert rows["load"] == replicas * sum(phase["loaded_bytes"] for phase in plan["phases"])
    assert rows["store"] == replicas * sum(phase["stored_bytes"] for phase in plan["phases"])
    assert {key: counts for key, counts in met.items() if key[0] not in slices} == {
        key: (replicas * calls, replicas * brought) for key, (calls, brought) in planned_groups(plan).items()
    }


def test_a_ring_sends_its_share_of_what_it_moves():
    for phase in planned(configuration((2, 2, 2))).program.phases:
        for c in phase.collectives:
            n = c.group_size
            if c.op == "replicated_all_gather":
                assert c.sent_bytes == (n - 1) * c.brought_bytes  # (n - 1) / n of the result, and padding of shards
            elif c.op == "replicated_reduce_scatter":
                padding = c.calls * (n - 1) * 4  # less than an element for each shard
                assert 0 <= c.sent_bytes - (n - 1) / n * c.brought_bytes <= padding
            else:
                assert c.op == "replicated_all_reduce"
                assert c.sent_bytes == pytest.approx(2 * (n - 1) / n * c.brought_bytes, abs=c.calls)


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


# Memory


def allocated_peak(work: Any) -> int:
    """Most bytes that torch's allocator has given out at a time during some work, beyond those from before.

    The profiler sees nothing of what was there when it began: the work is done once before.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
        with record_function("measured"):
            work()
    events = profiler.profiler.kineto_results.events()
    (begin,) = (e.start_ns() for e in events if e.name() == "measured")
    changes = sorted(((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda pair: pair[0])
    before = sum(nbytes for moment, nbytes in changes if moment < begin)
    products = sorted((e.start_ns(), e.end_ns()) for e in events if e.name() in ("aten::mm", "aten::addmm"))
    measured = without_scratch([change for change in changes if change[0] >= begin], products)
    live = np.cumsum([nbytes for _, nbytes in measured])
    assert live[-1] < 0.02 * before + 1000, "a step leaves nothing behind"
    return int(live.max())


def without_scratch(changes: "list[tuple[int, int]]", products: "list[tuple[int, int]]") -> "list[tuple[int, int]]":
    """Less what is taken and given back inside one product: where oneDNN rearranges a factor. No plan knows that."""
    found: "list[tuple[int, int]]" = []
    for moment, nbytes in changes:
        begin, end = products[max(0, bisect.bisect(products, (moment, moment)) - 1)]
        if found and begin < found[-1][0] < moment < end and nbytes == -found[-1][1]:
            found.pop()
        else:
            found.append((moment, nbytes))
    return found


def copying(name: str, monkeypatch: Any) -> None:
    """Let loads take memory of their own, as on a device beside the host."""
    original = getattr(Replica, name)
    monkeypatch.setattr(Replica, name, lambda *arguments: original(*arguments).clone())


@pytest.mark.slow
@pytest.mark.parametrize("borrows", [True, False], ids=["rows in place", "rows copied"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dropout": 0.1, "attention_serialisation": 11, "micro_batch_size": 3},
        {"dropout": 0.1, "widening": 3},
        {"precision": "bfloat16", "stochastic_rounding": True, "hidden_size": 180, "layers": 3},
        {
            "precision": "float16",
            "recomputation": False,
            "loss_scaling": 128.0,
            "device_iterations": 2,
            "hidden_size": 180,
        },
        {"vocabulary_size": 1511, "sequence_length": 37},
    ],
    ids=str,
)
def test_peak_memory_is_within_five_percent_of_a_run(changes, borrows, monkeypatch):
    config = configuration(**changes, max_norm=1e-3)  # the plan is for steps that clip, which need a little more
    expected = extensions.plan(training_program(config)[0], borrows_rows=borrows).peak_bytes
    session, arrays = pretraining(config), step_arrays(config)
    if not borrows:
        copying("remote_load", monkeypatch)
        copying("host_load", monkeypatch)
    with session:
        run_steps(session, config, *arrays)
        measured = allocated_peak(lambda: run_steps(session, config, *arrays))
    assert measured == pytest.approx(expected, rel=0.05)


def test_an_update_has_one_parameter_at_a_time_on_the_device():
    config = configuration(hidden_size=180)
    (update,) = (p for p in planned(config).program.phases if p.name == "decoder_optim_phase")
    weight_gradient_and_moments = 4 * 4 * config.model.hidden_size * config.model.feed_forward
    assert weight_gradient_and_moments < update.peak_bytes < 1.05 * weight_gradient_and_moments


def test_remembering_what_kernels_need_changes_no_peak(monkeypatch):
    changes = {"dropout": 0.1, "precision": "bfloat16", "stochastic_rounding": True, "attention_serialisation": 11}
    config = configuration((2, 2, 1), **changes)
    remembered = planned(config).program
    monkeypatch.setattr(rehearsal, "Remembered", lambda kernel, live: kernel)
    assert planned(config).program == remembered


@pytest.mark.parametrize("borrows", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["in place", "copied"])
@pytest.mark.parametrize("grid", GRIDS[1:], ids=str)
def test_peak_memory_of_replicas_in_one_process_is_within_five_percent_of_a_run(grid, borrows, monkeypatch):
    config = configuration(grid, max_norm=1e-3)
    ir = training_program(config)[0]
    expected = extensions.plan(ir, borrows_rows=borrows, together=True).peak_bytes
    assert expected <= ir.replication_factor * extensions.plan(ir, borrows_rows=borrows).peak_bytes
    session, arrays = pretraining(config), step_arrays(config)
    if not borrows:
        copying("remote_load", monkeypatch)
        copying("host_load", monkeypatch)
    with session:
        run_steps(session, config, *arrays)
        measured = allocated_peak(lambda: run_steps(session, config, *arrays))
    assert measured == pytest.approx(expected, rel=0.05)


# Time, and what the user sees


def test_a_step_takes_the_time_of_what_bounds_it():
    config = configuration((2, 2, 1))
    flops = sum(phase.flops for phase in planned(config).program.phases)
    alone = planned(config, device_tflops=1e-6, link_gbps=1e9, remote_gbps=1e9)
    assert alone.seconds == pytest.approx(flops / 1e6, rel=1e-3)
    assert alone.bound == "compute" and alone.limit == pytest.approx(alone.seconds, rel=1e-3)
    assert alone.tokens_per_second == pytest.approx(config.tokens_per_step / alone.seconds)
    assert planned(config, link_gbps=1e-6).bound == "links"
    slow = planned(config, remote_gbps=1e-6)
    assert slow.bound == "remote" and slow.limit == pytest.approx(slow.seconds, rel=1e-3)


def test_the_plan_is_of_one_step_whatever_the_iterations_of_a_run():
    one, three = (planned(configuration(device_iterations=n, steps=6)).program for n in (1, 3))
    assert three.steps == 3
    assert [(p.name, p.flops, p.loaded_bytes) for p in three.phases] == [
        (p.name, p.flops, p.loaded_bytes) for p in one.phases
    ]


def test_speeds_that_are_not_given_are_measured_here():
    found = make_run_plan(training_program, configuration(), PlanOptions(plan=True, link_gbps=2.5))
    assert found.measured == ("device_tflops", "remote_gbps")
    assert found.machine.link == 2.5e9 and found.machine.flops > 1e8
    assert "links 2.50 GB/s," in plan_text(found) and "FLOP/s (measured here)" in plan_text(found)


def test_the_text_has_a_line_for_each_phase_and_each_collective():
    found = planned(configuration((2, 2, 2)))
    lines = plan_text(found).splitlines()
    for phase in found.program.phases:
        assert any(line.startswith(f"{phase.name} ") for line in lines)
    for group in ("dp (2)", "tp1 (2)", "tp2 (2)", "all (8)"):
        assert any(group in line for line in lines), group
    assert any(line.startswith("remote memory") and "in total" in line for line in lines)
    assert json.loads(json.dumps(as_json(found)))["step"]["bound"] == found.bound


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
    flags = ("--config", "tiny", "--memmap_dir", str(rows), "--device_tflops", "1", "--link_gbps", "1")
    plan = plan_in_another_process(tmp_path, *flags, "--remote_gbps", "1", script=script)
    assert plan["config"] == "tiny" and plan["machine"]["measured"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "plan.png"]
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--link_gbps", "4"], "--link_gbps: got a value without --plan; expected both or none. Add --plan"),
        (["--plan", "--device_tflops", "-3"], "device_tflops: got -3.0; expected a number, more than 0, or none"),
        (["--plan", "--remote_gbps", "fast"], "remote_gbps: got 'fast'; expected a number"),
        (["--plan", "--link_gbps", "inf"], "link_gbps: got inf; expected a number"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_that_make_no_sense_are_refused(flags, says):
    with pytest.raises(UserError) as error:
        parse_command_line(flags, program="a test", default="tiny", options=Options)[1].is_plan()
    assert says in str(error.value)


# Large models


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in preset_names() if "175B" not in name])
def test_every_preset_can_be_planned(name):
    found = planned(preset(name))
    assert found.seconds > 0 and found.program.replicas == preset(name).execution.replication_factor
    assert sum(p.product_flops for p in found.program.phases) >= flops_per_step(preset(name)) / found.program.replicas


LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_175b_parameters_on_256_replicas_are_planned_in_a_minute_and_four_gibibytes(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flags = ["--config", "gpt3_175B_pod256", "--plan", "--plan_folder", str(tmp_path)]
    flags += [word for name, value in SPEEDS.items() for word in (f"--{name}", str(value))]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(ROOT / "demo/pretraining.py"), *flags],
        capture_output=True,
        text=True,
        timeout=240,  # seconds of the clock: other programs may be running
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["replicas"] == 256
    weights_and_state = plan["parameters"] * (2 + 4 + 4 + 4)  # float16 weights, two float32 moments, float32 gradients
    assert plan["memory"]["remote_bytes_total"] > weights_and_state
