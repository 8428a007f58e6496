"""The memory at its peak that plans tell, against what torch gives out in runs."""

import bisect
import gc
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from popxl import extensions
from popxl_engine import compiler
from popxl_engine.machine.memory import Rows
from popxl_engine.machine.replica import Replica
from popxl_engine.planner import dry_run
from torch.profiler import ProfilerActivity, profile, record_function

from popxl_gpt.config.presets import override
from popxl_gpt.demo.job.run_memory import RunMemory
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.inference.inference import evaluation_program
from popxl_gpt.execution.planning.memory import (
    copy_bytes,
    process_memory,
    programs_of,
    without_files,
)
from popxl_gpt.execution.planning.model_size import parameter_count
from popxl_gpt.execution.pretraining import pretraining, training_program
from tests.integration.architectures import MODELS
from tests.integration.execution.plan_cases import GRIDS, configuration, planned, step_arrays

PRODUCTS = ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise")
"""What multiplies matrices, whatever the kind of CPU."""


def allocated_peak(work: Any) -> int:
    """Most bytes that torch's allocator has given out at a time during some work, beyond those from
    before.

    The profiler sees nothing of what was there when it began: the work is done once before.
    """
    gc.collect()  # what other tests have left is not freed meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
        with record_function("measured"):
            work()
    events = profiler.profiler.kineto_results.events()
    (begin,) = (e.start_ns() for e in events if e.name() == "measured")
    changes = sorted(
        ((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"),
        key=lambda pair: pair[0],
    )
    products = sorted((e.start_ns(), e.end_ns()) for e in events if e.name() in PRODUCTS)
    measured = without_scratch([change for change in changes if change[0] >= begin], products)
    live = np.cumsum([nbytes for _, nbytes in measured])
    assert live[-1] < 0.02 * live.max() + 1000, "a step leaves nothing behind"
    return int(live.max())


def without_scratch(
    changes: "list[tuple[int, int]]", products: "list[tuple[int, int]]"
) -> "list[tuple[int, int]]":
    """Less what is taken and given back inside one product: where oneDNN rearranges a factor. No
    plan knows that. Small products are not oneDNN's.
    """
    if not products:
        return changes
    found: list[tuple[int, int]] = []
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


def check_peaks(config: Any, peaks: "dict[bool, int]", monkeypatch: Any) -> None:
    """The peaks of plans, by whether loads borrow rows, against steps of a session: its loads do,
    and then they take memory of their own.
    """
    session, arrays = pretraining(config), step_arrays(config)
    # rows keep their memory: what is measured is all else
    monkeypatch.setattr(Rows, "release", lambda *row: None)
    with session:
        run_steps(session, config, *arrays)
        for borrows in (True, False):
            if not borrows:
                copying("remote_load", monkeypatch)
                copying("host_load", monkeypatch)
            found = allocated_peak(lambda: run_steps(session, config, *arrays))
            assert found == pytest.approx(peaks[borrows], rel=0.05), f"borrowed rows: {borrows}"


@pytest.mark.sampled(3)
@pytest.mark.slow
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
        {"layers": 3, "hidden_size": 180, "activation_memory": 800_000},
        {
            **MODELS["norms around, gains from one, GEGLU"],
            "hidden_size": 180,
            "embedding_scale": 13.0,
        },
    ],
    ids=str,
)
def test_peak_memory_is_within_five_percent_of_a_run(changes, monkeypatch):
    # the plan is for steps that clip, which need a little more
    config = configuration(**changes, max_norm=1e-3)
    ir = training_program(config)[0]
    with extensions.compiled_once(ir):
        peaks = {b: extensions.plan(ir, borrows_rows=b).peak_bytes for b in (True, False)}
    check_peaks(config, peaks, monkeypatch)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "grid, changes",
    [((1, 1, 1), {}), ((2, 1, 1), {"device_iterations": 2}), ((1, 1, 2), {"layers": 3})],
    ids=str,
)
def test_rows_that_a_plan_gives_memory_are_those_that_have_it_in_a_run(grid, changes, monkeypatch):
    config = configuration(grid, **changes)
    expected = extensions.host_needs(training_program(config)[0])
    held = most_held(config, lambda rows: rows.held_bytes, monkeypatch)
    assert 0.98 * expected.rows <= held <= expected.rows < expected.all_rows


def most_held(config: Any, of: "Callable[[Rows], int]", monkeypatch: Any) -> int:
    """Most bytes that the rows of a step have, by what each buffer's have."""
    held: list[int] = []

    def noted(name: str) -> None:
        original = getattr(Replica, name)

        def call(replica: Replica, *arguments: Any) -> Any:
            found = original(replica, *arguments)
            held.append(sum(of(rows) for each in replicas for rows in each.rows.values()))
            return found

        monkeypatch.setattr(Replica, name, call)

    session, arrays = pretraining(config), step_arrays(config)
    replicas = session._engine.machine.replicas
    with session:
        run_steps(session, config, *arrays)
        for name in ("remote_load", "remote_store"):
            noted(name)
        run_steps(session, config, *arrays)
    return max(held)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "grid, changes",
    [
        ((1, 1, 1), {"recomputation": False}),
        ((1, 1, 1), {"precision": "bfloat16", "stochastic_rounding": True}),
        ((2, 1, 1), {}),
    ],
    ids=str,
)
def test_rows_beside_mapped_files_are_those_that_have_memory_in_a_run(
    grid, changes, tmp_path, monkeypatch
):
    config = configuration(grid, **changes, memmap_dir=str(tmp_path))
    program = training_program(without_files(config))[0]
    expected = extensions.host_needs(program, mapped=True)

    def unmapped(rows: Rows) -> int:
        return sum(t.nbytes for i, t in rows._rows.items() if i not in rows._callers)

    held = most_held(config, unmapped, monkeypatch)
    assert 0.98 * expected.rows <= held <= expected.rows
    whole, memory = extensions.host_needs(program), process_memory(config, [program])
    assert (memory.rows, memory.mapped) == (whole.rows, whole.rows - expected.rows)
    assert (memory.mapped > 0) == (grid == (1, 1, 1))


@pytest.mark.slow
def test_a_program_is_compiled_once_for_what_mapped_files_hold_of_it(tmp_path, monkeypatch):
    lowered, lower = [], compiler.lower

    def noted(*arguments: Any) -> Any:
        lowered.append(arguments)
        return lower(*arguments)

    monkeypatch.setattr(compiler, "lower", noted)
    config = configuration(memmap_dir=str(tmp_path))
    program = training_program(without_files(config))[0]
    assert process_memory(config, [program]).mapped > 0
    assert len(lowered) == 1


@pytest.mark.slow
def test_a_device_beside_the_host_has_rows_of_its_own():
    config = configuration(hidden_size=180)
    needs = extensions.host_needs(training_program(config)[0])
    gpu = override(config, device="cuda")
    found = process_memory(gpu, [training_program(gpu)[0]])
    assert (found.rows, found.tensors) == (needs.all_rows, 0)
    limit = extensions.device_needs(training_program(config)[0]).least + 400_000
    limited = override(config, device_memory=limit)
    planned_rows = process_memory(limited, [training_program(limited)[0]]).rows
    session = pretraining(limited)
    (cache,) = session._engine.machine.caches
    taken = cache.transfers.traffic.memory_bytes + cache.transfers.traffic.file_bytes
    assert planned_rows > needs.all_rows and taken == pytest.approx(planned_rows, rel=0.1)
    ample = override(config, device_memory=2**40)
    assert process_memory(ample, [training_program(ample)[0]]).rows == needs.all_rows


@pytest.mark.slow
def test_a_process_takes_what_it_has_and_rows_and_tensors(monkeypatch):
    config = configuration(hidden_size=180)
    needs = extensions.host_needs(training_program(config)[0])
    found = process_memory(config, [training_program(config)[0]], 1000)
    assert (found.itself, found.rows, found.tensors) == (1000, needs.rows, needs.tensors)
    model, layer = config.model, 3 * 4 * (12 * 180**2 + 13 * 180)  # weights and moments
    embedding = 3 * 4 * 180 * (model.vocabulary_size + model.sequence_length)
    assert found.saving == layer + max(layer * (model.layers > 1), embedding)
    assert found.copy == copy_bytes(config, 1)  # not resident at the end
    assert found.resident == 1000 + needs.rows + max(needs.tensors, found.saving)
    limited = override(config, memmap_dir="anywhere", host_memory=needs.rows // 2)
    assert process_memory(limited, [training_program(config)[0]]).rows == needs.rows // 2
    looks = override(config, validate_every=1)
    validated = process_memory(
        looks, programs_of(looks, training_program, evaluation_program), 1000
    )
    assert validated.rows > found.rows + 4 * parameter_count(config.model)
    apart = override(looks, inference_data_parallel=4, inference_micro_batch_size=2)
    programs = programs_of(apart, training_program, evaluation_program)
    assert programs[1].replication_factor == 4
    assert process_memory(apart, programs, 1000).rows > validated.rows


@pytest.mark.slow
def test_a_run_tells_its_resident_set_and_the_plan_beside_it(monkeypatch):
    config = configuration()
    short, long = RunMemory(config, None), RunMemory(config, None)
    for memory in (short, long):
        memory.end(2**30)
    assert re.fullmatch(r"[\d.]+ [MG]iB resident; [\d.]+ [MG]iB at its peak", short.text())
    monkeypatch.setattr("popxl_gpt.demo.job.run_memory.PLANNED_AFTER", 0.0)
    assert re.search(r"resident, [\d.]+ [MG]iB planned \([-+]\d+\.\d%\);", long.text())


@pytest.mark.slow
def test_an_update_has_one_parameter_at_a_time_on_the_device():
    config = configuration(hidden_size=180)
    (update,) = (p for p in planned(config).program.phases if p.name == "decoder_optim_phase")
    weight_gradient_and_moments = 4 * 4 * config.model.hidden_size * config.model.feed_forward
    assert weight_gradient_and_moments < update.peak_bytes < 1.05 * weight_gradient_and_moments


@pytest.mark.exhaustive
@pytest.mark.slow
def test_remembering_what_kernels_need_changes_no_peak(monkeypatch):
    changes = {
        "dropout": 0.1,
        "precision": "bfloat16",
        "stochastic_rounding": True,
        "attention_serialisation": 11,
    }
    config = configuration((2, 1, 1), **changes)
    remembered = planned(config).program
    monkeypatch.setattr(dry_run, "MemoizedKernel", lambda kernel, live: kernel)
    assert planned.__wrapped__(config).program == remembered


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS[1:], ids=str)
def test_peak_memory_of_replicas_in_one_process_is_within_five_percent_of_a_run(grid, monkeypatch):
    # two micro-batches each
    config = configuration(grid, max_norm=1e-3, global_batch_size=2 * grid[0])
    ir = training_program(config)[0]
    peaks = {}
    with extensions.compiled_once(ir):
        for borrows in (True, False):
            peaks[borrows] = extensions.plan(ir, borrows_rows=borrows, together=True).peak_bytes
            one = extensions.plan(ir, borrows_rows=borrows).peak_bytes
            assert peaks[borrows] <= ir.replication_factor * one
    check_peaks(config, peaks, monkeypatch)


@pytest.mark.parametrize(
    "changes", [{}, {"score_softcap": 5.0, "document_attention": True, "end_of_text": 3}], ids=str
)
def test_memory_is_linear_in_the_length_of_a_text(changes):
    peaks = [
        extensions.plan(training_program(configuration(sequence_length=n, **changes))[0]).peak_bytes
        for n in (16384, 32768)
    ]
    assert peaks[1] < 2.05 * peaks[0] < 16384**2
