"""The kernels and a training as CPUs with fewer instructions than this one play them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from popxl_engine.native import instruction_sets

from tests import warm

ROOT = Path(__file__).parents[2]
KERNELS = [
    f"runtime/tests/popxl_engine/{name}"
    for name in (
        "native/test_interface.py", "native/test_kernels.py", "native/test_edges.py", "native/test_attention.py",
        "native/test_few_rows.py", "native/test_small_products.py", "native/test_few_queries.py", "native/test_ceilings.py",
        "passes/test_products.py",
    )
]  # fmt: skip
TORCH = {
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "sse2": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
"""What has PyTorch's libraries play such a CPU; it reads this as it is loaded."""
LESSER = [each.name for each in instruction_sets.playable()[1:]]
"""What this CPU plays, but for the best: that is what all other tests have."""
CASES = LESSER or [pytest.param("", marks=pytest.mark.skip("this CPU plays no lesser one"))]


def environment(name: str) -> "dict[str, str]":
    return {**os.environ, **TORCH.get(name, {}), instruction_sets.VARIABLE: name}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_are_right(name):
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-m", "not slow", *KERNELS]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(name), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout and re.search(r"\d\d\d passed", done.stdout), done.stdout


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Losses without compiled kernels."""
    return losses(tmp_path_factory.mktemp("plain"), {**os.environ, "POPXL_NATIVE": "0"})


def losses(folder: Path, variables: "dict[str, str]") -> "list[float]":
    command = [sys.executable, str(ROOT / "demo/pretraining.py"), "--config", "tiny"]
    settings = "--precision bfloat16 --dropout 0.1 --steps 4 --name run --data_parallel 1"
    settings += " --tensor_parallel_1 1 --tensor_parallel_2 1"
    done = subprocess.run(
        [*command, *settings.split()], cwd=folder, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "runs/run/metrics.jsonl").read_text().splitlines()
    return [record["loss"] for line in lines if "loss" in (record := json.loads(line))]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_training_has_the_losses_of_the_plain_kernels(name, plain, tmp_path):
    found = losses(tmp_path, environment(name))
    assert len(found) == 4 and found == pytest.approx(plain, rel=2e-3)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "variable, value",
    [(instruction_sets.VARIABLE, "avx3"), ("POPXL_PASSES", "-tiles"), ("POPXL_PRINT_AFTER", "x")],
)
@pytest.mark.parametrize("plan", [[], ["--plan"]], ids=["training", "plan"])
def test_a_variable_with_an_unknown_value_ends_a_program_in_words(variable, value, plan, tmp_path):
    command = [warm.python(), str(ROOT / "demo/pretraining.py"), "--config", "tiny", *plan]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, variable: value},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert f"error: {variable}: got {value}; expected " in done.stderr
