"""`--auto`: what is searched, what is left out, and that the choice is the fastest that fits."""

import functools
import gc
import math
import time
import weakref
from collections import Counter
from dataclasses import replace

import pytest

from popxl_gpt.config.presets import override, preset
from popxl_gpt.config.saving import load
from popxl_gpt.demo import pretraining as program
from popxl_gpt.demo.commands import parse_training
from popxl_gpt.execution.block_graphs import kept_bytes, levels, stretches
from popxl_gpt.execution.checkpoints import checkpoint
from popxl_gpt.execution.inference.inference import evaluation_program
from popxl_gpt.execution.planning import axes, executing, placing, trial
from popxl_gpt.execution.planning import memory as memory_account
from popxl_gpt.execution.planning.executing import executable, resolved
from popxl_gpt.execution.planning.memory import (
    ProcessMemory,
    bytes_by_kind,
    file_bytes,
    least_rows,
    programs_of,
    state_bytes,
)
from popxl_gpt.execution.planning.options import PlanOptions
from popxl_gpt.execution.planning.placing import Placed, Room
from popxl_gpt.execution.pretraining import pretraining, training_program
from popxl_gpt.execution.recomputation import stretches_text
from popxl_gpt.utils.errors import ConfigError, UserError
from popxl_gpt.utils.runtime import planner

ALONE = {"data_parallel": 1, "tensor_parallel_1": 1, "tensor_parallel_2": 1}


def small(**changes):
    return preset("tiny", **{**ALONE, "layers": 3, **changes})


def ways(config, *given):
    return [
        (e.micro_batch_size, e.widening, e.recomputation)
        for e in (c.execution for c in axes.ways(config, frozenset(given)))
    ]


def test_every_number_of_sequences_that_divides_the_batch_is_a_candidate():
    both = (False, True)
    assert ways(small()) == [(1, n, kept) for n in (1, 2, 4, 8) for kept in both]
    # a micro-batch that does not divide gives way, unless it draws masks of its own
    two = small(micro_batch_size=2)
    assert ways(two) == [(1, 1, k) for k in both] + [(2, n, k) for n in (1, 2, 4) for k in both]
    drops = override(two, dropout=0.1)
    assert ways(drops) == [(2, n, kept) for n in (1, 2, 4) for kept in both]


def test_settings_that_are_given_are_not_searched():
    config = small(micro_batch_size=2, recomputation=False)
    assert ways(config, "micro_batch_size", "recomputation") == [(2, n, False) for n in (1, 2, 4)]
    wide = small(widening=2)
    assert ways(wide, "widening", "recomputation") == [(m, 2, True) for m in (1, 2, 4)]
    assert ways(override(wide, dropout=0.1), "widening", "recomputation") == [(1, 2, True)]


def pieces(config, *given):
    return axes.with_pieces(config, frozenset(given)).execution.head_serialisation


def test_a_gpu_computes_the_head_in_pieces_of_few_enough_logits(monkeypatch):
    """16,384 rows of 151,936 logits, four bytes each, take 9.3 GiB."""
    rows = {"micro_batch_size": 8, "widening": 2, "global_batch_size": 16}
    sizes = {"sequence_length": 1024, "max_positions": 1024, "vocabulary_size": 151_936}
    config = small(**rows, **sizes, device="cuda")
    assert pieces(config) == 8  # five pieces of 2 GiB, of which 16,384 rows are no multiple
    assert pieces(override(config, tensor_parallel_1=2)) == 4
    assert pieces(override(config, device_memory=2**36)) == 4
    assert pieces(override(config, device_memory=0.5)) == 8, "no number of bytes"
    assert pieces(override(config, head_serialisation=2)) == 2
    assert pieces(config, "head_serialisation") == pieces(override(config, device="cpu")) == 1
    assert pieces(small(device="cuda")) == 1
    _, executed = program.begun(config, parse_training(["--config", "tiny"]).options, set())
    assert executed == override(config, head_serialisation=8)
    there = override(config, device="auto")
    for is_there in (True, False):
        monkeypatch.setattr("popxl_gpt.utils.runtime.has_device", lambda name: is_there)
        assert pieces(there) == (8 if is_there else 1)
    found = axes.ways(override(config, precision="bfloat16"), {"micro_batch_size"})
    assert {(c.execution.widening, c.execution.head_serialisation) for c in found} == {
        (1, 4), (2, 8),
    }  # fmt: skip
    assert "head in 8 pieces" in axes.in_words(found[-1])


def test_layouts_are_those_of_the_replicas_that_flags_ask_for():
    config = small(tensor_parallel_1=2)
    found = axes.ways(config, {"tensor_parallel_1", "recomputation"})
    assert {c.execution.tensor_parallel_1 for c in found} == {2}
    assert {c.execution.replication_factor for c in found} == {2}
    spread = preset("tiny")  # 2 x 2 x 2, which no flag asks for
    assert {c.execution.replication_factor for c in axes.ways(spread, ())} == {1}
    assert executable(spread, ()).execution.replication_factor == 1


def test_layouts_of_a_launcher_are_all_that_its_replicas_can_have(monkeypatch):
    monkeypatch.setattr(axes.popdist, "isPopdistEnvSet", lambda: True)
    monkeypatch.setattr(axes.popdist, "getNumTotalReplicas", lambda: 4)
    found = axes.ways(small(), {"recomputation", "tensor_parallel_2"})
    layouts = {
        (c.execution.data_parallel, c.execution.tensor_parallel_1, c.execution.tensor_parallel_2)
        for c in found
    }
    assert layouts == {(1, 4, 1), (2, 2, 1), (4, 1, 1)}


def test_flags_that_leave_no_way_are_refused_with_what_is_wrong():
    config = small(global_batch_size=6, widening=3)
    given = {"micro_batch_size", "widening", "data_parallel"}
    with pytest.raises(ConfigError, match="--auto: got flags that leave no way") as caught:
        axes.ways(replace_execution(config, micro_batch_size=4), given)
    assert any("--widening 3" in problem for problem in caught.value.problems)


def replace_execution(config, **values):
    return replace(config, execution=replace(config.execution, **values))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--auto", "--plan", "--devices", "4"], "--devices: got it with --auto"),
        (["--auto_seconds", "5"], "--auto_seconds: got a value without --auto"),
        (["--auto", "--auto_seconds", "0"], "auto_seconds: got 0"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, says):
    with pytest.raises(ConfigError, match=says):
        parse_training(["--config", "tiny", *flags])[1].is_plan()


def test_a_batch_that_is_given_in_micro_batches_stays_whatever_the_way():
    words = ["--config", "tiny", "--auto", "--gradient_accumulation_steps", "3"]
    config, _, given = parse_training([*words, "--micro_batch_size", "2"])
    assert config.training.global_batch_size == 3 * 2 * preset("tiny").execution.data_parallel
    found = axes.ways(config, given)
    assert {way.training.global_batch_size for way in found} == {12}
    assert {way.execution.replication_factor for way in found} == {1} and len(found) > 2


def test_what_flags_give_is_known_by_name():
    words = ["--config", "tiny", "--auto", "--no-recomputation", "--execution.widening", "2"]
    assert parse_training(words).given == {
        "auto", "config", "recomputation", "widening"
    }  # fmt: skip


# Times


class Linear:
    """A program whose steps take what a formula says."""

    def __init__(self, monkeypatch):
        self.made = []
        monkeypatch.setattr(trial, "step_times", self.times)

    def times(self, program, config, unmeasured, measured, clock):
        self.made.append((config.model.layers, config.runs_per_phase))
        return [1.5 * self.exact(config), self.exact(config)]

    @staticmethod
    def exact(config):
        layers, runs = config.model.layers, config.runs_per_phase
        sequences = config.execution.micro_batch_size * config.execution.widening
        per_run = (0.3 + 0.2 * layers) * (0.5 + sequences)
        return (
            0.7 + 0.11 * layers + runs * per_run * (1.25 if config.execution.recomputation else 1)
        )


@pytest.mark.parametrize("products, first", [("precision", 1), ("fp8", 3)])
def test_a_time_that_is_linear_in_layers_and_runs_is_predicted_exactly(
    products, first, monkeypatch
):
    program = Linear(monkeypatch)
    for layers in (first, first + 1, 7):
        trials = trial.Trials(pretraining, time.perf_counter)
        for sequences in (1, 2, 8):
            config = small(layers=layers, micro_batch_size=sequences, products=products)
            assert trials.seconds(config) == pytest.approx(Linear.exact(config), rel=1e-12)
    assert {layers for layers, _ in program.made} == {first, first + 1}
    # of a layout the update alone is found once
    assert program.made.count((first, 2)) == 2 and program.made.count((first + 1, 2)) == 2


@pytest.mark.parametrize("kind, few", [("precision", 1), ("fp8", 3)])
def test_what_blocks_keep_saves_its_share_of_what_a_trial_of_some_that_keep_all_saves(
    kind, few, monkeypatch
):
    program = Linear(monkeypatch)
    config = small(layers=24, hidden_size=64, products=kind)
    none, *_, products, every = levels(config)
    some = override(config, activation_memory=24 * products.kept_bytes)
    share = (none.flops - products.flops) / (none.flops - every.flops)
    assert 0.5 < share < 1
    keeping = override(config, recomputation=False)
    trials = trial.Trials(pretraining, time.perf_counter)
    one = [override(each, layers=few) for each in (config, keeping)]
    saved = program.exact(override(one[0], global_batch_size=1)) - program.exact(
        override(one[1], global_batch_size=1)
    )
    expected = program.exact(config) - 24 * share * config.runs_per_phase * saved / few
    assert trials.seconds(some) == pytest.approx(expected)


def test_a_step_that_is_short_is_timed_as_it_is(monkeypatch):
    program = Linear(monkeypatch)
    exact = Linear.exact
    monkeypatch.setattr(Linear, "exact", staticmethod(lambda config: 1e-3 * exact(config)))
    found = trial.Trials(pretraining, time.perf_counter).seconds(small(layers=7))
    assert found == pytest.approx(1e-3 * exact(small(layers=7)))
    assert program.made == [(1, 1), (7, 8)]


def test_a_step_that_small_trials_find_short_is_timed_as_it_is(monkeypatch):
    """The update alone, times the runs, would seem to be long; runs of a whole batch take longer
    than those of small trials, whose activations stay in caches.
    """
    program = Linear(monkeypatch)

    def exact(config):
        runs = config.runs_per_phase
        return 0.4 + runs * (0.05 if runs <= 2 else 0.15)

    monkeypatch.setattr(Linear, "exact", staticmethod(exact))
    config = small(layers=7)
    assert trial.Trials(pretraining, time.perf_counter).seconds(config) == exact(config) == 1.6
    assert program.made[-1] == (7, 8)


@pytest.mark.parametrize("speed", [1e-3, 1.0], ids=["timed as it is", "by small trials"])
def test_trials_of_what_does_not_fit_in_memory_have_as_large_a_share_of_rows_in_files(
    speed, tmp_path, monkeypatch
):
    placed = []

    def times(program, config, *how):
        placed.append(config)
        return [speed * Linear.exact(config)]

    monkeypatch.setattr(trial, "step_times", times)
    rows = state_bytes(small(hidden_size=256, layers=7)) // 2
    config = small(hidden_size=256, layers=7, memmap_dir=str(tmp_path), host_memory=rows)
    trial.Trials(pretraining, time.perf_counter).seconds(config)
    assert {each.execution.memmap_dir for each in placed} == {str(tmp_path)}
    deep = [each for each in placed if each.model.layers > 1]
    assert deep and all(each.execution.host_memory < state_bytes(each) for each in deep)
    for each in placed:
        least, share = 2 * max(bytes_by_kind(each).values()), state_bytes(each) // 2
        assert each.execution.host_memory == pytest.approx(max(least, share), abs=1)


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", [True, False])
def test_trials_have_memory_for_a_layer_of_each_replica_of_a_process(is_sharded, tmp_path):
    changes = {"data_parallel": 4, "replicated_tensor_sharding": is_sharded}
    config = small(hidden_size=256, layers=12, **changes)
    config = override(config, memmap_dir=str(tmp_path), host_memory=least_rows(config, 1))
    assert trial.Trials(pretraining, time.perf_counter)._measured(config, 1, 1) > 0


@pytest.mark.slow
def test_a_trial_leaves_no_session_to_the_next_one():
    made = []

    def noted(config):
        session = pretraining(config)
        made.append(weakref.ref(session._engine.machine))
        return session

    gc.disable()  # it comes when it comes
    try:
        trial.step_times(noted, small(layers=1), 0, 1, time.perf_counter)
        assert made[0]() is None
    finally:
        gc.enable()


planned = functools.cache(executing.plan_step)


def chosen(config, monkeypatch, *given, place=None, **more):
    machine = planner().Machine(flops=1e12, link=1e9, remote=1e9)
    monkeypatch.setattr(executing, "speeds", lambda *asked: (machine, ()))
    monkeypatch.setattr(executing, "plan_step", planned)
    monkeypatch.setattr(Room, "place", place or (lambda self, c: Placed(c, memory(), "fits")))
    return executing.choose(config, given, pretraining, training_program, **more)


def memory():
    return ProcessMemory(itself=1 << 20, rows=0, tensors=0, saving=0, copy=0)


@pytest.mark.slow
def test_the_fastest_by_trials_is_chosen_and_slower_plans_are_not_tried(monkeypatch):
    Linear(monkeypatch)
    found = chosen(small(), monkeypatch)
    execution = found.config.execution
    assert (execution.widening, execution.recomputation) == (8, False)
    assert found.seconds == pytest.approx(Linear.exact(found.config))
    assert [t.seconds for t in found.tried] == sorted(t.seconds for t in found.tried)
    assert all("its plan is" in why for _, why in found.left_out)
    assert len(found.tried) + len(found.left_out) == 8
    text = executing.choice_text(found)
    assert "8 of them as one, activations kept: the fastest of" in text and "left out" in text


@pytest.mark.slow
def test_a_way_whose_trial_something_else_has_slowed_down_is_tried_again(monkeypatch):
    Linear(monkeypatch)
    seconds, counts = trial.Trials.seconds, Counter()

    def slowed(self, config):
        counts[config] += 1
        is_first_of_the_best = counts[config] == 1 and config.execution.widening == 8
        return seconds(self, config) * (1.4 if is_first_of_the_best else 1.0)

    monkeypatch.setattr(trial.Trials, "seconds", slowed)
    found = chosen(small(), monkeypatch)
    assert found.config.execution.widening == 8
    assert found.seconds == pytest.approx(Linear.exact(found.config))
    assert max(counts.values()) == 2


@pytest.mark.slow
def test_when_the_time_is_over_no_further_trial_begins(monkeypatch):
    Linear(monkeypatch)
    found = chosen(small(), monkeypatch, seconds=1e-9)
    assert len(found.tried) == 1 and len(found.left_out) == 7


@pytest.mark.slow
def test_what_does_not_fit_is_never_chosen(monkeypatch):
    Linear(monkeypatch)

    def place(self, config):
        fits = config.execution.widening <= 2 and config.execution.recomputation
        return Placed(config, memory(), "fits") if fits else "needs more"

    found = chosen(small(), monkeypatch, place=place)
    assert found.config.execution.widening == 2 and found.config.execution.recomputation
    assert ("needs more") in [why for _, why in found.left_out]
    with pytest.raises(UserError, match="none of whose 8 ways to execute it fits.*too large"):
        chosen(small(), monkeypatch, place=lambda self, config: "too large")


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (("", 0), "fits the memory of some processes only"),
        (("", 50), 50),
        (("", 200), 100),
        (("needs more", 0), "needs more"),
    ],
    ids=str,
)
def test_processes_place_rows_alike(theirs, expected, tmp_path, monkeypatch):
    ours = small(memmap_dir=str(tmp_path), host_memory=100)
    reason, rows = theirs
    monkeypatch.setattr(
        placing,
        "gather",
        lambda v, patiently: [v, reason if isinstance(v, str) else (rows, 0, 4)],
    )
    monkeypatch.setattr(Room, "place", lambda self, c: Placed(ours, memory(), "in files"))
    found = placing.placed_together(room_of(1 << 30), ours)
    told = found if isinstance(found, str) else found.config.execution.host_memory
    assert told == expected


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ({"activation_memory": 300}, 200, (True, 200)),
        ({"activation_memory": 200}, 300, (True, 200)),
        ({"activation_memory": 200}, math.inf, (True, 200)),
        ({"recomputation": False}, 300, (True, 300)),
        ({"recomputation": False}, math.inf, (False, None)),
        ({}, 0, (True, None)),
    ],
    ids=str,
)
def test_processes_keep_the_activations_that_fit_all_of_them(ours, theirs, expected, monkeypatch):
    placed = Placed(small(**ours), memory(), "fits")
    monkeypatch.setattr(
        placing,
        "gather",
        lambda v, patiently: [v, "" if isinstance(v, str) else (0, theirs, v[2])],
    )
    monkeypatch.setattr(Room, "place", lambda self, c: placed)
    found = placing.placed_together(room_of(1 << 30), placed.config)
    assert isinstance(found, Placed)
    execution = found.config.execution
    assert (execution.recomputation, execution.activation_memory) == expected


# Memory


def room_of(room, *given):
    return Room(training_program, None, frozenset(given), own=100 << 20, nbytes=room)


@pytest.mark.slow
def test_rows_are_in_memory_where_they_fit_and_else_in_files(tmp_path, monkeypatch):
    for module in (placing, memory_account):
        monkeypatch.setattr(module, "LOADED_TO_PAGE", 1 << 20)
    config = small(hidden_size=256, vocabulary_size=512, run_folder=str(tmp_path))
    free = room_of(1 << 40).place(config)
    assert isinstance(free, Placed) and free.config.execution.memmap_dir is None
    need = free.memory.resident
    tight = room_of(need - (4 << 20)).place(config)
    assert isinstance(tight, Placed) and tight.memory.resident <= need - (4 << 20)
    assert tight.memory.itself == free.memory.itself + (1 << 20)
    execution = tight.config.execution
    assert execution.memmap_dir == str(tmp_path) and 0 < execution.host_memory < free.memory.rows
    # the program runs with so little memory for rows
    assert len(trial.step_times(pretraining, tight.config, 0, 1, time.perf_counter)) == 1
    none = room_of(100 << 20).place(config)
    assert isinstance(none, str) and "needs" in none


@pytest.mark.slow
def test_activations_are_kept_as_far_as_they_fit(tmp_path):
    config = small(
        layers=6, hidden_size=64, sequence_length=64, micro_batch_size=8, recomputation=False,
        run_folder=str(tmp_path),
    )  # fmt: skip
    all_kept, none = (
        room_of(1 << 40).place(override(config, recomputation=each)).memory.resident
        for each in (False, True)
    )
    each = kept_bytes(config)
    assert 2 * each < all_kept - none
    flops = []
    for room in (none + 2 * each, none + 4 * each, all_kept - 1):
        found = room_of(room).place(config)
        assert isinstance(found, Placed) and found.memory.resident <= room
        assert found.config.execution.memmap_dir is None
        kept = stretches(found.config)
        flops.append(sum(len(part.layers) * part.level.flops for part in kept))
        assert f"activations: {stretches_text(kept)}" in axes.in_words(found.config)
    assert flops[0] > flops[1] >= flops[2]
    too_small = room_of(none + each // 100).place(config)  # another candidate recomputes
    assert isinstance(too_small, str) and "needs" in too_small
    all_given = room_of(none + 4 * each, "recomputation").place(config)
    assert isinstance(all_given, str) and "needs" in all_given


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [True, False])
def test_micro_batches_run_in_the_largest_groups_that_fit(recomputes):
    config = small(
        layers=6, hidden_size=64, sequence_length=64, micro_batch_size=1, global_batch_size=32,
        recomputation=recomputes,
    )  # fmt: skip
    needs = {
        group: room_of(1 << 40).place(override(config, micro_batch_group=group)).memory.needed
        for group in (None, 16, 8, 1)
    }
    for room, group in ((needs[None], None), (needs[None] - 1, 16), (needs[8] + 1, 8)):
        found = room_of(room).place(config)
        assert isinstance(found, Placed) and found.memory.needed <= room
        assert found.config.execution.micro_batch_group == group
        assert found.config.execution.memmap_dir is None
    assert "groups of 8 micro-batches" in axes.in_words(found.config) and "4 groups" in found.why
    given = room_of(needs[8], "micro_batch_group", "recomputation").place(config)
    assert not isinstance(given, Placed) or given.config.execution.memmap_dir is not None


@pytest.mark.slow
def test_a_place_for_rows_that_is_given_is_not_changed(tmp_path):
    config = small(run_folder=str(tmp_path))
    found = room_of(101 << 20, "host_memory", "memmap_dir").place(config)
    assert isinstance(found, str)


@pytest.mark.slow
def test_rows_that_mapped_files_hold_take_no_memory(tmp_path):
    config = small(hidden_size=256, memmap_dir=str(tmp_path))
    need = room_of(1 << 40, "memmap_dir").place(config).memory
    assert need.mapped > 0.5 * need.rows
    given = "memmap_dir", "micro_batch_group"
    assert isinstance(room_of(need.needed, *given).place(config), Placed)
    assert "needs" in room_of(need.needed - 1, *given).place(config)


def rows_of(build, config):
    return planner().plan(build(config)[0], with_peaks=False).remote_memory_bytes


@pytest.mark.slow
def test_files_hold_the_rows_of_each_process_here_and_of_validation(monkeypatch):
    config = small(validate_every=1)
    both = rows_of(training_program, config) + rows_of(evaluation_program, config)
    programs = programs_of(config, training_program, evaluation_program)
    assert file_bytes(programs) == both
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert file_bytes(programs[:1]) == 2 * rows_of(training_program, config)


# The whole


@pytest.mark.slow
def test_a_run_is_executed_as_chosen_and_one_that_goes_on_does_not_search_again(
    tmp_path, capsys, monkeypatch
):
    words = ["--config", "tiny", "--layers", "1", "--steps", "2", "--run_folder", str(tmp_path)]
    words += ["--auto", "--auto_seconds", "0.01", "--no-recomputation", "--samples", "0"]
    assert program.main(words) == 0
    shown = capsys.readouterr().out
    saved = load(tmp_path / "tiny" / "config.yml").execution
    assert "chosen " in shown and "prediction " in shown and "given       --recomputation" in shown
    assert saved.replication_factor == 1 and not saved.recomputation
    width = saved.widening * saved.micro_batch_size
    assert f"micro-batch {saved.micro_batch_size}" in shown and 8 % width == 0

    def fails(*arguments, **more):
        raise AssertionError("searched again")

    monkeypatch.setattr("popxl_gpt.execution.planning.executing.choose", fails)
    read, sha256 = [], checkpoint._sha256
    monkeypatch.setattr(checkpoint, "_sha256", lambda path: read.append(path) or sha256(path))
    newest = str(tmp_path / "tiny/checkpoints/step_00000002")
    goes_on = [*words, "--steps", "3", "--checkpoint.load", newest]
    assert program.main(goes_on) == 0
    assert len(read) == len(set(read)) == 3, "a checkpoint's files are read once to verify them"
    assert "executed as the run was that goes on" in capsys.readouterr().out
    assert load(tmp_path / "tiny" / "config.yml").execution == saved


def test_without_an_earlier_run_there_is_a_search(tmp_path, monkeypatch):
    config = small(run_folder=str(tmp_path), load="auto")
    asked = []

    def choose(*arguments):
        asked.append(arguments)
        raise UserError("asked")

    monkeypatch.setattr("popxl_gpt.execution.planning.executing.choose", choose)
    with pytest.raises(UserError, match="asked"):
        resolved(config, (), PlanOptions(auto=True), pretraining, training_program)
    assert asked[0][-1] == executing.SECONDS
