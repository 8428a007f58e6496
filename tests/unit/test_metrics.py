"""The file of metrics that a run leaves, and goes on from."""

import json
import tracemalloc
from pathlib import Path

import pytest

from popxl_gpt.execution.reports.metrics import MetricsFile

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
    assert metrics.seconds == 100.5
    metrics.close()


def test_a_line_without_seconds_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, **LINE}) + "\n")
    metrics = MetricsFile(path, 1)
    assert metrics.lines == 1
    assert metrics.seconds == 0.0
    metrics.close()


def test_a_long_file_is_read_without_memory_for_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": n, **LINE}) + "\n" for n in range(1, 10_001)))
    tracemalloc.start()
    metrics = MetricsFile(path, 9_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert metrics.lines == 9_000 and metrics.last == {"step": 9_000, **LINE}
    assert peak < path.stat().st_size // 4
    metrics.close()


@pytest.mark.parametrize(
    "steps, lost",
    [((1, 2, 3, 5, 6, 8), 7), ((1, 2, 5), 8), ((4, 5, 7, 8), 6), ((0, 1, 8), 7), ((), 8)],
    ids=str,
)
def test_the_last_step_that_has_no_line_is_named(
    steps: "tuple[int, ...]", lost: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": n, **LINE}) + "\n" for n in (*steps, 9)))
    metrics = MetricsFile(path, 8)
    metrics.tell_of_lost_lines(8)
    assert f"got {len(steps)} lines up to step 8 and none of step {lost};" in caplog.text
    metrics.close()
