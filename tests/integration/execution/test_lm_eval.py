"""Tasks of EleutherAI's lm-evaluation-harness: scores of our weights by our model and by the
harness's own model of Hugging Face's, each in a process of its own.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from popxl_gpt.data.prepare import main as prepare
from popxl_gpt.demo import evaluate as command
from popxl_gpt.demo.convert import main as convert
from popxl_gpt.demo.generate import generate
from popxl_gpt.execution.inference.sampling import Sampling
from popxl_gpt.utils.errors import UserError
from tests import warm
from tests.integration.runs import run_job

pytestmark = pytest.mark.multi
ROOT = Path(__file__).parents[3]
LINES = [f"line {number} of a text: über das Haus, 日本 {number * 7}\n" for number in range(400)]
TASK = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl}}}}
test_split: test
task: {name}
"""
CHOICES = """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_target: label
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
LIKELY = """
output_type: loglikelihood
doc_to_text: "{{text}}"
doc_to_target: "{{end}}"
metric_list: [{metric: acc}]
"""
ROLLING = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
WRITTEN = """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{end}}"
generation_kwargs: {until: [" 3", "5"], max_gen_toks: 9}
metric_list: [{metric: exact_match}]
"""
TASKS = {"choices": CHOICES, "likely": LIKELY, "rolling": ROLLING, "written": WRITTEN}
THEIRS = """
import json, sys
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
found = simple_evaluate("hf", {"pretrained": sys.argv[1], "dtype": "float32", "device": "cpu"},
    sys.argv[3:], batch_size=4, task_manager=TaskManager(include_defaults=False))
json.dump({"results": found["results"]}, open(sys.argv[2], "w"))
"""


def environment(folder):
    plain = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("RANK", "WORLD_SIZE", "POPDIST_"))
    }
    more = {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    return {**plain, **more}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A short run, and task files with their data."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "text.txt").write_text("".join(LINES), encoding="utf-8")
    words = "--vocabulary_size 300 --sequence_length 31 --validation 0.1 --workers 1"
    assert (
        prepare(["text", f"{folder}/text.txt", "--output", f"{folder}/data", *words.split()]) == 0
    )
    words = (
        f"--config tiny --name run --run_folder {folder} --vocabulary_size 300 --layers 2 "
        "--sequence_length 12 --max_positions 40 --data_parallel 1 --steps 30 --samples 0 "
        "--tensor_parallel_1 1 --tensor_parallel_2 1 --validate_every 0 --learning_rate 0.01 "
        f"--input_files {folder}/data/train-*.tfrecord --tokenizer {folder}/data/tokenizer.json"
    )
    run_job(*words.split())
    texts = ["", "line 3 of a ", "text: über", "Haus " * 30, *("日本 " * n for n in range(1, 8))]
    greedy = Sampling(temperature=0)
    ends = generate(folder / "run", texts[1:], tokens=9, sampling=greedy, stop=[" 3", "5"])
    documents = [
        {
            "text": text,
            "choices": ["text: über", " das", "x" * number, f" {number} of a text: über das Haus"],
            "label": number % 4,
            "end": end if number % 2 else " das",  # what the model writes, or not
        }
        for number, (text, end) in enumerate(zip(texts, ["über", *ends]), start=1)
    ]
    for name, task in TASKS.items():
        used = [document for document in documents if document["text"] or name != "written"]
        lines = "".join(json.dumps(document) + "\n" for document in used)
        (folder / f"{name}.jsonl").write_text(lines)
        (folder / f"{name}.yaml").write_text(TASK.format(folder=folder, name=name) + task)
    return folder


def tasks(folder):
    return [str(folder / f"{name}.yaml") for name in TASKS]


def ours(folder, *words, launcher=()):
    python = warm.launcher() if launcher else warm.python()
    script = [python, *launcher, str(ROOT / "demo/evaluate.py")]
    done = subprocess.run(
        [*script, "--checkpoint", str(folder / "run"), "--lm_eval", *tasks(folder), *words],
        capture_output=True,
        text=True,
        timeout=180,
        env=environment(folder),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(results):
    """Those that do not depend on what they are called."""
    return {
        (task, metric): value
        for task, values in results.items()
        for metric, value in values.items()
        if isinstance(value, float)
    }


@pytest.fixture(scope="module")
def shown(folder):
    """What the command prints; it writes a file, too."""
    return ours(folder, "--json", str(folder / "ours.json"))


def results_of(path):
    return numbers(json.loads(path.read_text())["results"])


@pytest.mark.exhaustive
def test_scores_are_those_of_the_harness_own_hugging_face_model(folder, shown):
    convert(["to_hugging_face", str(folder / "run"), str(folder / "gpt2")])
    done = subprocess.run(
        [warm.python(), "-c", THEIRS, folder / "gpt2", folder / "theirs.json", *tasks(folder)],
        capture_output=True,
        text=True,
        timeout=180,
        env=environment(folder),
    )
    assert done.returncode == 0, done.stderr
    got, expected = results_of(folder / "ours.json"), results_of(folder / "theirs.json")
    assert got == pytest.approx(expected, rel=1e-5)
    assert {task for task, _ in got} == set(TASKS)
    assert 0 < got["likely", "acc,none"] < 1 and 0 < got["written", "exact_match,none"] < 1
    for (_, metric), value in got.items():
        name, _, _ = metric.partition(",")
        if not name.endswith("_stderr"):
            assert re.search(rf"\|{name} *\|.*\| *{value:.4f}\|", shown), shown


@pytest.mark.slow
def test_two_processes_give_the_scores_of_one(folder, shown):
    launcher = ["-m", "poprun", "--num-replicas", "4", "--num-instances", "2", warm.python()]
    flags = "--data_parallel 2 --tensor_parallel_1 2 --json".split()
    told = ours(folder, *flags, str(folder / "two.json"), launcher=launcher)
    got, expected = results_of(folder / "two.json"), results_of(folder / "ours.json")
    assert got == pytest.approx(expected, rel=1e-5)
    # Sums of other parts may be rounded otherwise, in the last digit that is printed, too.
    number = r"\d+\.\d{4}"
    assert re.sub(number, "", told) == re.sub(number, "", shown)
    values, others = ([float(each) for each in re.findall(number, s)] for s in (told, shown))
    assert values == pytest.approx(others, rel=1e-5, abs=1e-4) and values


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_examples_and_documents_are_as_many_as_asked_for(folder):
    found = command.evaluate_tasks(
        folder / "run", [folder / "likely.yaml"], num_fewshot=2, limit=3, tensor_parallel_1=2
    )
    assert found["step"] == 30 and found["n-shot"] == {"likely": 2}
    assert found["n-samples"]["likely"]["effective"] == 3


def run_words(folder, *words):
    with pytest.raises(UserError) as told:
        command.main(["--checkpoint", str(folder / "run"), *map(str, words)])
    assert "\n" not in str(told.value)
    return str(told.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tasks_that_cannot_be_run_are_told_in_one_line(folder, tmp_path, monkeypatch):
    said = run_words(folder, "--lm_eval", folder / "likely.yaml", "--stride", 3)
    assert said.startswith("--lm_eval: got tasks, and --text, --input_files or --stride;")
    said = run_words(folder, "--lm_eval", "nowhere.yaml")
    assert "--lm_eval: got nowhere.yaml: 'Spec 'nowhere.yaml' is not a registered" in said
    task = TASK.format(folder=tmp_path, name="missing") + LIKELY
    (tmp_path / "missing.yaml").write_text(task)
    assert "missing.jsonl" in run_words(folder, "--lm_eval", tmp_path / "missing.yaml")
    beams = (folder / "written.yaml").read_text().replace("max_gen_toks: 9", "num_beams: 3")
    (tmp_path / "beams.yaml").write_text(beams)
    said = run_words(folder, "--lm_eval", tmp_path / "beams.yaml", "--limit", 1)
    assert 'got generation_kwargs {"num_beams": 3}; expected some of until, max_gen_toks' in said
    kwargs = "temperature: 1, top_p: 0"
    none = (folder / "written.yaml").read_text().replace("max_gen_toks: 9", kwargs)
    (tmp_path / "none.yaml").write_text(none)
    said = run_words(folder, "--lm_eval", tmp_path / "none.yaml", "--limit", 1)
    assert said.startswith("--lm_eval: generation_kwargs: top_p: got 0.0; expected a number, at")
    (tmp_path / "likely.jsonl").write_text(json.dumps({"text": "a", "end": "猫" * 41}))
    (tmp_path / "likely.yaml").write_text(TASK.format(folder=tmp_path, name="likely") + LIKELY)
    said = run_words(folder, "--lm_eval", tmp_path / "likely.yaml")
    assert "continuation of 123 tokens; expected at most max_positions = 40" in said


def test_without_the_package_it_is_told_how_to_get_it(folder, monkeypatch):
    monkeypatch.delitem(sys.modules, "popxl_gpt.demo.harness", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval.api.instance", None)
    said = run_words(folder, "--lm_eval", "hellaswag")
    assert said.startswith("--lm_eval: got no package lm_eval") and "pip install" in said
