"""Profiles of training runs: against the plan of the program, and as users see them."""

import errno
import json
import os
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.quick import Later
from popxl.extensions import LANES, PHASES, Machine, PhaseProfile, Profile, Work, plan, profile

from popxl_gpt.config.command_line import parse_command_line
from popxl_gpt.config.presets import preset
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.planning.options import PlanOptions
from popxl_gpt.execution.pretraining import pretraining, training_program
from popxl_gpt.execution.reports.benchmark.options import Options
from popxl_gpt.execution.reports.profile.report import StepProfiler
from popxl_gpt.execution.reports.profile.run_profile import RunProfile, make_run_profile
from popxl_gpt.execution.reports.profile.text import profile_text
from popxl_gpt.execution.reports.profile.values import profile_values
from popxl_gpt.utils.errors import UserError
from tests import warm
from tests.integration.execution.plan_cases import step_arrays
from tests.integration.runs import run_job
from tests.metrics_text import metrics_of

picture = Later("imgs.draw_profile")

ROOT = Path(__file__).parents[3]
ALONE = {"data_parallel": 1, "tensor_parallel_1": 1, "tensor_parallel_2": 1}
ODD = {
    **ALONE,
    "hidden_size": 60,
    "heads": 6,
    "sequence_length": 11,
    "vocabulary_size": 97,
    "global_batch_size": 6,
}
NAMES = [
    "main", "embedding_fwd_phase", "decoder_fwd_phase", "head_phase", "decoder_bwd_phase", "embedding_bwd_phase",
    "head_optim_phase", "decoder_optim_phase",
]  # fmt: skip
SPEEDS = {"device_tflops": 1.0, "remote_gbps": 1.0}


def recorded(config: Config) -> "tuple[Profile, Any]":
    """The profile of a session's first run, and its results."""
    session = pretraining(config)
    with session, profile(session) as profiles:
        results = run_steps(session, config, *step_arrays(config))
    return profiles[0], results


# What is recorded


SCALARS = "scalar_cse"
"""The pass that takes work away from a training step: equal scalars are computed once."""


def works_inside(found: Profile, phase: str) -> "list[Work]":
    """Of each instruction in the spans of a phase, unless it does nothing that counts."""
    spans = [s for s in found.spans if s.lane == PHASES and s.name == phase]
    return [
        leaf.work
        for leaf in found.spans
        if leaf.lane != PHASES and leaf.work != Work()
        for span in spans
        if span.replica == leaf.replica and span.begin <= leaf.begin and leaf.end <= span.end
    ]


RECORDED = [
    {},
    {"dropout": 0.1, "attention_serialisation": 11},
    {"dropout": 0.1, "widening": 2},
    {"precision": "bfloat16", "stochastic_rounding": True, "device_iterations": 2},
    {"recomputation": False, "data_parallel": 2, "tensor_parallel_1": 2},
    {"tensor_parallel_2": 2, "replicated_tensor_sharding": False, "micro_batch_size": 3},
]


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("changes", RECORDED, ids=str)
def test_what_instructions_do_adds_up_to_the_plan(changes, monkeypatch):
    monkeypatch.setenv("POPXL_PASSES", f"-{SCALARS}")
    config = preset("tiny", **{**ODD, **changes})
    (found, _), expected = recorded(config), plan(training_program(config)[0], with_peaks=False)
    names = [p.name for p in expected.phases]
    assert [p.name for p in found.phases] == names
    assert set(names) == {*NAMES, *(["decoder_optim_fwd_phase"] * (found.steps > 1))}
    assert found.steps == expected.steps == config.execution.device_iterations
    times = len(found.replicas)
    for ours, theirs in zip(found.phases, expected.phases):
        amounts = (
            theirs.flops,
            theirs.loaded_bytes,
            theirs.stored_bytes,
            theirs.host_bytes,
            theirs.sent_bytes,
        )
        assert ours.work == Work(*amounts).times(times)
        assert ours.runs == theirs.runs
        assert Work.sum(works_inside(found, ours.name)) == ours.work
    assert found.left_out == 0


@pytest.mark.slow
def test_instructions_do_less_than_the_plan_only_by_scalars_that_are_computed_once(monkeypatch):
    config = preset("tiny", **ALONE)
    found, _ = recorded(config)
    monkeypatch.setenv("POPXL_PASSES", f"-{SCALARS}")
    plain, _ = recorded(config)
    fewer = Counter()
    for phase in plain.phases:
        ours, theirs = (Counter(works_inside(p, phase.name)) for p in (found, plain))
        assert not ours - theirs
        fewer += theirs - ours
    assert fewer.keys() == {Work(flops=1)}


@pytest.mark.slow
def test_layers_are_spans_with_their_share_of_the_work():
    found, _ = recorded(preset("tiny", **ALONE, layers=3))
    for phase in ("decoder_fwd_phase", "decoder_bwd_phase", "decoder_optim_phase"):
        (whole,) = [p for p in found.phases if p.name == phase]
        layers = [s for s in found.spans if s.lane == PHASES and s.name.startswith(f"{phase} ")]
        assert [s.name for s in layers] == [f"{phase} {n} of 3" for n in (1, 2, 3)]
        assert [s.work.times(3) for s in layers] == [whole.work] * 3


@pytest.mark.slow
def test_losses_are_those_of_a_run_that_is_not_recorded():
    config = preset("tiny", **{**ALONE, "tensor_parallel_1": 2, "dropout": 0.1})
    session = pretraining(config)
    with session:
        plain = run_steps(session, config, *step_arrays(config))
    assert recorded(config)[1] == plain


# What the user sees


def made_up() -> RunProfile:
    """A profile of round numbers: two phases, two steps, on a machine of 1 TFLOP/s and 1 GB/s."""
    config = preset("tiny", **ALONE, device_iterations=2)
    lanes = dict.fromkeys(LANES, 0)
    phases = (
        PhaseProfile(
            "first_phase",
            4,
            Work(10**12, 10**9, 0),
            {**lanes, "compute": 3 * 10**9, "store": 10**9},
        ),
        PhaseProfile("second_phase", 2, Work(0, 0, 2 * 10**9), {**lanes, "compute": 4 * 10**9}),
    )
    record = Profile((0,), 2, 0, 8 * 10**9, phases, (), 0)
    return make_run_profile(config, PlanOptions(profile=True, link_gbps=1.0, **SPEEDS), record)


def test_times_are_set_beside_the_limit():
    found = made_up()
    assert found.machine == Machine(flops=1e12, link=1e9, remote=1e9) and found.measured == ()
    assert (found.seconds, found.limit) == (4.0, 1.5)
    told, memory = profile_text(found).split("phase         tensors")
    lines = {line.split()[0]: line.split() for line in told.splitlines() if line}
    assert "\nfirst_phase         -        -   0 B        -       0 B        -\n" in memory
    #                         runs    time         of step  speed           from          to
    assert lines["first_phase"][1:10] == [
        "2",
        "2.00",
        "s",
        "50.0%",
        "250",
        "GFLOP/s",
        "477",
        "MiB",
        "0",
    ]
    assert lines["first_phase"][11:] == ["0.50", "s", "25.0%", "compute", "store", "25%"]
    assert lines["second_phase"][-5:] == ["1.00", "s", "50.0%", "remote", "nothing"]
    assert lines["step"][-3:] == ["1.50", "s", "37.5%"]
    values = json.loads(json.dumps(profile_values(found)))
    assert (
        values["limit_seconds"] == 3.0
        and values["seconds"] == 8.0
        and values["machine"]["measured"] == []
    )
    assert [phase["bound"] for phase in values["phases"]] == ["compute", "remote"]


@pytest.mark.slow
def test_speeds_that_are_not_given_are_measured_in_the_precision_of_the_model():
    record = made_up().record
    found = make_run_profile(
        preset("tiny", **ALONE, precision="bfloat16"),
        PlanOptions(profile=True, remote_gbps=2.0),
        record,
    )
    assert found.measured == ("device_tflops", "link_gbps") and found.machine.remote == 2e9
    assert "FLOP/s (measured here), remote memory 2.00 GB/s\n" in profile_text(found)


@pytest.mark.slow
def test_one_run_is_recorded_and_files_are_left(tmp_path, capsys):
    config = preset("tiny", **{**ALONE, "tensor_parallel_1": 2})
    profiler = StepProfiler(
        config, PlanOptions(profile=True, profile_folder=str(tmp_path / "new"), **SPEEDS)
    )
    session = pretraining(config)
    with session:
        for run in range(4):
            assert not any((tmp_path / "new").iterdir()) or run == 3
            with profiler.around(session, is_last=run == 3):
                run_steps(session, config, *step_arrays(config))
    output = capsys.readouterr().out
    assert (
        output.count("profile of tiny: ") == 1
        and "float32, 2 replicas, 8 micro-batches per step" in output
    )
    for name in NAMES:
        assert f"\n{name} " in output
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "profile.json",
        "timeline.json",
    ]
    events = json.loads((tmp_path / "new/timeline.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {*NAMES} <= {
        event["name"] for event in events if event["ph"] == "X" and event["cat"] == PHASES
    }
    phases = json.loads((tmp_path / "new/profile.json").read_text())["phases"]
    assert [phase["name"] for phase in phases] == NAMES


@pytest.mark.slow
def test_of_few_runs_the_last_is_recorded(tmp_path, capsys):
    config = preset("tiny", **ALONE)
    profiler = StepProfiler(config, PlanOptions(profile=True, **SPEEDS), tmp_path)
    session = pretraining(config)
    with session, profiler.around(session, is_last=True):
        run_steps(session, config, *step_arrays(config))
    assert "profile of tiny" in capsys.readouterr().out and (tmp_path / "timeline.json").exists()


def test_lanes_are_as_busy_as_their_spans_are_long():
    edges = np.array([0.0, 10, 20, 30, 40])
    assert picture.busy([], edges).tolist() == [0] * 4
    assert picture.busy([(5, 12), (12, 15), (20, 40)], edges).tolist() == [0.5, 0.5, 1, 1]
    assert picture.busy([(39, 40), (0, 1)], edges).tolist() == [0.1, 0, 0, 0.1]


@pytest.mark.slow
def test_the_picture_of_the_docs_is_drawn_from_a_run(tmp_path):
    picture.main(preset("tiny", **ALONE), tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")


# The programs


def run(*words: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    python = warm.launcher() if "poprun" in words else warm.python()
    done = subprocess.run([python, *words], capture_output=True, text=True, timeout=120, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_training_with_a_profile_gives_the_run_without_it_bitwise(tmp_path, capsys):
    flags = ("--config", "tiny", "--steps", 5, "--validate_every", 0, "--run_folder", tmp_path)
    flags += ("--tensor_parallel_1", 1, "--tensor_parallel_2", 1)
    run_job(*flags, "--name", "plain")
    plain = capsys.readouterr().out
    run_job(*flags, "--name", "profiled", "--profile")
    profiled = capsys.readouterr().out
    runs = [tmp_path / name for name in ("plain", "profiled")]
    assert metrics_of(runs[0]) == metrics_of(runs[1])
    names = [sorted(path.name for path in folder.iterdir()) for folder in runs]
    assert set(names[1]) - set(names[0]) == {"profile.json", "timeline.json"}
    assert "profile of profiled" in profiled and "profile of" not in plain
    before = profiled.split("profile of profiled")[0]
    assert "step 2/5 " in before and "step 3/5 " not in before


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--profile",), ("--profile_every", 3)], ids=str)
def test_what_is_shown_of_a_profile_is_no_part_of_a_step(flags, tmp_path, monkeypatch):
    show = StepProfiler._show
    monkeypatch.setattr(StepProfiler, "_show", lambda *given: [time.sleep(3), show(*given)])
    alone = [word for name, count in ALONE.items() for word in (f"--{name}", count)]
    run_job("--config", "tiny", "--steps", 5, *alone, "--run_folder", tmp_path, *flags)
    lines = (tmp_path / "tiny/metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line)["step_seconds"] for line in lines[1:]) < 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, call",
    [
        (("--profile",), "write_whole"),
        (("--profile_every", 3), "write_whole"),
        (("--profile_every", 3), "mkdir"),
    ],
    ids=str,
)
def test_a_disk_that_is_full_for_a_profile_costs_no_step(flags, call, tmp_path, monkeypatch, capfd):
    def full(path, *given, **named):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def mkdir(path, *given, **named):
        return full(path) if path.parent.name == "profiles" else made(path, *given, **named)

    made = Path.mkdir
    if call == "mkdir":
        monkeypatch.setattr(Path, "mkdir", mkdir)
    else:
        monkeypatch.setattr("popxl_gpt.execution.reports.profile.report.write_whole", full)
    alone = [word for name, count in ALONE.items() for word in (f"--{name}", count)]
    run_job("--config", "tiny", "--steps", 6, *alone, "--run_folder", tmp_path, *flags)
    told, run = capfd.readouterr().err, tmp_path / "tiny"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 6
    assert (run / "checkpoints/step_00000006").is_dir()
    assert not (run / "profile.json").exists()
    profiles = len(flags)  # one, or after steps 3 and 6
    assert told.count("profile: got 'No space left on device' while writing to") == profiles
    assert told.count("Training goes on without this profile.") == profiles
    assert "--profile_folder" not in told


SLOW = """
import sys, time
import popdist
from popxl_gpt.demo import pretraining
from popxl_gpt.execution.reports.profile import report
make = report.make_run_profile
report.make_run_profile = lambda *given: [time.sleep(12), make(*given)][1]
sys.exit(pretraining.main(sys.argv[1:]))
"""


@pytest.mark.multi
@pytest.mark.slow
def test_processes_wait_for_the_first_that_makes_the_profile(tmp_path):
    (tmp_path / "program.py").write_text(SLOW)
    launcher = ("-m", "poprun", "--num-replicas", "2", "--num-instances", "2", "--timeout", "5")
    alone = [w for n, c in {**ALONE, "data_parallel": 2}.items() for w in (f"--{n}", str(c))]
    flags = ("--config", "tiny", *alone, "--steps", "5", "--profile")
    run(*launcher, warm.python(), str(tmp_path / "program.py"), *flags, cwd=tmp_path)
    assert (tmp_path / "runs/tiny/checkpoints/step_00000005").is_dir()
    assert (tmp_path / "runs/tiny/profile.json").exists()


@pytest.mark.multi
def test_the_benchmark_profiles_a_run_of_its_own(tmp_path):
    flags = ("--config", "tiny", "--profile", "--measured_runs", "1", "--unmeasured_runs", "0")
    flags += ("--tensor_parallel_1", "1", "--tensor_parallel_2", "1")
    done = run(str(ROOT / "execution/pretraining.py"), *flags, cwd=tmp_path)
    assert (
        "profile of tiny" in done.stdout
        and json.loads(done.stdout.splitlines()[-1])["config"] == "tiny"
    )
    assert (tmp_path / "runs/tiny-profile/timeline.json").exists()


@pytest.mark.multi
def test_processes_leave_one_timeline_of_all_replicas(tmp_path):
    launcher = (
        "-m",
        "poprun",
        "--num-replicas",
        "4",
        "--num-instances",
        "2",
        warm.python(),
    )
    flags = (
        "--config",
        "tiny",
        "--data_parallel",
        "2",
        "--tensor_parallel_1",
        "2",
        "--tensor_parallel_2",
        "1",
    )
    done = run(
        *launcher,
        str(ROOT / "demo/pretraining.py"),
        *flags,
        "--steps",
        "2",
        "--profile",
        cwd=tmp_path,
    )
    assert done.stdout.count("profile of tiny") == 1 and "float32, 2 of 4 replicas" in done.stdout
    events = json.loads((tmp_path / "runs/tiny/timeline.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    for replica in range(4):
        mine = [event for event in complete if event["pid"] == replica]
        assert {*NAMES} <= {event["name"] for event in mine if event["cat"] == PHASES}
        assert any(event["cat"] == "collectives" for event in mine)
    assert min(event["ts"] for event in complete) >= 0
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in complete if e["name"] == "run"]
    assert max(begin for begin, _ in spans) < min(end for _, end in spans), (
        "processes run at the same time"
    )


@pytest.mark.parametrize(
    "flags, says",
    [
        (
            ["--profile_folder", "x"],
            "--profile_folder: got a value without --profile; expected both or none. Add",
        ),
        (
            ["--device_tflops", "1"],
            "--device_tflops: got a value without --plan or --profile;",
        ),
        (["--profile", "--link_gbps", "1"], "--link_gbps: got a value without --plan; expected"),
        (
            ["--plan", "--devices", "8", "65537"],
            "--devices: got 65537; expected a whole number, at least 1 and at most 65536.",
        ),
        (
            ["--profile", "--plan"],
            "--profile: got it with --plan, which runs nothing; expected one of them",
        ),
        (["--profile_folder", "x", "--plan_folder", "y"], "2 problems"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_that_make_no_sense_are_refused(flags, says):
    with pytest.raises(UserError) as error:
        parse_command_line(flags, program="a test", default="tiny", options=Options)[1].is_plan()
    assert says in str(error.value)


@pytest.mark.slow
def test_an_interpreted_run_cannot_be_profiled(tmp_path, monkeypatch):
    monkeypatch.setenv("POPXL_INTERPRET", "1")
    config = preset("tiny", **ALONE)
    profiler = StepProfiler(config, PlanOptions(profile=True), tmp_path)
    session = pretraining(config)
    with pytest.raises(UserError, match="--profile: got a session that interprets"):
        with session, profiler.around(session, is_last=True):
            pass
