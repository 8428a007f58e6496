"""The table of what our own parts cost: how cases are measured and shown, and that each measures what
it says.
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from benchmarks import own, own_auto, own_bert, own_data, own_programs, own_steps
from benchmarks.harness import BenchmarkError, Missing, one_of
from benchmarks.own_cases import BEYOND, MORE, RATIO, SPEED, Case
from popxl_gpt.data.prepare import main as prepare

DATASETS = '''
import json


class Data(list):
    """The few names of `datasets` that the benchmark uses, by a plain loop."""

    def map(self, function, *, batched, remove_columns, num_proc):
        assert batched and remove_columns == ["text"] and num_proc == 1
        return Data([{"ids": ids} for ids in function({"text": [row["text"] for row in self]})["ids"][EXTRA:]])

    def with_format(self, name):
        return {"ids": [row["ids"] for row in self]}


def load_dataset(kind, *, data_files, split, cache_dir):
    assert (kind, split) == ("json", "train")
    return Data([json.loads(line) for line in open(data_files, encoding="utf-8")])


def disable_progress_bars():
    pass
'''


def flags(**given):
    """The defaults, and some flags."""
    return argparse.Namespace(**{"rounds": None, "folder": None, **given})


def case_of(name: str) -> Case:
    (found,) = (case for case in own.CASES if case.name == name)
    return found


@pytest.mark.exhaustive
def test_what_is_timed_and_what_stands_beside_it_take_turns():
    done = []

    def way(name, seconds):
        return lambda ready: done.append((ready, name)) or np.array(seconds)

    case = Case(
        name="a, b", ready=lambda *_: "it", timed=way("timed", [3.0, 2.0]),
        beside=way("beside", [2.0, 1.0]), compared=RATIO, bar=(-np.inf, 1.9), rounds=2, warmup=1,
    )  # fmt: skip
    figures = own.measured(case, flags())
    order = ["beside", "timed", "timed", "beside", "beside", "timed"]
    assert done == [("it", name) for name in order]
    assert figures["compared"] == [1.5, 2.0] and not figures["met"]
    assert own.measured(replace(case, clock=0), flags(rounds=1))["met"], "by the wall's clock"
    row = own.row(case, figures)
    assert row == [
        "a, b",
        "2 s",
        "3",
        "1",
        "2",
        "2",
        "1.5 of it",
        "<= 1.9 by the processor",
        "missed",
    ]


def test_without_a_comparison_the_bar_is_for_what_is_timed_in_its_unit():
    case = Case(
        name="a, b", ready=lambda *_: None, timed=lambda _: 2e-3, unit=("ms", 1e3), rounds=1
    )
    assert own.measured(replace(case, bar=(-np.inf, 2.0)), flags())["met"]
    assert not own.measured(replace(case, bar=(-np.inf, 1.9)), flags())["met"]
    assert own.row(case, own.measured(case, flags()))[1:4] == ["2 ms", "2", ""]


def test_comparisons_are_what_they_are_called():
    timed, beside = np.array([3.0]), np.array([2.0])
    found = [compared.of(timed, beside).item() for compared in (MORE, RATIO, SPEED, BEYOND)]
    assert found == [50.0, 1.5, 2 / 3, 1.0]


def test_groups_are_chosen_and_what_is_missing_is_said(monkeypatch, capsys):
    def missing(*_):
        raise Missing("b: got nothing; expected something.")

    quick = Case(name="a, one", ready=lambda *_: None, timed=lambda _: 1.0, rounds=1)
    cases = (quick, replace(quick, name="a, two"), replace(quick, name="b, one", ready=missing))
    monkeypatch.setattr(own, "CASES", cases)
    monkeypatch.setitem(own.FLAGS, "groups", {"nargs": "*", "type": one_of(["a", "b"])})
    monkeypatch.setattr(own, "GROUPS", ["a", "b"])

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["own.py", *words])
        code, printed = own.main(), capsys.readouterr()
        return code, sorted(json.loads(printed.out.splitlines()[-1])["cases"]), printed.err

    assert run() == (0, ["a, one", "a, two"], "\nb: got nothing; expected something.\n")
    assert run("a", "--cases", "tw")[:2] == (0, ["a, two"])
    assert run("b")[:2] == (2, [])
    monkeypatch.setattr(own, "CASES", (replace(quick, bar=(2.0, np.inf)),))
    assert run("a")[0] == 0 and run("a", "--check")[0] == 1
    monkeypatch.setattr(own, "CASES", cases)
    assert run("a", "--check")[0] == 0
    assert run("a", "--cases", "none", "--check")[:2] == (1, []), "nothing was measured"
    with pytest.raises(SystemExit) as stopped:
        run("c")
    assert stopped.value.code == 2 and "got c; expected some of a, b" in capsys.readouterr().err


STEPS = ["profiling, preset tiny", *(
    f"saving, mini: {way}" for way in ("before the next step", "in all", "waited for")
)]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_steps_are_timed_beside_plain_ones(name, tmp_path):
    case = replace(case_of(name), ready=partial(own_steps.training, "tiny"), warmup=1)
    figures = own.measured(case, flags(rounds=1, folder=tmp_path))
    assert all(np.isfinite(figures["timed"]))
    if "saving" in name:
        assert "compared" not in figures and not list(tmp_path.iterdir())
    else:
        assert figures["beside"][0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("part", ["build", *own_programs.PARTS])
def test_building_is_timed_by_op(part):
    seconds = own_programs.per_op(50, part, None)
    assert seconds.shape == (2,) and 0 < seconds[1] < 1
    sizes = [case.bar[1] for case in own.CASES if case.name.startswith(f"building, {part}: ")]
    assert sizes == [np.inf, np.inf, 1.2], "the largest beside the one before has a bar"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ops_and_starts_are_timed(monkeypatch, tmp_path):
    monkeypatch.setattr(own_programs, "SHORT", 2)
    monkeypatch.setattr(own_programs, "LONG", 12)
    monkeypatch.setenv("POPXL_NATIVE", "0")  # nothing is compiled
    add = own.measured(case_of("overhead, add of 8 x 8"), flags())
    beyond = [1e6 * (a - b) for a, b in zip(add["timed"], add["beside"])]
    assert add["compared"] == pytest.approx(beyond)
    small = 'preset("tiny", data_parallel=1, tensor_parallel_1=1, tensor_parallel_2=1)'
    for program, large in (
        (own_programs.BUILD, 'preset("gpt3_175B_pod256")'),
        (own_programs.START, 'preset("demo")'),
    ):
        assert large in program
        wall, used, *waited = own_programs.printed(program.replace(large, small), tmp_path)
        assert 0 < used and 0 < wall and len(waited) == (program == own_programs.START)
    with pytest.raises(BenchmarkError, match="exit code 3"):
        own_programs.printed("raise SystemExit(3)", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("extra", [0, 1], ids=["as it is", "with a document left out"])
@pytest.mark.parametrize("is_fast", [True, False], ids=["tiktoken", "tokenizers"])
def test_all_make_the_same_tokens_or_the_benchmark_says_no(tmp_path, extra, is_fast, monkeypatch):
    if not is_fast:
        monkeypatch.setattr(own_data.Encoder, "is_fast", False)
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"text {number}: the cat sat on the mat\n" * 200)
    (tmp_path / "datasets.py").write_text(DATASETS.replace("EXTRA", str(extra)))
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", paths)
    given = {"text": [str(tmp_path / "*.txt")], "vocabulary_size": 300, "workers": 1}
    given |= {"datasets_python": sys.executable}
    folder = tmp_path / "work"
    folder.mkdir()
    ready = own_data.preparing(flags(**given), folder)
    assert ready.encode == (own_data.BY_TIKTOKEN if is_fast else own_data.BY_TOKENIZERS)
    assert all(own_data.same_tokens(own_data.by_library, ready) > 0)
    if extra:
        with pytest.raises(BenchmarkError, match="tokens; expected the same of all"):
            own_data.same_tokens(own_data.by_datasets, ready)
    else:
        for way in (own_data.by_datasets, own_data.by_prepare):
            assert all(own_data.same_tokens(way, ready) > 0)


def test_a_python_without_datasets_is_told(tmp_path):
    with pytest.raises(Missing, match="/bin/false: got no package datasets; expected"):
        own_data.preparing(flags(datasets_python="/bin/false"), tmp_path)


@pytest.mark.slow
def test_a_consumer_waits_for_what_is_prepared(tmp_path, monkeypatch):
    folder = tmp_path / "prepared"
    given = flags(data=folder, batch=2, rate=1e6)
    with pytest.raises(Missing, match="Make it: python data/prepare.py stdlib"):
        own_data.loading(given, tmp_path)
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n\n" * 2000)
    words = ["--vocabulary_size", "260", "--sequence_length", "16", "--workers", "1"]
    prepare(["text", str(tmp_path / "text.txt"), "--output", str(folder), *words])
    monkeypatch.setattr(own_data, "BATCHES", 20)
    share, longest = own_data.waits(own_data.loading(given, tmp_path))
    assert 0 < share < 1 and 0 < longest


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_choice_of_auto_stands_beside_the_best_of_all(monkeypatch, capsys):
    small = {"layers": 1, "hidden_size": 16, "heads": 2, "sequence_length": 8}
    small |= {"vocabulary_size": 64, "global_batch_size": 4, "micro_batch_size": 1}
    monkeypatch.setitem(own_auto.MODELS, "small", small)
    found = own_auto.choice("small", True, 1.0, 1)
    assert 0 < found.best <= found.chosen and found.predicted > 0
    assert "small: 6 ways, best " in capsys.readouterr().out


@pytest.mark.slow
def test_both_berts_learn():
    ours, theirs = own_bert.ways()
    for step in (lambda: ours()[0], theirs):
        losses = [step() for _ in range(3)]
        assert losses[-1] < losses[0]


def test_the_program_says_what_each_group_measures():
    assert all(f"\n    {group} " in own.__doc__ for group in own.GROUPS)
