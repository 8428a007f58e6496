"""Runs that go on where they lie now, whatever they were called."""

import json
import shutil
from pathlib import Path

import pytest

from popxl_gpt.config.command_line import parse_command_line
from popxl_gpt.config.saving import load
from popxl_gpt.config.schema import Config
from popxl_gpt.demo.job.step_lines import append_lines, drop_later_lines
from tests.integration.runs import run_job
from tests.metrics_text import metrics_of

ONE = "--config tiny --data_parallel 1 --tensor_parallel_1 1 --tensor_parallel_2 1".split()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two runs of one name, of which the second was cut off after two of four steps."""
    folder = tmp_path_factory.mktemp("runs")
    flags = [*ONE, "--name", "run", "--steps", 4, "--checkpoint.every", 2, "--run_folder", folder]
    run_job(*flags)
    run_job(*flags, "--seed", 7)
    shutil.copytree(folder / "run-2", folder / "undisturbed")
    shutil.rmtree(folder / "run-2/checkpoints/step_00000004")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("of_folder", [False, True], ids=["file", "folder"])
def test_a_run_whose_name_was_taken_goes_on_in_its_own_folder(runs, of_folder, tmp_path, capsys):
    shutil.copytree(runs, tmp_path / "runs")
    first, second = tmp_path / "runs/run", tmp_path / "runs/run-2"
    before = (first / "metrics.jsonl").read_bytes(), (first / "config.yml").read_bytes()
    assert load(second / "config.yml").name == "run-2"
    told = second if of_folder else second / "config.yml"
    run_job("--config", told, "--checkpoint.load", "auto")
    said = capsys.readouterr()
    assert "continuing after step 2" in said.out and f"from {second}/checkpoints" in said.out
    assert "other settings" not in said.err
    assert metrics_of(second) == metrics_of(runs / "undisturbed")
    assert before == tuple((first / name).read_bytes() for name in ("metrics.jsonl", "config.yml"))


@pytest.mark.slow
def test_a_run_that_was_renamed_and_moved_goes_on_there(runs, tmp_path, monkeypatch, capsys):
    shutil.copytree(runs / "run-2", tmp_path / "elsewhere/moved")
    monkeypatch.chdir(tmp_path / "elsewhere/moved")
    run_job("--config", "config.yml", "--checkpoint.load", "auto")
    assert "continuing after step 2" in capsys.readouterr().out
    assert metrics_of(Path()) == metrics_of(runs / "undisturbed")
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


def place(*words: str) -> "tuple[str, str]":
    config = parse_command_line(words, program="p", default="tiny", options=None).config
    return config.name, config.logging.run_folder


def test_a_configuration_says_where_a_run_goes_unless_that_run_goes_on(tmp_path):
    folder = tmp_path / "moved"
    folder.mkdir()
    file = folder / "config.yml"
    file.write_text("name: old\nlogging: {run_folder: there}\n")
    auto = ("--checkpoint.load", "auto")
    assert place("--config", str(file), *auto) == ("old", "there")  # no run has begun beside it
    (folder / "metrics.jsonl").touch()
    assert place("--config", str(file)) == ("old", "there")
    assert place("--config", str(file), *auto) == ("moved", str(tmp_path))
    assert place("--config", str(folder), *auto) == ("moved", str(tmp_path))
    assert place("--config", str(file), *auto, "--name", "new") == ("new", "there")
    (tmp_path / "latest").symlink_to(folder)
    assert place("--config", str(tmp_path / "latest"), *auto) == ("moved", str(tmp_path))
    other = file.rename(folder / "other.yml")
    assert place("--config", str(other), *auto) == ("old", "there")
    assert place("--config", "tiny", *auto) == ("tiny", Config().logging.run_folder)


def test_samples_of_steps_that_a_run_comes_to_again_are_dropped(tmp_path):
    path = tmp_path / "samples.jsonl"
    drop_later_lines(path, 4, "texts")  # there is none
    for step in (2, 4, 6):
        append_lines(path, [{"step": step, "text": text} for text in ("b", "ü")])
    with open(path, "a") as file:
        file.write('no line of ours\n{"step": 4, "pro')
    drop_later_lines(path, 4, "texts")
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines[:-1]] == [2, 2, 4, 4]
    assert lines[-1] == "no line of ours"
