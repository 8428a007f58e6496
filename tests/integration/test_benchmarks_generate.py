"""The benchmark of generated text: what it counts, and that it runs."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.generate import bytes_per_token, speeds
from tests import warm

ROOT = Path(__file__).parents[2]
CASE = {"dtype": "bfloat16", "prompt": 512, "batch": 8, "tokens": 64, "layers": 12}


def test_the_limit_counts_all_weights_but_the_positions_and_the_tokens_before():
    weights = 124_439_808 - 1024 * 768  # GPT-2 small
    cached = 12 * 2 * 768 * 8 * (512 + 32)
    assert bytes_per_token(CASE) == 2 * (weights + cached)
    assert bytes_per_token({**CASE, "dtype": "float32"}) == 4 * (weights + cached)


def test_the_first_token_is_counted_apart_from_the_others():
    assert speeds([[0.0, 5.0, 6.0, 8.0], [1.0, 4.0, 5.0, 6.0]]) == (4.0, 1.0)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_both_write_in_alternation():
    flags = "--dtypes float32 --prompts 5 --batches 2 --tokens 4 --layers 1 --rounds 1".split()
    words = [warm.python(), str(ROOT / "benchmarks/generate.py"), *flags]
    done = subprocess.run(
        words, env=warm.with_children(), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(done.stdout.splitlines()[-1])["cases"]
    assert case["layers"] == 1 and case["speedup"] > 0 and 0 < case["share_of_limit"]
    assert set(case["tokens_per_second"]) == {"phased", "transformers", "limit"}
