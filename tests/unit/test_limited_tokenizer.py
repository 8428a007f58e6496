"""Tokenizers that multiply text, search for long, or fail, end in a sentence that names them."""

import gc
import os
import resource
import signal
import time

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import popxl_gpt.data.limited_tokenizer
from popxl_gpt.data.conversations import conversation_source
from popxl_gpt.data.limited_tokenizer import LimitedTokenizer
from popxl_gpt.data.preparation import Settings, prepare
from popxl_gpt.data.sources import text_source
from popxl_gpt.data.text_tokenizer import TextTokenizer
from popxl_gpt.demo.job.text import whole_lines
from popxl_gpt.demo.job.writing import TextStream
from popxl_gpt.utils.errors import DataError, EndedError

TEXTS = ["the cat sat on the mat", "日本 über  \n\tx", "", "🐈" * 9, "a" * 999, "<unk></s>"]


def letters(model=None, **parts):
    """A tokenizer of `a` and `b`, with the given steps."""
    made = Tokenizer(model or models.BPE({"a": 0, "b": 1}, []))
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def doubling(times, kind=normalizers):
    return kind.Sequence([kind.Replace("a", "aa")] * times)


def backtracking(kind, **more):
    return kind(Regex("(a+)+$"), **more)


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(popxl_gpt.data.limited_tokenizer, "SECONDS", 1)


GROWS, LONG = "times the size of what it is given", "no tokens within"
UNKNOWN = {
    "word": (models.WordLevel({"a": 0}), r"Missing \[UNK\] token"),
    "bpe": (models.BPE({"a": 0}, [], unk_token="x"), "Unk token `x` not found"),
    "piece": (models.WordPiece({"a": 0}, unk_token="x"), r"Missing \[UNK\] token"),
    "unigram": (models.Unigram([("a", -1.0)], None, False), "`unk_id` is missing"),
}
BAD = {
    "doubles 16 times": (letters(normalizer=doubling(16)), "a", GROWS),
    "doubles 40 times": (letters(normalizer=doubling(40)), "a", LONG),
    "splits by trying all": (
        letters(pre_tokenizer=backtracking(pre_tokenizers.Split, behavior="isolated")),
        "a" * 40 + "b",
        "retry-limit-in-match over",
    ),
    "replaces by trying all": (
        letters(normalizer=backtracking(normalizers.Replace, content="b")),
        "a" * 40 + "b",
        "retry-limit-in-match over",
    ),
    **{name: (letters(model), "b", said) for name, (model, said) in UNKNOWN.items()},
}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", BAD)
def test_a_tokenizer_that_cannot_make_tokens_ends_in_a_sentence_that_names_it(case, soon):
    tokenizer, text, said = BAD[case]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with pytest.raises(DataError, match=rf"^there/tokenizer\.json: got .*{said}.*; expected .*\."):
        LimitedTokenizer(tokenizer.to_str(), "there/tokenizer.json").encode([text])
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps, make, said",
    [
        (doubling(16, decoders), whole_lines, GROWS),
        (doubling(16, decoders), lambda tokens, own: TextStream(own, tokens).append(1), GROWS),
        (
            backtracking(decoders.Replace, content="x"),
            lambda tokens, own: own.decode(tokens),
            "retry-limit-in-match over",
        ),
    ],
    ids=["lines", "stream", "tries all"],
)
def test_a_tokenizer_that_cannot_make_text_ends_in_a_sentence_too(steps, make, said, soon):
    decoder = decoders.Sequence([decoders.Fuse(), steps])
    with pytest.raises(DataError, match=rf"^mine: got .*{said}.*; expected .*\."):
        make([0] * 30 + [1], TextTokenizer(letters(decoder=decoder), "mine"))


@pytest.mark.slow
def test_memory_is_bounded_where_time_is_left(monkeypatch):
    monkeypatch.setattr(popxl_gpt.data.limited_tokenizer, "MEMORY", 2**26)
    limited = LimitedTokenizer(letters(normalizer=doubling(40)).to_str(), "mine")
    with pytest.raises(DataError, match=r"^mine: got no tokens within 64\.0 MiB of memory"):
        limited.encode(["a"])
    assert [found.tolist() for found in limited.encode(["b"])] == [[1]]  # by another process


@pytest.mark.slow
@pytest.mark.parametrize("is_added", [False, True])
def test_memory_is_bounded_where_a_token_is_long(is_added, monkeypatch):
    monkeypatch.setattr(popxl_gpt.data.limited_tokenizer, "MEMORY", 2**26)
    long = "a" * 2**20
    made = letters(None if is_added else models.BPE({"a": 0, "b": 1, long: 2}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    if is_added:
        made.add_tokens([long])
    limited = LimitedTokenizer(made.to_str(), "mine")
    assert limited.decode([0, 2]) == "a" + long
    with pytest.raises(DataError, match=r"^mine: got no text within 6\d\.\d MiB of memory"):
        limited.decode([2] * 300)


def trained(kind):
    """A tokenizer whose steps are not known here, trained on a few words."""
    unknown = ["<unk>", "</s>"]
    if kind == "bpe":
        made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        parts = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        made.normalizer = normalizers.Sequence(parts)
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=[*unknown, *(f"<0x{byte:02X}>" for byte in range(256))]
        )
    elif kind == "unigram":
        made = Tokenizer(models.Unigram())
        made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=unknown, unk_token="<unk>")
    else:
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer, made.decoder = normalizers.BertNormalizer(), decoders.WordPiece()
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=60, special_tokens=unknown)
    made.train_from_iterator([TEXTS[0]] * 20, trainer)
    return made


@pytest.mark.parametrize("kind", ["bpe", "unigram", "piece"])
def test_tokens_and_text_are_those_of_the_library(kind):
    made = trained(kind)
    limited = LimitedTokenizer(made.to_str(), "mine")
    assert limited.library is None
    for special_tokens in (False, True):
        made.encode_special_tokens = not special_tokens
        found = [tokens.tolist() for tokens in limited.encode(TEXTS, special_tokens)]
        assert found == [each.ids for each in made.encode_batch(TEXTS, add_special_tokens=False)]
        assert [limited.decode(tokens) for tokens in found] == [made.decode(ids) for ids in found]


def test_the_process_ends_with_its_tokenizer_and_hears_no_ctrl_c():
    limited = LimitedTokenizer(letters(normalizer=doubling(1)).to_str(), "mine")
    assert limited.encode(["ab"])[0].tolist() == [0, 0, 1]
    process = limited._process._process
    for number in (signal.SIGINT, signal.SIGTERM):  # of the terminal, and a scheduler
        os.kill(process.pid, number)
    time.sleep(0.05)
    assert limited.encode(["b"])[0].tolist() == [1]
    del limited
    gc.collect()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["text", "conversations"])
def test_preparation_names_the_tokenizer_that_was_given(tmp_path, kind, workers):
    lines = '{"text": "cab", "prompt": "a", "answer": "c"}\n' * 9
    (tmp_path / "text.jsonl").write_text(lines)
    path = tmp_path / "tokenizer.json"
    letters(models.WordLevel({"a": 0, "<|endoftext|>": 1})).save(str(path))
    source = (conversation_source if kind == "conversations" else text_source)(
        [str(tmp_path / "text.jsonl")]
    )
    with pytest.raises(DataError, match=rf"^{path}: got 'WordLevel error: Missing \[UNK\]"):
        prepare(
            source,
            tmp_path / "out",
            Settings(sequence_length=4, tokenizer=path),
            workers=workers,
            report=lambda line: None,
        )
    assert not (tmp_path / "out").exists()


def test_what_was_interrupted_answers_nothing_later():
    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    limited = LimitedTokenizer(letters(normalizer=doubling(22)).to_str(), "mine")
    assert limited.encode(["b"])[0].tolist() == [1]
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            limited.encode(["a"])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert limited.encode(["bb"])[0].tolist() == [1, 1]


def test_a_process_that_was_killed_is_told_of_as_that():
    limited = LimitedTokenizer(letters(normalizer=doubling(1)).to_str(), "mine")
    limited.encode(["b"])
    os.kill(limited._process._process.pid, signal.SIGKILL)
    with pytest.raises(EndedError, match="^mine: got no tokens, for the process .* was killed;"):
        limited.encode(["b"])
    assert limited.encode(["b"])[0].tolist() == [1]
