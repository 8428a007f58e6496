"""What the commands do, from Python: `popxl_gpt.api`, and the notebook that uses it."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import mypy.api
import pytest

from popxl_gpt import api
from popxl_gpt.demo.commands import parse_training
from popxl_gpt.utils import program_clock
from tests import warm

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "config": "tiny", "data_parallel": 1, "tensor_parallel_1": 1, "tensor_parallel_2": 1,
    "steps": 4, "warmup_steps": 0, "samples": 0, "validate_every": 2,
}  # fmt: skip

OF_LIBRARIES = ("GOMP_SPINCOUNT", "TORCHINDUCTOR_CACHE_DIR")
"""Variables that the engine sets once for libraries, and that stay."""


def state():
    handlers = {n: signal.getsignal(n) for n in signal.valid_signals()}
    return (
        handlers, {k: v for k, v in os.environ.items() if k not in OF_LIBRARIES}, sys.excepthook, threading.excepthook, sys.stdout, os.getcwd(),
    )  # fmt: skip


@pytest.mark.multi
def test_what_the_commands_do_is_done_in_one_process_which_stays_as_it_was(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. the dog sat on the log.\n" * 400)
    data = tmp_path / "data"
    info = api.prepare("text", text, output=data, tokenizer="characters", sequence_length=16, workers=1, validation=0.1, document_bytes=99)  # fmt: skip
    assert info["splits"]["train"]["records"] > 9
    before = state()
    settings = {**SMALL, "sequence_length": 16, "vocabulary_size": info["vocabulary_size"], "input_files": [data], "run_folder": tmp_path}  # fmt: skip
    runs = [api.train(**settings, name=name) for name in ("one", "two")]
    assert state() == before
    assert runs[0].losses == runs[1].losses and len(runs[0].losses) == 4
    assert runs[0].evaluation == runs[1].evaluation > 0
    assert runs[1].folder == tmp_path / "two"
    assert "4" in capsys.readouterr().out
    result = api.evaluate(runs[0].folder)
    assert result.measured.loss == pytest.approx(
        runs[0].evaluation, rel=1e-2
    )  # a run validates on a part
    assert len(api.generate(runs[0].folder, ["the ", "a"], tokens=3)) == 2
    made = api.convert("to_hugging_face", runs[0].folder, tmp_path / "made")
    assert (made / "config.json").is_file()


WRONG = {
    "stps": ({"stps": 3}, "stps.*steps"),
    "steps": ({"steps": "many"}, "--steps: got .many.; expected"),
    "plan": ({"plan": True}, "^plan: got it for train"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_setting_is_told_as_the_command_tells_it(name, capsys):
    given, words = WRONG[name]
    with pytest.raises(api.UserError, match=words):
        api.train(config="tiny", **given)


def test_minutes_count_from_the_call(monkeypatch):
    monkeypatch.setattr(program_clock._Clock, "begun", time.monotonic() - 3600)
    heard = []

    def run(line, on_folder):
        heard.append(program_clock.since_start())
        raise api.UserError("enough")

    monkeypatch.setattr(api.pretraining, "run", run)
    with pytest.raises(api.UserError, match="enough"):
        api.train(minutes=30)
    assert heard[0] < 60


def test_no_minutes_are_none(monkeypatch):
    monkeypatch.setattr(api, "check_training", lambda words: parse_training(words) and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        api.train(minutes=None)


CALLED = """
from pathlib import Path
from popxl_gpt import api
api.train(config="tiny", steps=3, memmap_dir=Path("rows"), input_files=["data"], host_memory="1GiB")
api.prepare("text", "file", sequence_length=64, tokenizer=None)
api.convert("to_hugging_face", "run", "out", precision="bfloat16")
api.evaluate("run", "data", data_parallel=2)
api.generate("run", "a", device="cpu")
"""
CALLED_WRONG = """
api.train(stps=3)
api.train(steps="many")
api.convert("to_gguf", "run", "out", type="f31")
api.prepare("text", "file", plan=True)
api.evaluate("run", learning_rate=1e-3)
api.generate("run", precision="int8")
"""


@pytest.mark.slow
def test_a_type_checker_knows_the_settings_of_each_function(tmp_path):
    program = tmp_path / "calls.py"
    program.write_text(CALLED + CALLED_WRONG)
    first = len(CALLED.splitlines()) + 1
    out, told, _ = mypy.api.run(["--follow-imports=silent", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache"), str(program)])  # fmt: skip
    lines = {int(number) for number in re.findall(r"calls.py:(\d+): error", out)}
    assert lines == {*range(first + 1, first + 7)}, (out, told)


def test_another_thread_is_refused(tmp_path):
    told = []

    def call():
        try:
            api.train(config="tiny")
        except api.UserError as error:
            told.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert told[0].startswith("train: got a call on another thread; expected")


@pytest.mark.multi
def test_ctrl_c_saves_raises_and_is_heard_again(tmp_path):
    before = state()
    timer = threading.Timer(0.1, lambda: None)

    def stop():
        while not list(tmp_path.glob("run/metrics.jsonl")) or not (tmp_path / "run/metrics.jsonl").read_text():  # fmt: skip
            threading.Event().wait(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    timer.function = stop
    timer.start()
    with pytest.raises(KeyboardInterrupt, match="run.* was stopped, and is saved"):
        api.train(**{**SMALL, "steps": 100_000, "validate_every": 0}, name="run", run_folder=tmp_path)  # fmt: skip
    timer.join()
    assert state() == before
    assert list((tmp_path / "run/checkpoints").glob("step_*"))


@pytest.mark.slow
@pytest.mark.multi
def test_the_notebook_runs_cell_by_cell(tmp_path):
    notebook = json.loads((ROOT / "docs/notebook.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    few = {"steps=200": "steps=10", "2_000_000": "200_000"}
    shorter = [re.sub("|".join(few), lambda found: few[found[0]], cell) for cell in cells]
    assert sum(a != b for a, b in zip(cells, shorter)) == len(few)
    code = "import json, sys\nfor cell in json.loads(sys.argv[1]): exec(cell, globals())"
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": f"{ROOT}:{ROOT}/runtime"}
    done = subprocess.run(
        [warm.python(), "-c", f"if True:\n {code.replace(chr(10), chr(10) + ' ')}", json.dumps(shorter)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.count("\n---\n") == 2 and (tmp_path / "runs/notebook/metrics.jsonl").is_file()
    )
