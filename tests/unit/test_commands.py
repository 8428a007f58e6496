"""The commands: what they load before they answer, and what they are called."""

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import popart
import pytest

from popxl_gpt import __version__
from popxl_gpt.config.flags import Flags
from popxl_gpt.config.leaves import leaves
from popxl_gpt.demo import commands, starting
from popxl_gpt.demo.commands import GenerateOptions, parse_training
from popxl_gpt.demo.job.tensorboard_log import TensorboardLog
from popxl_gpt.execution.inference.sampling import Sampling
from popxl_gpt.utils import programs
from popxl_gpt.utils.errors import ConfigError, UserError

ROOT = Path(__file__).resolve().parents[2]
LOADED = """
import json, runpy, sys
from popxl_gpt.demo import commands
found = {}
SLOW = {"torch", "numpy", "popxl", "popdist", "tokenizers", "tqdm", "matplotlib", "transformers"}
for name, words in json.loads(sys.argv[1]):
    sys.argv = [f"popxl-gpt-{name}", *words]
    try:
        if name.endswith(".py"):
            runpy.run_path(name, run_name="__main__")
        else:
            getattr(commands, name)()
    except SystemExit as end:
        found[f"{name} {' '.join(words)}"] = end.code
    slow = SLOW & sys.modules.keys()
    assert not slow, (name, words, slow)
print(json.dumps(found), file=sys.stderr)
"""


@pytest.mark.slow
def test_help_and_wrong_flags_are_answered_before_anything_slow_is_loaded():
    named = ("train", "evaluate", "generate", "report", "convert", "prepare")
    benchmark = "execution/pretraining.py"
    calls = [(name, [flag]) for name in (*named, benchmark) for flag in ("--help", "--layer")]
    calls += [(name, ["--version"]) for name in named]
    calls += [
        ("train", ["--config", "tinny"]),
        ("train", ["--layers", "x"]),
        ("train", ["--config", "tiny", "--global_batch_size", "3", "--micro_batch_size", "2"]),
        ("convert", ["to_hugging_face", "--help"]),
        ("prepare", ["text", "--help"]),
        ("prepare", ["text", "--nothing"]),
        (benchmark, ["--measured_runs", "0"]),
    ]
    done = subprocess.run(
        [sys.executable, "-c", LOADED, json.dumps(calls)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stderr.splitlines()[-1])
    for words, code in found.items():
        assert code == (0 if {"--help", "--version"} & set(words.split()) else 2), words
    assert done.stdout.count(f"popxl-gpt {__version__}\n") == len(named)
    for name in named:
        assert f"popxl-gpt-{name}" in done.stdout


def test_both_products_and_the_changelog_have_one_version():
    runtime = (ROOT / "runtime/pyproject.toml").read_text()
    changes = (ROOT / "CHANGELOG.md").read_text()
    newest, *_ = re.findall(r"^## (.+)$", changes, re.MULTILINE)
    assert newest == __version__ == popart.versionString()
    assert f'\nversion = "{__version__}"\n' in runtime


@pytest.mark.parametrize("name", ["train", "evaluate", "generate", "report", "convert", "prepare"])
def test_a_command_and_its_script_are_one_program(name, monkeypatch):
    started, start = [], getattr(commands, name)
    monkeypatch.setattr(commands, name, lambda: started.append(start))
    monkeypatch.setattr(starting.signal, "signal", lambda *_: None)
    place = starting if name == "train" else commands
    getattr(place, name)()
    assert started == [start] and start.func is programs.start
    module = start.args[0]
    script = ROOT / (module.removeprefix("popxl_gpt.").replace(".", "/") + ".py")
    text = script.read_text()
    assert (
        f"{place.__name__.rpartition('.')[2]}.{name}()" in text
        or f'start("{module}", parse_preparation)' in text
    )


def test_sampling_from_the_command_line_is_that_of_python():
    options, sampling = GenerateOptions(), Sampling()
    for name in ("temperature", "top_k", "top_p"):
        assert getattr(options, name) == getattr(sampling, name)
    flags, values = (
        {leaf.name: leaf.bound for leaf in leaves(kind)} for kind in (GenerateOptions, Sampling)
    )
    assert all(flags[name] == bound for name, bound in values.items() if name != "seed")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temperature": -1}, "temperature: got -1.0; expected a number, at least 0."),
        ({"temperature": float("nan")}, "temperature: got nan; expected a number, at least 0."),
        ({"top_k": 0}, "top_k: got 0; expected a whole number, at least 1, or none."),
        ({"top_p": 0}, "top_p: got 0.0; expected a number, at least 1e-06 and at most 1."),
        ({"top_p": "x"}, "top_p: got 'x'; expected a number, at least 1e-06 and at most 1."),
        ({"seed": -1}, "seed: got -1; expected a whole number, at least 0 and below 4294967296."),
    ],
)
def test_sampling_refuses_values_with_which_tokens_cannot_be_chosen(values, says):
    with pytest.raises(ConfigError) as told:
        Sampling(**values)
    assert str(told.value) == says


def test_tensorboard_without_its_package_is_refused_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in list(sys.modules):
        if name.startswith("tensorboard."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    words = ["--config", "tiny", "--tensorboard"]
    with pytest.raises(UserError, match="--tensorboard: got it without the package tensorboard"):
        commands.check_training(words)
    commands.check_training([*words, "--plan"])
    commands.check_training(words[:-1])
    with pytest.raises(UserError, match="expected that it can be imported. Run `pip install"):
        TensorboardLog(tmp_path / "tensorboard", 0)
    assert not list(tmp_path.iterdir())


def test_a_run_by_the_clock_is_called_after_its_data_and_its_minutes(tmp_path):
    (tmp_path / "mine").mkdir()
    for link, folder in (("bytes", "\udcff"), ("commands", "\x1b[2J")):
        (tmp_path / folder).mkdir()
        (tmp_path / link).symlink_to(tmp_path / folder)
    names = {
        ("--minutes", "5", "--input_files", f"{tmp_path}/bytes"): "5_minutes",
        ("--minutes", "5", "--input_files", f"{tmp_path}/commands"): "5_minutes",
        ("--minutes", "5"): "5_minutes",
        ("--minutes", "0.5", "--input_files", f"{tmp_path}/mine/"): "mine_0.5_minutes",
        ("--minutes", "5", "--input_files", f"{tmp_path}/mine/*.tfrecord"): "5_minutes",
        ("--minutes", "5", "--name", "other"): "other",
        ("--minutes", "5", "--config", "tiny", "--schedule", "wsd"): "tiny",
    }
    for words, name in names.items():
        assert parse_training(words)[0].name == name
    with pytest.raises(UserError, match="input files: got .*, which is not UTF-8"):
        parse_training(("--minutes", "5", "--input_files", f"{tmp_path}/\udcff"))


@pytest.mark.parametrize("words", [["--config", "tiny", "--auto"], ["--minutes", "3"]], ids=str)
def test_the_words_of_a_training_are_read_once(words, monkeypatch):
    read, ran, original = [], [], Flags.__init__

    def noted(self, *arguments, **more):
        read.append(arguments[0])
        original(self, *arguments, **more)

    monkeypatch.setattr(Flags, "__init__", noted)
    monkeypatch.setattr("popxl_gpt.demo.pretraining.train", lambda *given: ran.append(given) or 0)
    monkeypatch.setattr("popxl_gpt.demo.pretraining.choose", lambda config, *_: config)
    monkeypatch.setattr("popxl_gpt.demo.pretraining.lasting_output", nullcontext)
    monkeypatch.setattr("popxl_gpt.utils.programs._end_by_ctrl_c", lambda: None)
    monkeypatch.setattr(sys, "argv", ["program", *words])
    with pytest.raises(SystemExit) as ended:
        commands.train()
    assert (ended.value.code, read) == (0, [words])
    ((_, options, given, _),) = ran
    assert given == {word.removeprefix("--") for word in words if word.startswith("--")}
    assert options.auto == ("--auto" in words)
