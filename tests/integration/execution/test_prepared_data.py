"""Runs on folders that preparation made."""

import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from popxl_gpt.data.loader import BatchLoader
from popxl_gpt.data.prepare import main as prepare
from popxl_gpt.data.text_tokenizer import TextTokenizer
from popxl_gpt.demo.commands import parse_training
from popxl_gpt.demo.convert import main as convert
from popxl_gpt.demo.job.run_folder import RunFolder
from popxl_gpt.demo.job.training_data import in_steps, open_data
from popxl_gpt.demo.pretraining import main
from popxl_gpt.utils.errors import UserError

pytestmark = pytest.mark.slow
RUN = (
    "--config tiny --data_parallel 1 --tensor_parallel_1 1 --tensor_parallel_2 1 --layers 1 "
    "--name run --validate_every 0 --samples 0 --global_batch_size 2"
).split()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two, of different words and equally large vocabularies."""
    root, made = tmp_path_factory.mktemp("data"), []
    for seed in (1, 2):
        letters = random.Random(seed).sample("abcdefghijklmnopqrstuvwxyz", 12)
        words = ("".join(random.Random(n).choices(letters, k=5)) for n in range(seed, 3000))
        text, output = root / f"{seed}.txt", root / f"made{seed}"
        text.write_text(" ".join(words))
        flags = f"--output {output} --vocabulary_size 300 --sequence_length 8 --workers 1"
        assert prepare(["text", str(text), *flags.split(), "--validation", "0.1"]) == 0
        made.append(output)
    return made


def trained(folder: Path, *words: object) -> int:
    return main([*RUN, "--run_folder", str(folder), *map(str, words)])


def test_a_run_goes_on_with_its_own_tokenizer_alone(folders, tmp_path, capsys):
    mine, other = folders
    resume = "--checkpoint.load", "auto"
    assert trained(tmp_path, "--input_files", mine, "--steps", 2) == 0
    kept = tmp_path / "run/checkpoints/tokenizer.json"
    before = kept.read_bytes()
    for words in (
        ("--input_files", other),
        ("--config", tmp_path / "run/config.yml", "--input_files", other),
    ):
        with pytest.raises(ValueError, match="--tokenizer: got .*expected"):
            trained(tmp_path, *words, "--steps", 4, *resume)
    assert kept.read_bytes() == before
    assert trained(tmp_path, "--input_files", mine, "--steps", 4, *resume) == 0
    assert "continuing after step 2" in capsys.readouterr().out


def test_weights_of_a_model_are_not_trained_on_another_tokenizers_tokens(folders, tmp_path):
    assert trained(tmp_path, "--input_files", folders[0], "--steps", 2) == 0
    begin = "--config", tmp_path / "run/config.yml", "--init_from", tmp_path / "run"
    with pytest.raises(ValueError, match="Use the tokenizer that made the data"):
        trained(tmp_path / "tuned", *begin, "--input_files", folders[1])


def test_a_run_that_begins_with_a_model_keeps_its_tokenizer(folders, tmp_path, monkeypatch):
    mine, other = folders
    source, first = tmp_path / "run", tmp_path / "run/checkpoints/step_00000002"
    assert trained(tmp_path, "--input_files", mine, "--steps", 2) == 0
    exported = tmp_path / "theirs"
    assert convert(["to_hugging_face", str(source), str(exported)]) == 0
    monkeypatch.chdir(first)
    begin = "--vocabulary_size", 300, "--steps", 2, "--name"
    for number, path in enumerate((source, first, source / "checkpoints", exported, ".")):
        words = *begin, f"tuned{number}", "--init_from", path
        with pytest.raises(UserError, match=f"--init_from: got {path}, which .* and data that"):
            trained(tmp_path, *words, "--input_files", other)
        with pytest.raises(UserError, match=f"{other}/tokenizer.json, and --init_from {path}"):
            trained(
                tmp_path, *words, "--input_files", other, "--tokenizer", other / "tokenizer.json"
            )
    beside = tmp_path / "tuned4/checkpoints/tokenizer.json"
    assert not beside.exists()
    assert trained(tmp_path, *words, "--input_files", mine) == 0
    assert beside.read_bytes() == (source / "checkpoints/tokenizer.json").read_bytes()
    go_on = "--config", tmp_path / "tuned4/config.yml", "--checkpoint.load", "auto", "--steps", 4
    with pytest.raises(UserError, match="Use the tokenizer that made the data"):
        trained(tmp_path, *begin, "tuned4", *go_on, "--input_files", other / "train-*.tfrecord")
    assert trained(tmp_path, *begin, "tuned4", *go_on) == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("damage", [b"\xff", b"{}", b""])
def test_a_damaged_tokenizer_beside_checkpoints_costs_no_save(folders, tmp_path, damage):
    words = "--input_files", folders[0], "--checkpoint.load", "auto"
    assert trained(tmp_path, *words, "--steps", 2) == 0
    kept = tmp_path / "run/checkpoints/tokenizer.json"
    whole = kept.read_bytes()
    kept.write_bytes(damage)
    assert trained(tmp_path, *words, "--steps", 4) == 0
    assert kept.read_bytes() == whole
    assert (tmp_path / "run/checkpoints/step_00000004").is_dir()


def test_a_tokenizer_that_cannot_be_written_is_said_and_no_error(tmp_path, caplog):
    folder = RunFolder(tmp_path, tmp_path)
    (tmp_path / "tokenizer.json").mkdir()
    folder.keep_tokenizer(
        TextTokenizer(Tokenizer.from_str('{"model": {"type": "BPE", "vocab": {}, "merges": []}}'))
    )
    assert "not written" in caplog.text


def test_of_a_mixed_folder_in_the_home_folder_what_is_held_out_is_not_trained_on(
    folders, monkeypatch
):
    monkeypatch.setenv("HOME", str(folders[0].parent))
    flags = [*RUN, "--mix", "~/made1=1"]
    alone, _ = open_data(parse_training([*RUN, "--input_files", str(folders[0])])[0])
    mixed, validation = open_data(parse_training(flags)[0])
    assert validation is not None and len(validation)
    assert sorted(map(len, mixed.sources)) == [len(alone)]


def test_the_first_samples_alone_are_trained_on(folders):
    words = [*RUN, "--input_files", str(folders[0]), "--train_samples", "3"]
    config = parse_training([*words, "--epochs", "4"]).config
    data, _ = open_data(config)
    assert len(data) == 3 and in_steps(config).training.steps == 6  # 4 * 3 samples, 2 a step
    whole, _ = open_data(parse_training(words[:-2]).config)
    assert data.fingerprint != whole.fingerprint
    drawn = BatchLoader(data, 3, seed=0).batch(0)[0]
    expected = whole.read(np.arange(3))[:, :-1]
    assert sorted(drawn.tolist()) == sorted(expected.tolist())
    words[-1] = "1000000"
    with pytest.raises(
        UserError, match=f"--train_samples: got 1000000; expected at most the {len(whole)}"
    ):
        open_data(parse_training(words).config)
