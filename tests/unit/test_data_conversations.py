"""Conversations: prompts and answers as records, in which only answers count as labels."""

import json

import numpy as np
import pytest
import tfrecord
from tokenizers import Tokenizer

from popxl_gpt.config.presets import preset
from popxl_gpt.data.conversations import conversation_source, packed
from popxl_gpt.data.dataset import TokenDataset
from popxl_gpt.data.loader import BatchLoader
from popxl_gpt.data.masking import IGNORED, ids_of, labels_of, masked
from popxl_gpt.data.nanogpt import write_bins
from popxl_gpt.data.preparation import Settings, prepare
from popxl_gpt.data.prepare import main
from popxl_gpt.data.splits import write_split
from popxl_gpt.data.tokenisation import END_OF_TEXT
from popxl_gpt.demo.job.training_data import open_data
from popxl_gpt.utils.errors import DataError, UserError, exit_on_user_error

PAIRS = [(f"{a}+{b}=", f"{a + b}") for a in range(12) for b in range(9)]


def prepared(folder, lines, **changes):
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = Settings(**{"sequence_length": 24, "characters": True, "validation": 0.1, **changes})
    source = conversation_source([str(folder / "lines.jsonl")])
    return prepare(source, folder / "out", settings, report=lambda line: None)


def test_answers_and_the_ends_after_them_are_the_labels_and_nothing_else(tmp_path):
    info = prepared(tmp_path, [{"prompt": p, "answer": a} for p, a in PAIRS])
    tokenizer = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    found = []
    for path in sorted((tmp_path / "out").glob("*.tfrecord")):
        description = {"input_ids": "int", "loss_mask": "int"}
        for record in tfrecord.tfrecord_loader(str(path), None, description):
            ids, mask = record["input_ids"], record["loss_mask"]
            assert len(ids) == len(mask) == 25
            pieces = np.split(np.stack([ids, mask]), np.flatnonzero(ids == end) + 1, axis=1)
            for piece, counts in pieces:
                text = [tokenizer.decode(piece[counts == kind].tolist()) for kind in (0, 1)]
                if text != ["", ""]:
                    assert counts[-1] == 1 and piece[-1] == end
                    found.append(tuple(text))
    assert sorted(found) == sorted(PAIRS)
    assert info["masked"] and sum(s["documents"] for s in info["splits"].values()) == len(PAIRS)


@pytest.mark.parametrize("flag", ["input_files", "mix"])
def test_conversations_are_refused_without_masked_labels_by_the_flag_that_names_them(
    tmp_path, flag
):
    prepared(tmp_path, [{"prompt": p, "answer": a} for p, a in PAIRS])
    named = {
        "input_files": [f"{tmp_path}/out/train-*.tfrecord"],
        "mix": [f"{tmp_path}/out=1"],
    }
    config = preset("tiny", sequence_length=24, validate_every=0, **{flag: named[flag]})
    with pytest.raises(UserError, match=f"^--{flag}: got .* Give --masked_labels"):
        open_data(config)


def test_batches_have_the_ids_as_inputs_and_ignore_other_labels(tmp_path):
    prepared(tmp_path, [{"prompt": p, "answer": a} for p, a in PAIRS])
    data = TokenDataset(str(tmp_path / "out/train-*.tfrecord"), 24, 64)
    assert data.is_masked
    tokens = data.read(np.arange(len(data)))
    with BatchLoader(data, len(data), shuffle=False, prefetch=0) as loader:
        words, labels = loader.batch(0)
    np.testing.assert_array_equal(words, ids_of(tokens)[:, :-1])
    counts = tokens[:, 1:] >= 0
    np.testing.assert_array_equal(labels, np.where(counts, tokens[:, 1:], IGNORED))
    assert words.min() >= 0 and 0 < counts.mean() < 0.6


def test_messages_of_the_assistant_count_and_each_ends_with_a_line_break(tmp_path):
    messages = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "bye"},
        {"role": "assistant", "content": "so long"},
    ]
    prepared(tmp_path, [{"messages": messages}], validation=0.0, sequence_length=40)
    tokenizer = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    (tokens,) = TokenDataset(tmp_path / "out", 40, 64).read(np.arange(1))
    assert tokenizer.decode(ids_of(tokens).tolist()) == "be short\nhi\nho\nbye\nso long\n"
    assert tokenizer.decode(tokens[tokens >= 0].tolist()) == "ho\nso long\n"
    assert (tokens == tokenizer.token_to_id(END_OF_TEXT)).sum() == 1


@pytest.mark.parametrize("length", [3, 7, 50])
def test_conversations_stay_whole_where_they_fit_and_no_label_is_lost(length, tmp_path):
    generator = np.random.default_rng(0)
    given = []
    for number in range(40):
        size = int(generator.integers(2, 12))
        counts = np.arange(size) >= generator.integers(0, size)
        given.append(masked(np.full(size, number), counts))
    documents = [each.view(np.uint32) for each in given]
    records = np.concatenate(list(packed(documents, length, padding=99)))
    told = write_split(
        "train", documents, tmp_path, sequence_length=length, shard_bytes=2**20, padding=99
    )
    assert told.get("cut", 0) == sum(each.size > length + 1 for each in given)
    assert told["documents"] == 40 and told["records"] == len(records)
    assert records.shape[1] == length + 1 and (ids_of(records) == 99).mean() < 0.6
    for number, each in enumerate(given):
        rows = (ids_of(records) == number).any(axis=1).sum()
        if each.size <= length + 1 and (each[1:] >= 0).any():
            assert rows == 1
            kept = records[ids_of(records) == number]
            np.testing.assert_array_equal(kept, each)


@pytest.mark.parametrize("length", [3, 7, 50])
@pytest.mark.parametrize("size", [2, 8, 15, 16, 150])
def test_every_token_of_a_conversation_that_is_cut_is_a_label_once(size, length):
    counts = np.arange(size) % 3 > 0
    counts[8:31] = False
    given = [masked(np.arange(size) + first, counts) for first in (1000, 2000)]
    records = np.concatenate(list(packed((each.view(np.uint32) for each in given), length, 99)))
    words, labels = ids_of(records[:, :-1]), labels_of(records[:, 1:])
    of_own = labels // 1000 == words // 1000
    wanted = [each[1:][counts[1:]] for each in given]
    assert sorted(labels[of_own]) == np.concatenate(wanted).tolist()
    assert (words[of_own] == labels[of_own] - 1).all()


def test_marks_are_undone():
    tokens, counts = np.array([0, 5, 70000]), np.array([False, True, False])
    marked = masked(tokens, counts)
    np.testing.assert_array_equal(ids_of(marked), tokens)
    np.testing.assert_array_equal(labels_of(marked), [IGNORED, 5, IGNORED])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a"}', "got no texts 'prompt' and 'answer' (fields: 'prompt')"),
        ('{"prompt": "a", "answer": ""}', "got an empty answer"),
        ('{"messages": {}}', "got messages '{}'"),
        ('{"messages": [{"role": "robot", "content": "a"}]}', 'got message \'{"role": "robot"'),
        ('{"messages": [{"role": "user", "content": "a"}]}', "without one of the assistant"),
        ('{"prompt": "\\ud800", "answer": "a"}', "half of a surrogate pair"),
        ("[1]", "got '[1]'; expected a JSON object with texts 'prompt' and 'answer'"),
    ],
)
def test_lines_that_hold_no_conversation_are_named_or_left_out(tmp_path, capsys, line, words):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n' * 9 + line + "\n")
    asked = ["conversations", str(file), "--output", str(tmp_path / "out")]
    asked += ["--tokenizer", "characters", "--sequence_length", "4", "--workers", "1"]
    with pytest.raises(SystemExit) as stop, exit_on_user_error():
        main(asked)
    told = capsys.readouterr().err
    assert stop.value.code == 2 and words in told and "line 10 at byte 279" in told
    assert main([*asked, "--skip_damaged"]) == 0
    assert "1 damaged record left out" in capsys.readouterr().out


def test_files_without_masks_are_not_made_of_conversations(tmp_path):
    prepared(tmp_path, [{"prompt": p, "answer": a} for p, a in PAIRS])
    with pytest.raises(DataError, match="got conversations, of which only answers count"):
        write_bins(tmp_path / "out", tmp_path / "bins")
