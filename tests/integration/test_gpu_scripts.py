"""The scripts for machines with a GPU, run on the processor, with no packages beyond torch, numpy
and pyyaml: this project is not installed, either.
"""

import argparse
import json
import math
import shlex
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import fake_gpu
from helpers.quick import Later

from benchmarks import gpu
from popxl_gpt.config.schema import Model
from tests import warm

gpu_steps, plain_llama = Later("benchmarks.gpu_steps"), Later("benchmarks.plain_llama")
pretraining, transformers = Later("popxl_gpt.execution.pretraining"), Later("transformers")

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = """
import runpy, sys
for name in ("crc32c", "matplotlib", "pytest", "safetensors", "tfrecord", "tokenizers", "transformers", "wandb"):
    sys.modules[name] = None
sys.meta_path = [finder for finder in sys.meta_path if "__editable__" not in finder.__module__]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def script(words):
    return subprocess.run(
        [warm.python(), "-c", WITHOUT, *shlex.split(words)],
        cwd=ROOT,
        env=warm.with_children(),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.multi
def test_the_checks_for_a_gpu_hold_on_a_processor():
    only = "'rows survive' windows refused uploads compiled softmax 'nothing waits' profiles"
    only += " 'in float32 has' 'gives the same bits'"
    done = script(f"tests/gpu_checks.py --device cpu --only {only}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed on cpu" in done.stdout.splitlines()[-1]


@pytest.mark.multi
def test_a_check_that_there_is_not_is_refused():
    done = script("tests/gpu_checks.py --device cpu --only rows 'rows that are nowhere'")
    assert (
        done.returncode == 2
        and "got 'rows that are nowhere'; expected a part of a check's name" in done.stderr
    )


@pytest.mark.multi
def test_a_check_that_fails_is_told_and_ends_with_1(tmp_path):
    text = (ROOT / "tests" / "gpu_checks.py").read_text()
    broken = text.replace("store.read(0, memory)", "pass").replace(
        "Path(__file__).resolve().parent.parent", f"Path({str(ROOT)!r})"
    )
    assert broken.count("pass\n") > text.count("pass\n")
    (tmp_path / "broken.py").write_text(broken)
    done = script(f"{tmp_path / 'broken.py'} --device cpu --only rows")
    assert done.returncode == 1 and "FAILED rows survive" in done.stdout, done.stdout + done.stderr


@pytest.mark.multi
@pytest.mark.parametrize("name", ["tests/gpu_checks.py", "benchmarks/gpu.py"])
def test_a_gpu_that_is_not_there_ends_with_2_and_what_to_do(name):
    done = script(f"{name} --device cuda:99")
    assert (
        done.returncode == 2
        and "expected a GPU that is there. Use 'cpu', or install" in done.stderr
    )
    assert "Traceback" not in done.stderr


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.exhaustive
@pytest.mark.multi
def test_the_benchmark_for_a_gpu_measures_its_cases_once(tmp_path):
    cases = "7b-all 7b-one-layer plain-8-layers FSDP2-8-layers"
    flags = f"--results {tmp_path / 'gpu.jsonl'} --timelines {tmp_path} --steps 1"
    words = f"benchmarks/gpu.py --device cpu --small {flags} {cases}"
    done = script(words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {
        record["run"].removesuffix(" small"): record for record in records(tmp_path / "gpu.jsonl")
    }
    assert list(found) == [
        *("7b-all/1", "7b-all/2", "plain-8-layers/1", "FSDP2-8-layers/1"),
        *("7b-one-layer/1", "7b-one-layer/2"),
    ]
    for groups in (1, 2):
        there, moving = (found[f"7b-{memory}/{groups}"] for memory in ("all", "one-layer"))
        assert there["loss"] == moving["loss"] == pytest.approx(math.log(96), abs=0.1)
        assert there["tokens"] == groups * 4 * 16
        assert there["to_device_bytes_per_s"] == 0 < moving["to_device_bytes"]
        assert (
            0 < moving["from_device_bytes"]
            and 0 < moving["pinned_bytes"] <= moving["plan"]["pinned"]
        )
        assert {"planning", "program", "touching", "filling", "drawing"} < set(moving["start_up"])
        assert there["flops_share"] < 0.2 < there["flops"]
    assert all(0 <= record["idle"] < 1 for record in found.values())
    assert (tmp_path / found["7b-one-layer/1"]["timeline"]).stat().st_size > 0
    assert "extrapolated: 7b-all, a step of 524,288 tokens" not in done.stdout  # of small shapes
    again = script(words)
    assert again.returncode == 0 and len(records(tmp_path / "gpu.jsonl")) == 6, again.stderr


@pytest.mark.multi
def test_one_script_checks_a_gpu_and_then_measures(tmp_path):
    environment = {"PYTHON": warm.python(), "CHECKS": "--device cpu --only windows"}
    done = subprocess.run(
        ["bash", "benchmarks/gpu.sh", str(tmp_path), "--list"],
        cwd=ROOT,
        env={**warm.with_children(), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "checks ended with 0" in done.stdout, done.stderr
    assert "1 checks passed, 0 failed on cpu" in (tmp_path / "checks.txt").read_text()
    assert (tmp_path / "gpu.txt").read_text() in done.stdout
    assert "7b-fp8-22GiB" in done.stdout


def arguments(**given):
    return argparse.Namespace(device="cpu", steps=1, timelines=Path(), **given)


def test_a_run_without_an_answer_in_time_is_told_and_tried_last():
    one, two = (gpu.Run(case, 1, small=True) for case in gpu.CASES[:2])
    record = gpu.measured(one, arguments(), time.monotonic())
    assert record["run"] == "7b-22GiB/1 small" and "gave no answer to 'build'" in record["error"]
    assert not gpu.is_there(record) and record["error"] in gpu.told([record])
    assert gpu.due([one, two], [record], again=False) == [two, one]
    measured = {"run": two.name, "tokens_per_s": 1.0}
    assert gpu.due([one, two], [record, measured], again=False) == [one]
    assert gpu.due([one, two], [record, measured], again=True) == [one, two]


def test_a_case_that_there_is_not_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu.py", "9b"])
    with pytest.raises(SystemExit) as ended:
        gpu.parsed()
    assert ended.value.code == 2
    assert "expected some of 7b-22GiB, 14b" in capsys.readouterr().err


def result(run, seconds, tokens=gpu.GROUP, **more):
    rate = tokens / seconds
    return {"run": run, "seconds": [seconds], "tokens": tokens, "tokens_per_s": rate, **more}


def test_what_did_not_run_is_extrapolated():
    """From seconds that a line gives: 3 and 2 a group; 2 and 0.5 a layer."""
    found = gpu.extrapolated(
        [
            result("7b-22GiB/1", 3 + 2),
            result("7b-22GiB/2", 3 + 4, 2 * gpu.GROUP),
            result("plain-4-layers/1", 2 + 0.5 * 4),
            result("plain-8-layers/1", 2 + 0.5 * 8),
            result("14b-22GiB/1", 4, flops_share=0.25),
        ]
    )
    assert [rate for _, rate in found] == [
        *(gpu.FULL_STEP / (3 + 8 * 2), gpu.GROUP / 4 * 0.25, gpu.GROUP / (2 + 0.5 * 28))
    ]


def test_shares_are_of_the_cards_peak_and_of_products():
    told = {"flops": 4e14, "tokens": 8, "parameters": 2, "products": {"up": 8e14}}
    run = {"seconds": [1.0, 1.0, 9.0], "card": "NVIDIA H200", "dtype": "bfloat16", **told}
    found = gpu.rates(run)
    assert found["of_peak"] == 4e14 / 989e12 and found["of_products"] == 0.5
    assert found["tokens_per_s"] == 8
    assert gpu.rates({**run, "card": "another"})["of_peak"] is None


@pytest.mark.parametrize("seed", range(5))
def test_a_device_is_busy_where_any_kernel_runs(seed):
    random = np.random.default_rng(seed)
    begins, lengths = random.integers(0, 300, 40), random.integers(1, 12, 40)
    ticks = np.zeros(400, bool)
    for begin, length in zip(begins, lengths):
        ticks[begin : begin + length] = True
    spans = [(int(b), int(b + n)) for b, n in zip(begins, lengths)]
    assert gpu_steps.busy(spans) == ticks.sum()


PHASED = [case for case in gpu.CASES if case.kind == "phased"]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", PHASED, ids=[case.name for case in PHASED])
def test_a_case_fits_the_machines_that_it_is_for(case):
    """128 GiB of the host's memory, of which all but 16 may be rows; the largest case's groups."""
    options = gpu.Run(case, max(case.groups)).options(arguments())
    ir = pretraining.training_program(gpu_steps.config_of({**options, "device": "cuda"}))[0]
    assert 0 < gpu_steps.rows_of(ir) < 112 * 2**30


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", ["7b-22GiB", "32b-adapters-22GiB", "demo"])
def test_a_cases_program_runs_on_a_fake_gpu(case):
    run = next(gpu.Run(each, 1, small=True) for each in gpu.CASES if each.name == case)
    config = gpu_steps.config_of({**run.options(arguments()), "device": "cuda"})
    assert fake_gpu.run_on_fake_gpu(pretraining.training_program(config)[0]) > 0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_plan_of_a_case_is_within_its_limit():
    """14 G parameters and more need what their embedding takes, at least: 1.5 GB and gradients."""
    case = next(case for case in gpu.CASES if case.name == "14b-22GiB")
    options = {**gpu.Run(case, 1).options(arguments()), "device": "cuda"}
    plan = gpu_steps.plan_of(gpu_steps.config_of(options), options)
    assert 152_064 * 5120 * 6 < plan["least"] < plan["device"] == 22 * 2**30 < plan["resident"]
    assert plan["least"] < plan["pinned"] < plan["resident"]


@pytest.mark.parametrize("tied", [False, True])
def test_the_plain_llama_has_the_losses_of_hugging_faces(tied):
    sizes = {"hidden_size": 32, "vocabulary_size": 37, "sequence_length": 9, "layers": 2}
    heads = {"heads": 4, "key_value_heads": 2, "feed_forward_size": 40, "tied_head": tied}
    plain = plain_llama.PlainLlama(Model(**sizes, **heads, activation="swiglu"))
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32,
            vocab_size=37,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=40,
            tie_word_embeddings=tied,
            rms_norm_eps=1e-5,
        )
    )
    weights = {}
    for name, weight in theirs.state_dict().items():
        layer = name.removeprefix("model.").removeprefix("layers.").removesuffix(".weight")
        weights[layer] = weight
    for number, block in enumerate(plain.blocks):
        of = {"qkv": "q k v", "gate_up": "gate up"}
        parts = [[f"{number}.self_attn.{n}_proj" for n in of["qkv"].split()]]
        parts.append([f"{number}.mlp.{n}_proj" for n in of["gate_up"].split()])
        block.qkv.weight.data = torch.cat([weights[name] for name in parts[0]])
        block.gate_up.weight.data = torch.cat([weights[name] for name in parts[1]])
        block.output.weight.data = weights[f"{number}.self_attn.o_proj"]
        block.down.weight.data = weights[f"{number}.mlp.down_proj"]
    plain.embedding.weight.data = weights["embed_tokens"]
    if not tied:
        plain.head.weight.data = weights["lm_head"]
    else:
        plain.head.weight = plain.embedding.weight
    ids = torch.randint(0, 37, (3, 10), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(plain.logits(ids[:, :-1]), theirs(ids[:, :-1]).logits)
    expected = theirs(ids, labels=ids).loss
    torch.testing.assert_close(plain(ids[:, :-1], ids[:, 1:]), expected)
