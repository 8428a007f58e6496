"""Token files as data sets: what is read, and what is refused in which words."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tfrecord

import popxl_gpt.data.dataset
from popxl_gpt.data.dataset import TokenDataset
from popxl_gpt.data.in_memory import TokenArray
from popxl_gpt.data.loader import BatchLoader
from popxl_gpt.data.masking import IGNORED, labels_of
from popxl_gpt.data.preparation import Settings, prepare
from popxl_gpt.data.records import RecordFile, index_path
from popxl_gpt.data.sources import text_source
from popxl_gpt.data.token_files import find_files
from popxl_gpt.utils.errors import DataError

LENGTH = 4
VOCABULARY = 100


def write(path, rows, feature="input_ids", kind="int"):
    """Write with the independent writer; it makes no index."""
    writer = tfrecord.TFRecordWriter(str(path))
    for row in rows:
        writer.write({feature: (row, kind)})
    writer.close()
    return path


def rows(count, first=0):
    return [
        [(first + row + token) % VOCABULARY for token in range(LENGTH + 1)] for row in range(count)
    ]


def flip(path, byte):
    content = bytearray(path.read_bytes())
    content[byte] ^= 0x10
    path.write_bytes(content)


@pytest.fixture
def no_verification(monkeypatch):
    """As for a data set that is too large to be checked when it is opened."""
    monkeypatch.setattr(popxl_gpt.data.dataset, "VERIFIED_BYTES", 0)


def test_samples_are_the_records_of_all_files_in_order_of_name(tmp_path):
    write(tmp_path / "b.tfrecord", rows(3, first=10))
    write(tmp_path / "a.tfrecord", rows(5))
    write(tmp_path / "c.tfrecord", rows(1, first=50))
    for files in (
        tmp_path,
        str(tmp_path / "*.tfrecord"),
        [tmp_path / "c.tfrecord", tmp_path / "[ab].tfrecord"],
    ):
        dataset = TokenDataset(files, LENGTH, VOCABULARY)
        assert len(dataset) == 9
        expected = rows(5) + rows(3, first=10) + rows(1, first=50)
        assert dataset.read(np.arange(9)).tolist() == expected
        assert dataset.read(np.array([8, 0, 5, 0])).tolist() == [
            expected[sample] for sample in (8, 0, 5, 0)
        ]
        assert dataset.read(np.array([3])).dtype == np.int32
        dataset.close()


def test_more_files_than_may_be_open_at_once_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(popxl_gpt.data.dataset, "_OPEN_FILES", 2)
    for file in range(7):
        write(tmp_path / f"{file}.tfrecord", rows(1, first=file))
    dataset = TokenDataset(tmp_path, LENGTH, VOCABULARY)
    samples = np.array([6, 0, 3, 6, 1, 2, 5, 4, 0])
    assert dataset.read(samples)[:, 0].tolist() == samples.tolist()


def test_a_missing_index_is_made_beside_the_file_once(tmp_path):
    path = write(tmp_path / "a.tfrecord", rows(3))
    TokenDataset(path, LENGTH, VOCABULARY)
    made = index_path(path).stat()
    assert RecordFile(path).has_index
    TokenDataset(path, LENGTH, VOCABULARY)
    assert index_path(path).stat().st_mtime_ns == made.st_mtime_ns


def test_refused_files_are_left_as_they_are(tmp_path):
    path = write(tmp_path / "a.tfrecord", rows(3))
    flip(path, -6)
    before = path.read_bytes()
    with pytest.raises(DataError):
        TokenDataset(path, LENGTH, VOCABULARY)
    assert [found.name for found in tmp_path.iterdir()] == [
        "a.tfrecord"
    ] and path.read_bytes() == before


def stream(folder, tokens, per_record, split="train", files=3):
    """A text as preparation leaves it in several files, with its description."""
    records = [tokens[i : i + per_record + 1] for i in range(0, len(tokens) - 1, per_record)]
    listed = []
    for number, part in enumerate(np.array_split(np.arange(len(records)), files)):
        path = write(folder / f"{split}-{number}.tfrecord", [records[i] for i in part])
        listed.append({"name": path.name, "bytes": path.stat().st_size, "records": len(part)})
    facts = {"files": listed, "tokens": len(tokens), "records": len(records)}
    info = {"vocabulary_size": VOCABULARY, "sequence_length": per_record, "splits": {split: facts}}
    (folder / "dataset.json").write_text(json.dumps(info))


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("per_record", [1, 3, 4, 7, 16, 29])
@pytest.mark.parametrize("stride", [None, 1, 3])
def test_records_of_any_length_give_samples_of_any_other_and_every_token_is_once(
    tmp_path, per_record, stride
):
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 60).tolist()
    stream(tmp_path, tokens, per_record)
    for length in (1, 4, 5, 16, 58, 59):
        step = None if stride is None else min(stride, length)
        dataset = TokenDataset(tmp_path, length, VOCABULARY, stride=step)
        samples = np.arange(len(dataset))
        found = dataset.read(samples)
        labels = [
            token
            for row, (begin, end) in zip(found, dataset.counted(samples))
            for token in row[1 + begin : 1 + end].tolist()
        ]
        assert labels == tokens[1:]
        starts = np.minimum(samples * (step or length), len(tokens) - 1 - length)
        assert found.tolist() == [tokens[start : start + length + 1] for start in starts]


def test_samples_of_the_records_length_are_the_records(tmp_path):
    tokens = list(range(61))
    stream(tmp_path, tokens, LENGTH)
    dataset = TokenDataset(tmp_path, LENGTH, VOCABULARY)
    expected = [tokens[i : i + LENGTH + 1] for i in range(0, 60, LENGTH)]
    assert dataset.read(np.arange(len(dataset))).tolist() == expected


def test_data_from_before_the_last_record_was_written_in_part_is_read(tmp_path):
    tokens = list(range(60))
    stream(tmp_path, tokens[:57], 8)
    path = tmp_path / "dataset.json"
    path.write_text(path.read_text().replace('"tokens": 57', '"tokens": 60'))
    dataset = TokenDataset(tmp_path, 14, VOCABULARY)
    assert len(dataset) == 4 and dataset.read(np.array([3])).tolist() == [tokens[42:57]]


def test_files_that_do_not_follow_each_other_are_not_joined(tmp_path):
    tokens = list(range(61))
    stream(tmp_path, tokens, 5)  # 12 records in 3 files
    files = [tmp_path / f"train-{number}.tfrecord" for number in (0, 2)]
    dataset = TokenDataset(files, 8, VOCABULARY)
    found = dataset.read(np.arange(len(dataset)))
    starts = [0, 8, 12, 40, 48, 52]
    assert found.tolist() == [tokens[start : start + 9] for start in starts]


def test_a_text_that_does_not_go_on_from_record_to_record_is_damaged(tmp_path):
    tokens = list(range(61))
    stream(tmp_path, tokens, 5)
    path = tmp_path / "train-1.tfrecord"
    write(path, [[t % 50 + 1 for t in tokens[i : i + 6]] for i in range(20, 40, 5)])
    with pytest.raises(DataError, match="train-1.tfrecord, record 0: got first token 21; expected"):
        TokenDataset(tmp_path, 8, VOCABULARY).read(np.arange(7))


def test_records_that_nothing_describes_are_texts_of_their_own(tmp_path):
    write(tmp_path / "a.tfrecord", [[1, 2, 3, 4, 5, 6, 7], [11, 12, 13, 14, 15, 16, 17]])
    dataset = TokenDataset(tmp_path, LENGTH, VOCABULARY)
    assert dataset.read(np.arange(4)).tolist() == [
        [1, 2, 3, 4, 5],
        [3, 4, 5, 6, 7],
        [11, 12, 13, 14, 15],
        [13, 14, 15, 16, 17],
    ]
    assert dataset.counted(np.arange(4)).tolist() == [[0, 4], [2, 4], [0, 4], [2, 4]]
    write(tmp_path / "b.tfrecord", [[1, 2, 3, 4, 5, 6, 7], [11, 12, 13, 14, 15], [1] * 7])
    with pytest.raises(DataError, match="record 1: got 5 tokens; expected 7"):
        TokenDataset(tmp_path / "b.tfrecord", LENGTH, VOCABULARY).read(np.arange(4))


def test_the_last_record_of_a_file_that_nothing_describes_may_be_shorter(tmp_path, caplog):
    content = [[1, 2, 3, 4, 5, 6, 7], [11, 12, 13, 14, 15, 16, 17], [21, 22, 23, 24, 25]]
    write(tmp_path / "a.tfrecord", content)
    dataset = TokenDataset(tmp_path, LENGTH, VOCABULARY)
    assert dataset.read(np.array([4])).tolist() == [[21, 22, 23, 24, 25]] and len(dataset) == 5
    assert not caplog.text
    assert len(TokenDataset(tmp_path, 6, VOCABULARY)) == 2
    assert "a.tfrecord, record 2: got 5 tokens; expected 7 as in the records" in caplog.text
    whole = TokenDataset(tmp_path, 6, VOCABULARY, stride=6)
    assert whole.counted(np.arange(3)).tolist() == [[0, 6], [0, 6], [0, 4]]


def test_a_text_in_memory_gives_the_samples_of_the_same_text_in_files(tmp_path):
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 30)
    stream(tmp_path, tokens.tolist(), 7)
    for length, stride in ((4, 4), (4, 3), (29, 29), (40, 8)):
        files = TokenDataset(tmp_path, length, VOCABULARY, stride=stride)
        memory = TokenArray(tokens, length, VOCABULARY, stride)
        samples = np.arange(len(files))
        assert len(memory) == len(files)
        assert np.array_equal(files.read(samples), memory.read(samples))
        assert np.array_equal(files.counted(samples), memory.counted(samples))


def test_the_fingerprint_names_the_data_wherever_it_lies(tmp_path):
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for count, folder in zip((3, 3, 4), folders):
        folder.mkdir()
        write(folder / "a.tfrecord", rows(count))
    one, two, three = (TokenDataset(folder, LENGTH, VOCABULARY).fingerprint for folder in folders)
    assert one == two != three


def test_the_fingerprint_tells_other_contents_of_the_same_size_and_keeps_its_first_part(tmp_path):
    whole = [rows(3), rows(3, first=1)]
    found = []
    for number, content in enumerate(whole):
        (tmp_path / str(number)).mkdir()
        write(tmp_path / str(number) / "a.tfrecord", content)
        found.append(TokenDataset(tmp_path / str(number), LENGTH, VOCABULARY).fingerprint)
    (files, contents), (other_files, other_contents) = (name.split("-") for name in found)
    assert files == other_files and contents != other_contents


def test_pieces_that_name_large_data_lie_in_all_of_its_files(monkeypatch):
    monkeypatch.setattr(popxl_gpt.data.dataset, "SAMPLED_BYTES", 100)
    monkeypatch.setattr(popxl_gpt.data.dataset, "SAMPLED_PIECE", 10)
    assert list(popxl_gpt.data.dataset._sampled([40, 60])) == [(0, 0, 40), (1, 0, 60)]
    sizes = [300, 5, 695]
    pieces = list(popxl_gpt.data.dataset._sampled(sizes))
    assert pieces[0] == (0, 0, 10) and pieces[-1] == (2, 685, 10) and len(pieces) == 10
    assert all(0 <= start and 0 < size <= sizes[number] - start for number, start, size in pieces)
    starts = [start + sum(sizes[:number]) for number, start, _ in pieces]
    assert starts == [i * 990 // 9 for i in range(10)]


def rewritten(path, content):
    """Other contents of the same size, with right checksums."""
    before = path.stat()
    write(path, content)
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda path: os.truncate(path, path.stat().st_size - 1), "expected the .* it had when"),
        (lambda path: rewritten(path, rows(3, first=7)), "written to after it was opened"),
        (lambda path: (path.unlink(), write(path, rows(2))), "written to|it had when"),
    ],
    ids=["shrinks", "is rewritten", "is replaced"],
)
@pytest.mark.parametrize("is_open", [True, False])
def test_a_file_that_changes_after_it_was_opened_is_told(tmp_path, change, words, is_open):
    path = write(tmp_path / "a.tfrecord", rows(3))
    dataset = TokenDataset(tmp_path, LENGTH, VOCABULARY)
    if not is_open:
        dataset.close()
    change(path)
    if is_open and "replaced" in os.environ["PYTEST_CURRENT_TEST"]:
        assert dataset.read(np.array([2])).tolist() == rows(3)[2:]  # still there for who has it
        return
    with pytest.raises(DataError, match=f"a.tfrecord: got .*{words}"):
        dataset.read(np.array([0]))


@pytest.mark.parametrize(
    ("content", "feature", "kind", "words"),
    [
        (
            [*rows(2), [1, 2, 3, 4], *rows(1)],
            "input_ids",
            "int",
            "record 2: got 4 tokens; expected 5",
        ),
        ([[1, 2, 3, 4]], "input_ids", "int", "record 0: got 4 tokens; expected at least 5"),
        ([[]], "input_ids", "int", "record 0: got 0 tokens"),
        (
            rows(1) + [[0, 1, 2, 100, 4]],
            "input_ids",
            "int",
            r"record 1: got token id 100; expected 0 to 99",
        ),
        ([[0, 1, -7, 3, 4]], "input_ids", "int", "record 0: got token id -7; expected 0 to 99"),
        ([[2**31 + 5, 1, 2, 3, 4]], "input_ids", "int", "record 0: got token id 2147483653"),
        (
            rows(1),
            "tokens",
            "int",
            r"record 0: got no feature 'input_ids' \(features found: 'tokens'\)",
        ),
        ([[0.5] * 5], "input_ids", "float", "record 0: got feature 'input_ids' of type float"),
    ],
)
def test_records_the_model_cannot_use_are_named(tmp_path, content, feature, kind, words):
    path = write(tmp_path / "bad.tfrecord", content, feature, kind)
    with pytest.raises(DataError, match=words) as caught:
        TokenDataset(path, LENGTH, VOCABULARY).read(np.arange(len(content)))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("record", [0, 5])
def test_a_flipped_bit_of_small_data_is_found_when_it_is_opened(tmp_path, record):
    path = write(tmp_path / "a.tfrecord", rows(6))
    frame = path.stat().st_size // 6
    flip(path, record * frame + frame // 2)
    with pytest.raises(
        DataError, match=rf"a.tfrecord, record {record}: got data with checksum .* damaged"
    ):
        TokenDataset(path, LENGTH, VOCABULARY)


def test_a_flipped_bit_of_large_data_is_found_when_it_is_read(tmp_path, no_verification):
    path = write(tmp_path / "a.tfrecord", rows(6))
    frame = path.stat().st_size // 6
    flip(path, 4 * frame + frame // 2)
    dataset = TokenDataset(path, LENGTH, VOCABULARY)
    assert dataset.read(np.array([0, 1, 2, 3, 5])).shape == (5, LENGTH + 1)
    with BatchLoader(dataset, 2, shuffle=False) as loader:
        loader.batch(1)
        with pytest.raises(DataError, match="a.tfrecord, record 4: got data with checksum"):
            loader.batch(2)


def test_a_flipped_length_of_large_data_is_found_when_it_is_read(tmp_path, no_verification):
    path = write(tmp_path / "a.tfrecord", rows(6))
    TokenDataset(path, LENGTH, VOCABULARY)
    flip(path, 4 * path.stat().st_size // 6)
    with pytest.raises(DataError, match="a.tfrecord, record 4: got a length with checksum"):
        TokenDataset(path, LENGTH, VOCABULARY).read(np.array([4]))


@pytest.mark.parametrize("spared", [1, 5, 30])
def test_a_truncated_file_is_refused_with_and_without_index(tmp_path, spared):
    path = write(tmp_path / "a.tfrecord", rows(6))
    TokenDataset(path, LENGTH, VOCABULARY)  # Makes the index.
    path.write_bytes(path.read_bytes()[:-spared])
    for _ in range(2):
        with pytest.raises(
            DataError, match=r"a.tfrecord, record 5: got \d+ bytes before the file ends.*cut off"
        ):
            TokenDataset(path, LENGTH, VOCABULARY)
        index_path(path).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ("none-*.tfrecord", "got '.*none-.*', which matches no file; expected TFRecord files"),
        ("missing.tfrecord", "missing.tfrecord', which matches no file"),
        (["good.tfrecord", "missing.tfrecord"], "missing.tfrecord', which matches no file"),
        ("empty_folder", "empty_folder', which matches no file"),
        ("empty.tfrecord", "empty.tfrecord: got an empty file"),
        ([], "input files: got none"),
    ],
)
def test_files_that_are_not_there_are_named(tmp_path, monkeypatch, files, words):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "good.tfrecord", rows(1))
    (tmp_path / "empty_folder").mkdir()
    (tmp_path / "empty.tfrecord").touch()
    with pytest.raises(DataError, match=words):
        TokenDataset(files, LENGTH, VOCABULARY)


def test_find_files_gives_each_file_once(tmp_path):
    paths = [write(tmp_path / name, rows(1)) for name in ("a.tfrecord", "b.tfrecord")]
    assert find_files([tmp_path / "*.tfrecord", tmp_path, paths[1]]) == paths


def test_indices_that_a_shell_names_beside_their_files_are_left_out(tmp_path):
    path = write(tmp_path / "a.tfrecord", rows(1))
    RecordFile(path).save_index()
    named = sorted(tmp_path.glob("a*"))
    assert len(named) == 2 and find_files(named) == [path]
    with pytest.raises(DataError, match=r"a.tfindex', which matches no file"):
        find_files(named[0])


def test_the_description_beside_the_files_is_checked_against_the_model(tmp_path):
    write(tmp_path / "a.tfrecord", rows(1))
    description = tmp_path / "dataset.json"
    description.write_text(json.dumps({"vocabulary_size": 100, "tokenizer": "tokenizer.json"}))
    assert TokenDataset(tmp_path, LENGTH, 100).info["tokenizer"] == "tokenizer.json"
    with pytest.raises(
        DataError, match="dataset.json: got data with vocabulary_size 100; expected at most.* 99"
    ):
        TokenDataset(tmp_path, LENGTH, 99)
    for content in ("{", "[]", '{"vocabulary_size": "many"}'):
        description.write_text(content)
        with pytest.raises(DataError, match="dataset.json: got no valid description"):
            TokenDataset(tmp_path, LENGTH, 100)


def prepared(folder, counts):
    """Files as preparation leaves them, with so many records each."""
    files = []
    for number, count in enumerate(counts):
        path = write(folder / f"train-{number}.tfrecord", rows(count, first=10 * number))
        RecordFile(path).save_index()
        files.append({"name": path.name, "bytes": path.stat().st_size, "records": count})
    description = {
        "vocabulary_size": VOCABULARY,
        "sequence_length": LENGTH,
        "splits": {"train": {"files": files}},
    }
    (folder / "dataset.json").write_text(json.dumps(description))
    return [row for number, count in enumerate(counts) for row in rows(count, first=10 * number)]


def open_files(folder):
    """Numbers of the token files that this process has open."""
    names = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return {
        int(path.stem.split("-")[1]) for path in folder.glob("*.tfrecord") if str(path) in names
    }


def test_each_instance_opens_its_share_of_the_files_and_others_when_it_reads_them(tmp_path):
    expected = prepared(tmp_path, [3, 2, 4, 1])
    whole = TokenDataset(tmp_path, LENGTH, VOCABULARY)
    whole.close()
    for instance, own in enumerate(({0, 3}, {1}, {2})):
        dataset = TokenDataset(tmp_path, LENGTH, VOCABULARY, instance=instance, instances=3)
        assert open_files(tmp_path) == own and len(dataset) == 10
        assert dataset.read(np.array([4])).tolist() == [expected[4]]
        assert open_files(tmp_path) == own | {1}
        assert dataset.read(np.arange(10)).tolist() == expected
        assert dataset.fingerprint == whole.fingerprint
        dataset.close()


def test_an_instance_finds_damage_in_its_share_at_once_and_elsewhere_when_it_reads_there(tmp_path):
    prepared(tmp_path, [3, 3])
    flip(tmp_path / "train-1.tfrecord", -6)
    with pytest.raises(DataError, match="train-1.tfrecord, record 2: got data with checksum"):
        TokenDataset(tmp_path, LENGTH, VOCABULARY, instance=1, instances=2)
    dataset = TokenDataset(tmp_path, LENGTH, VOCABULARY, instance=0, instances=2)
    assert len(dataset.read(np.arange(5))) == 5
    with pytest.raises(DataError, match="train-1.tfrecord, record 2: got data with checksum"):
        dataset.read(np.array([5]))


def test_an_instance_opens_files_at_once_whose_length_nobody_says(tmp_path):
    expected = prepared(tmp_path, [3, 2])
    (tmp_path / "dataset.json").unlink()
    dataset = TokenDataset(tmp_path, LENGTH, VOCABULARY, instance=0, instances=2)
    assert len(dataset) == 5 and dataset.read(np.arange(5)).tolist() == expected


def test_a_file_with_other_records_than_the_description_says_is_named(tmp_path):
    prepared(tmp_path, [3, 2])
    description = tmp_path / "dataset.json"
    description.write_text(description.read_text().replace('"records": 2', '"records": 7'))
    dataset = TokenDataset(tmp_path, LENGTH, VOCABULARY, instance=0, instances=2)
    with pytest.raises(
        DataError, match="train-1.tfrecord: got 2 records; expected the 7 that dataset.json"
    ):
        dataset.read(np.array([4]))


@pytest.mark.parametrize(
    "old, new, words",
    [
        ('"sequence_length": 4', '"sequence_length": 3', "record 0: got 5 tokens; expected 4"),
        (
            '"files": [',
            '"records": 5, "tokens": 19, "files": [',
            "train-1.tfrecord, record 1: got 5 tokens; expected 3",
        ),
        ('"bytes": ', '"bytes": 1', "bytes; expected the 1.* that dataset.json beside it says"),
    ],
    ids=["length of records", "tokens", "bytes"],
)
def test_a_description_that_lies_is_found_out_when_it_is_read(tmp_path, old, new, words):
    prepared(tmp_path, [3, 2])
    description = tmp_path / "dataset.json"
    text = description.read_text()
    assert old in text
    description.write_text(text.replace(old, new))
    with pytest.raises(DataError, match=words):
        TokenDataset(tmp_path, LENGTH, VOCABULARY)


def test_a_file_that_the_description_lists_and_is_gone_is_told(tmp_path, caplog):
    prepared(tmp_path, [3, 2])
    TokenDataset(tmp_path / "train-0.tfrecord", LENGTH, VOCABULARY)
    assert not caplog.records
    (tmp_path / "train-1.tfrecord").unlink()
    TokenDataset(tmp_path, LENGTH, VOCABULARY)
    assert "2 files, of which 1 are not there, the first train-1.tfrecord" in caplog.text


def test_importing_the_room_loads_neither_tokenizers_nor_torch():
    script = (
        "import sys, data; sys.exit(any(name in sys.modules for name in ('tokenizers', 'torch', "
        "'tfrecord')))"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def damaged_text(folder):
    """A prepared text of 40 tokens in records of four labels, of which number 3 is damaged."""
    (folder / "text.txt").write_text("abcdefghij" * 4)
    prepared = Settings(sequence_length=LENGTH, characters=True, validation=0.0)
    prepare(text_source([str(folder / "text.txt")]), folder / "out", prepared, report=print)
    path = folder / "out/train-00000.tfrecord"
    frame = int(RecordFile(path).offsets[1])
    flip(path, 3 * frame + frame // 2)
    return path, 3 * frame


@pytest.mark.parametrize("opens_all", [True, False])
def test_damaged_records_are_left_out_named_once_and_counted_if_asked(
    tmp_path, caplog, monkeypatch, opens_all
):
    if not opens_all:
        monkeypatch.setattr(popxl_gpt.data.dataset, "VERIFIED_BYTES", 0)
    path, byte = damaged_text(tmp_path)
    dataset = TokenDataset(path, LENGTH, VOCABULARY, skip_damaged=True)
    found = dataset.read(np.arange(len(dataset)))
    whole = [n for n in range(len(dataset)) if n != 3]
    np.testing.assert_array_equal(found[3], found[4])
    first = found[0, 0]
    tokens = [[first + (LENGTH * n + i) % 10 for i in range(1, LENGTH + 1)] for n in whole[:-1]]
    np.testing.assert_array_equal(found[whole[:-1], 1:], tokens)
    assert (found >= 0).all() and len(dataset.damaged) == 1
    (told,) = caplog.messages
    assert f"{path}, record 3: got data with checksum" in told and f"at byte {byte};" in told
    assert told.endswith("It is left out, record 1 so far.")
    again = TokenDataset(path, LENGTH, VOCABULARY, skip_damaged=True)
    np.testing.assert_array_equal(again.read(np.array([3])), found[3:4])


def test_labels_of_damaged_records_do_not_count_in_an_evaluation(tmp_path):
    path, _ = damaged_text(tmp_path)
    dataset = TokenDataset(path, LENGTH, VOCABULARY, stride=LENGTH, skip_damaged=True)
    labels = labels_of(dataset.read(np.arange(len(dataset)))[:, 1:])
    assert (labels == IGNORED).all(axis=1).nonzero()[0].tolist() == [3]
    assert (labels == IGNORED).sum() == LENGTH
    with pytest.raises(DataError, match="record 3: got data .* Or leave it out: --skip_damaged."):
        TokenDataset(path, LENGTH, VOCABULARY, stride=LENGTH)


@pytest.mark.parametrize("record", [0, 4])
def test_a_damaged_record_at_an_end_of_a_file_that_nothing_describes_is_left_out(
    tmp_path, caplog, no_verification, record
):
    path = write(tmp_path / "a.tfrecord", rows(5))
    frame = int(RecordFile(path).offsets[1])
    TokenDataset(path, LENGTH, VOCABULARY)  # makes its index
    flip(path, record * frame + frame // 2)
    with pytest.raises(DataError, match=f"record {record}: got data .* leave it out: --skip_dam"):
        TokenDataset(path, LENGTH, VOCABULARY)
    dataset = TokenDataset(path, LENGTH, VOCABULARY, skip_damaged=True)
    expected = rows(5)
    expected[record] = expected[(record + 1) % 5]  # the next one takes its place
    assert dataset.read(np.arange(len(dataset))).tolist() == expected
    assert len(caplog.messages) == 1 and "It is left out, record 1 so far." in caplog.text


def test_data_that_are_all_damaged_are_refused(tmp_path, no_verification):
    path, _ = damaged_text(tmp_path)
    frame = int(RecordFile(path).offsets[1])
    for record in (n for n in range(len(RecordFile(path))) if n != 3):
        flip(path, record * frame + frame // 2)
    dataset = TokenDataset(path, LENGTH, VOCABULARY, skip_damaged=True)
    with pytest.raises(DataError, match="got records that are all damaged; expected whole ones"):
        dataset.read(np.array([0]))
