"""The benchmarks' harness: alternation, memory, failures, and what the scripts print."""

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from popxl_engine.planner import measuring

from benchmarks import ceilings, harness, replicas, shakespeare, train_step, trees
from benchmarks.harness import (
    BenchmarkError,
    Measurement,
    Variant,
    VariantProcess,
    machine,
    measure,
    table,
)
from benchmarks.shakespeare import BATCH, CHUNK, Characters, preset_steps, summarise
from popxl_gpt.config.presets import preset
from popxl_gpt.execution.planning.model_size import flops_per_step

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = {"layers": 1, "hidden_size": 16, "heads": 2, "sequence_length": 8, "vocabulary_size": 30}

SCRIPT = """
import sys, time
sys.path.insert(0, {root!r})
from benchmarks.harness import main_or_worker

class Work:
    def __init__(self, options):
        self.options, self.taken = options, 0
        self.held = bytearray(options.get("bytes", 0))
        for place in range(0, len(self.held), 4096):
            self.held[place] = 1
    def step(self, count):
        self.taken += count
        print("chatter that is no reply")
        with open(self.options["log"], "a") as log:
            log.write(self.options["name"] * count)
        time.sleep(self.options.get("sleep", 0.0) * count)
        if self.taken >= self.options.get("fail_at", 1000):
            raise RuntimeError("out of luck")
        return {{"taken": self.taken}}
    def finish(self):
        return {{"total": self.taken}}

main_or_worker(Work, lambda: 0)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(root=str(ROOT)))
    return path


def variant(tmp_path, name: str, **options) -> Variant:
    return Variant(name=name, options={"name": name, "log": str(tmp_path / "log"), **options})


@pytest.mark.slow
def test_variants_alternate_and_turn_round(script, tmp_path):
    measured = measure(
        script,
        [variant(tmp_path, "a"), variant(tmp_path, "b")],
        rounds=3,
        warmup=1,
        steps_per_round=2,
    )
    assert (tmp_path / "log").read_text() == "aabbbbaaaabbbbaa"
    assert [m.name for m in measured] == ["a", "b"]
    assert all(len(m.seconds) == 3 and m.finish == {"total": 8} for m in measured)
    assert [figures["taken"] for figures in measured[0].steps] == [2, 4, 6, 8]


@pytest.mark.parametrize("threads, size", [(2, 4 * ceilings.BLOCK), (4, 2**20)])
def test_ceilings_of_a_disk_leave_nothing_behind(threads, size, tmp_path):
    rates = ceilings.disk_rates(tmp_path, threads, size)
    assert all(rates[way] > 0 for way in ("read", "write", "both"))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_seconds_are_per_step(script, tmp_path):
    (slow,) = measure(
        script, [variant(tmp_path, "a", sleep=0.02)], rounds=3, warmup=1, steps_per_round=4
    )
    assert 0.02 <= slow.median < 0.04


@pytest.mark.slow
def test_peak_memory_is_the_process_own(script, tmp_path):
    small, large = measure(
        script,
        [variant(tmp_path, "a"), variant(tmp_path, "b", bytes=200 << 20)],
        rounds=1,
        warmup=1,
    )
    assert (200 << 20) * 0.95 < large.peak_bytes - small.peak_bytes < (200 << 20) * 1.05


@pytest.mark.slow
def test_a_variant_that_dies_is_named_with_its_last_words(script, tmp_path):
    with pytest.raises(BenchmarkError, match=r"(?s)variant 'b' died with exit code 1.*out of luck"):
        measure(
            script, [variant(tmp_path, "a"), variant(tmp_path, "b", fail_at=2)], rounds=3, warmup=1
        )


@pytest.mark.slow
def test_a_variant_that_the_system_kills_between_two_steps_is_named(script, tmp_path):
    process = VariantProcess(script, variant(tmp_path, "a"), 60.0)
    process.ask("build")
    process.process.kill()
    process.process.wait()
    with pytest.raises(BenchmarkError, match="variant 'a' died with exit code -9"):
        process.ask("step", count=1)
    process.stop()


@pytest.mark.slow
def test_variants_that_memory_will_not_do_for_are_refused_before_they_step(
    script, tmp_path, monkeypatch
):
    free = iter([5 << 30, 2 << 30, 2 << 30])
    monkeypatch.setattr(harness, "free_bytes", lambda: next(free))
    with pytest.raises(
        BenchmarkError, match="variant 'b' would need about 3.00 GiB more .* but 2.00 GiB are free"
    ):
        measure(script, [variant(tmp_path, "a"), variant(tmp_path, "b")], rounds=1, warmup=0)
    assert (tmp_path / "log").read_text() == "a"


@pytest.mark.slow
def test_a_variant_that_hangs_is_given_up(script, tmp_path):
    with pytest.raises(BenchmarkError, match="gave no answer to 'step' for 1 s"):
        measure(script, [variant(tmp_path, "a", sleep=60.0)], rounds=1, warmup=0, timeout=1.0)


@pytest.mark.slow
def test_a_variant_of_another_checkout_runs_there(tmp_path):
    script = tmp_path / "benchmarks" / "there.py"
    script.parent.mkdir()
    script.write_text(SCRIPT.format(root=str(ROOT)))
    there = replace(variant(tmp_path, "a"), tree=tmp_path)
    (of,) = measure(ROOT / "benchmarks" / "there.py", [there], rounds=1, warmup=0)
    assert of.finish == {"total": 1}


def test_two_checkouts_are_compared_round_by_round():
    def of(name: str, seconds: tuple[float, ...], peak_bytes: int) -> Measurement:
        times = {"seconds": seconds, "cpu_seconds": seconds, "finish": {}}
        return Measurement(name=name, peak_bytes=peak_bytes, steps=({"loss": 1.0},), **times)

    (fast,) = trees.in_both([Variant(name="a", options={})], Path("/elsewhere"))[:1]
    assert (fast.name, fast.tree) == ("a, there", Path("/elsewhere"))
    found = trees.ratios(
        [
            of("a, there", (1.0, 3.0, 9.0), 100),
            of("a, here", (1.0, 2.0, 10.0), 101),
            of("b, there", (0.94, 0.94), 100),
            of("b, here", (1.0, 1.0), 100),
        ]
    )
    assert (found["a"]["speed"], found["a"]["memory"]) == (1.0, 1.01)
    assert trees.verdict([found["a"]])["met"] and not trees.verdict(list(found.values()))["met"]
    assert trees.verdict(list(found.values()))["least_speed"] == pytest.approx(0.94)


def test_shares_are_of_a_ceiling_that_is_measured_once_for_a_type(monkeypatch):
    asked = []

    def rate(dtype, *, from_cache):
        asked.append((dtype, from_cache))
        return 1e9 if dtype is torch.float32 else 0.0

    monkeypatch.setattr(measuring, "multiply_rate", rate)
    harness.multiply_ceiling.cache_clear()
    try:
        assert harness.ceiling_share(3e8, 0.5, "float32") == 0.6
        assert harness.ceiling_share(3e8, 1.0, "float32") == 0.3
        assert harness.ceiling_share(3e8, 1.0, "bfloat16") is None, "without a compiler"
    finally:
        harness.multiply_ceiling.cache_clear()
    assert asked == [(torch.float32, False), (torch.bfloat16, False)]
    assert [harness.percent(share) for share in (0.656, None)] == ["66%", "-"]


def test_steps_are_counted_as_papers_count_them():
    def forward(layers: int, hidden: int, sequence: int, vocabulary: int) -> int:
        """Operations of a token in GPT-2's products."""
        return 2 * layers * (12 * hidden * hidden + 2 * sequence * hidden) + 2 * hidden * vocabulary

    arguments = argparse.Namespace(**train_step.SHAPES["gpt2"])
    assert train_step.step_flops(arguments) == 3 * 1024 * forward(12, 768, 256, 50257)
    config = shakespeare.config_of("phased", 65, steps=50, seed=0)
    assert flops_per_step(config) == 3 * 12 * 64 * forward(4, 128, 64, 65)
    options = {"model": SMALL, "batch": 8, "layout": "1 x 1 x 2"}
    assert flops_per_step(replicas.configuration(options)) == 3 * 8 * 8 * forward(1, 16, 8, 30)


def test_median_and_spread_over_rounds():
    times = Measurement(
        name="a",
        seconds=(4.0, 1.0, 2.0, 3.0, 100.0),
        cpu_seconds=(1.0,),
        peak_bytes=1,
        steps=(),
        finish={},
    )
    assert times.median == 3.0
    assert times.spread == pytest.approx((4.0 - 2.0) / 3.0)


def of_plain(measured: list[Measurement]) -> dict | None:
    """The verdict beside plain PyTorch."""
    variants = train_step.compare(measured, 10)["variants"]
    return train_step.verdict(variants, *train_step.BARS["bar"])


def test_bars_look_at_speed_and_memory():
    def verdict(speed: float, memory: float) -> bool:
        times = {
            "seconds": (1.0,),
            "cpu_seconds": (1.0,),
            "steps": ({"loss": 1.0},),
            "finish": {},
        }
        plain = Measurement(name="eager", peak_bytes=100, **times)
        phased = Measurement(
            name="phased", peak_bytes=int(100 * memory), **{**times, "seconds": (1.0 / speed,)}
        )
        slow = Measurement(name="compiled", peak_bytes=10, **{**times, "seconds": (9.0,)})
        return of_plain([slow, plain, phased])["met"]

    assert verdict(1.01, 1.19)
    assert not verdict(0.99, 1.0)
    assert not verdict(2.0, 1.21)


def test_without_a_baseline_nothing_is_met():
    times = {
        "seconds": (1.0,),
        "cpu_seconds": (1.0,),
        "steps": ({"loss": 1.0},),
        "finish": {},
    }
    alone = Measurement(name="phased", peak_bytes=100, **times)
    assert of_plain([alone]) is None


def test_a_variant_that_there_is_not_is_refused():
    sizes = {**train_step.SHAPES["gpt2"], "dropout": 0.0, "wide": False, "offloading": False}
    arguments = argparse.Namespace(**sizes, variants=["fast"])
    with pytest.raises(BenchmarkError, match="got fast; expected some of: eager;"):
        train_step.variants_of(arguments, "float32")


def test_table_aligns_its_columns():
    assert (
        table(["name", "n"], [["a", "10"], ["long", "9"]])
        == "name   n\n----  --\na     10\nlong   9"
    )


def test_machine_has_no_names_of_hosts_or_people():
    assert set(machine()) == {
        "processor",
        "cores",
        "vector",
        "memory_gib",
        "load",
        "threads",
        "torch",
        "python",
    }


def test_text_is_cut_and_windows_cover_the_validation_part(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(ord("a") + i * i % 26) for i in range(1000)))
    text = Characters.read(path)
    assert (len(text.train), len(text.validation)) == (900, 100)
    ids, labels = text.validation_windows(16)
    np.testing.assert_array_equal(ids.ravel(), text.validation[:96])
    np.testing.assert_array_equal(labels.ravel(), text.validation[1:97])
    batch, following = next(text.batches(seed=0, sequence=16))
    assert batch.shape == following.shape == (BATCH, 16)
    np.testing.assert_array_equal(batch[:, 1:], following[:, :-1])


def test_missing_text_is_the_users_mistake(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["shakespeare.py", "--text", str(tmp_path / "none.txt")])
    with pytest.raises(SystemExit) as stopped:
        shakespeare.main()
    told = capsys.readouterr().err
    assert stopped.value.code == 2 and "none.txt" in told and "--text FILE" in told


def test_rounds_after_a_variants_last_step_are_not_its_time():
    of_others = Measurement(
        name="preset", seconds=(2.0, 0.0, 0.0), cpu_seconds=(1.0, 0.0, 0.0), peak_bytes=0,
        steps=(), finish={"validation_loss": 1.5},
    )  # fmt: skip
    figures = summarise([of_others], steps=2 * CHUNK)
    assert figures["seconds"] == 2 * CHUNK * 2.0 and figures["milliseconds_per_step"] == 2000.0
    assert preset_steps(2000) == preset("shakespeare").training.steps
    assert preset_steps(2 * CHUNK) == 2 * CHUNK


HELP = """
import contextlib, io, runpy, sys

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "popxl_engine", "transformers", "matplotlib"}:
            raise ImportError(f"{name} may not be imported before the command line is read")

sys.meta_path.insert(0, Forbid())
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code, (script, end.code)
    else:
        raise AssertionError(f"{script} --help runs it")
    assert "usage:" in said.getvalue(), script
"""


@pytest.mark.slow
def test_benchmarks_answer_help_before_anything_slow_is_loaded():
    folder = ROOT / "benchmarks"
    scripts = [path for path in folder.glob("*.py") if '"__main__"' in path.read_text()]
    named = [str(path) for path in sorted(scripts)]
    assert len(named) > 10
    command = [sys.executable, "-c", HELP, *named]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
