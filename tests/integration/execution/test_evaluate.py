"""Evaluation of a trained model: against Hugging Face's model in a plain loop, and as a process."""

import itertools
import json
import math
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tfrecord
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models

from popxl_gpt.config.presets import build, from_mapping, preset
from popxl_gpt.config.saving import load
from popxl_gpt.data.dataset import TokenDataset
from popxl_gpt.data.in_memory import SyntheticDataset, TokenArray
from popxl_gpt.data.mixture import MixedDataset
from popxl_gpt.data.prepare import main as prepare
from popxl_gpt.data.text_tokenizer import TextTokenizer
from popxl_gpt.data.tokenisation import (
    END_OF_TEXT,
    character_tokenizer,
    token_bytes,
    train_tokenizer,
)
from popxl_gpt.demo.commands import EvaluateOptions
from popxl_gpt.demo.evaluate import _sections, evaluate, main
from popxl_gpt.demo.evaluation_data import open_evaluated, tokenizer_of
from popxl_gpt.demo.job.text import check_made_by, read_tokenizer
from popxl_gpt.execution.inference.evaluation import Evaluation
from popxl_gpt.execution.inference.inference import evaluation, token_losses
from popxl_gpt.execution.variables import write_whole_weights
from popxl_gpt.utils.errors import DataError, UserError, exit_on_user_error
from tests import warm
from tests.integration.gpt_oracle import hugging_face, random_weights, small
from tests.integration.runs import run_job

ROOT = Path(__file__).parents[3]
SEQUENCE = 12
LINES = [f"line {number} of a text: über das Haus, 日本 {number * 7}\n" for number in range(400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Text, token files and a short run on them."""
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "text.txt").write_text("".join(LINES), encoding="utf-8")
    words = "--vocabulary_size 300 --sequence_length 31 --validation 0.1 --workers 1"
    assert (
        prepare(["text", f"{folder}/text.txt", "--output", f"{folder}/data", *words.split()]) == 0
    )
    words = (
        f"--config tiny --name run --run_folder {folder}/runs --vocabulary_size 300 --layers 2 "
        f"--sequence_length {SEQUENCE} --max_positions 40 --data_parallel 1 --steps 2 --samples 0 "
        "--tensor_parallel_1 1 --tensor_parallel_2 1 --validate_every 2 --validation_batches 2 "
        f"--input_files {folder}/data/train-*.tfrecord --tokenizer {folder}/data/tokenizer.json "
        f"--validation_files {folder}/data/validation-*.tfrecord"
    )
    run_job(*words.split())
    return folder


def validation_tokens(folder):
    """All tokens of the validation split, read with the independent package."""
    (path,) = folder.glob("data/validation-*.tfrecord")
    records = [
        r["input_ids"] for r in tfrecord.tfrecord_loader(str(path), None, {"input_ids": "int"})
    ]
    assert all(before[-1] == after[0] for before, after in itertools.pairwise(records))
    return np.concatenate([records[0][:1], *(record[1:] for record in records)])


def model_of(folder):
    """The run's weights in Hugging Face's model, float64."""
    model = load(folder / "runs/run/config.yml").model
    weights = {
        f"{file.stem}.{name.removeprefix('weights.')}": tensor
        for file in (folder / "runs/run/checkpoints/step_00000002").glob("*.safetensors")
        for name, tensor in load_file(file).items()
        if name.startswith("weights.")
    }
    return hugging_face(model, weights).eval()


def plain_loss(gpt, tokens, sequence, stride):
    """Sum of losses and number of tokens by a plain loop: each window counts what is new in it."""
    total, done, begin = 0.0, 0, 0
    labels = len(tokens) - 1
    while done < labels:
        begin = min(begin, max(0, labels - sequence))
        end = min(begin + sequence, labels)
        words = torch.from_numpy(tokens[begin : end + 1].astype(np.int64))
        with torch.no_grad():
            logits = gpt(input_ids=words[None, :-1]).logits[0]
        losses = torch.nn.functional.cross_entropy(logits, words[1:], reduction="none")
        total += losses[done - begin :].sum().item()
        done, begin = end, begin + stride
    return total, labels


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"stride": 5},
        {"stride": 1, "sequence_length": 7},
        {"sequence_length": 40, "stride": 33},
        {"data_parallel": 2, "tensor_parallel_1": 2, "widening": 3, "micro_batch_size": 2},
        {"tensor_parallel_2": 2, "widening": 1},
    ],
)
def test_the_loss_is_that_of_a_plain_loop_over_the_same_tokens(folder, settings):
    tokens = validation_tokens(folder)
    result = evaluate(folder / "runs/run", **settings)
    sequence = settings.get("sequence_length", SEQUENCE)
    total, labels = plain_loss(model_of(folder), tokens, sequence, settings.get("stride", sequence))
    found = result.measured
    assert found.tokens == labels == len(tokens) - 1
    assert found.loss == pytest.approx(total / labels, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(total / labels), rel=1e-5)
    tokenizer = Tokenizer.from_file(str(folder / "data/tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces = [tokenizer.id_to_token(token) for token in tokens[1:] if token != end]
    assert found.bytes == sum(map(len, pieces))  # byte-level: a character a byte
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / found.bytes, rel=1e-6)


@pytest.mark.slow
def test_text_gives_the_loss_of_its_tokens_and_bits_over_its_own_bytes(folder, tmp_path):
    texts = ["One text, short.\n", "日本 and " * 20]
    (tmp_path / "a.txt").write_text(texts[0], encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": texts[1]}), encoding="utf-8")
    result = evaluate(folder / "runs/run", text=[tmp_path], stride=4)
    tokenizer = Tokenizer.from_file(str(folder / "data/tokenizer.json"))
    end = [tokenizer.token_to_id(END_OF_TEXT)]
    tokens = np.array(end + sum((tokenizer.encode(text).ids + end for text in texts), []))
    total, labels = plain_loss(model_of(folder), tokens, SEQUENCE, 4)
    assert result.measured.tokens == labels
    assert result.measured.loss == pytest.approx(total / labels, rel=1e-6)
    assert result.measured.bytes == len("".join(texts).encode())


@pytest.mark.slow
def test_text_shorter_than_a_window_is_evaluated(folder, tmp_path):
    (tmp_path / "a.txt").write_text("a b")
    result = evaluate(folder / "runs/run", text=[tmp_path / "a.txt"], sequence_length=40)
    tokenizer = Tokenizer.from_file(str(folder / "data/tokenizer.json"))
    end = [tokenizer.token_to_id(END_OF_TEXT)]
    tokens = np.array([*end, *tokenizer.encode("a b").ids, *end])
    total, labels = plain_loss(model_of(folder), tokens, 40, 40)
    assert result.measured.tokens == labels < 40
    assert result.measured.loss == pytest.approx(total / labels, rel=1e-6)


def run(*words, launcher=()):
    plain = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("RANK", "WORLD_SIZE", "POPDIST_"))
    }
    python = warm.launcher() if launcher else warm.python()
    command = [python, *launcher, str(ROOT / "demo/evaluate.py"), *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=90, env={**plain, "OMP_NUM_THREADS": "1"}
    )


@pytest.mark.multi
def test_the_command_prints_a_table_and_writes_json(folder, tmp_path):
    done = run("--checkpoint", folder / "runs/run", "--json", tmp_path / "result.json")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    values = json.loads((tmp_path / "result.json").read_text())
    measured = evaluate(folder / "runs/run").measured
    assert values["loss"] == measured.loss and values["tokens"] == measured.tokens
    assert values["step"] == 2 and values["stride"] == values["sequence_length"] == SEQUENCE
    assert re.search(rf"^  loss +{measured.loss:.4f} nats per token$", done.stdout, re.M)
    assert re.search(rf"^  bits per byte +{measured.bits_per_byte:.4f}$", done.stdout, re.M)
    assert re.search(rf"^  tokens +{measured.tokens}, each once$", done.stdout, re.M)


@pytest.mark.multi
def test_two_processes_give_the_numbers_of_one(folder, tmp_path):
    flags = "--data_parallel 2 --tensor_parallel_1 2 --widening 2 --json".split()
    launcher = "-m poprun --num-replicas 4 --num-instances 2".split()
    words = ("--checkpoint", folder / "runs/run", *flags, tmp_path / "result.json")
    done = run(*words, launcher=[*launcher, warm.python()])
    assert done.returncode == 0, done.stderr
    values = json.loads((tmp_path / "result.json").read_text())
    measured = evaluate(folder / "runs/run").measured
    assert values["loss"] == pytest.approx(measured.loss, rel=1e-6)
    assert (values["tokens"], values["bytes"]) == (measured.tokens, measured.bytes)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "--checkpoint: got none; expected a run's folder"),
        ("--checkpoint nowhere", "--checkpoint: got nowhere, no folder; expected"),
        ("--checkpoint RUN --stride 13", "--stride: got 13; expected at most sequence_length = 12"),
        ("--checkpoint RUN --stride 0", "--stride: got '0'"),
        ("--checkpoint RUN --strid 3", "--strid: unknown flag. Did you mean '--stride'?"),
        ("--checkpoint RUN --steps 3", "--steps: got a flag that demo/evaluate.py does not use"),
        ("--checkpoint RUN --text none*.txt", "text files: got 'none*.txt', which matches no file"),
        ("--checkpoint RUN --input_files no*", "input files: got 'no*', which matches no file"),
        (
            "--checkpoint RUN --text a --input_files b",
            "--text: got text and --input_files; expected",
        ),
        ("--checkpoint RUN --tokenizer none.json", "--tokenizer: got none.json: No such file"),
        (
            "--checkpoint RUN --sequence_length 41",
            "--sequence_length: got 41; expected at most 40, the positions that",
        ),
        ("--checkpoint RUN --json /nowhere/a.json", "--json: got /nowhere/a.json: No such file"),
        ("--checkpoint RUN --json /", "--json: got /: Is a directory;"),
        ("--checkpoint RUN --limit 3", "--limit: got 3 without --lm_eval; expected tasks"),
        ("--checkpoint RUN --num_fewshot 1", "--num_fewshot: got 1 without --lm_eval;"),
    ],
)
def test_bad_input_is_one_message_and_code_two(folder, tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop, exit_on_user_error():
        main(words.replace("RUN", str(folder / "runs/run")).split())
    said = capsys.readouterr().err
    assert stop.value.code == 2 and says in said.replace("got 0", "got '0'"), said
    assert not list(tmp_path.iterdir())


def test_data_that_another_tokenizer_made_are_refused_by_name(folder, tmp_path):
    (tmp_path / "text.txt").write_text("other text has other tokens, which others make\n" * 400)
    words = "--vocabulary_size 280 --sequence_length 31 --validation 0 --workers 1"
    assert (
        prepare(["text", f"{tmp_path}/text.txt", "--output", f"{tmp_path}/o", *words.split()]) == 0
    )
    made = f"{tmp_path}/o/tokenizer.json"
    with pytest.raises(
        UserError, match=rf"--tokenizer: got .*, and data that {made} made; expected"
    ):
        evaluate(folder / "runs/run", [f"{tmp_path}/o/train-*.tfrecord"])
    tokenizer = read_tokenizer(folder / "data/tokenizer.json")
    parts = (folder / "data/train-*.tfrecord", tmp_path / "o")
    own, others = (TokenDataset(path, SEQUENCE, 300) for path in parts)
    check_made_by(tokenizer, "own", own)
    with pytest.raises(UserError, match=r"--tokenizer: got own"):
        check_made_by(tokenizer, "own", MixedDataset([own, others], [0.5, 0.5]))
    tokenizer.library.add_tokens(["<|pad|>"])  # what has no meaning in the data may be added
    check_made_by(TextTokenizer(tokenizer.library), "own", own)


def test_pieces_of_the_head_that_do_not_divide_an_evaluations_rows_become_fewer():
    one = {"data_parallel": 1, "tensor_parallel_1": 1, "tensor_parallel_2": 1}
    batch = {"micro_batch_size": 6, "global_batch_size": 6, "widening": 1}
    trained = preset("tiny", **one, **batch, head_serialisation=6)
    found = from_mapping(_sections(SimpleNamespace(config=trained), {}))
    assert found.execution.head_serialisation == 2
    rows = found.execution.widening * found.model.sequence_length
    assert math.gcd(rows, 6) == 2


@pytest.mark.parametrize(
    ("given", "pieces"),
    [
        ({}, 40),
        ({"micro_batch_size": 3}, 40),
        ({"sequence_length": 2048}, 2),
        ({"sequence_length": 1031}, 1),
    ],
)
def test_logits_of_a_long_sequence_come_in_pieces_of_about_a_thousand_tokens(given, pieces):
    one = {"data_parallel": 1, "tensor_parallel_1": 1, "tensor_parallel_2": 1}
    trained = SimpleNamespace(config=preset("tiny", **one, sequence_length=40960))
    assert build(_sections(trained, given), given).execution.head_serialisation == pieces
    own = {**given, "head_serialisation": 1}
    assert build(_sections(trained, own), own).execution.head_serialisation == 1


@pytest.mark.slow
def test_pieces_of_logits_do_not_change_the_loss(folder, monkeypatch):
    whole = evaluate(folder / "runs/run").measured.loss
    monkeypatch.setattr("popxl_gpt.demo.evaluate.ROWS", 4)
    assert evaluate(folder / "runs/run").measured.loss == pytest.approx(whole, rel=1e-6)


WRONG = [
    ({"stride": -3}, "stride: got -3; expected a whole number, at least 1, or none."),
    ({"stride": 0}, "stride: got 0; expected a whole number, at least 1, or none."),
    ({"text": ""}, "text: got ['']; expected a list of texts, none of them empty."),
    ({"sequence_length": 0}, "sequence_length: got 0; expected a whole number, at least 1."),
    ({"micro_batch_size": 0}, "micro_batch_size: got 0; expected a whole number, at least 1."),
    ({"widening": "2"}, "widening: got '2'; expected a whole number, at least 1. Write it"),
    ({"steps": 3}, "steps: unknown setting. Known are precision, "),
]


@pytest.mark.parametrize(("given", "says"), WRONG, ids=[str(given) for given, _ in WRONG])
def test_python_is_told_of_a_wrong_value_as_the_command_is(folder, given, says):
    with pytest.raises(UserError) as told:
        evaluate(folder / "runs/run", **given)
    assert says in str(told.value)


def test_help_names_every_flag_that_is_used_and_no_other(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    told = capsys.readouterr().out
    assert stop.value.code == 0
    for flag in ("checkpoint", "text", "stride", "json", "input_files", "widening", "device"):
        assert f"  --{flag} " in told
    assert "--steps" not in told and "--config" not in told


# Parts of data


def measured(dataset, batches, **settings):
    config = small(**settings)
    session = evaluation(config)
    write_whole_weights(session, config, random_weights(config.model).items())
    return Evaluation(session, config, dataset, batches), config


def test_a_part_is_spread_over_all_of_the_data_and_the_same_every_time():
    dataset = SyntheticDataset(12, 37, samples=400)
    first, _ = measured(dataset, 10)
    again, _ = measured(dataset, 10, seed=7, data_parallel=2, widening=2)
    assert np.array_equal(first.samples, again.samples)
    assert len(set(first.samples.tolist())) == 40 and not first.is_whole
    more, _ = measured(dataset, 20)
    assert np.array_equal(more.samples[:40], first.samples)
    counts, _ = np.histogram(more.samples, bins=8, range=(0, 400))
    assert counts.min() >= 3


def test_data_that_fit_into_the_batches_are_read_whole_and_every_token_once():
    tokens = np.random.default_rng(0).integers(0, 37, 12 * 9 + 6)
    dataset = TokenArray(tokens, 12, 37, 12)
    for batches in (3, 99, None):
        part, _ = measured(dataset, batches)
        found = part.measure()
        assert found.tokens == len(tokens) - 1 and found.standard_error is None
    part, _ = measured(dataset, 2)
    assert part.measure().tokens == 8 * 12 and part.measure().standard_error > 0


def test_bytes_are_not_known_where_those_of_a_token_that_counts_are_not():
    sizes = np.arange(37.0)
    sizes[5] = np.nan
    tokens = np.random.default_rng(0).integers(6, 37, 12 * 9 + 6)
    part, _ = measured(TokenArray(tokens, 12, 37, 12), None)
    part.token_bytes = sizes
    assert part.measure().bytes == tokens[1:].sum()
    tokens[50] = 5
    part.dataset = TokenArray(tokens, 12, 37, 12)
    found = part.measure()
    assert found.bytes is None and found.bits_per_byte is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", [str, Path])
def test_one_file_is_given_as_a_text_or_a_path(folder, kind):
    (path,) = folder.glob("data/validation-*.tfrecord")
    found = evaluate(folder / "runs/run", kind(path), sequence_length=8)
    assert (
        found.data == (str(path),) and found.measured.tokens == len(validation_tokens(folder)) - 1
    )


LETTERS = {letter: number for number, letter in enumerate("abc\n", start=1)}
WITH_UNKNOWN = {"<unk>": 0, **LETTERS}
TOKENIZERS = {
    # and whether the bytes of a text are known, of which it has every character
    "characters": (lambda: character_tokenizer(["abc\n"]), True),
    "unigram": (
        lambda: Tokenizer(models.Unigram([(t, -1.0) for t in WITH_UNKNOWN], unk_id=0)),
        True,
    ),
    "pairs": (lambda: Tokenizer(models.BPE(WITH_UNKNOWN, [], unk_token="<unk>")), True),
    "pairs that leave out": (lambda: Tokenizer(models.BPE(LETTERS, [])), False),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_bytes_of_text_are_not_known_where_the_tokenizer_lacks_a_character(tmp_path, kind):
    make, is_known = TOKENIZERS[kind]
    made = make()
    made.add_special_tokens([END_OF_TEXT])
    options = EvaluateOptions(text=(str(tmp_path),))
    for text, size in (("cab\n", 4 if is_known else None), ("cäb\n", None)):
        (tmp_path / "a.txt").write_text(text, encoding="utf-8")
        data, found = open_evaluated(preset("tiny"), options, TextTokenizer(made), 8)
        assert found == size and len(data) == 1


def test_text_of_json_is_that_of_its_field_or_the_whole_file(tmp_path, capsys):
    content = '[{"body": "ab"}, {"body": null}, {"body": "c"}]'
    (tmp_path / "a.json").write_text(content)
    tokenizer = TextTokenizer(character_tokenizer([content]))
    given = {"text": (str(tmp_path),)}
    for options, size in (({"text_field": "body"}, 3), ({"plain_text": True}, len(content))):
        _, found = open_evaluated(preset("tiny"), EvaluateOptions(**given, **options), tokenizer, 8)
        assert found == size
    assert capsys.readouterr().err.count("1 row left out that had null") == 1
    with pytest.raises(DataError, match="got no text in 'text' .*--text_field"):
        open_evaluated(preset("tiny"), EvaluateOptions(**given), tokenizer, 8)


def test_a_tokenizer_is_looked_for_in_a_folder_of_data_that_is_given(tmp_path):
    (tmp_path / "data").mkdir()
    character_tokenizer(["abc"]).save(str(tmp_path / "data/tokenizer.json"))
    folder = tmp_path / "run/checkpoints/step_1"
    beside = [*folder.parents[:2]]
    saved = SimpleNamespace(folder=folder, config=preset("tiny"), ends=[], beside=beside)
    for name in ("data", "data/train-00000.tfrecord"):
        config = preset("tiny", input_files=(str(tmp_path / name),), validate_every=0)
        assert tokenizer_of(saved, config, needed=True).classes == 5


@pytest.mark.slow
def test_the_standard_error_is_how_far_parts_are_from_the_whole():
    dataset = SyntheticDataset(12, 37, samples=400)
    whole, config = measured(dataset, None)
    losses = []
    with whole.session:
        for numbers in np.array_split(np.arange(400), 100):
            tokens = dataset.read(numbers)
            found = token_losses(whole.session, config, tokens[:, :-1], tokens[:, 1:])
            losses += found.mean(axis=1).tolist()
    part, _ = measured(dataset, 10)
    found = part.measure()
    expected = np.std(losses) * math.sqrt((1 - 0.1) / 40)
    assert found.loss == pytest.approx(np.mean([losses[i] for i in part.samples]), rel=1e-6)
    assert found.standard_error == pytest.approx(expected, rel=0.3)
    assert abs(found.loss - np.mean(losses)) < 4 * expected


def test_bytes_of_tokens_are_those_of_the_text_they_make():
    tokenizer = train_tokenizer(LINES, 300)
    sizes = token_bytes(tokenizer)
    for text in ("line 5 of a text", "日本 über\n", "\t x"):
        assert sizes[tokenizer.encode(text).ids].sum() == len(text.encode())
    assert sizes[tokenizer.token_to_id(END_OF_TEXT)] == 0


# Validation while training


def metrics_of(folder, name):
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_validation_of_all_is_the_evaluation_of_the_checkpoint(folder, tmp_path, capsys):
    words = (
        f"--config {folder}/runs/run/config.yml --run_folder {tmp_path} --validation_batches all "
        "--validate_every 1 --validate_first --validate_training --checkpoint.every 1"
    )
    run_job(*words.split())
    lines = metrics_of(tmp_path, "run")
    assert [line["step"] for line in lines] == [0, 1, 2]
    per_step = 8 * SEQUENCE
    assert [line["tokens"] for line in lines] == [0, per_step, 2 * per_step]
    for line in lines[1:]:
        checkpoint = tmp_path / "run/checkpoints" / f"step_{line['step']:08d}"
        expected = evaluate(checkpoint).measured
        assert line["validation_loss"] == pytest.approx(expected.loss, rel=1e-6)
        bits = line["validation_bits_per_byte"]
        assert bits == pytest.approx(expected.bits_per_byte, rel=1e-6)
        assert "validation_standard_error" not in line
    assert lines[0]["loss"] is None and lines[0]["validation_loss"] > lines[2]["validation_loss"]
    assert lines[0]["training_loss"] > lines[2]["training_loss"]
    told = re.sub(r"\d+\.\d+", "N", capsys.readouterr().out)
    assert "step 0/2  validation N  on training data N  N bits/byte" in told


@pytest.mark.slow
def test_a_part_has_a_standard_error_and_one_order_whatever_the_seed(folder, tmp_path):
    words = f"--config {folder}/runs/run/config.yml --run_folder {tmp_path} --learning_rate 1e-9"
    found = []
    for name, flags in (("a", ""), ("b", "--data_parallel 2 --widening 2 --micro_batch_size 2")):
        run_job(*words.split(), *flags.split(), "--name", name)
        found.append(metrics_of(tmp_path, name)[-1])
    assert found[0]["validation_standard_error"] > 0
    for name in ("validation_loss", "validation_standard_error", "validation_bits_per_byte"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-4)
