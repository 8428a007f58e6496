"""Data as people have it: tables, folders of Hugging Face's `datasets`, files that are held out,
GPT-2's merges; and what a preparation tells while it works.
"""

import hashlib
import io
import itertools
import json
import random
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.ipc
import pytest
from helpers.quick import Later
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

import popxl_gpt.data.encoding
import popxl_gpt.data.merges
import popxl_gpt.data.shuffle
import popxl_gpt.data.throughput
from popxl_gpt.data.dataset import TokenDataset
from popxl_gpt.data.encoding import Encoder, byte_names
from popxl_gpt.data.merges import gpt2_file
from popxl_gpt.data.preparation import Settings, prepare
from popxl_gpt.data.prepare import main
from popxl_gpt.data.shuffle import DocumentShuffle
from popxl_gpt.data.sources import text_source
from popxl_gpt.data.throughput import Throughput
from popxl_gpt.data.tokenisation import (
    END_OF_TEXT,
    character_tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from popxl_gpt.utils.errors import DataError, exit_on_user_error

transformers = Later("transformers")

SMALL = ("--sequence_length", "8", "--workers", "1", "--vocabulary_size", "300")


def save_to_disk(folder: Path, texts: "list[str | None]", files: int = 2, name="text") -> Path:
    """A folder as `datasets.Dataset.save_to_disk` (5.2) writes it: Arrow streams of batches of rows,
    `state.json` that lists them, `dataset_info.json`.
    """
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    for number, file in enumerate(names):
        part = texts[number * len(texts) // files : (number + 1) * len(texts) // files]
        table = pyarrow.table({name: pyarrow.array(part, pyarrow.string()), "n": range(len(part))})
        with pyarrow.ipc.new_stream(folder / file, table.schema) as stream:
            stream.write_table(table, max_chunksize=3)
    state = {
        "_data_files": [{"filename": file} for file in names],
        "_fingerprint": "e20d",
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {name: {"dtype": "string"}}}))
    return folder


def texts_in(*patterns: object, **options) -> "list[str]":
    return list(text_source([*map(str, patterns)], **options).documents())


@pytest.mark.slow
def test_a_folder_that_datasets_saved_gives_the_texts_of_its_rows(tmp_path):
    texts = [f"text {number}\n" for number in range(20)]
    folder = save_to_disk(tmp_path / "in/saved", [*texts, None, ""])
    assert texts_in(folder) == texts_in(tmp_path / "in") == texts
    assert texts_in(folder / "data-00001-of-00002.arrow") == texts[11:]
    with pytest.raises(DataError, match=r"got no text in 'n' \(columns: 'text' \(string\), 'n'"):
        texts_in(folder, text_field="n")


@pytest.mark.slow
def test_an_arrow_file_that_is_no_stream_is_read_too(tmp_path):
    table = pyarrow.table({"text": pyarrow.array(["a", "b", "c"], pyarrow.large_string())})
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=2)
    assert texts_in(tmp_path) == ["a", "b", "c"]


@pytest.mark.slow
def test_a_data_set_of_several_splits_says_what_to_give(tmp_path):
    for split in ("train", "test"):
        save_to_disk(tmp_path / "both" / split, ["a"] * 4)
    (tmp_path / "both/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match="splits train, test; .*both/train.*--validation_files"):
        texts_in(tmp_path / "both")


def harm(folder: Path, name: str, change) -> None:
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


def first_batches(content: bytes) -> bytes:
    """A stream that was cut off where a batch ends."""
    stream = io.BytesIO(content)
    reader = pyarrow.ipc.open_stream(stream)
    reader.read_next_batch()
    return content[: stream.tell()]


DAMAGES = {
    "a cut file": ("data-00000-of-00002.arrow", lambda c: c[:-30], "'no end of the stream'; expected a whole Arrow"),
    "a file cut where a batch ends": ("data-00000-of-00002.arrow", first_batches, "'no end of the stream'"),
    "no file": ("data-00000-of-00002.arrow", lambda c: b"", "'no end of the stream'"),
    "another file": ("data-00000-of-00002.arrow", lambda c: b"ARROW1" + b"x" * 99, "expected a whole Arrow file"),
    "no state": ("state.json", lambda c: b"{", "got no description of a data set"),
    "a list": ("state.json", lambda c: b"[]", "got no description of a data set"),
    "a state of nothing": ("state.json", lambda c: b"{}", "got no description of a data set"),
    "indices": ("state.json", lambda c: c[:-1] + b', "_indices_data_files": [{"filename": "i"}]}', "indices beside"),
    "a file elsewhere": ("state.json", lambda c: c.replace(b"data-00001", b"data-00007"), "got no such file"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_saved_folder_that_is_damaged_is_refused_in_words(tmp_path, damage):
    name, change, words = DAMAGES[damage]
    harm(save_to_disk(tmp_path / "saved", ["text\n"] * 9), name, change)
    with pytest.raises(DataError) as found:
        texts_in(tmp_path / "saved")
    assert words in str(found.value)


def test_a_state_names_no_file_outside_its_folder(tmp_path):
    save_to_disk(tmp_path / "saved", ["text\n"] * 9)
    save_to_disk(tmp_path / "other", ["secret\n"] * 9)
    harm(tmp_path / "saved", "state.json", lambda c: c.replace(b'"data-', b'"../other/data-'))
    assert set(texts_in(tmp_path / "saved")) == {"text\n"}


def tokens_of(folder: Path, split: str) -> "set[str]":
    """The documents of a split, whatever their order."""
    data = TokenDataset(folder / f"{split}-*.tfrecord", 8, 300, stride=8)
    rows, counted = data.read(np.arange(len(data))), data.counted(np.arange(len(data)))
    parts = [rows[0][:1], *(row[1 + a : 1 + b] for row, (a, b) in zip(rows, counted))]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = tokenizer.decode(np.concatenate(parts).tolist(), skip_special_tokens=False)
    return {document for document in text.split(END_OF_TEXT) if document}


def test_files_that_are_given_to_be_held_out_are_all_of_the_validation_split(tmp_path):
    (tmp_path / "text").mkdir()
    texts = [f"{number}: the cat sat on the mat" for number in range(9)]
    for number, text in enumerate(texts):
        (tmp_path / f"text/{number}.txt").write_text(text)
    (tmp_path / "more.txt").write_text("something else that is held out")
    held = [str(tmp_path / name) for name in ("text/[78].txt", "more.txt")]
    words = ["text", str(tmp_path / "text"), "--output", str(tmp_path / "out"), *SMALL]
    assert main([*words, "--validation_files", *held]) == 0
    assert tokens_of(tmp_path / "out", "train") == set(texts[:7])
    expected = {*texts[7:], "something else that is held out"}
    assert tokens_of(tmp_path / "out", "validation") == expected
    (tmp_path / "more.txt").write_text("and now it is another text")
    with pytest.raises(DataError, match="prepared from other input"):
        main([*words, "--validation_files", *held])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--validation_files", "*.txt"], "got 1, which are all validation files; expected others"),
        (["--validation_files", "./none"], "text files: got './none', which matches no file"),
        (["--validation_files", "a.txt", "--validation", "0.1"], "got 0.1 and validation_files"),
        (["--tokenizer", "gpt2"], "tokenizer: got gpt2, and no file"),
        (["--tokenizer", "bad.bpe"], "bad.bpe, line 3: got 'ab zz'; expected two tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_out_or_used_is_refused(tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    Path("a.txt").write_text("one text")
    Path("bad.bpe").write_text("#version: 0.2\na b\nab zz\n")
    with pytest.raises(SystemExit) as stop, exit_on_user_error():
        main(["text", "a.txt", *words])
    assert stop.value.code == 2 and says in capsys.readouterr().err


@pytest.fixture(scope="module")
def gpt2_like(tmp_path_factory) -> Path:
    """Files of a small byte-level BPE as GPT-2's are, made from the list of merges as its release
    numbers tokens.
    """
    folder = tmp_path_factory.mktemp("gpt2")
    trained = json.loads(train_tokenizer([Path(__file__).read_text()], 400).to_str())
    merges = [tuple(pair) for pair in trained["model"]["merges"]]
    # of github.com/openai/gpt-2, src/encoder.py: bytes_to_unicode
    printed = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    names = [chr(code) for code in printed] + [chr(256 + n) for n in range(256 - len(printed))]
    names += ["".join(pair) for pair in merges] + [END_OF_TEXT]
    (folder / "vocab.json").write_text(json.dumps({name: n for n, name in enumerate(names)}))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.mark.slow
def test_a_list_of_merges_gives_the_tokens_of_gpt2s_tokenizer(gpt2_like):
    theirs = transformers.GPT2TokenizerFast(
        vocab=str(gpt2_like / "vocab.json"), merges=str(gpt2_like / "merges.txt")
    )
    ours = load_tokenizer(gpt2_like / "merges.txt")
    assert ours.get_vocab() == theirs.get_vocab() and ours.end == len(theirs) - 1
    for text in (Path(__file__).read_text(), "über 日本\n\n  x'll  12\t\u3000 end ", "", "a" * 99):
        assert (
            ours.encode(text) == theirs(text)["input_ids"]
            and ours.decode(ours.encode(text)) == text
        )


def test_gpt2s_file_is_found_where_tiktoken_keeps_it(gpt2_like, tmp_path, monkeypatch):
    content = (gpt2_like / "merges.txt").read_bytes()
    name = hashlib.sha1(popxl_gpt.data.merges.ADDRESS.encode()).hexdigest()
    assert name == "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"  # as tiktoken 0.14 names it
    for number, (variable, folder) in enumerate(
        [("TIKTOKEN_CACHE_DIR", "a"), ("DATA_GYM_CACHE_DIR", "b"), ("", "tmp/data-gym-cache")]
    ):
        with monkeypatch.context() as patch:
            patch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
            patch.delenv("DATA_GYM_CACHE_DIR", raising=False)
            patch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
            if variable:
                patch.setenv(variable, str(tmp_path / folder))
            (tmp_path / folder).mkdir(parents=True)
            (tmp_path / folder / name).write_bytes(content)
            with pytest.raises(DataError, match="another file than GPT-2's vocab.bpe"):
                gpt2_file()
            patch.setattr(popxl_gpt.data.merges, "SHA256", hashlib.sha256(content).hexdigest())
            assert gpt2_file() == tmp_path / folder / name, number
            if variable:
                continue
            (tmp_path / "a.txt").write_text("def f():\n    return 1\n" * 99)
            words = ["--sequence_length", "8", "--workers", "1", "--tokenizer", "gpt2"]
            assert (
                main(["text", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out"), *words])
                == 0
            )
            made = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
            assert made.get_vocab() == load_tokenizer(gpt2_like / "merges.txt").get_vocab()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch):
    monkeypatch.setattr(popxl_gpt.data.throughput, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(popxl_gpt.data.throughput, "DRAW_SECONDS", 0.0)
    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stdout", stream)
        told: list[str] = []
        with Throughput(told.append, 400, 50) as throughput:
            for number, _ in enumerate(throughput.counted(["ä" * 50, "b" * 100]), 1):
                throughput.show(number, 50 + 10 * number)
        speed = r"[\d.]+ [kM]?tokens/s"
        if stream.isatty():
            assert re.search(r"25%.*100/400 .*tokens/s", stream.getvalue()), stream.getvalue()
            assert len(told) == 1
        else:
            assert re.fullmatch(rf"25%: 1 document, 100 B, 60 tokens, {speed}", told[0])
            assert len(told) == 3 and not stream.getvalue()
        assert re.fullmatch(rf"2 documents, 200 B, 70 tokens in .*s, {speed}\.", told[-1]), told


def test_a_preparation_with_files_to_hold_out_goes_on_where_it_was(tmp_path, monkeypatch):
    for name in ("train", "held"):
        lines = [json.dumps({"text": f"{name} {n}: a cat sat"}) + "\n" for n in range(90)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    made = Settings(sequence_length=8, vocabulary_size=300, validation=0.0)
    train, held = (text_source([str(tmp_path / f"{name}.jsonl")]) for name in ("train", "held"))

    def make(name: str) -> "dict[str, bytes]":
        prepare(train, tmp_path / name, made, validation=held, report=lambda line: None)
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    whole = make("whole")
    monkeypatch.setattr(popxl_gpt.data.shuffle, "_BUFFER_BYTES", 1000)
    monkeypatch.setattr(popxl_gpt.data.shuffle, "SHARE", float("inf"))  # at once
    add = DocumentShuffle.add
    for count in (50, 90 + 40):  # of documents to train on, and of those that are held out
        with monkeypatch.context() as patch:
            added = itertools.count()

            def stop(self, tokens, added=added, count=count):
                if next(added) == count:
                    raise KeyboardInterrupt
                add(self, tokens)

            patch.setattr(DocumentShuffle, "add", stop)
            with pytest.raises(KeyboardInterrupt):
                make("out")
    assert make("out") == whole and not list(tmp_path.glob(".out*"))


def byte_level(merges: "list[tuple[str, str]]") -> Tokenizer:
    """Byte-level BPE of these merges."""
    names = [END_OF_TEXT, *byte_names(), *dict.fromkeys("".join(pair) for pair in merges)]
    made = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([END_OF_TEXT])
    return made


ODD = (
    "a 's 'S ’s don't we'll I'VE \n \r\n \t \u00a0 \u3000 \u200b \u0085 \u2028 \ufeff \x00 é e\u0301 日本 "
    f"١ ½ 🙂 👩‍👩‍👧 ß İ ǅ __ ==> 1234 \u1c89 \U00010d40 \U000323b0 {END_OF_TEXT} def self return"
).split(" ")


@pytest.mark.slow
def test_tiktoken_gives_the_tokens_of_tokenizers_where_it_is_used(gpt2_like):
    draw = random.Random(0)
    texts = ["".join(draw.choices([*ODD, " ", "  "], k=draw.randint(0, 40))) for _ in range(2000)]
    drawn = [*range(32, 0xD800), *range(0xE000, 0x110000)]
    texts += ["".join(map(chr, draw.choices(drawn, k=30))) for _ in range(2000)]
    # long enough for the packages' other ways to merge, and for a stack
    texts += [" " * 9999 + "a", "a" * 9999, "ab" * 9999, "\n" * 9999 + "x", "🙂" * 999, ""]
    texts += [Path(__file__).read_text()]
    for made in (
        load_tokenizer(gpt2_like / "merges.txt").library,
        train_tokenizer(texts[-1:], 400),
    ):
        encoder = Encoder(made.to_str())
        assert encoder.is_fast
        made.encode_special_tokens = True
        found = made.encode_batch(texts, add_special_tokens=False)
        for text, ids, expected in zip(texts, encoder(texts), found):
            assert ids.dtype == np.uint32 and ids.tolist() == expected.ids, repr(text)[:200]


def test_tokenizers_is_used_where_tiktoken_would_give_other_tokens_or_is_missing(monkeypatch):
    unreachable = byte_level([("b", "c"), ("a", "b"), ("ab", "c")])  # abc stays a, bc
    twice = byte_level([("a", "b"), ("b", "c"), ("a", "bc"), ("d", "e"), ("ab", "c")])
    spaced, added, lowered = (byte_level([("a", "b")]) for _ in range(3))
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    added.add_tokens(["ba"])
    lowered.normalizer = normalizers.Lowercase()
    content = json.loads(byte_level([("a", "b")]).to_str())
    content["model"]["ignore_merges"] = True  # words of the vocabulary need none
    content["model"]["vocab"]["xabc"] = len(content["model"]["vocab"])
    whole = Tokenizer.from_str(json.dumps(content))
    others = (spaced, added, lowered, whole, character_tokenizer(["abc"]))
    for made in (unreachable, twice, *others):
        encoder = Encoder(made.to_str())
        texts = ["abc", "xabc dede", "baab", "ABC"]
        found = made.encode_batch(texts, add_special_tokens=False)
        assert not encoder.is_fast
        assert [ids.tolist() for ids in encoder(texts)] == [encoding.ids for encoding in found]
    plain = byte_level([("a", "b")]).to_str()
    assert Encoder(plain).is_fast
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tiktoken", None)
        assert not Encoder(plain).is_fast
    # a package that knows another Unicode
    monkeypatch.setattr(popxl_gpt.data.encoding, "PATTERN", r"\p{Latin}+|\P{Latin}+")
    assert not Encoder(plain).is_fast
