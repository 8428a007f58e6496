"""`--plan --devices N`: the search for layouts against a plan of each, and against counting."""

import json
import re
from dataclasses import replace

import pytest
from popxl.errors import RemoteMemoryError

from popxl_gpt.config.presets import override
from popxl_gpt.execution.planning.axes import splits
from popxl_gpt.execution.planning.layouts import (
    Search,
    fastest_layouts,
    layouts,
    layouts_text,
    layouts_values,
    that_fit,
)
from popxl_gpt.execution.planning.memory import least_device_bytes
from popxl_gpt.execution.planning.options import PlanOptions
from popxl_gpt.execution.planning.plan_report import plan_and_show
from popxl_gpt.execution.planning.run_plan import plan_step
from popxl_gpt.execution.pretraining import pretraining, training_program
from popxl_gpt.utils.errors import ConfigError, UserError
from popxl_gpt.utils.units import bytes_text
from tests.integration.execution.plan_cases import SPEEDS, configuration, planned

GRIDS = [(1, 1, 2), (1, 2, 1), (2, 1, 1)]


def search(devices=2, **changes):
    options = PlanOptions(plan=True, devices=(devices,), **{**SPEEDS, "link_gbps": 0.3})
    (found,) = fastest_layouts(training_program, configuration(**changes), options)
    return found


def test_splits_are_all_ordered_products():
    for devices in (1, 6, 8, 12):
        numbers = range(1, devices + 1)
        expected = [
            (a, b, c) for a in numbers for b in numbers for c in numbers if a * b * c == devices
        ]
        assert splits(devices) == expected


def test_layouts_are_those_that_the_model_can_have():
    found = {
        (e.data_parallel, e.tensor_parallel_1, e.tensor_parallel_2)
        for e in (c.execution for c in layouts(configuration(), 12))
    }
    # heads 6 and global batch 6 split over 1, 2, 3 and 6; hidden size 60 over all but 8 and the like
    assert found == {
        (dp, tp1, tp2)
        for dp, tp1, tp2 in splits(12)
        if 6 % dp == 0 and 6 % tp1 == 0 and 60 % tp2 == 0
    }


def test_devices_that_no_layout_splits_over_are_refused_with_what_is_wrong_with_each():
    with pytest.raises(ConfigError, match="devices: got 7; expected a number that tiny") as caught:
        layouts(configuration(), 7)
    assert len(caught.value.problems) == 1 + 3
    assert caught.value.problems[1].startswith("1 x 1 x 7: ")


@pytest.fixture(scope="module")
def alone():
    """A plan of each layout by itself, the fastest first."""
    configs = [override(configuration(grid), device_memory=2**40) for grid in GRIDS]
    plans = [planned(config, link_gbps=0.3) for config in configs]
    plans = [replace(p, device_bytes=p.program.peak_bytes) for p in plans]
    return sorted(plans, key=lambda p: (p.seconds, p.program.peak_bytes))


@pytest.mark.slow
def test_the_fastest_layouts_come_first_and_their_plans_are_those_of_each_alone(alone):
    found = search(device_memory=2**40)
    assert found.others == []
    assert [p.config for p in found.shown] == [p.config for p in alone]
    assert [p.program for p in found.shown] == [p.program for p in alone]
    assert [p.seconds for p in found.shown] == [p.seconds for p in alone]


@pytest.mark.slow
def test_the_text_names_the_flags_of_the_fastest_layout(alone):
    first, text = alone[0].config.execution, layouts_text(Search(alone[:2], alone[2:]))
    assert f"--tensor_parallel_1 {first.tensor_parallel_1} --tensor_parallel_2" in text
    assert "the fastest 2 of 3" in text


def without_peaks(plan):
    phases = tuple(replace(phase, peak_bytes=0) for phase in plan.program.phases)
    return replace(plan, program=replace(plan.program, phases=phases), device_bytes=0)


def chosen(alone, memory, shown):
    """What fits, and the configurations whose peaks were asked for."""
    asked = []

    def with_peaks(configs):
        asked.extend(configs)
        return [next(p for p in alone if p.config == config) for config in configs]

    return that_fit([without_peaks(p) for p in alone], memory, with_peaks, shown), asked


@pytest.mark.slow
def test_peaks_are_found_of_the_layouts_that_are_shown_alone(alone):
    found, asked = chosen(alone, None, shown=1)
    assert found.shown == alone[:1] and asked == [alone[0].config]
    values = json.loads(json.dumps(layouts_values(found)))
    assert [v["seconds"] for v in values] == [p.seconds for p in alone]
    peaks = [v["device_peak_bytes"] for v in values]
    assert peaks == [alone[0].program.peak_bytes, None, None]


@pytest.mark.slow
def test_layouts_that_do_not_fit_device_memory_are_left_out(alone):
    peaks = sorted(p.program.peak_bytes for p in alone)
    assert len(set(peaks)) == 3
    fitting = [p for p in alone if p.program.peak_bytes < peaks[2]]
    for shown in (1, 2, 3):
        found, asked = chosen(alone, peaks[1], shown)
        assert found.shown == fitting[:shown]
        # no more are looked at than it takes
        needed = alone.index(fitting[:shown][-1]) + 1 if shown < 3 else 3
        in_question = [p for p in alone[:needed] if least_device_bytes(p.config) <= peaks[1]]
        assert asked == [p.config for p in in_question]
    with pytest.raises(UserError, match="expected at least .* smallest of 3 layouts over 2"):
        chosen(alone, peaks[0] - 1, 1)


@pytest.mark.slow
def test_what_a_block_takes_alone_is_less_than_the_peak_and_rules_layouts_out(alone):
    for plan in alone:
        block, tp = plan.config, plan.config.execution.tensor_parallel_1
        assert 0 < least_device_bytes(block) < plan.program.peak_bytes
        whole = least_device_bytes(override(block, tensor_parallel_1=1, tensor_parallel_2=1))
        assert least_device_bytes(block) == whole // (tp * block.execution.tensor_parallel_2)
    least = min(least_device_bytes(p.config) for p in alone)
    with pytest.raises(UserError, match="expected at least"):
        chosen(alone, least - 1, 1)
    too_large = next(p for p in alone if least_device_bytes(p.config) > least)
    with pytest.raises(UserError, match=bytes_text(too_large.program.peak_bytes)):
        chosen([too_large], least, 1)
    found, asked = chosen(alone, 2**40, 3)
    assert len(asked) == len(found.shown) == 3


@pytest.mark.slow
def test_of_equally_fast_layouts_that_which_needs_less_memory_comes_first(alone):
    equal = [replace(p, times=alone[0].times) for p in alone]
    found, _ = chosen(equal, None, shown=1)
    least = min(equal, key=lambda p: p.program.peak_bytes)
    assert found.shown == [least] and len(found.others) == 2


@pytest.mark.slow
def test_a_layout_that_is_shown_runs_with_the_memory():
    def limited(memory):
        return override(configuration(), device_memory=memory)

    machine = planned(configuration()).machine
    plan = plan_step(training_program, limited(2**40), machine, ())
    assert plan.program.peak_bytes < plan.device_bytes
    for memory in (plan.program.peak_bytes, plan.device_bytes - 1):
        with pytest.raises(RemoteMemoryError, match=f"expected at least {plan.device_bytes}"):
            pretraining(limited(memory))
        with pytest.raises(UserError, match=f"at least {bytes_text(plan.device_bytes)}"):
            that_fit([without_peaks(plan)], memory, lambda configs: [plan])
    pretraining(limited(plan.device_bytes))
    assert that_fit([without_peaks(plan)], plan.device_bytes, lambda configs: [plan]).shown == [
        plan
    ]


def test_a_share_of_memory_that_nobody_knows_is_refused():
    with pytest.raises(ConfigError, match="device_memory: got a share with --devices"):
        search(device_memory=0.5)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_of_several_numbers_the_fastest_layout_of_each_is_told(alone, capsys, tmp_path):
    options = PlanOptions(
        plan=True, devices=(1, 2), plan_folder=str(tmp_path), **{**SPEEDS, "link_gbps": 0.3}
    )
    plan_and_show(training_program, configuration(), options)
    plans = [planned(configuration(grid), link_gbps=0.3) for grid in GRIDS]
    one = planned(configuration(), link_gbps=0.3)
    both = min(plans, key=lambda p: p.seconds)
    values = json.loads((tmp_path / "devices.json").read_text())
    assert [v["seconds"] for v in values] == [one.seconds, both.seconds]
    assert [v["exposed_seconds"] for v in values] == [0.0, both.exposed]
    assert values[0]["efficiency"] == 1.0
    assert values[1]["efficiency"] == pytest.approx(one.seconds / both.seconds / 2)
    assert re.findall(r"^(\d)  +\d x", capsys.readouterr().out, re.MULTILINE) == ["1", "2"]
