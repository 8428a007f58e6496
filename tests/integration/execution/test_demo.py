"""The training job as a user runs it: what it prints and leaves."""

import html
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from popxl_gpt.config.presets import preset
from popxl_gpt.config.saving import load
from popxl_gpt.data import example
from popxl_gpt.data.records import RecordWriter
from popxl_gpt.data.tokenisation import train_tokenizer
from popxl_gpt.demo.job.part import Distribution
from popxl_gpt.demo.job.run_folder import claimed
from popxl_gpt.demo.job.text import whole_lines
from popxl_gpt.demo.job.wandb_log import QUEUE, WandbLog
from tests import warm
from tests.integration.runs import run_job
from tests.metrics_text import metrics_of

pytestmark = pytest.mark.multi
ROOT = Path(__file__).parents[3]
TEXT = "the cat sat on the mat. the dog sat on the log. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Text, its tokenizer and a finished run on it."""
    folder = tmp_path_factory.mktemp("demo")
    tokenizer = train_tokenizer([TEXT * 20], 270)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = np.array(tokenizer.encode(TEXT * 40).ids)
    for name in ("train", "validation"):
        with RecordWriter(folder / f"{name}-0.tfrecord") as writer:
            starts = np.random.default_rng(0).integers(0, tokens.size - 17, 64)
            for payload in example.encode(
                np.stack([tokens[start : start + 17] for start in starts])
            ):
                writer.write(payload)
    done = train(
        folder, *"--limit --device_tflops 1 --link_gbps 1 --remote_gbps 1 --sample_every 8".split()
    )
    assert done.returncode == 0, done.stderr
    (folder / "output.txt").write_text(done.stdout)
    return folder


def words(folder: Path) -> "list[str]":
    return (
        "--config tiny --data_parallel 1 --tensor_parallel_1 1 --tensor_parallel_2 1 --name run "
        f"--run_folder {folder}/runs --input_files {folder}/train-*.tfrecord --validation_files "
        f"{folder}/validation-*.tfrecord --tokenizer {folder}/tokenizer.json --vocabulary_size "
        "270 --sequence_length 16 --widening 4 --steps 20 --validate_every 5 "
        "--validation_batches 2 --log_every 5 --checkpoint.every 10"
    ).split()


def train(folder: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [warm.python(), str(ROOT / "demo/pretraining.py"), *words(folder), *flags],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def test_a_progress_line_tells_all_that_is_worth_knowing(folder):
    lines = [
        line
        for line in (folder / "output.txt").read_text().splitlines()
        if line.startswith("step ")
    ]
    assert [int(line.split("/")[0].split()[1]) for line in lines] == [1, 5, 10, 15, 20]
    pattern = (
        r"step +\d+/20  loss \d\.\d+  smoothed \d\.\d+  validation (\d\.\d+ ±\d\.\d+  \d\.\d+ bits/byte|-)  "
        r"lr \d\.\d+e-\d+  norm \d+\.\d+  [\d.]+ k?tokens  [\d.]+ k?tokens/s  [\d.]+ [MGT]FLOP/s  \d+\.\d% MFU  \d+% of the limit  (\S+ m?s \(\d+%\) waiting for data  )?.* left"
    )
    for line in lines:
        assert re.fullmatch(pattern, line), line


def test_a_run_leaves_its_configuration_metrics_report_and_checkpoints(folder):
    run = folder / "runs/run"
    assert load(run / "config.yml").model.vocabulary_size == 270
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == list(range(1, 21))
    assert [line["step"] for line in metrics if line["validation_loss"] is not None] == [
        5,
        10,
        15,
        20,
    ]
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.3
    ceilings = [
        line["tokens"] / line["step"] / line["step_seconds"] / line["mfu"] for line in metrics
    ]
    assert max(ceilings) < 1.1 * min(ceilings), "all of one ceiling"
    report = (run / "report.html").read_text()
    assert ">finished: step 20 of 20" in report and "Computed by --limit" in report
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [8, 8, 16, 16, 20, 20]
    page = html.unescape(report)
    assert all(sample["text"] in page for sample in samples)
    assert json.loads((run / "run.json").read_text())["training_data"]["samples"] > 0
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [
        "step_00000010",
        "step_00000020",
        "tokenizer.json",
    ]


def test_at_the_end_the_model_writes_and_everything_is_named(folder):
    output = (folder / "output.txt").read_text()
    end = output[output.rindex("step 20/20") :]
    samples = re.findall(r"^    \| (.*)»(.*)$", end, re.MULTILINE)
    assert len(samples) == 2
    for given, written in samples:
        assert given.strip() in TEXT * 2 and given.strip() and written.strip()
    for name in ("metrics.jsonl", "report.html", "checkpoints", "config.yml"):
        assert str(folder / "runs/run" / name) in end


def test_a_model_that_sees_one_token_writes_too(folder, tmp_path):
    run_job(
        *"--config tiny --data_parallel 1 --tensor_parallel_1 1 --tensor_parallel_2 1".split(),
        *"--vocabulary_size 270 --sequence_length 1 --steps 1 --validate_every 0".split(),
        *("--input_files", folder / "train-*.tfrecord", "--tokenizer", folder / "tokenizer.json"),
        *("--samples", 1, "--name", "run", "--run_folder", tmp_path),
    )
    (line,) = (tmp_path / "run/samples.jsonl").read_text().splitlines()
    assert json.loads(line)["prompt"] and json.loads(line)["step"] == 1


def test_prompts_are_whole_lines_where_there_are_any():
    tokenizer = train_tokenizer(["def f():\n    return 1\n"], 257)
    tokens = tokenizer.encode("nd\nfor a in b:\n    print(a)\n    a").ids
    assert tokenizer.decode(whole_lines(tokens, tokenizer)) == "for a in b:\n    print(a)\n"
    assert whole_lines(tokens[:2], tokenizer) == tokens[:2]


def test_the_saved_configuration_runs_again(folder, tmp_path):
    run_job(
        *words(folder),
        "--config",
        folder / "runs/run/config.yml",
        "--run_folder",
        tmp_path,
        "--samples",
        0,
    )
    assert metrics_of(tmp_path / "run") == metrics_of(folder / "runs/run")


def test_a_finished_run_that_is_continued_trains_no_more(folder, capsys):
    before = (folder / "runs/run/metrics.jsonl").read_text()
    run_job(*words(folder), "--checkpoint.load", "auto", "--samples", 0)
    printed = capsys.readouterr().out
    assert "continuing after step 20" in printed and "step 20/20" not in printed
    assert "nothing is left of the run's steps; it trains for longer with more --steps" in printed
    assert (folder / "runs/run/metrics.jsonl").read_text() == before


def test_a_run_can_go_back_to_an_older_checkpoint_and_leaves_the_newer_ones(folder):
    run = folder / "runs/run"
    newer = {path.name for path in (run / "checkpoints").iterdir()}
    run_job(*words(folder), "--checkpoint.load", run / "checkpoints/step_00000010", "--samples", 0)
    assert {path.name for path in (run / "checkpoints").iterdir()} == newer
    lines = metrics_of(run).splitlines()
    assert metrics_of(folder / "runs/run-2").splitlines() == lines[10:]


def test_batch_and_schedule_may_change_and_no_token_is_left_out(folder, tmp_path, capsys):
    # weights hardly move, so that a loss tells which samples a step has read
    still = "--samples 0 --dropout 0 --validate_every 0 --learning_rate 1e-12 --schedule constant"
    flags = ("--run_folder", tmp_path, *still.split(), "--warmup_steps", 0, "--widening", 1)
    again = (*words(folder), *flags, "--checkpoint.load", "auto", "--name", "changed")
    run_job(*words(folder), *flags, "--steps", 8, "--name", "same")
    run_job(*words(folder), *flags, "--steps", 3, "--name", "changed")
    run_job(*again, "--steps", 5, "--global_batch_size", 16, "--schedule", "linear")
    run_job(*again, "--steps", 6)
    same, changed = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("same", "changed")
    )
    losses, tokens = ([line[name] for line in same] for name in ("loss", "tokens"))
    pairs = [(losses[3] + losses[4]) / 2, (losses[5] + losses[6]) / 2]
    expected = [*losses[:3], *pairs, losses[7]]
    assert [line["loss"] for line in changed] == pytest.approx(expected, abs=1e-5)
    assert [line["tokens"] for line in changed] == [*tokens[:3], tokens[4], tokens[6], tokens[7]]
    assert len({round(loss, 3) for loss in losses}) > 4
    said = capsys.readouterr()
    assert "global_batch_size: 8 -> 16; training.schedule: constant -> linear" in said.err
    assert "global_batch_size: 16 -> 8" in said.err
    assert "continuing after step 5, 896 tokens, from" in said.out


@pytest.mark.slow
def test_wandb_has_all_of_a_run_also_of_one_that_goes_on(folder, tmp_path):
    flags = ("--run_folder", str(tmp_path), "--wandb", "--wandb_tags", "one", "two")
    done = train(folder, *flags, "--steps", "10", WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    done = train(folder, *flags, "--checkpoint.load", "auto", WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    number = (tmp_path / "run/wandb_id").read_text().strip()
    first, second = sorted((tmp_path / "run/wandb").glob(f"offline-run-*-{number}/run-*.wandb"))
    records = records_of(first)
    (run,) = [record.run for record in records if record.HasField("run")]
    told = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert list(run.tags) == ["one", "two"] and run.run_id == number
    assert told["model"]["vocabulary_size"] == 270 and "torch" in told["versions"]
    steps = [s for path in (first, second) for s in history_of(records_of(path), "step")]
    assert steps == [*range(1, 11), 10, *range(11, 21), 20]  # a table has a row of its own
    assert history_of(records, "tokens")[:2] == [128, 256]
    tables = list((tmp_path / "run/wandb").glob("offline-run-*/files/media/table/samples*.json"))
    assert len(tables) == 2 and json.loads(tables[0].read_text())["columns"][2] == "text"


@pytest.mark.slow
def test_wandb_keeps_steps_that_a_run_repeats(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = WandbLog(preset("tiny"), tmp_path)
    for step in (1, 2, 3, 2, 3):
        log.log({"step": step, "loss": float(step)})
    log.log_histograms(2, {"weights/head/weight": Distribution(0.5, 1)})
    log.close()
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    records = ended_records_of(file)
    assert history_of(records, "step") == [1, 2, 3, 2, 3, 2]
    assert history_of(records, "loss") == [1, 2, 3, 2, 3]
    axes = {r.metric.glob_name: r.metric.step_metric for r in records if r.HasField("metric")}
    assert axes["*"] == "step"


def ended_records_of(path: Path) -> "list[Any]":
    """What a file of wandb's holds once a run has ended: a process of wandb's own writes it, and
    `close` does not wait for that."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        records = records_of(path)
        if any(record.HasField("exit") for record in records):
            return records
        time.sleep(0.05)
    raise AssertionError(f"{path} has no end")


def records_of(path: Path) -> "list[Any]":
    """What a file of wandb's holds."""
    from wandb.proto import wandb_internal_pb2  # a second, of each process that collects tests

    content, at, found, parts = path.read_bytes(), 7, [], b""
    # LevelDB's log: blocks of 32 KiB; parts with checksum, length, and 1 whole, 2 first, 4 last
    while at + 7 <= len(content):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
            continue
        size, kind = struct.unpack_from("<HB", content, at + 4)
        if at + 7 + size > len(content):
            break  # not yet written to its end
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found


def history_of(records: "list[Any]", name: str) -> "list[float]":
    """A metric's values."""
    lines = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in r.history.item}
        for r in records
        if r.HasField("history")
    ]
    return [line[name] for line in lines if name in line]


@pytest.mark.slow
def test_a_wandb_that_fails_stops_nothing(folder, tmp_path):
    flags = ("--run_folder", str(tmp_path), "--wandb", "--samples", "0")
    kernels = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    # where no key is, and kernels are compiled
    elsewhere = {"HOME": str(tmp_path), "XDG_CACHE_HOME": kernels}
    done = train(
        folder, *flags, "--name", "failing", WANDB_MODE="online", WANDB_API_KEY="", **elsewhere
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("wandb: RuntimeError: no API key") == 1, done.stderr
    assert metrics_of(tmp_path / "failing") == metrics_of(folder / "runs/run")


def test_tensorboard_shows_what_the_metrics_say_also_of_a_run_that_goes_on(folder, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = ("--run_folder", tmp_path, "--tensorboard", "--samples", 0)
    run_job(*words(folder), *flags, "--steps", 12)
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000012")
    run_job(*words(folder), *flags, "--checkpoint.load", "auto", "--steps", 14)
    shown = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "learning_rate", "validation_loss", "tokens"):
        expected = [(line["step"], line[name]) for line in lines if line[name] is not None]
        found = [(event.step, event.value) for event in shown.Scalars(name)]
        assert found == [(step, pytest.approx(value)) for step, value in expected]


@pytest.mark.parametrize("steps", [QUEUE, 2 * QUEUE])  # as many as may wait, and more
def test_a_wandb_that_hangs_delays_no_step(monkeypatch, tmp_path, steps):
    monkeypatch.setattr(WandbLog, "_work", lambda self: time.sleep(5))
    monkeypatch.setattr("popxl_gpt.demo.job.wandb_log.CLOSE_SECONDS", 0.2)
    log = WandbLog(preset("tiny"), tmp_path)
    begin = time.perf_counter()
    for step in range(steps):
        log.log({"step": step})
    closing = threading.Thread(target=log.close, daemon=True)
    closing.start()
    closing.join(3)
    assert not closing.is_alive() and time.perf_counter() - begin < 3


def test_a_wandb_that_is_slow_for_a_while_lacks_steps_and_its_run_ends(
    monkeypatch, tmp_path, caplog
):
    sent, goes_on = [], threading.Event()

    class Run:
        define_metric = finish = lambda self, *given, **named: sent.append(given or "finished")

        def log(self, told):
            goes_on.wait(30)
            sent.append(told["step"])

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **given: Run()))
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = WandbLog(preset("tiny"), tmp_path)
    for step in range(2 * QUEUE):
        log.log({"step": step})
    goes_on.set()
    end = time.monotonic() + 30
    while QUEUE - 1 not in sent and time.monotonic() < end:
        time.sleep(0.01)
    log.log({"step": 3 * QUEUE})
    log.close()
    steps = [step for step in sent if isinstance(step, int)]
    assert steps[: QUEUE - 1] == list(range(QUEUE - 1)) and len(steps) < QUEUE + 9
    assert steps[-1] == 3 * QUEUE and sent[-1] == "finished"
    (told,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert told.startswith(f"wandb: got {QUEUE} steps that wait for it; expected a faster")


def test_a_fresh_run_takes_a_folder_that_no_run_has(tmp_path):
    settings = preset("tiny", run_folder=str(tmp_path))
    names = []
    for _ in range(3):
        with claimed(settings) as (run, saved), run.prepared(settings):
            assert saved is None
            run.metrics.write_text("")
        names.append(run.path.name)
    assert names == ["tiny", "tiny-2", "tiny-3"]
