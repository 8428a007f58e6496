"""What is told of a program before it runs: its phases with what they move, and its parameters."""

import json
from xml.etree import ElementTree

import pytest
from helpers.quick import Later
from popxl import extensions

from popxl_gpt.demo.job.options import TrainOptions
from popxl_gpt.execution.planning.model_size import parameter_count
from popxl_gpt.execution.planning.parameter_groups import parameter_groups, parameter_text
from popxl_gpt.execution.planning.schedule import schedule, step_program
from popxl_gpt.utils.errors import ConfigError
from popxl_gpt.utils.units import bytes_text
from tests.integration.gpt_oracle import small
from tests.integration.runs import run_job

drawing = Later("imgs.draw_schedule")
GRID = {"data_parallel": 2, "tensor_parallel_1": 2, "tensor_parallel_2": 2, "heads": 4}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("changes", [{}, {**GRID, "optimizer": "muon"}, {"micro_batch_group": 2}])
def test_a_schedule_moves_what_the_plan_counts(changes):
    config = small(**changes)
    planned = extensions.plan(step_program(config)[0], with_peaks=False)
    found = schedule(config)
    for phase in found:
        assert all(move.tensors >= move.rounds for move in phase.moves)
        (same,) = (each for each in planned.phases if each.name == phase.name)
        moved = {verb: 0 for verb in ("load", "store")}
        for move in phase.moves:
            if move.what != "host" and move.verb in moved:
                moved[move.verb] += move.nbytes
        assert moved == {"load": same.loaded_bytes, "store": same.stored_bytes}, phase.name
        assert sum(phase.flops_by_op.values()) == same.flops
    assert [phase.name for phase in found][-1] == "decoder_optim_phase"
    assert {move.verb for phase in found for move in phase.moves} >= (
        {"load", "store", "sum", "gather"} if "heads" in changes else {"load", "store"}
    )


def test_the_schedule_is_printed_and_nothing_runs(tmp_path, capsys):
    flags = "--config", "tiny", "--run_folder", tmp_path, "--device_iterations", 2, "--steps", 2
    run_job(*flags, "--print_schedule")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "schedule of tiny: tensors and bytes of each replica in one optimizer step"
    at = lines.index("decoder_optim_phase, 2 times, together")
    assert lines[at + 1].split()[0] == "compute" and lines[at + 1].endswith("FLOP")
    assert lines[at + 2].split() == "load gradients 24 49.2 KiB in 12 rounds".split()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("changes", [GRID, {"heads": 4, "micro_batch_group": 2}], ids=str)
def test_a_picture_has_an_arrow_with_bytes_for_each_move_and_no_texts_that_overlap(changes):
    for phase in schedule(small(**changes)):
        root = ElementTree.fromstring(drawing.picture(phase))
        tags = {kind: root.findall(f"{{*}}{kind}") for kind in ("line", "text")}
        assert len(tags["line"]) == len(phase.moves)
        for move, arrow in zip(phase.moves, tags["line"]):
            x1, x2 = (int(arrow.attrib[end]) for end in ("x1", "x2"))
            left, device, right = (drawing.LEFT[1], drawing.DEVICE, drawing.RIGHT[0])
            beside = (left, device[0]) if move.verb in ("load", "store") else (device[1], right)
            assert beside[0] < min(x1, x2) < max(x1, x2) < beside[1]
            assert (x1 < x2) == (move.verb in ("load", "sum"))
            assert bytes_text(move.nbytes) in [text.text for text in tags["text"]]
        spans = sorted((int(t.attrib["y"]), *span_of(t)) for t in tags["text"])
        for (y, _, end), (below, begin, _) in zip(spans, spans[1:]):
            assert below > y or begin > end, (phase.name, y)
        assert max(end for _, _, end in spans) <= drawing.WIDTH


def span_of(text: ElementTree.Element) -> "tuple[float, float]":
    """Left and right end of a text, with letters as wide as those of a wide font."""
    size = float(text.attrib.get("font-size", 13))
    bold = 1.1 if "font-weight" in text.attrib else 1.0
    width, x = 0.58 * size * bold * len(text.text or ""), float(text.attrib["x"])
    left = x - width * {"middle": 0.5, "end": 1.0}.get(text.attrib.get("text-anchor", ""), 0.0)
    return left, left + width


def test_groups_of_parameters_say_what_updates_them():
    config = small(optimizer="muon", embedding_rate_multiplier=3.0, weight_decay=0.2)
    found = {group.role: group for group in parameter_groups(config)}
    told = {role: (g.optimizer, g.rate_multiplier, g.weight_decay) for role, g in found.items()}
    assert told == {
        "embedding": ("adamw", 3.0, 0.2),
        "gain": ("adamw", 1.0, 0.0),
        "bias": ("adamw", 1.0, 0.0),
        "weight": ("muon", 1.0, 0.2),
    }
    assert sum(group.parameters for group in found.values()) == parameter_count(config.model)
    assert parameter_text([found["weight"]]).splitlines()[-1].split()[:4] == [
        "weight",
        "muon",
        "x",
        "1",
    ]
    frozen = {g.role for g in parameter_groups(small(lora_rank=2)) if g.optimizer == "frozen"}
    assert frozen == {"embedding", "gain", "bias", "weight"}
    assert {g.optimizer for g in parameter_groups(small(updates=False))} == {"frozen"}


@pytest.mark.multi
@pytest.mark.slow
def test_profiles_come_every_so_many_steps_and_change_no_number(tmp_path):
    flags = "--config tiny --tensor_parallel_1 1 --tensor_parallel_2 1 --data_parallel 1"
    more = "--steps 7 --validate_every 0 --samples 0"
    losses = []
    for name, words in (("plain", ()), ("profiled", ("--profile_every", 3))):
        run_job(*flags.split(), *more.split(), "--name", name, "--run_folder", tmp_path, *words)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0] == losses[1]
    run = tmp_path / "profiled"
    assert sorted(path.name for path in (run / "profiles").iterdir()) == [
        "step_00000003",
        "step_00000006",
    ]
    newest = (run / "profiles/step_00000006/profile.json").read_bytes()
    assert (run / "profile.json").read_bytes() == newest
    about = json.loads((run / "run.json").read_text())
    assert about["program"]["build_seconds"] > 0 and about["program"]["compile_seconds"] > 0
    assert [group["role"] for group in about["parameters"]] == [
        "embedding",
        "gain",
        "bias",
        "weight",
    ]
    assert "<h2>Parameters</h2>" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    "first, second",
    [
        ("profile", "profile_every"),
        ("plan", "profile_every"),
        ("plan", "print_schedule"),
        ("profile", "print_schedule"),
        ("profile_every", "print_schedule"),
    ],
)
def test_flags_that_leave_nothing_for_each_other_are_not_asked_for_together(first, second):
    with pytest.raises(ConfigError, match=f"--{first} and --{second}: got them together; expected"):
        TrainOptions(**{first: 1, second: 1}).is_plan()


def test_speeds_are_for_profiles_of_every_so_many_steps_too():
    assert not TrainOptions(profile_every=3, device_tflops=1.0, remote_gbps=2.0).is_plan()
    with pytest.raises(ConfigError, match="--link_gbps: got a value without --plan or --limit"):
        TrainOptions(profile_every=3, link_gbps=2.0).is_plan()
