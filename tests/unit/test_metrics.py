"""The file of metrics that a run leaves, and goes on from."""

import json
from pathlib import Path

import pytest

from popxl_gpt.config import preset
from popxl_gpt.demo.run_clock import RunClock
from popxl_gpt.execution.metrics import MetricsFile

LINE = {"loss": 4.5, "validation_loss": None, "learning_rate": 0.001, "gradient_norm": 2.0}


@pytest.mark.parametrize(
    "seconds",
    [
        '"x"',
        "null",
        "[1]",
        "true",
        "-1",
        "NaN",
        "1e999",
        "1" + 400 * "0",
        '0, "not_finite": {"seconds": "nan"}',
    ],
)
def test_a_line_whose_seconds_are_none_counts_as_damaged(seconds: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    before = json.dumps({"step": 1, **LINE, "seconds": 100.5})
    path.write_text(f'{before}\n{{"step": 2, {json.dumps(LINE)[1:-1]}, "seconds": {seconds}}}\n')
    metrics = MetricsFile(path, 2)
    assert metrics.last == json.loads(before) and metrics.lines == 1
    assert 100.5 <= RunClock(preset("tiny"), metrics, None, has_texts=False).seconds < 160
    metrics.close()


def test_a_line_without_seconds_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, **LINE}) + "\n")
    metrics = MetricsFile(path, 1)
    assert metrics.lines == 1
    assert 0 <= RunClock(preset("tiny"), metrics, None, has_texts=False).seconds < 60
    metrics.close()
