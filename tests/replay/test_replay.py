"""The replay finds what two states of the code do differently, and nothing where they do not."""

import pytest

from tests import warm
from tests.replay.replay import ALONE, differences, run

FLAGS = f"--config tiny {ALONE} --steps 3 --checkpoint.every 1"


@pytest.mark.slow
def test_a_run_is_recorded_alike_twice_and_otherwise_with_another_rate(tmp_path):
    python = warm.python()
    first = run(tmp_path, "tiny", FLAGS, python)
    assert list(differences(first, run(tmp_path, "tiny", FLAGS, python))) == []
    assert len(first["metrics"]) == 3 and len(first["files"]) == 10 and first["sources"]
    changed = run(tmp_path, "tiny", f"{FLAGS} --learning_rate 0.002", python)
    told = {line.split(":")[0] for line in differences(first, changed)}
    assert "/metrics/3/learning_rate" in told and "/metrics/3/loss" in told
    assert "/files/checkpoints/step_00000003/head.safetensors" in told
    assert not any(name.startswith("/sources") for name in told)
