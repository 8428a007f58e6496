"""The scripts for machines with a GPU, run on the processor, with no packages beyond torch, numpy
and pyyaml: this project is not installed, either.
"""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = """
import runpy, sys
for name in ("crc32c", "matplotlib", "pytest", "safetensors", "tfrecord", "tokenizers", "transformers", "wandb"):
    sys.modules[name] = None
sys.meta_path = [finder for finder in sys.meta_path if "__editable__" not in finder.__module__]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SMALL = (
    "--layers 2 --hidden_size 32 --heads 2 --sequence_length 8 --vocabulary_size 37 --batch 4 "
    "--micro_batch 2 --rounds 1 --warmup 1 --link_bytes 65536 --dtype float32"
)


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


@pytest.mark.multi
def test_the_benchmark_for_a_gpu_measures_every_variant_on_a_processor():
    done = script(f"benchmarks/gpu.py --device cpu {SMALL}")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    variants = figures["variants"]
    assert variants.keys() == {"plain", "resident", "half resident", "one layer resident"}
    assert variants["resident"]["read_bytes"] == 0 < variants["one layer resident"]["read_bytes"]
    assert variants["resident"]["loss"] == variants["one layer resident"]["loss"]
    assert set(figures["reached"]) == {"one layer / resident", "resident / plain", "MFU"}
