"""Where the time of a step goes: every op has its family, nothing is lost, and shares are right."""

import json
import sys

import pytest
from popxl.profile import Profile, Span, Work

from benchmarks import step_sections, train_step
from benchmarks.harness import BenchmarkError
from benchmarks.phased import PhasedSteps
from popxl_gpt.utils.runtime import profile
from tests import warm

LAYERS, HIDDEN, SEQUENCE, VOCABULARY, BATCH = 2, 64, 128, 96, 4
SIZES = {
    "layers": LAYERS,
    "hidden_size": HIDDEN,
    "heads": 2,
    "sequence_length": SEQUENCE,
    "vocabulary_size": VOCABULARY,
    **{"micro_batch_size": 1, "accumulation": BATCH, "width": BATCH},
}


def recorded(*spans: Span, left_out: int = 0) -> Profile:
    return Profile((0,), 1, 0, 100 * 10**6, (), spans, left_out)


def span(name: str, begin: int, end: int, flops: int = 0, lane: str = "compute") -> Span:
    return Span(0, lane, name, begin * 10**6, end * 10**6, Work(flops))


def test_every_moment_of_a_step_has_one_family():
    found = step_sections.split(
        recorded(
            span("run", 0, 100, 9, "phases"),
            span("remote_load 7", 1, 3, lane="load"),
            span("matmul", 3, 33, 600),
            span("fused_accumulate_gemm_", 33, 43, 200),
            span("fused_attention_no_probs", 43, 58, 50),
            span("all_reduce", 58, 60, lane="collectives"),
            span("host_store", 60, 61, lane="host I/O"),
            span("roi_align", 61, 69),
            span("8 bytes", 5, 80, lane="file reads"),
        )
    )
    milliseconds = {name: 1e3 * value for name, value in found["family_seconds"].items() if value}
    expected = {"products": 40, "attention": 15, "copies": 2, "collectives": 2, "other": 8}
    expected["runtime"] = 1 + 1 + 31  # host I/O, and before and after all spans
    assert milliseconds == pytest.approx(expected) and found["seconds"] == pytest.approx(0.1)
    assert found["family_flops"]["products"] == 800 and found["family_flops"]["attention"] == 50
    with pytest.raises(BenchmarkError, match="got 3 spans left out"):
        step_sections.split(recorded(left_out=3))


def test_shares_are_medians_over_steps_each_beside_its_own_ceiling():
    def step(seconds: float, products: float, ceiling: float) -> dict:
        times = dict.fromkeys(step_sections.FAMILIES, 0.0)
        times |= {"products": products, "attention": 0.1, "norm": seconds - products - 0.1}
        flops = {**dict.fromkeys(step_sections.FAMILIES, 0), "products": 80, "attention": 10}
        figures = {"seconds": seconds, "family_seconds": times, "family_flops": flops}
        return {**figures, "ceiling": ceiling}

    slow_machine, usual, disturbed = step(2.0, 1.6, 50.0), step(1.0, 0.8, 100.0), step(9, 1, 100.0)
    found = step_sections.summarise([slow_machine, usual, disturbed], model_flops=90)
    assert found["of_ceiling"] == 0.9 and found["products_of_ceiling"] == 1.0
    assert found["no_product"] == pytest.approx(0.2) and found["time"]["norm"] == pytest.approx(
        0.15
    )
    assert found["attention_of_ceiling"] == 0.5, "the half that is not masked"
    assert not step_sections.verdict(found)
    assert step_sections.verdict({**found, "no_product": 0.15})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_a_recorded_step_are_those_of_the_model(dtype):
    options = {"model": {name: SIZES[name] for name in list(SIZES)[:5]}, "dtype": dtype}
    options |= {"micro_batch_size": 1, "accumulation": BATCH, "widening": BATCH, "dropout": 0.0}
    steps = PhasedSteps({**options, "recomputation": False, "master_weights": False})
    steps.step(1)
    with profile(steps.session) as profiles:
        steps.step(1)
    found = step_sections.split(profiles[0])
    assert found["family_seconds"]["other"] == 0, "an op without a family"
    assert sum(found["family_seconds"].values()) == pytest.approx(found["seconds"])
    weights = LAYERS * 12 * HIDDEN**2 + HIDDEN * VOCABULARY
    # beside products there are bias, sums of gradients and their squares
    assert found["family_flops"]["products"] == pytest.approx(
        6 * BATCH * SEQUENCE * weights, rel=0.02
    )


@pytest.mark.multi
def test_its_quick_form_prints_a_table_for_each_shape(monkeypatch, capsys):
    monkeypatch.setattr(train_step, "SHAPES", {"gpt2": SIZES})
    monkeypatch.setattr(step_sections, "SHAPES", {"gpt2": BATCH})
    monkeypatch.setattr(sys, "executable", warm.python())
    monkeypatch.setattr(sys, "argv", "step_sections.py --shapes gpt2 --rounds 1 --check".split())
    assert step_sections.main() == 1, "a tiny step is no match for its bars"
    *shown, last = capsys.readouterr().out.strip().splitlines()
    assert any(line.startswith("products ") for line in shown) and "missed" in shown[-1]
    found = json.loads(last)["shapes"]["gpt2"]
    assert 0 < found["of_ceiling"] < 1 and 0 < found["products_of_ceiling"] < 1
    assert sum(found["time"].values()) == pytest.approx(1)
    assert found["no_product"] == pytest.approx(1 - found["time"]["products"])
