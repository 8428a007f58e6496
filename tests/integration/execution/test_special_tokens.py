"""Tokenizers without `<|endoftext|>`: documents end with the token of their model, and what begins
texts stands where transformers puts it.
"""

import importlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.quick import Later
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, UnigramTrainer

from popxl_gpt.config.presets import override
from popxl_gpt.data.dataset import TokenDataset
from popxl_gpt.data.masking import ids_of
from popxl_gpt.data.prepare import main as prepare
from popxl_gpt.data.text_tokenizer import TextTokenizer
from popxl_gpt.data.tokenisation import load_tokenizer, token_bytes, tokenise
from popxl_gpt.demo.convert import main as convert
from popxl_gpt.demo.evaluate import evaluate
from popxl_gpt.demo.generate import generate
from popxl_gpt.demo.job.text import read_tokenizer
from popxl_gpt.demo.job.writing import TextStream
from popxl_gpt.execution.checkpoints.finding import find_trained
from popxl_gpt.execution.inference.sampling import Sampling
from popxl_gpt.utils.errors import UserError
from tests.integration.runs import run_job

transformers = Later("transformers")
harness = Later("popxl_gpt.demo.harness")

TEXT = "the cat sat on the mat, and the dog lay on the rug. "
TEXTS = [TEXT, " a cat", "on\n\nthe  rug\t", "日本 über", "x", "<s>the</s> dog"]
ROOM = {"vocab_size": 320, "show_progress": False}


def around(before, after, vocabulary):
    """A post-processor as the models' are."""
    names = [f"{name}:0" for name in before] + ["$A:0"] + [f"{name}:0" for name in after]
    special = [(name, vocabulary[name]) for name in (*before, *after)]
    pair = [*names, *(name.replace(":0", ":1").replace("A", "B") for name in names)]
    return processors.TemplateProcessing(single=names, pair=pair, special_tokens=special)


def byte_level(special):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(special_tokens=special, initial_alphabet=alphabet, **ROOM)
    made.train_from_iterator([TEXT] * 20, trainer)
    return made


def llama(before=("<s>",), after=()):
    """SentencePiece's BPE as Llama 2, TinyLlama and Mistral have it."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(steps)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator([TEXT] * 20, BpeTrainer(special_tokens=special, **ROOM))
    made.post_processor = around(before, after, made.get_vocab())
    return made


def unigram():
    """As T5's: texts end with a token."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = UnigramTrainer(special_tokens=special, unk_token="<unk>", **ROOM)
    made.train_from_iterator([TEXT] * 20, trainer)
    made.post_processor = around([], ["</s>"], made.get_vocab())
    return made


CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"
KINDS = {
    # a tokenizer, what its model's files say, its end
    "byte level": (lambda: byte_level(["<|end_of_text|>"]), {CONFIG: {"eos_token": "<|end_of_text|>"}}, "<|end_of_text|>"),
    "llama": (llama, {MAP: {"bos_token": "<s>", "eos_token": {"content": "</s>"}}}, "</s>"),
    "both": (lambda: llama(after=["</s>"]), {CONFIG: {"eos_token": "</s>", "add_eos_token": False}}, "</s>"),
    "unigram": (unigram, {CONFIG: {"eos_token": "</s>"}}, "</s>"),
    "not begun": (
        lambda: byte_level(["<s>", "</s>"]),
        {CONFIG: {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}},
        "</s>",
    ),
}  # fmt: skip
ENDS = {
    "an id": ({"config.json": {"eos_token_id": 2}}, "</s>"),
    "several ids": ({"generation_config.json": {"eos_token_id": [2, 5]}, "config.json": {"eos_token_id": 5}}, "</s>"),
    "no token": ({CONFIG: {"eos_token": "<gone>"}, "config.json": {"eos_token_id": 2}}, "<|endoftext|>"),
    "no number": ({"config.json": {"eos_token_id": 9999}}, "<|endoftext|>"),
    "ours first": ({"config.json": {"eos_token_id": 1}}, "<|endoftext|>"),
    "a name first": ({CONFIG: {"eos_token": "</s>"}, "config.json": {"eos_token_id": 1}}, "</s>"),
    "nothing": ({}, None),
}  # fmt: skip
"""What a model's files say, and the end; some have `<|endoftext|>`."""


def folder_of(kind, folder):
    """A model's folder, as far as its tokenizer goes. Returns the name of its end."""
    make, files, end = KINDS[kind]
    folder.mkdir()
    make().save(str(folder / "tokenizer.json"))
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values))
    return end


def theirs(folder, scratch):
    """transformers' tokenizer of a folder."""
    copy = Path(shutil.copytree(folder, scratch))
    values = json.loads((copy / CONFIG).read_text()) if (copy / CONFIG).exists() else {}
    values |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (copy / CONFIG).write_text(json.dumps(values))
    (copy / "config.json").unlink(missing_ok=True)
    found = transformers.AutoTokenizer.from_pretrained(copy)
    found.split_special_tokens = True  # texts that spell special tokens are text
    return found


@pytest.mark.parametrize("case", ENDS)
def test_documents_end_with_what_names_a_token_of_the_tokenizer(case, tmp_path):
    files, end = ENDS[case]
    special = ["<s>", "<|endoftext|>" if end == "<|endoftext|>" else "<unk>", "</s>"]
    byte_level(special).save(str(tmp_path / "tokenizer.json"))
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    found = read_tokenizer(tmp_path / "tokenizer.json")
    assert found.end == (None if end is None else special.index(end))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_and_documents_have_the_tokens_that_transformers_gives(kind, tmp_path):
    path = tmp_path / "model/tokenizer.json"
    name = folder_of(kind, path.parent)
    loaded = theirs(path.parent, tmp_path / "again")
    expected = [loaded(text)["input_ids"] for text in TEXTS]
    assert [read_tokenizer(path).encode(text) for text in TEXTS] == expected
    ours = load_tokenizer(path)
    assert ours.end == ours.get_vocab()[name]
    documents = [tokens.tolist() for tokens in tokenise(TEXTS, ours)]
    ended = [ids if ids[-1] == ours.end else [*ids, ours.end] for ids in expected]
    assert documents == ended
    assert [ours.decode(ids) for ids in expected] == [
        loaded.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for ids in expected
    ]


def read(folder, length):
    """All tokens of a prepared folder's one split."""
    data = TokenDataset(f"{folder}/train-*.tfrecord", length, 400)
    rows = ids_of(data.read(np.arange(len(data))))
    return np.concatenate([rows[0, :1], *rows[:, 1:]])


def test_a_flag_names_the_end_where_nothing_else_does(tmp_path, capsys):
    bare = byte_level([])
    bare.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text(TEXT)
    words = ["text", f"{tmp_path}/text.txt", "--tokenizer", f"{tmp_path}/tokenizer.json"]
    words += ["--workers", "1", "--validation", "0", "--sequence_length", "8"]
    out = tmp_path / "out"
    for more, said in (
        ([], "got no token '<|endoftext|>', and no eos_token in a file"),
        (["--eos_token", "</s>"], "--eos_token: got '</s>', which is no token of"),
    ):
        with pytest.raises(UserError) as refused:
            prepare([*words, "--output", str(out), *more])
        assert said in str(refused.value) and "tokenizer.json" in str(refused.value)
    assert prepare([*words, "--output", str(out), "--eos_token", "."]) == 0
    tokens = read(out, 8)
    ids = [*bare.encode(TEXT).ids, bare.token_to_id(".")]
    assert tokens[: len(ids)].tolist() == ids and not tokens[len(ids) :].any()
    assert json.loads((out / "dataset.json").read_text())["end_of_text"] == bare.token_to_id(".")
    again = load_tokenizer(out / "tokenizer.json")  # knows it without the flag
    assert again.end == bare.token_to_id(".")
    assert prepare([*words, "--output", str(out), "--eos_token", "."]) == 0
    assert "is there already" in capsys.readouterr().out
    with pytest.raises(UserError, match="got data prepared from other input"):
        prepare([*words, "--output", str(out), "--eos_token", ","])
    with pytest.raises(UserError, match="eos_token: got '.' without a tokenizer; expected it with"):
        prepare(["text", f"{tmp_path}/text.txt", "--eos_token", ".", "--output", f"{tmp_path}/o"])


def test_post_processors_that_do_more_are_refused_by_name(tmp_path):
    made = llama()
    path = tmp_path / "tokenizer.json"
    for post in (
        processors.TemplateProcessing(single="$A $A", pair="$A $B", special_tokens=[]),
        processors.BertProcessing(("</s>", 2), ("<s>", 9999)),
    ):
        made.post_processor = post
        made.save(str(path))
        for load in (read_tokenizer, load_tokenizer):
            with pytest.raises(UserError, match=r"tokenizer\.json: .*does more than to put tokens"):
                load(path)


def test_a_post_processor_of_many_tokens_is_refused_before_it_makes_them(tmp_path):
    content = json.loads(llama().to_str())
    post = content["post_processor"]
    post["special_tokens"]["<s>"] |= {"ids": [1] * 30_000, "tokens": ["<s>"] * 30_000}
    post["single"] = [post["single"][0]] * 30_000 + post["single"]  # 900 million
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        UserError, match="a post-processor that puts 900030000 tokens around a text"
    ):
        read_tokenizer(tmp_path / "tokenizer.json")


def test_a_file_beside_a_tokenizer_that_cannot_be_read_is_named(tmp_path):
    folder_of("byte level", tmp_path / "model")
    for name, content in ((MAP, "[]"), (CONFIG, "{")):
        (tmp_path / "model" / name).write_text(content)
        for load in (read_tokenizer, load_tokenizer):
            with pytest.raises(UserError, match=rf"{name}: got no JSON object; expected one"):
                load(tmp_path / "model/tokenizer.json")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small Llama as transformers saves it, its tokenizer, and what it becomes here."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(
        vocab_size=320, bos_token_id=1, eos_token_id=2, initializer_range=0.5, **sizes, **heads
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=llama(), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    theirs.save_pretrained(folder / "theirs")
    tokenizer.save_pretrained(folder / "theirs")
    assert convert(["from_hugging_face", str(folder / "theirs"), str(folder / "ours")]) == 0
    return folder, theirs, tokenizer


@pytest.mark.slow
def test_greedy_text_is_that_of_transformers_token_for_token(model):
    folder, theirs, tokenizer = model
    prompts, greedy = [TEXT, "a cat", "日本"], Sampling(temperature=0)
    expected, begun = [], tokenizer("", return_tensors="pt")
    for given in (*(tokenizer(prompt, return_tensors="pt") for prompt in prompts), begun):
        with torch.no_grad():
            found = theirs.generate(
                given["input_ids"].long(), max_new_tokens=16, do_sample=False, pad_token_id=0
            )[0]
        whole = tokenizer.decode(found, skip_special_tokens=True)
        expected.append(
            whole[len(tokenizer.decode(given["input_ids"][0], skip_special_tokens=True)) :]
        )
    assert len(set(expected)) == 4 and all(expected)
    assert generate(folder / "ours", prompts, tokens=16, sampling=greedy) == expected[:-1]
    assert generate(folder / "ours", tokens=16, sampling=greedy) == expected[-1:]


@pytest.mark.slow
def test_the_loss_of_text_is_that_of_transformers_after_what_begins_it(model, tmp_path):
    folder, theirs, tokenizer = model
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text("the dog")
    total, labels, before = 0.0, 0, []
    for text in (TEXT, "the dog"):  # the second is seen after the first
        ids = torch.tensor([*before, *tokenizer(text)["input_ids"], 2])
        with torch.no_grad():
            logits = theirs(input_ids=ids[None, :-1]).logits[0]
        losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        total, labels = (
            total + losses[len(before) :].sum().item(),
            labels + len(ids[1:]) - len(before),
        )
        before = ids.tolist()
    found = evaluate(folder / "ours", text=[tmp_path]).measured
    assert found.tokens == labels
    assert found.loss == pytest.approx(total / labels, rel=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_harness_is_answered_as_by_its_own_hugging_face_model(model):
    folder, network, tokenizer = model
    saved = find_trained(folder / "ours")
    config = override(saved.config, global_batch_size=1)
    own = read_tokenizer(folder / "ours/checkpoints/tokenizer.json")
    ours = harness.HarnessModel(saved, config, own)
    others = importlib.import_module("lm_eval.models.huggingface").HFLM(
        pretrained=network, tokenizer=tokenizer, batch_size=1, device="cpu", max_length=64
    )
    instance = importlib.import_module("lm_eval.api.instance").Instance

    def asked(kind, *given):
        return [instance(kind, {}, arguments, 0) for arguments in given]

    pairs = asked("loglikelihood", ("the cat", " sat"), ("", "a dog"), ("日本 ", "x"))
    whole = asked("loglikelihood_rolling", (TEXT,), (TEXT * 6,))
    until = {"until": ["zz"], "max_gen_toks": 9, "do_sample": False}
    written = asked("generate_until", (TEXT, until), ("a cat", until))
    for name, requests in (("loglikelihood", pairs), ("loglikelihood_rolling", whole)):
        found, expected = (getattr(each, name)(requests) for each in (ours, others))
        assert np.array(found, float) == pytest.approx(np.array(expected, float), rel=1e-5)
    assert ours.generate_until(written) == others.generate_until(written)


@pytest.mark.slow
def test_a_model_with_another_end_is_trained_further_and_goes_back(model, tmp_path):
    folder, _, tokenizer = model
    own = folder / "ours/checkpoints/tokenizer.json"
    line = json.dumps({"prompt": "the cat", "answer": "sat"})
    (tmp_path / "lines.jsonl").write_text(f"{line}\n" * 30)
    words = [
        "--tokenizer",
        str(own),
        "--workers",
        "1",
        "--validation",
        "0",
        "--sequence_length",
        "32",
    ]
    assert (
        prepare(
            ["conversations", f"{tmp_path}/lines.jsonl", "--output", f"{tmp_path}/data", *words]
        )
        == 0
    )
    (row, *_) = TokenDataset(f"{tmp_path}/data/train-*.tfrecord", 32, 320).read(np.arange(1))
    parts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("the cat", "sat")]
    expected = [1, *parts[0], *parts[1], 2]
    assert ids_of(row)[: len(expected)].tolist() == expected
    assert row[row >= 0][: len(parts[1]) + 1].tolist() == [*parts[1], 2]
    run_job(
        "--config", str(folder / "ours/config.yml"), "--init_from", str(folder / "ours"),
        *"--masked_labels --document_attention --sequence_length 32 --steps 2 --samples 1".split(),
        *"--validate_every 0 --global_batch_size 1 --name fine".split(),
        *("--run_folder", str(tmp_path), "--input_files", str(tmp_path / "data")),
    )  # fmt: skip
    kept = tmp_path / "fine/checkpoints"
    assert read_tokenizer(kept / "tokenizer.json").end == 2
    assert generate(tmp_path / "fine", TEXT, tokens=2)[0] is not None
    assert convert(["to_hugging_face", str(tmp_path / "fine"), str(tmp_path / "back")]) == 0
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert back(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    assert (back.bos_token, back.eos_token) == ("<s>", "</s>")
    assert json.loads((tmp_path / "back/config.json").read_text())["eos_token_id"] == 2


def test_a_token_without_text_begins_nothing_that_no_file_says():
    made = Tokenizer(models.BPE({"": 0, "a": 1}, []))
    assert TextTokenizer(made, beside={"eos_token": "a"}).begin is None
    assert TextTokenizer(made, beside={"bos_token": ""}).begin == 0


def test_the_end_has_no_bytes_where_it_is_no_special_token():
    made = byte_level([])
    sizes = token_bytes(TextTokenizer(made, end="."))
    assert sizes[made.token_to_id(".")] == 0 and sizes[made.token_to_id(",")] == 1


STREAMS = {
    # a prompt, and what comes after it
    "characters of bytes": ("ကကကက", "ခ the"),
    "one byte more": (" ကကကက.", "ခ"),
    "few tokens": ("က", "ခ"),
    "what is no character": ("a\ufffdကကကက", "ခ"),
    "a special token": ("the", "<unk>cat"),
    "only special tokens": ("", "<s><s>cat"),
}


def llama_whose_bytes_are_text():
    """As published ones are, whose bytes are no special tokens."""
    content = json.loads(llama().to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    return Tokenizer.from_str(json.dumps(content))


@pytest.mark.parametrize("case", STREAMS)
def test_text_that_comes_token_by_token_is_that_of_all_tokens(case):
    tokenizer, (prompt, text) = TextTokenizer(llama_whose_bytes_are_text()), STREAMS[case]
    before = tokenizer.encode_part(prompt)
    tokens = tokenizer.encode_part(f"{prompt}{text}", special_tokens=True)
    assert tokens[: len(before)] == before
    stream = TextStream(tokenizer, before)
    for token in tokens[len(before) :]:
        stream.append(token)
    stream.end()
    assert prompt + stream.text == tokenizer.decode(tokens)
