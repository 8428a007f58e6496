"""Preparation: from text to token files, and the command line as a real process."""

import bz2
import collections
import functools
import gzip
import itertools
import json
import lzma
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import hypothesis
import numpy as np
import pyarrow.parquet
import pytest
import tfrecord
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import popxl_gpt.data.preparation
import popxl_gpt.data.shuffle
from popxl_gpt.config import preparing
from popxl_gpt.data import example
from popxl_gpt.data import prepare as data_prepare
from popxl_gpt.data.conversations import conversation_source
from popxl_gpt.data.dataset import TokenDataset
from popxl_gpt.data.dataset_info import implied_settings
from popxl_gpt.data.loader import BatchLoader
from popxl_gpt.data.nanogpt import read_bins
from popxl_gpt.data.preparation import Settings, prepare
from popxl_gpt.data.prepare import main
from popxl_gpt.data.records import RecordWriter
from popxl_gpt.data.shuffle import DocumentShuffle
from popxl_gpt.data.sources import stdlib_source, text_source
from popxl_gpt.data.splits import HeldOut, write_split
from popxl_gpt.data.text_tokenizer import TextTokenizer
from popxl_gpt.data.tokenisation import END_OF_TEXT, token_bytes, tokenise, train_tokenizer
from popxl_gpt.demo.commands import parse_training
from popxl_gpt.utils.errors import DataError, exit_on_user_error
from popxl_gpt.utils.files.folders import partial_folder, publish, resumable_folder

SCRIPT = Path(__file__).parents[2] / "data" / "prepare.py"
WORDS = "the cat sat on a mat and saw seven more cats run past, über das Haus: 日本 end".split()


def quiet(line):
    del line


def documents(count):
    """Documents of different lengths, each told from the others by its number."""
    return [
        f"{number} " + " ".join(WORDS[: 1 + number % len(WORDS)]) + "\n" for number in range(count)
    ]


@functools.cache
def small_tokenizer():
    return train_tokenizer(documents(20), 300)


def write_documents(folder, count=60):
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(documents(count)):
        (folder / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    return folder


def settings(**changes):
    return Settings(**{"sequence_length": 8, "vocabulary_size": 300, "validation": 0.2, **changes})


def read_split(folder, split):
    """All tokens of a split, joined, read with the independent package."""
    paths = sorted(folder.glob(f"{split}-*.tfrecord"))
    records = [
        record["input_ids"]
        for path in paths
        for record in tfrecord.tfrecord_loader(str(path), None, {"input_ids": "int"})
    ]
    for before, after in itertools.pairwise(records):
        assert before[-1] == after[0]
    return np.concatenate([records[0][:1], *(record[1:] for record in records)]), records


def texts_of(tokens, tokenizer):
    """The documents in a stream of tokens; the last one may be cut off."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces = np.split(tokens, np.flatnonzero(tokens == end) + 1)
    return [tokenizer.decode(piece[piece != end].tolist()) for piece in pieces if piece.size]


def snapshot(folder):
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def contents(folder):
    return {name: content for name, (content, _) in snapshot(folder).items()}


def run(*arguments, **options):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def test_short_documents_are_left_out_and_told(tmp_path):
    source, told = text_source([str(write_documents(tmp_path / "text"))]), []
    asked = settings(validation=0.0, min_tokens=12)
    info = prepare(source, tmp_path / "out", asked, report=told.append)
    tokenizer = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    long = [text for text in documents(60) if len(tokenizer.encode(text).ids) + 1 >= 12]
    assert 0 < len(long) < 60
    found = texts_of(read_split(tmp_path / "out", "train")[0], tokenizer)
    assert sorted(found) == sorted(long)
    assert info["splits"]["train"]["documents"] == len(long)
    assert f"{60 - len(long)} documents left out, of fewer than 12 tokens." in told


def test_samples_to_train_on_overlap_by_the_stride_of_preparation(tmp_path):
    source = text_source([str(write_documents(tmp_path / "text"))])
    prepare(source, tmp_path / "out", settings(stride=3), report=quiet)
    for split, stride in (("train", 3), ("validation", 8)):
        tokens, _ = read_split(tmp_path / "out", split)
        data = TokenDataset(str(tmp_path / f"out/{split}-*.tfrecord"), 8, 300)
        last = len(tokens) - 9
        begins = [min(stride * n, last) for n in range(1 + -(-last // stride))]
        expected = [tokens[begin : begin + 9] for begin in begins]
        np.testing.assert_array_equal(data.read(np.arange(len(data))), expected)


def test_conversations_have_no_stride(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    source = conversation_source([str(tmp_path / "a.jsonl")])
    with pytest.raises(DataError, match="stride: got 3 for conversations; expected text, whose"):
        prepare(source, tmp_path / "out", settings(stride=3), report=quiet)


def test_prepared_documents_are_the_given_ones_shuffled_and_held_out_once(tmp_path):
    source = text_source([str(write_documents(tmp_path / "text"))])
    info = prepare(source, tmp_path / "out", settings(), report=quiet)
    tokenizer = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    found = []
    for split in ("train", "validation"):
        tokens, records = read_split(tmp_path / "out", split)
        described = info["splits"][split]
        assert all(len(record) == 9 for record in records[:-1]) and 1 < len(records[-1]) <= 9
        assert described["records"] == len(records) == -(-(described["tokens"] - 1) // 8)
        assert described["tokens"] == len(tokens)
        found.append(texts_of(tokens, tokenizer))
        assert described["documents"] == len(found[-1])
    sizes = [info["splits"][split]["tokens"] for split in ("train", "validation")]
    assert sizes[1] == pytest.approx(0.2 * sum(sizes), rel=0.01, abs=1)
    # one document is cut: its end is held out, its beginning is the first of training
    whole = [*found[0][1:], found[0][0] + found[1][-1], *found[1][:-1]]
    assert sorted(whole) == sorted(documents(60))
    assert whole != sorted(whole, key=lambda text: int(text.split()[0]))
    assert info["vocabulary_size"] == tokenizer.get_vocab_size() == 300
    assert json.loads((tmp_path / "out/dataset.json").read_text()) == info


@pytest.mark.slow
def test_the_result_depends_on_input_and_seed_and_not_on_workers_buckets_or_call(
    tmp_path, monkeypatch
):
    source = text_source([str(write_documents(tmp_path / "text"))])
    for name, changes, workers in (("a", {}, 1), ("b", {}, 2), ("d", {"seed": 1}, 1)):
        prepare(source, tmp_path / name, settings(**changes), workers=workers, report=quiet)
    monkeypatch.setattr(popxl_gpt.data.shuffle, "BUCKET_BYTES", 256)
    monkeypatch.setattr(popxl_gpt.data.shuffle, "_BUFFER_BYTES", 512)
    prepare(source, tmp_path / "c", settings(), report=quiet)
    a, b, c, d = (contents(tmp_path / name) for name in "abcd")
    assert a == b == c
    assert (
        a["tokenizer.json"] == d["tokenizer.json"]
        and a["train-00000.tfrecord"] != d["train-00000.tfrecord"]
    )


def test_shards_hold_the_same_records_as_one_file(tmp_path):
    source = text_source([str(write_documents(tmp_path / "text"))])
    prepare(source, tmp_path / "one", settings(), report=quiet)
    info = prepare(source, tmp_path / "many", settings(shard_bytes=200), report=quiet)
    names = [file["name"] for file in info["splits"]["train"]["files"]]
    assert len(names) > 5 and names == sorted(
        path.name for path in (tmp_path / "many").glob("train-*.tfrecord")
    )
    assert np.array_equal(
        read_split(tmp_path / "one", "train")[0], read_split(tmp_path / "many", "train")[0]
    )
    dataset = TokenDataset(tmp_path / "many/train-*.tfrecord", 8, 300)
    assert len(dataset) == info["splits"]["train"]["records"]


def test_a_second_call_reuses_and_a_different_one_refuses_unless_told(tmp_path):
    text = write_documents(tmp_path / "text")
    out = tmp_path / "out"
    lines = []
    first = prepare(text_source([str(text)]), out, settings(), report=quiet)
    before = snapshot(out)
    assert prepare(text_source([str(text)]), out, settings(), report=lines.append) == first
    assert "is there already" in lines[0] and snapshot(out) == before
    (text / "new.txt").write_text("one more document that nobody has seen\n")
    for source, changes in (
        (text_source([str(text)]), {}),
        (text_source([str(text)]), {"seed": 1}),
    ):
        with pytest.raises(
            DataError, match="out: got data prepared from other input, .*--overwrite"
        ):
            prepare(source, out, settings(**changes), report=quiet)
    assert snapshot(out) == before
    prepare(text_source([str(text)]), out, settings(), overwrite=True, report=quiet)
    assert contents(out) != {name: content for name, (content, _) in before.items()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text"]


def test_a_damaged_result_is_not_taken_for_a_whole_one(tmp_path):
    source = text_source([str(write_documents(tmp_path / "text"))])
    out = tmp_path / "out"
    prepare(source, out, settings(), report=quiet)
    whole = contents(out)
    for damage in (
        lambda: (out / "train-00000.tfrecord").write_bytes(whole["train-00000.tfrecord"][:-1]),
        lambda: (out / "validation-00000.tfrecord").unlink(),
        lambda: (out / "tokenizer.json").unlink(),
        lambda: (out / "dataset.json").write_text("{"),
    ):
        damage()
        with pytest.raises(DataError, match="--overwrite"):
            prepare(source, out, settings(), report=quiet)
        prepare(source, out, settings(), overwrite=True, report=quiet)
        assert contents(out) == whole


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_somebody_else_is_never_replaced(tmp_path, overwrite):
    source = text_source([str(write_documents(tmp_path / "text"))])
    before = snapshot(tmp_path / "text")
    for output in (tmp_path / "text", tmp_path / "text/000.txt"):
        with pytest.raises(DataError, match="something not made by data/prepare.py"):
            prepare(source, output, settings(), overwrite=overwrite, report=quiet)
    assert snapshot(tmp_path / "text") == before
    (tmp_path / "empty").mkdir()
    prepare(source, tmp_path / "empty", settings(), report=quiet)


def test_an_existing_tokenizer_is_used_and_must_end_documents(tmp_path):
    source = text_source([str(write_documents(tmp_path / "text"))])
    prepare(source, tmp_path / "trained", settings(), report=quiet)
    tokenizer = tmp_path / "trained/tokenizer.json"
    given = settings(vocabulary_size=None, tokenizer=tokenizer)
    prepare(source, tmp_path / "given", given, report=quiet)
    for name in ("tokenizer.json", "train-00000.tfrecord", "validation-00000.tfrecord"):
        assert contents(tmp_path / "given")[name] == contents(tmp_path / "trained")[name]
    content = tokenizer.read_text()
    for bad, words in (
        (content.replace(END_OF_TEXT, "<s>"), "got no token"),
        ("{}", "expected a tokenizer.json"),
    ):
        tokenizer.write_text(bad)
        with pytest.raises(DataError, match=words):
            prepare(source, tmp_path / "bad", given, report=quiet)


@pytest.mark.slow
@hypothesis.settings(deadline=None, max_examples=50)
@given(st.lists(st.text(max_size=30), max_size=12), st.integers(1, 40))
def test_tokens_decode_to_the_documents_in_their_order(texts, batch_characters):
    tokenizer = small_tokenizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(popxl_gpt.data.tokenisation, "_BATCH_CHARACTERS", batch_characters)
        encoded = list(tokenise(texts, TextTokenizer(tokenizer)))
    assert len(encoded) == len(texts)
    for text, tokens in zip(texts, encoded):
        if text.strip():
            assert tokens[-1] == 0 and 0 not in tokens[:-1]
            assert tokenizer.decode(tokens[:-1].tolist()) == text
        else:
            assert tokens.size == 0


def test_text_that_spells_the_end_of_text_does_not_end_it():
    tokenizer = small_tokenizer()
    (tokens,) = tokenise([f"a{END_OF_TEXT}b"], TextTokenizer(tokenizer))
    assert tokens.tolist().count(0) == 1
    assert tokenizer.decode(tokens[:-1].tolist()) == f"a{END_OF_TEXT}b"


@pytest.mark.slow
def test_workers_keep_the_order_and_clean_each_document(monkeypatch):
    monkeypatch.setattr(popxl_gpt.data.tokenisation, "_BATCH_CHARACTERS", 200)
    tokenizer = small_tokenizer()
    serial = list(tokenise(documents(200), TextTokenizer(tokenizer), str.upper))
    parallel = list(tokenise(documents(200), TextTokenizer(tokenizer), str.upper, workers=2))
    assert all(np.array_equal(one, two) for one, two in zip(serial, parallel, strict=True))
    assert tokenizer.decode(serial[150][:-1].tolist()) == documents(200)[150].upper()


def test_tokenising_reads_no_further_ahead_than_a_few_batches(monkeypatch):
    monkeypatch.setattr(popxl_gpt.data.tokenisation, "_BATCH_CHARACTERS", 100)
    tokenizer = small_tokenizer()
    taken = itertools.count()
    endless = (f"document {next(taken)}" for _ in itertools.count())
    results = tokenise(endless, TextTokenizer(tokenizer))
    for _ in range(30):
        next(results)
    assert next(taken) < 60


def by_rank(documents, seed):
    """By SplitMix64 of their numbers, in plain integers."""

    def scrambled(value, key):
        value = (value + key * 0x9E3779B97F4A7C15 + 1) % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            value = (value ^ value >> shift) * factor % 2**64
        return value ^ value >> 31

    key = scrambled(seed, 1)
    numbers = sorted(range(len(documents)), key=lambda number: scrambled(number, key))
    return [documents[number].tolist() for number in numbers if documents[number].size]


@pytest.mark.slow
@hypothesis.settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 9), max_size=40), st.integers(0, 3), st.integers(1, 2000))
def test_the_shuffle_keeps_every_document_and_its_order_needs_no_memory(
    lengths, seed, bucket_bytes
):
    given_documents = [
        np.full(length, number, dtype=np.uint32) for number, length in enumerate(lengths)
    ]
    orders = []
    # in memory, by buckets, and by buckets that are scattered again
    for buckets, files, buffer in (
        (2**40, 256, 2**40),
        (bucket_bytes, 256, 50),
        (bucket_bytes, 2, 50),
    ):
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
            patch.setattr(os, "fsync", lambda _: None)  # thousands of them
            patch.setattr(popxl_gpt.data.shuffle, "BUCKET_BYTES", buckets)
            patch.setattr(popxl_gpt.data.shuffle, "MAX_BUCKETS", files)
            patch.setattr(popxl_gpt.data.shuffle, "_BUFFER_BYTES", buffer)
            shuffle = DocumentShuffle(Path(folder) / "buckets", seed, 4 * sum(lengths))
            for document in given_documents:
                shuffle.add(document)
            orders.append([document.tolist() for document in shuffle])
    assert orders[0] == orders[1] == orders[2] == by_rank(given_documents, seed)
    assert collections.Counter(map(tuple, orders[0])) == collections.Counter(
        tuple(document.tolist()) for document in given_documents if document.size
    )


@pytest.mark.slow
def test_the_memory_of_the_shuffle_is_bounded_for_any_number_and_length(tmp_path, monkeypatch):
    size, documents = 2**16, 40000
    monkeypatch.setattr(popxl_gpt.data.shuffle, "BUCKET_BYTES", size)
    monkeypatch.setattr(popxl_gpt.data.shuffle, "_BUFFER_BYTES", size)
    monkeypatch.setattr(popxl_gpt.data.shuffle, "MAX_BUCKETS", 2)
    token = np.ones(1, dtype=np.uint32)
    tracemalloc.start()
    # said to be a thousand million documents of a thousand tokens
    shuffle = DocumentShuffle(tmp_path / "buckets", 0, 4 * 1000 * 10**9)
    for _ in range(documents):
        shuffle.add(token)
    assert sum(1 for _ in shuffle) == documents
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * size < 16 * documents
    assert len(list((tmp_path / "buckets").iterdir())) == 3  # two buckets, and the progress


def test_the_memory_of_records_is_that_of_few_whatever_their_length(tmp_path):
    documents = (np.full(2**16, 2**21, np.uint32) for _ in range(32))
    tracemalloc.start()
    told = write_split("train", documents, tmp_path, sequence_length=2**17, shard_bytes=2**40)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert told["records"] == 16 and peak < 2**26


@pytest.mark.parametrize(
    ("kind", "limit", "expected"),
    [
        ("file", 1000, ["one\ntwo\n\n\nthree\nfour"]),
        ("file", 3, ["one\n", "two\n", "\n\nthre", "e\nfour"]),
        ("line", 1000, ["one", "two", "", "", "three", "four"]),
        ("paragraph", 1000, ["one\ntwo\n\n\n", "three\nfour"]),
        ("paragraph", 4, ["one\n", "two\n", "\n\nthre", "e\nfour"]),
    ],
)
def test_text_files_are_cut_into_documents(tmp_path, kind, limit, expected):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\ntwo\r\n\n\nthree\nfour")
    found = list(
        text_source([str(tmp_path / "a.txt")], documents=kind, document_bytes=limit).documents()
    )
    assert found == expected
    if kind != "line":
        assert "".join(found) == "one\ntwo\n\n\nthree\nfour"


@pytest.mark.parametrize(
    ("texts", "share"),
    [(["word and word \n" * 3000], 0.05), (["a b c " * 500, "d e " * 200, "f g " * 900], 0.1)],
)
def test_the_share_of_tokens_asked_for_is_held_out_of_long_documents(tmp_path, texts, share):
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    source = text_source([str(tmp_path)], document_bytes=2**14)
    info = prepare(source, tmp_path / "out", settings(validation=share), report=quiet)
    tokens = {split: facts["tokens"] for split, facts in info["splits"].items()}
    assert tokens["validation"] == pytest.approx(share * sum(tokens.values()), rel=0.01)


@hypothesis.settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(0, 400))
def test_what_is_held_out_and_what_is_left_are_all_documents_once(lengths, tokens):
    pieces = [np.full(length, number + 1, np.uint32) for number, length in enumerate(lengths)]
    documents = iter(pieces)
    held = HeldOut(documents, tokens, 0)
    found = [piece.tolist() for piece in held]
    left = [piece[:-1].tolist() for piece in held.rest] + [piece.tolist() for piece in documents]
    count = collections.Counter(itertools.chain(*found, *left))
    assert count == {number + 1: length for number, length in enumerate(lengths)}
    assert all(piece[-1] == 0 for piece in held.rest) and len(held.rest) <= 1
    wanted = min(tokens, sum(lengths))
    assert abs(sum(map(len, found)) - wanted) <= tokens // 100


def write_lines(path, texts, opener=open):
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"id": 1, "text": text}) + "\n" for text in texts)
    return path


@pytest.mark.parametrize(
    ("name", "opener"),
    [
        ("a.jsonl", open),
        ("a.ndjson.gz", gzip.open),
        ("a.jsonl.xz", lzma.open),
        ("a.jsonl.bz2", bz2.open),
        ("a.jsonl.zst", zstandard.open),
    ],
)
def test_json_lines_give_their_texts(tmp_path, name, opener):
    texts = ["one\n\ntwo", "", 'quoted "three"', "日本\n", "five " * 20]
    path = write_lines(tmp_path / name, texts, opener)
    assert list(text_source([str(path)]).documents()) == [text for text in texts if text]
    cut = list(text_source([str(path)], document_bytes=10).documents())
    assert "".join(cut) == "".join(texts) and max(map(len, cut)) <= 20


def test_compressed_text_is_the_text(tmp_path):
    with gzip.open(tmp_path / "a.txt.gz", "wt", encoding="utf-8") as file:
        file.write("one\ntwo\n")
    assert list(text_source([str(tmp_path)], documents="line").documents()) == ["one", "two"]


def test_zst_files_of_several_frames_are_read_whole(tmp_path):
    parts = [bytes([97 + n]) * (10 ** (n + 1)) for n in range(6)]
    path = tmp_path / "a.txt.zst"
    path.write_bytes(b"".join(map(zstandard.compress, parts)))
    source = text_source([str(path)], document_bytes=2**31 - 1)
    assert "".join(source.documents()).encode() == b"".join(parts)
    path.write_bytes(b"no frame")
    with pytest.raises(DataError, match="got compressed data that are damaged"):
        list(source.documents())


@pytest.mark.slow
def test_parquet_gives_the_texts_of_a_column_a_document_a_row(tmp_path):
    texts = [f"text {number}\n" * (number % 5) for number in range(2500)]
    table = pyarrow.table({"number": range(2500), "body": texts[:-1] + [None]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    found = list(text_source([str(tmp_path)], text_field="body").documents())
    assert found == [text for text in texts[:-1] if text]
    with pytest.raises(
        DataError, match=r"got no text in 'number' \(columns: 'number' \(int64\), 'b"
    ):
        list(text_source([str(tmp_path)], text_field="number").documents())


def test_tables_whose_text_is_not_utf8_are_refused_in_words(tmp_path):
    parts = [pyarrow.py_buffer(np.array([0, 2], np.int32)), pyarrow.py_buffer(b"a\xff")]
    column = pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, *parts])
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet: got text in 'text' that is not UTF-8 \(inv"):
        list(text_source([str(tmp_path)]).documents())


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.txt.zst").touch()
    with pytest.raises(DataError, match="zstandard reads, which is not installed.*pip install"):
        list(text_source([str(tmp_path)]).documents())


def test_damaged_json_lines_are_left_out_counted_and_named_if_asked(tmp_path):
    good = documents(60)
    path = write_lines(tmp_path / "a.jsonl", good)
    lines = path.read_bytes().splitlines(keepends=True)
    bad = [b"{", b'"a"\n', b'{"txt": "x"}\n', b'{"text": "\\ud800"}\n', b"\xff\n"]
    bad[0] += b"\n"
    path.write_bytes(b"".join([*lines[:20], *bad, *lines[20:]]))
    start = len(b"".join(lines[:20]))
    with pytest.raises(DataError, match=rf"a.jsonl, line 21 at byte {start}: got .*--skip_damaged"):
        list(text_source([str(path)]).documents())
    source = text_source([str(path)], skip_damaged=True)
    assert list(source.documents()) == good and len(source.left_out.records) == 5
    told = []
    info = prepare(source, tmp_path / "out", settings(), report=told.append)
    assert info["damaged"] == 5
    assert any(f"5 damaged records left out, the first at byte {start} of" in x for x in told)


def test_folders_and_globs_give_each_file_once_without_hidden_ones(tmp_path):
    for name in ("b/c.txt", "a.txt", ".hidden/x.txt", "b/.y.txt", "b/d.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert list(text_source([str(tmp_path)]).documents()) == ["a.txt", "b/c.txt", "b/d.md"]
    patterns = [str(tmp_path / "**/*.txt"), str(tmp_path / "a.txt")]
    assert list(text_source(patterns).documents()) == ["a.txt", "b/c.txt"]


def test_links_to_folders_are_followed_and_each_folder_is_read_once(tmp_path):
    names = ("text/a.txt", "text/b/b.txt", "other/c.txt", "other/d/d.txt", "above.txt")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    links = {"a": "b", "circle": ".", "above": "..", "one": "../other", "two": "../other/d"}
    for name, target in links.items():
        (tmp_path / "text" / name).symlink_to(target)
    (tmp_path / "other/back").symlink_to("../text")
    assert list(text_source([str(tmp_path / "text")]).documents()) == list(names[:4])


def test_a_file_that_several_inputs_or_links_lead_to_is_read_once(tmp_path):
    for name in ("a/a.txt", "b/b.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    (tmp_path / "a/again.txt").symlink_to("a.txt")
    (tmp_path / "b/a").symlink_to("../a")
    first, second = tmp_path / "a", tmp_path / "b"
    for inputs, expected in (
        ([first], ["a/a.txt"]),
        ([first, second], ["a/a.txt", "b/b.txt"]),
        ([second, first], ["a/a.txt", "b/b.txt"]),
        ([first / "a.txt", second / "../a/a.txt", first / "again.txt"], ["a/a.txt"]),
    ):
        assert sorted(text_source([*map(str, inputs)]).documents()) == expected


def test_the_standard_library_is_read_once_per_file_without_installed_packages(tmp_path):
    for name in (
        "os.py",
        "json/decoder.py",
        "json/copy.py",
        "site-packages/torch.py",
        "__pycache__/x.py",
        "notes.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f'"""Docstring of {name}."""\n')
    (tmp_path / "json/copy.py").write_text((tmp_path / "os.py").read_text())
    (tmp_path / "latin.py").write_bytes("# coding: latin-1\n# schön\n".encode("latin-1"))
    (tmp_path / "bad.py").write_bytes(b"# \xff\n")
    found = list(stdlib_source(tmp_path).documents())
    assert sorted(found) == [
        '"""Docstring of json/decoder.py."""\n',
        '"""Docstring of os.py."""\n',
        "# coding: latin-1\n# schön\n",
    ]
    with pytest.raises(DataError, match="no Python source files"):
        stdlib_source(tmp_path / "__pycache__/..//site-packages/none")


@pytest.mark.multi
def test_the_demo_command_prepares_what_the_model_can_train_on(tmp_path, capsys):
    arguments = (
        "stdlib",
        "--max_bytes",
        150_000,
        "--sequence_length",
        32,
        "--vocabulary_size",
        400,
    )
    outputs = [tmp_path / "one", tmp_path / "two"]
    first = run(*arguments, "--output", outputs[0], "--workers", 2, cwd=tmp_path)
    second = run(
        *arguments,
        "--output",
        outputs[1],
        "--workers",
        1,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert contents(outputs[0]) == contents(outputs[1])
    assert "train: " in first.stdout and first.stderr == ""
    dataset = TokenDataset(outputs[0] / "train-*.tfrecord", 32, 400)
    tokenizer = Tokenizer.from_file(str(outputs[0] / dataset.info["tokenizer"]))
    with BatchLoader(dataset, 8) as loader:
        ids, labels = loader.batch(0)
    assert ids.shape == (8, 32) and np.array_equal(ids[:, 1:], labels[:, :-1])
    text = "".join(tokenizer.decode(row.tolist()) for row in dataset.read(np.arange(len(dataset))))
    assert "def " in text and '"""' in text and "import" in text
    assert main(["check", str(outputs[0])]) == 0
    assert "all checksums right" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--minutes 1", 1024),
        ("--minutes 5", 2048),
        ("--minutes 0.01", 512),
        ("--minutes 1e9", 32768),
        ("--minutes 5 --vocabulary_size 300", 300),
        ("--minutes 5 --tokenizer characters", None),
        ("", 50257),
    ],
)
def test_minutes_choose_the_size_of_a_tokenizer_that_is_trained(
    tmp_path, monkeypatch, words, expected
):
    asked = []
    monkeypatch.setattr(preparing, "usable_cores", lambda: 2)
    monkeypatch.setattr(
        data_prepare, "prepare", lambda source, output, settings, **_: asked.append(settings)
    )
    monkeypatch.setattr(data_prepare, "_show", lambda *_: None)
    (tmp_path / "a.txt").write_text("some words")
    assert main(["text", str(tmp_path), *words.split()]) == 0
    assert [settings.vocabulary_size for settings in asked] == [expected]


@pytest.mark.parametrize("kind", ["text", "conversations"])
def test_the_command_that_is_shown_trains_on_what_was_prepared(tmp_path, capsys, kind):
    text, output = tmp_path / "in.jsonl", tmp_path / "it's"
    line = {"text": "some words " * 20, "prompt": "so? " * 20, "answer": "yes"}
    text.write_text(f"{json.dumps(line)}\n" * 100)
    words = "--vocabulary_size 300 --sequence_length 128 --workers 1"
    assert main([kind, str(text), "--output", str(output), *words.split()]) == 0
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("Train on it: ")
    if kind == "conversations":
        run = tmp_path / "run"
        run.mkdir()
        (run / "config.yml").write_text("model: {vocabulary_size: 300}")
        command = command.replace("RUN", str(run))
    python, script, *arguments = shlex.split(command)
    assert (python, script) == ("python", "demo/pretraining.py")
    config = parse_training(arguments).config
    assert config.training.masked_labels == (kind == "conversations")
    data = TokenDataset(
        config.data.input_files, config.model.sequence_length, config.model.vocabulary_size
    )
    assert config.model.vocabulary_size >= data.info["vocabulary_size"] and len(data) > 0
    assert config.data.validation_files == (f"{output}/validation-*.tfrecord",)
    if kind == "text":
        assert config.model.vocabulary_size == data.info["vocabulary_size"]
        assert [Path(config.data.tokenizer or "")] == list(data.tokenizers)


def test_all_records_are_checked_and_those_that_are_damaged_counted(tmp_path, capsys):
    records = np.arange(60).reshape(6, 10)
    for name, flipped in (("a", (1, 4)), ("b", ()), ("c", (0,))):
        path = tmp_path / f"{name}.tfrecord"
        with RecordWriter(path) as writer:
            for payload in example.encode(records):
                writer.write(payload)
        content = bytearray(path.read_bytes())
        for number in flipped:
            content[(2 * number + 1) * len(content) // 12] ^= 1
        path.write_bytes(content)
    with pytest.raises(
        DataError, match=r"^\S+a.tfrecord, record 1: .* first of 3 damaged records.$"
    ):
        main(["check", str(tmp_path)])
    told = [line.rpartition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    whole = "6 records, all checksums right"
    assert told == ["6 records, 2 damaged", whole, "6 records, 1 damaged", "18 records"]


def corrupt(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.quick_every(3)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["text", "none-*.txt"], "text files: got 'none-*.txt', which matches no file"),
        (["text", "binary.txt"], "binary.txt: got bytes that are not UTF-8"),
        (["text", "one.txt"], "validation: got 0 documents of 0 tokens together; expected"),
        pytest.param(
            ["text", "one.txt", "--validation", "0"],
            "train: got 1 document of",
            marks=pytest.mark.slow,
        ),
        (["text", "empty.txt", "--validation", "0"], "train: got 0 documents of 0 tokens"),
        (["text", "text", "--sequence_length", "0"], "sequence_length: got 0; expected at least 1"),
        (
            ["text", "text", "--vocabulary_size", "100"],
            "vocabulary_size: got 100; expected at least 257",
        ),
        (["text", "text", "--validation", "1.5"], "validation: got 1.5; expected a share from 0"),
        (
            ["text", "text", "--tokenizer", "none.json"],
            "--tokenizer: got none.json: no such file; expected characters, gpt2 or the path of a "
            "tokenizer.json. Check the path, or leave it out to train one.",
        ),
        (["text", "text", "--tokenizer", "character"], "json. Did you mean 'characters'?"),
        (["text", "text", "--tokenizer", "one.txt"], "one.txt: got 'expected value"),
        (
            ["text", "text", "--tokenizer", "one.txt", "--vocabulary_size", "300"],
            "expected one of the two",
        ),
        (["text", "text", "--workers", "0"], "workers: got 0; expected 1 to 1024"),
        (["text", "text", "--document_bytes", "0"], "document_bytes: got 0"),
        (["text", "text", "--output", "text"], "text: got something not made by data/prepare.py"),
        (["text", "text", "--output", "one.txt/out"], "one.txt"),
        (["text", "text", "--output", "/proc/out"], "/proc"),
        (["text", "text", "--documents", "word"], "--documents: got 'word'; expected one of file,"),
        (
            ["text", "text", "--sequence_lenght", "4"],
            "--sequence_lenght: unknown flag. Did you mean '--sequence_length'?",
        ),
        (["text", "text", "--seed", "x"], "--seed: got 'x'; expected a whole number"),
        (["wikipedia", "none.xml.bz2"], "none.xml.bz2: got no such file"),
        (["wikipedia", "one.txt"], "one.txt: got damaged data after article 0"),
        (["check", "none-*.tfrecord"], "input files: got 'none-*.tfrecord'"),
        (["check", "flipped.tfrecord"], "flipped.tfrecord, record 0: got data with checksum"),
        (
            [],
            "command: got none; expected one of text, conversations, stdlib, wikipedia, from_bins, "
            "to_bins, check. data/prepare.py --help says what each does.",
        ),
        (["txt"], "to_bins, check. Did you mean 'text'?"),
        (["text"], "INPUTS: got none; expected a path, or several. Give one."),
        (["wikipedia", "a", "b"], "b: got a second dump; expected one."),
        (
            ["text", "bad.jsonl"],
            "bad.jsonl, line 2 at byte 14: got a value of type int in 'text', which is no text; expected",
        ),
        (["text", "asked.jsonl"], "Prompts with answers are for `prepare.py conversations`."),
        (["text", "text", "--documents", "json"], "000.txt, line 1 at byte 0: got '0 the"),
        (["text", "cut.txt.gz"], "cut.txt.gz: got compressed data that are damaged"),
        (
            ["text", "a.jsonl.zst"],
            "a.jsonl.zst: got compressed data that are damaged (it ends within a frame); expected",
        ),
        (
            ["text", "a.txt.zip"],
            "a.txt.zip: got a file of kind .zip; expected plain text or .gz",
        ),
        (
            ["text", "bad.parquet"],
            "bad.parquet: got 'Parquet magic bytes not found in footer.",
        ),
    ],
)
def test_mistakes_end_with_code_two_one_message_and_no_change(
    tmp_path, monkeypatch, capsys, arguments, words
):
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path / "text", 5)
    (tmp_path / "one.txt").write_text("One document.")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x01")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": 5}\n')
    (tmp_path / "asked.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"text " * 99)[:-9])
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(b"text " * 99)[:-2])
    (tmp_path / "a.txt.zip").write_bytes(b"PK")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1" + b"text " * 99)
    writer = tfrecord.TFRecordWriter(str(tmp_path / "flipped.tfrecord"))
    writer.write({"input_ids": (list(range(50)), "int")})
    writer.close()
    corrupt(tmp_path / "flipped.tfrecord")
    before = snapshot(tmp_path)
    with pytest.raises(SystemExit) as stop, exit_on_user_error():
        main(arguments)
    assert stop.value.code == 2 and words in capsys.readouterr().err
    assert snapshot(tmp_path) == before and not list(tmp_path.glob("**/.*.partial-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["text", "none.txt"], ["text", "--worker", "1", "."], ["check", SCRIPT]]
)
def test_mistakes_in_a_real_process_show_no_traceback(tmp_path, arguments):
    before = os.times()
    result = run(*arguments, cwd=tmp_path)
    after = os.times()
    assert (
        result.returncode == 2 and "error: " in result.stderr and "Traceback" not in result.stderr
    )
    spent = after.children_user + after.children_system
    assert spent - before.children_user - before.children_system < 2, "seconds of processor"


@pytest.mark.slow
def test_a_disk_that_is_full_is_one_message_and_leaves_nothing(tmp_path):
    write_documents(tmp_path / "text", 400)
    limited = (
        f"ulimit -f 8; exec '{sys.executable}' '{SCRIPT}' text text --vocabulary_size 300 "
        "--sequence_length 8"
    )
    result = subprocess.run(
        ["bash", "-c", f"{limited} --workers 1 --output out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2, result.stderr
    assert (
        "File too large" in result.stderr
        and "Traceback" not in result.stderr
        and "Nothing was changed" in result.stderr
    )
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.multi
def test_a_killed_preparation_leaves_nothing_that_counts_and_the_next_clears_it(tmp_path):
    arguments = ["stdlib", "--output", str(tmp_path / "out"), "--workers", "1"]
    small = ("--vocabulary_size", 300, "--sequence_length", 16, "--validation", 0)
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments], stdout=subprocess.DEVNULL
    ) as process:
        try:
            deadline = time.monotonic() + 30
            while not list(tmp_path.glob(".out.partial-*")) and time.monotonic() < deadline:
                time.sleep(0.01)
            partial = list(tmp_path.iterdir())
            process.send_signal(signal.SIGSTOP)  # it goes on to hold its folder
            beside = run("stdlib", "--output", tmp_path / "out", "--max_bytes", 60_000, *small)
            assert process.poll() is None
        finally:
            process.kill()
    assert beside.returncode == 0, beside.stderr
    assert len(partial) == 1 and sorted(tmp_path.iterdir()) == sorted([*partial, tmp_path / "out"])
    again = run(
        "stdlib", "--output", tmp_path / "out", "--max_bytes", 50_000, *small, "--overwrite"
    )
    assert again.returncode == 0 and list(tmp_path.iterdir()) == [tmp_path / "out"]


@pytest.mark.sampled(2)
@pytest.mark.quick_every(3)
@pytest.mark.parametrize("stopped_at", ["the tokenizer", "documents", "validation", "the end"])
@pytest.mark.parametrize("is_masked", [False, True])
def test_a_stopped_preparation_goes_on_where_it_was_to_the_same_bytes(
    tmp_path, monkeypatch, stopped_at, is_masked
):
    path = write_lines(tmp_path / "a.jsonl", documents(300))
    if is_masked:
        lines = [{"prompt": text, "answer": text[:3]} for text in documents(300)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(popxl_gpt.data.shuffle, "_BUFFER_BYTES", 1000)
    monkeypatch.setattr(popxl_gpt.data.shuffle, "SHARE", float("inf"))  # at once
    source = (conversation_source if is_masked else text_source)([str(path)])
    chosen = settings(tokenizer_bytes=4000, shard_bytes=3000)
    prepare(source, tmp_path / "whole", chosen, report=quiet)
    calls = collections.Counter()

    def stop_at(where, function, number):
        def called(*arguments, **options):
            calls[where] += 1
            if where == stopped_at and calls[where] == number:
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return called

    with monkeypatch.context() as patch:
        preparation = popxl_gpt.data.preparation
        patch.setattr(preparation, "train_tokenizer", stop_at("the tokenizer", train_tokenizer, 1))
        add = stop_at("documents", DocumentShuffle.add, 200)
        patch.setattr(DocumentShuffle, "add", lambda self, tokens: add(self, tokens))
        patch.setattr(preparation, "write_split", stop_at("validation", preparation.write_split, 2))
        patch.setattr(preparation, "publish", stop_at("the end", preparation.publish, 1))
        with pytest.raises(KeyboardInterrupt):
            prepare(source, tmp_path / "out", chosen, report=quiet)
    assert len(list(tmp_path.glob(".out.partial-*"))) == 1 and not (tmp_path / "out").exists()
    told = []
    prepare(source, tmp_path / "out", chosen, report=told.append)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not list(tmp_path.glob(".out.partial-*"))
    going_on = [int(line.split()[3]) for line in told if line.startswith("Going on after")]
    if stopped_at == "documents":
        assert len(going_on) == 1 and 100 < going_on[0] < 200
    else:
        assert going_on == ([300] if stopped_at == "validation" else [])


@pytest.mark.slow
def test_a_preparation_goes_on_whose_worker_was_killed(tmp_path, monkeypatch):
    source = text_source([str(write_lines(tmp_path / "a.jsonl", documents(300)))])
    monkeypatch.setattr(popxl_gpt.data.shuffle, "_BUFFER_BYTES", 1000)
    monkeypatch.setattr(popxl_gpt.data.shuffle, "SHARE", float("inf"))  # at once
    monkeypatch.setattr(popxl_gpt.data.tokenisation, "_BATCH_CHARACTERS", 500)
    prepare(source, tmp_path / "whole", settings(), report=quiet)
    add, told = DocumentShuffle.add, []

    def killing(self, tokens):
        add(self, tokens)
        if self.added == 150:
            for worker in multiprocessing.active_children():
                worker.kill()

    with monkeypatch.context() as patch, pytest.raises(DataError, match="got a worker process th"):
        patch.setattr(DocumentShuffle, "add", killing)
        prepare(source, tmp_path / "out", settings(), workers=2, report=quiet)
    prepare(source, tmp_path / "out", settings(), report=told.append)
    assert any(line.startswith("Going on after") for line in told)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 2], ids=["begins", "works"])
def test_ctrl_c_of_a_terminal_is_one_line_whatever_workers_do(tmp_path, seconds):
    write_lines(tmp_path / "a.jsonl", [text * 100 for text in documents(10_000)])
    words = "text a.jsonl --output out --tokenizer_bytes 9999 --vocabulary_size 300 --workers 2"
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), *words.split()],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        children = ["bash", "-c", f"cat /proc/{process.pid}/task/*/children 2>/dev/null; true"]
        while len(subprocess.check_output(children).split()) < 3:  # workers, and what cleans up
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "stopped; the same command goes on.\n")


@pytest.mark.slow
def test_a_script_needs_no_guard_against_its_workers(tmp_path):
    write_documents(tmp_path / "text")
    words = "text text --output out --sequence_length 8 --vocabulary_size 300 --workers 2"
    (tmp_path / "script.py").write_text(
        "from popxl_gpt.data.prepare import main\n"
        f"print('begins', flush=True)\nmain({words.split()!r})\nprint('ends')\n"
    )
    root = SCRIPT.parents[1]
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{root}:{root / 'runtime'}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("begins") == done.stdout.count("ends") == 1


@pytest.mark.parametrize(
    "command",
    ["text", "conversations", "stdlib", "wikipedia", "from_bins", "to_bins", "check"],
)
def test_help_says_what_every_command_takes(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0 and f"data/prepare.py {command}: " in shown
    paragraph = shown.split("\n\n")[2].split("\n  ")[0]
    assert paragraph.endswith(".") and all(len(line) <= 110 for line in paragraph.splitlines())


def test_characters_are_tokens_and_a_model_can_go_back_to_the_text(tmp_path):
    source = text_source([str(write_documents(tmp_path / "text"))])
    made = settings(vocabulary_size=None, characters=True)
    info = prepare(source, tmp_path / "out", made, report=quiet)
    tokenizer = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    text = "".join(documents(60))
    assert info["vocabulary_size"] == len(set(text)) + 2
    assert tokenizer.encode(text).ids == [tokenizer.token_to_id(c) for c in text]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.decode(tokenizer.encode("aЖb").ids) == "a\ufffdb"
    sizes = token_bytes(tokenizer)
    assert sizes[tokenizer.encode(text).ids].sum() == len(text.encode()) and sizes[0] == 0
    assert np.isnan(sizes[tokenizer.encode("Ж").ids]).all() and np.isnan(sizes).sum() == 1
    tokens, _ = read_split(tmp_path / "out", "train")
    assert set("".join(texts_of(tokens, tokenizer))) <= set(text)


def test_characters_are_asked_for_on_the_command_line(tmp_path):
    text = write_documents(tmp_path / "text")
    words = ["--tokenizer", "characters", "--sequence_length", "8", "--workers", "1"]
    assert main(["text", str(text), "--output", str(tmp_path / "out"), *words]) == 0
    content = json.loads((tmp_path / "out/tokenizer.json").read_text())
    assert content["model"]["type"] == "WordLevel"


@pytest.mark.parametrize("size, end", [(None, 50256), (50257, None), (400, None)])
def test_documents_of_nanogpts_files_end_with_gpt2s_token_where_tokens_are_gpt2s(
    tmp_path, size, end
):
    np.arange(100, dtype="<u2").tofile(tmp_path / "train.bin")
    read_bins(tmp_path, tmp_path / "out", sequence_length=8, vocabulary_size=size)
    flags = {"input_files": (str(tmp_path / "out"),), "document_attention": True}
    assert implied_settings(flags, {}).get("end_of_text") == end


@pytest.mark.slow
def test_nanogpts_files_hold_the_tokens_of_the_records_in_both_directions(tmp_path):
    tokens = {
        name: np.random.default_rng(size).integers(0, 400, size).astype("<u2")
        for name, size in (("train", 1001), ("val", 50))
    }
    (tmp_path / "bins").mkdir()
    for name, array in tokens.items():
        array.tofile(tmp_path / f"bins/{name}.bin")
    made = run(
        "from_bins", tmp_path / "bins", "--output", tmp_path / "out", "--sequence_length", 8,
        "--vocabulary_size", 400,
    )  # fmt: skip
    assert made.returncode == 0 and "train: 1 document, 1001 tokens" in made.stdout, made.stderr
    for split, name in (("train", "train"), ("validation", "val")):
        assert np.array_equal(read_split(tmp_path / "out", split)[0], tokens[name])
    back = run("to_bins", tmp_path / "out", "--output", tmp_path / "back")
    assert back.returncode == 0, back.stderr
    for name in tokens:
        path = f"{name}.bin"
        assert (tmp_path / "back" / path).read_bytes() == (tmp_path / "bins" / path).read_bytes()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("from_bins bins", "train.bin: got token 300 at byte 20; expected at most 299"),
        ("from_bins odd", "train.bin: got 7 bytes; expected two for each token"),
        ("from_bins nowhere", "train.bin: got no such file"),
        ("from_bins bins --output odd", "odd: got a folder that is there; expected a new one"),
        ("from_bins bins --output odd --overwrite", "a new one, or one with dataset.json"),
        ("to_bins bins", "bins: got no folder with a dataset.json; expected one that"),
        ("to_bins", "FOLDER: got none; expected text. Give one."),
    ],
)
def test_files_of_nanogpt_that_cannot_be_used_are_refused(
    tmp_path, monkeypatch, capsys, words, says
):
    monkeypatch.chdir(tmp_path)
    for name in ("bins", "odd"):
        (tmp_path / name).mkdir()
    np.array([*range(10), 300, *range(30)], "<u2").tofile(tmp_path / "bins/train.bin")
    (tmp_path / "odd/train.bin").write_bytes(b"1234567")
    before = snapshot(tmp_path)
    extra = ["--vocabulary_size", "300"] if words.startswith("from") else []
    with pytest.raises(SystemExit) as stop, exit_on_user_error():
        main([*words.split(), *extra])
    assert stop.value.code == 2 and says in capsys.readouterr().err
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("command", ["text", "from_bins", "to_bins"])
def test_overwriting_replaces_what_the_command_made_and_nothing_else(
    tmp_path, monkeypatch, command
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("the cat sat. " * 50)
    (tmp_path / "bins").mkdir()
    np.arange(40, dtype="<u2").tofile(tmp_path / "bins/train.bin")
    main("from_bins bins --output records --sequence_length 8 --vocabulary_size 300".split())
    words = {
        "text": "text a.txt --sequence_length 8 --vocabulary_size 258",
        "from_bins": "from_bins bins --sequence_length 8 --vocabulary_size 300",
        "to_bins": "to_bins records",
    }[command].split()
    main([*words, "--output", "out"])
    main([*words, "--output", "out", "--overwrite"])
    main([*words, "--output", "out", "--overwrite", *(["--seed", "9"] * (command == "text"))])
    (tmp_path / "out/notes.md").write_text("mine")
    before = snapshot(tmp_path)
    with pytest.raises(DataError, match="out: got a folder with notes.md; .*, with nothing else"):
        main([*words, "--output", "out", "--overwrite", *(["--seed", "8"] * (command == "text"))])
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("kind", ["partial", "resumable"])
def test_a_kill_between_the_renames_of_a_replacement_loses_nothing(tmp_path, monkeypatch, kind):
    target = tmp_path / "out [1]"
    target.mkdir()
    (target / "old").write_text("old")

    def make(work):
        return partial_folder(target) if kind == "partial" else resumable_folder(target, work)

    class Killed(BaseException):
        pass

    rename = os.rename

    def killed(source, name):
        if Path(name) == target:
            raise Killed
        rename(source, name)

    with pytest.raises(Killed), make("a") as folder, monkeypatch.context() as patch:
        (folder / "new").write_text("new")
        patch.setattr(os, "rename", killed)
        patch.setattr("shutil.rmtree", lambda *_, **__: None)  # nor does a kill clean up
        publish(folder, target, overwrite=True)
    assert not target.exists()
    with make("b"):
        assert contents(target) == {"old": b"old"}
    with make("c") as folder:
        (folder / "new").write_text("newer")
        publish(folder, target, overwrite=True)
    assert contents(target) == {"new": b"newer"}
    assert os.listdir(tmp_path) == [target.name]


def test_what_a_call_replaces_at_this_moment_is_left_to_it(tmp_path, monkeypatch):
    target, rename = tmp_path / "out", os.rename
    target.mkdir()
    (target / "old").write_text("old")

    def meanwhile(source, name):
        if Path(name) == target:
            with partial_folder(target):
                assert not target.exists()
        rename(source, name)

    with partial_folder(target) as folder:
        monkeypatch.setattr(os, "rename", meanwhile)
        (folder / "new").write_text("new")
        publish(folder, target, overwrite=True)
    assert contents(target) == {"new": b"new"} and os.listdir(tmp_path) == ["out"]
