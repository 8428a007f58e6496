"""Models out to GGUF: what llama.cpp, transformers and gguf's own reader find in a file."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.quick import Later
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
    trainers,
)
from tokenizers import pre_tokenizers as cut

from popxl_gpt.config.schema import Model
from popxl_gpt.data.tokenisation import END_OF_TEXT, character_tokenizer, train_tokenizer
from popxl_gpt.demo.convert import main as convert
from popxl_gpt.demo.job.text import read_tokenizer
from popxl_gpt.execution.checkpoints.finding import find_trained
from popxl_gpt.execution.exchange import gguf_tokenizer as known
from popxl_gpt.execution.exchange.families.family import Family
from popxl_gpt.execution.exchange.families.gemma import GEMMA2, GEMMA3
from popxl_gpt.execution.exchange.families.gpt2 import GPT2
from popxl_gpt.execution.exchange.families.gpt_neox import GPT_NEOX
from popxl_gpt.execution.exchange.families.llama import LLAMA
from popxl_gpt.execution.exchange.families.mistral import MISTRAL
from popxl_gpt.execution.exchange.families.olmo2 import OLMO2
from popxl_gpt.execution.exchange.families.olmo3 import OLMO3
from popxl_gpt.execution.exchange.families.phi3 import PHI3
from popxl_gpt.execution.exchange.families.qwen2 import QWEN2
from popxl_gpt.execution.exchange.families.qwen3 import QWEN3
from popxl_gpt.execution.exchange.families.smollm3 import SMOLLM3
from popxl_gpt.execution.exchange.gguf_files import gguf_family, write_gguf
from popxl_gpt.execution.inference.generation import CachedModel
from popxl_gpt.execution.variables import write_whole_weights
from popxl_gpt.utils.errors import UserError

gguf, transformers = Later("gguf"), Later("transformers")
ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs/model.md").read_text()
WORDS = 288
SIZES = {
    "vocab_size": WORDS, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 32, "head_dim": 6,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "attn_implementation": "eager",
}  # fmt: skip


def rope(kind: str, **values: float) -> "dict[str, object]":
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **values}}


LLAMA3 = {"low_freq_factor": 0.5, "high_freq_factor": 2.0, "original_max_position_embeddings": 8}
YARN = {"original_max_position_embeddings": 8, "beta_fast": 3.0, "beta_slow": 0.5}
# of each: the family, its settings
EXPORTED = {
    "gpt2": (GPT2, {}),
    "tied llama": (LLAMA, {"tie_word_embeddings": True, **rope("default")}),
    "llama 3.1": (LLAMA, rope("llama3", factor=8.0, **LLAMA3)),
    "llama, linear": (LLAMA, rope("linear", factor=4.0)),
    "llama, yarn": (LLAMA, rope("yarn", factor=4.0, attention_factor=1.5, **YARN)),
    "mistral nemo": (MISTRAL, {"head_dim": 10, "num_attention_heads": 2, "sliding_window": None}),
    "mistral, a window as long as texts": (
        MISTRAL,
        {"sliding_window": 32, **rope("linear", factor=2.0)},
    ),
    "qwen2, yarn": (QWEN2, rope("yarn", factor=2.0, **YARN)),
    "qwen3": (QWEN3, {"head_dim": 10}),
    "smollm3": (SMOLLM3, {"num_hidden_layers": 5, "no_rope_layer_interval": 4}),
    "olmo 2": (OLMO2, {}),
    "tied olmo 2": (OLMO2, {"tie_word_embeddings": True}),
    "olmo 3": (OLMO3, {"num_hidden_layers": 5, "sliding_window": 3}),
    "gemma 2": (
        GEMMA2,
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 3,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma 3": (
        GEMMA3,
        {
            "head_dim": 16,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 16,
            "sliding_window": 3,
        },
    ),
    "gemma 3, turned in windows as elsewhere": (
        GEMMA3,
        {
            "head_dim": 16,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 16,
            "sliding_window": 3,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 100.0}
                for kind in ("full_attention", "sliding_attention")
            },
        },
    ),
    "pythia": (GPT_NEOX, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.34}}),
    "pythia, tied": (
        GPT_NEOX,
        {"tie_word_embeddings": True, **rope("default", partial_rotary_factor=0.34)},
    ),
    "phi-3": (PHI3, {"sliding_window": None}),
}


def their_model(family: Family, **changes: object) -> torch.nn.Module:
    """A model of transformers, no gain of which is one."""
    kind = getattr(transformers, family.architecture)
    torch.manual_seed(1)
    model = kind(kind.config_class(**{**SIZES, **changes}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def exported(folder: Path, name: str, *flags: object) -> "tuple[Path, torch.nn.Module]":
    """A model's GGUF file, and the model of transformers that it was made of."""
    family, theirs = EXPORTED[name]
    model = their_model(family, **theirs)
    model.save_pretrained(folder / "theirs")
    train_tokenizer([TEXT], WORDS).save(str(folder / "theirs/tokenizer.json"))
    convert(["from_hugging_face", str(folder / "theirs"), str(folder / "ours")])
    convert(["to_gguf", str(folder / "ours"), str(folder / "out.gguf"), *map(str, flags)])
    return folder / "out.gguf", model


def gelu_by_table(x: torch.Tensor) -> torch.Tensor:
    """llama.cpp's GELU: its tanh form, as a table from float16 to float16."""
    return torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()


SERVE = """
import os, sys, xllamacpp
asked = xllamacpp.CommonParams()
asked.model.path, asked.n_ctx, asked.n_parallel, asked.warmup = sys.argv[1], 32, 1, False
asked.cpuparams.n_threads = asked.cpuparams_batch.n_threads = 1
asked.verbosity, asked.n_gpu_layers = -1, 0
asked.cache_type_k = asked.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
asked.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(asked)
print(server.listening_address, flush=True)
sys.stdin.read()
os._exit(0)
"""
"""Serves a model until its standard input ends. The server is never destroyed: its destructor holds
the GIL while it joins a thread, and hangs when that thread waits for the GIL.
"""


class LlamaCpp:
    """llama.cpp with a model, on one thread, while it is entered."""

    def __init__(self, file: Path):
        self._words = [sys.executable, "-c", SERVE, str(file)]

    def __enter__(self) -> "LlamaCpp":
        self._server = subprocess.Popen(
            self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._address = self._server.stdout.readline().strip()
        return self

    def __exit__(self, *error: object) -> None:
        with self._server:
            self._server.kill()

    def ask(self, path: str, **values: object) -> "dict[str, object]":
        body, kind = json.dumps(values).encode(), {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self._address}{path}", body, kind)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.load(answer)

    def tokens(self, text: str, special_tokens: bool = False) -> "list[int]":
        found = self.ask("/tokenize", content=text, add_special=True, parse_special=special_tokens)
        return found["tokens"]

    def greedy(self, prompt: "list[int]", count: int) -> "list[int]":
        """The likeliest tokens, but the end of text."""
        values = {"temperature": 0, "return_tokens": True, "logit_bias": [[0, False]]}
        return self.ask("/completion", prompt=prompt, n_predict=count, **values)["tokens"]

    def logits(self, prompt: "list[int]") -> np.ndarray:
        """Logarithms of probabilities of the next token."""
        # a token that is no whole character would have none
        values = {"n_probs": WORDS, "temperature": 0, "logit_bias": [[40, 1000.0]]}
        answer = self.ask("/completion", prompt=prompt, n_predict=1, **values)
        found = np.full(WORDS, np.nan)
        for token in answer["completion_probabilities"][0]["top_logprobs"]:
            found[token["id"]] = token["logprob"]
        return found


def texts_of(checkpoint: Path, prompts: "list[list[int]]", count: int) -> "list[list[int]]":
    """The likeliest tokens after prompts, but the end of text, as we write them."""
    saved = find_trained(checkpoint)
    cached = CachedModel(saved.config, len(prompts), max(map(len, prompts)), count)
    write_whole_weights(cached.session, cached.config, saved.weights())
    texts = [[] for _ in prompts]
    with cached.session:
        rows = cached.start(prompts)
        for _ in range(count):
            for text, row in zip(texts, rows, strict=True):
                text.append(1 + int(row[1:].argmax()))
            rows = cached.append([text[-1] for text in texts])
    return texts


def of_model(model: torch.nn.Module, tokens: "list[int]") -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].double().log_softmax(-1).numpy()


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_llama_cpp_has_the_same_logits_and_writes_the_same_texts(name, tmp_path):
    file, model = exported(tmp_path, name)
    prompts = [[3, 141, 59, 26, 53], [58, 97, 93], [238, 46]]
    texts = texts_of(tmp_path / "ours", prompts, 20)
    whole = [*prompts[0], *texts[0]]
    counts = (1, 5, 20, 25)
    with LlamaCpp(file) as program:
        assert [program.greedy(prompt, 20) for prompt in prompts] == texts
        got = [program.logits(whole[:count]) for count in counts]
    for module in model.modules():
        for act in ("act", "act_fn"):
            if "GELU" in type(getattr(module, act, None)).__name__:
                module._modules.pop(act, None)
                setattr(module, act, gelu_by_table)
    expected = of_model(model, whole)
    # the table's steps: numbers beside one of them may be on its other side
    has_table = name.startswith(("gpt2", "pythia", "gemma"))
    rounding = 5e-4 if has_table else 1e-5
    for count, logits in zip(counts, got, strict=True):
        np.testing.assert_allclose(logits, expected[count - 1], rtol=0, atol=rounding)


# of each: how far numbers may be from what they were, as a share of the largest of 32 beside them
ROUNDING = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 0.57 / 127}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ROUNDING)
@pytest.mark.parametrize("name", ["llama 3.1", "mistral nemo", "qwen2, yarn", "qwen3", "gpt2"])
def test_every_type_is_read_back_within_its_rounding(name, kind, tmp_path, capsys, monkeypatch):
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    # transformers reads no head size of Qwen3, no positions of GPT-2, and no scaled ones
    own = {"gpt2": {"max_position_embeddings": 1024}, "qwen3": {"head_dim": 128}}
    sizes |= own.get(name, {"head_dim": 16})
    sizes |= rope("default") if "yarn" in name else {}
    family, theirs = EXPORTED[name]
    monkeypatch.setitem(EXPORTED, name, (family, {**theirs, **sizes}))
    file, model = exported(tmp_path, name, "--type", kind)
    assert f", {kind}, " in capsys.readouterr().out
    types = gguf.GGMLQuantizationType
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for tensor in read.values():
        is_kept = len(tensor.shape) == 1 or tensor.name == "position_embd.weight"
        assert tensor.tensor_type == (types.F32 if is_kept else types[kind.upper()]), tensor.name
    words = read["token_embd.weight"]
    found = gguf.quants.dequantize(words.data, words.tensor_type)
    before = model.get_input_embeddings().weight.detach().numpy()
    largest = np.abs(before.reshape(WORDS, -1, 32)).max(-1, keepdims=True)
    assert (np.abs((found - before).reshape(WORDS, -1, 32)) <= ROUNDING[kind] * largest).all()
    if name == "llama 3.1":  # transformers takes rope_freqs for no positions
        return
    # all of it, as transformers reads it
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = list(range(3, 19))
    got, expected = of_model(again, tokens), of_model(model, tokens)
    assert np.abs(got - expected).max() <= 1e-5 + 40 * ROUNDING[kind]


TEXTS = (
    *("Hello, world! It's 1234567 o'clock; WE'LL see.\n\n\tdef f(x):\r\n        return x**2  \n", ""),
    *("naïve café — “quoted” … 中文字符，日本語テキスト 한국어 עברית العربية ไทย हिन्दी", "   leading and trailing   "),
    *("🙂🙃👩‍👩‍👧 e\u0301 x\u200by\u00a0z ǅ ⅷ ½ ²³ ٣٤", "\r\n\r\n \n  \n a\n b 'S 'tIs CamelCaseWords HTTPServer/2"),
    "a" * 200 + " " * 50 + "1" * 20,
)  # fmt: skip


def cut_by(*patterns: str) -> cut.PreTokenizer:
    if patterns[-1] == known.GPT2:
        steps = [cut.Digits(individual_digits=True) for _ in patterns[:-1]]
        return cut.Sequence([*steps, cut.ByteLevel(add_prefix_space=False)])
    steps = [cut.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return cut.Sequence([*steps, cut.ByteLevel(add_prefix_space=False, use_regex=False)])


def trained(
    pre_tokenizer: cut.PreTokenizer, ignore_merges: bool = False, size: int = 400
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT, "<|user|>"],
        initial_alphabet=cut.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT, *TEXTS], trainer)
    return tokenizer


def exported_tokenizer(folder: Path, tokenizer: Tokenizer, ends: object = 0, **beside: str) -> Path:
    """The GGUF file of a small model with a tokenizer."""
    theirs = folder / "theirs"
    size = 8 + max(tokenizer.get_vocab().values())  # some have no token
    their_model(LLAMA, vocab_size=size, eos_token_id=ends).save_pretrained(theirs)
    tokenizer.save(str(theirs / "tokenizer.json"))
    convert(["from_hugging_face", str(theirs), str(folder / "ours")])
    for name, content in beside.items():
        path = (
            folder / "ours/checkpoints" / name.replace("__", ".").replace("kept_", "hugging_face/")
        )
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    convert(["to_gguf", str(folder / "ours"), str(folder / "out.gguf")])
    return folder / "out.gguf"


@pytest.mark.slow
@pytest.mark.parametrize("patterns, ignore_merges", known.CUTS)
def test_llama_cpp_cuts_text_as_the_tokenizer_does(patterns, ignore_merges, tmp_path):
    tokenizer = trained(cut_by(*patterns), ignore_merges)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    begin = [("<|user|>", tokenizer.token_to_id("<|user|>"))]
    if ignore_merges:
        around = processors.TemplateProcessing("<|user|> $A", special_tokens=begin)
        tokenizer.post_processor = around
    file = exported_tokenizer(tmp_path, tokenizer)
    ours = read_tokenizer(tmp_path / "ours")
    with LlamaCpp(file) as program:
        for text in (*TEXTS, TEXT[:3000], "so <think>it is</think>"):
            assert program.tokens(text) == ours.encode(text), text
        text = "<|user|>Hi<|endoftext|> there"
        assert program.tokens(text) != program.tokens(text, True) == ours.encode(text, True)


@pytest.mark.slow
def test_a_tokenizer_of_characters_is_one_of_bytes(tmp_path):
    tokenizer = character_tokenizer([*TEXTS, TEXT])
    file = exported_tokenizer(tmp_path, tokenizer)
    ours = read_tokenizer(tmp_path / "ours")
    with LlamaCpp(file) as program:
        for text in (*TEXTS, TEXT[:3000]):
            assert program.tokens(text) == ours.encode(text), text


def of_pieces(has_space: bool) -> Tokenizer:
    """A tokenizer as Llama 2 or Gemma has it."""
    space = normalizers.Replace(" ", "\u2581")
    taught = Tokenizer(models.BPE())
    taught.pre_tokenizer = cut.Metaspace()
    taught.train_from_iterator(
        [TEXT, *TEXTS], trainers.BpeTrainer(vocab_size=500, show_progress=False)
    )
    vocabulary = taught.get_vocab()
    by_number = [name for name in sorted(vocabulary, key=vocabulary.get) if "z" not in name]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *by_number]
    vocabulary = {name: number for number, name in enumerate(names)}
    merges = [
        (name[:end], name[end:])
        for name in by_number
        for end in range(1, len(name))
        if {name[:end], name[end:]} <= vocabulary.keys()
    ]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = space
    if has_space:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), space])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    begin = [("<s>", 1)]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=begin)
    return tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("has_space", [False, True])
def test_pieces_of_sentencepiece_are_those_of_the_tokenizer(has_space, tmp_path):
    end = {"tokenizer_config__json": json.dumps({"bos_token": "<s>", "eos_token": "</s>"})}
    file = exported_tokenizer(tmp_path, of_pieces(has_space), **end)
    ours = read_tokenizer(tmp_path / "ours")
    with LlamaCpp(file) as program:
        for text in (*TEXTS, TEXT[:3000], "so <think>it is</think>", "zzz", "aaaa  aaaaa"):
            assert program.tokens(text) == ours.encode(text), text


def test_all_tokens_that_are_said_to_end_texts_end_them(tmp_path):
    trained(cut_by(known.GPT2), size=260).save(str(tmp_path / "tokenizer.json"))
    said = {"eos_token_id": [1, 0, 5]}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    tokenizer = read_tokenizer(tmp_path)
    values, _ = known.tokenizer_values(tokenizer, 260, {"eos_token_id": 0})
    assert [values[name] for name in known.ENDS] == [0, 1, 5]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["", "kept_"])
def test_chat_template_and_sampling_leave_with_the_model(place, tmp_path, capsys):
    template = "{% for m in messages %}<|user|>{{ m.content }}<|endoftext|>{% endfor %}"
    tokenizer = trained(cut_by(known.GPT2))
    sampling = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    beside = {"chat_template__jinja": template, "generation_config__json": json.dumps(sampling)}
    beside = {f"{place}{name}": content for name, content in beside.items()}
    file = exported_tokenizer(tmp_path, tokenizer, [0, 1, 5, 6], **beside)
    told = capsys.readouterr().out
    assert "names for 3 tokens that end a text, of 4." in told
    assert "with its chat template" in told
    values = gguf.GGUFReader(file).fields
    assert values["tokenizer.chat_template"].contents() == template
    assert values["tokenizer.ggml.eos_token_id"].contents() == 0
    assert values["tokenizer.ggml.eot_token_id"].contents() == 1
    assert (tmp_path / "Modelfile").read_text() == (
        "# Made by to_gguf: ollama create NAME -f Modelfile\nFROM ./out.gguf\n"
        "PARAMETER num_ctx 32\nPARAMETER temperature 0.6\nPARAMETER top_k 20\n"
        'PARAMETER repeat_penalty 1.1\nPARAMETER stop "<|endoftext|>"\n'
        'PARAMETER stop "<|user|>"\nPARAMETER stop "$"\n'
    )
    with LlamaCpp(file) as program:
        answer = program.ask("/apply-template", messages=[{"role": "user", "content": "Hi"}])
    assert answer["prompt"] == "<|user|>Hi<|endoftext|>"


def change_pieces(folder: Path, **changes: object) -> None:
    """Change what the tokenizer.json of a folder says of its model."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    for name, change in changes.items():
        content["model"][name] = change(content["model"][name])
    file.write_text(json.dumps(content))


NOTED = {
    "as Qwen": (
        lambda: spoilt(lambda t: setattr(t, "normalizer", normalizers.NFC())),
        "llama.cpp does not bring text into Unicode's form NFC",
    ),
    "as newer Llamas": (
        lambda: newer_pieces(),
        "llama.cpp puts a space before all text, and after",
    ),
}


def newer_pieces() -> Tokenizer:
    tokenizer = of_pieces(True)
    tokenizer.normalizer = normalizers.Sequence([])
    content = json.loads(tokenizer.to_str()) | {"normalizer": None}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.pre_tokenizer = cut.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


@pytest.mark.parametrize("name", NOTED)
def test_what_llama_cpp_does_otherwise_is_told(name, tmp_path):
    make, words = NOTED[name]
    make().save(str(tmp_path / "tokenizer.json"))
    _, (note,) = known.tokenizer_values(read_tokenizer(tmp_path), 1000, {})
    assert note.startswith(words)


def several(merges: "list[list[str]]") -> int:
    """The second merge of a piece, not of the first one."""
    joined = ["".join(pair) for pair in merges]
    return next(i for i in range(9, len(joined)) if joined[i] == joined[i - 1])


PIECES = {
    "merges that are not all": (
        {"merges": lambda merges: merges[: several(merges)]},
        "; expected all of a piece. Train with another tokenizer, or use to_hugging_face.",
    ),
    "merges that stand apart": (
        {"merges": lambda merges: [merges.pop(several(merges)), *merges]},
        " that stand apart; expected them together",
    ),
    "a byte that is missing": (
        {"vocab": lambda names: {("?" if n == "<0x00>" else n): i for n, i in names.items()}},
        "got pieces without one for each byte; expected all 256",
    ),
}


@pytest.mark.parametrize("name", PIECES)
def test_pieces_that_llama_cpp_would_join_otherwise_are_refused(name, tmp_path):
    changes, words = PIECES[name]
    of_pieces(True).save(str(tmp_path / "tokenizer.json"))
    change_pieces(tmp_path, **changes)
    with pytest.raises(UserError) as found:
        known.tokenizer_values(read_tokenizer(tmp_path), 1000, {})
    assert words in str(found.value)


def spoilt(change) -> Tokenizer:
    tokenizer = trained(cut_by(known.GPT2), size=260)
    change(tokenizer)
    return tokenizer


REFUSED = {
    "another pattern": (
        lambda t: setattr(t, "pre_tokenizer", cut_by(r"\d|\D+")),
        r"got text cut by \d|\D+; expected a pattern of gpt-2, smollm, llama-bpe, dbrx, qwen2,",
    ),
    "words with a space before": (
        lambda t: setattr(t, "pre_tokenizer", cut.ByteLevel(add_prefix_space=True)),
        "got text cut by ByteLevel; expected a pattern of",
    ),
    "a normalizer": (
        lambda t: setattr(t, "normalizer", normalizers.Lowercase()),
        "got a normalizer Lowercase; expected text that is taken as it is",
    ),
    "tokens that take spaces": (
        lambda t: t.add_special_tokens([AddedToken("<mask>", lstrip=True)]),
        "got the token <mask> that takes spaces beside it",
    ),
    "two tokens before a text": (
        lambda t: setattr(
            t,
            "post_processor",
            processors.TemplateProcessing("<|user|> <|user|> $A", special_tokens=[("<|user|>", 1)]),
        ),
        "got the tokens [1, 1] before a text and [] after it; expected at most one",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_that_llama_cpp_has_not_is_refused(name, tmp_path):
    change, words = REFUSED[name]
    with pytest.raises(UserError) as found:
        exported_tokenizer(tmp_path, spoilt(change))
    assert words in str(found.value)
    assert not (tmp_path / "out.gguf").exists()


LIKE_QWEN3 = {
    "norm": "rms_norm", "position_embedding": "rotary", "activation": "swiglu", "biases": False,
    "qk_norm": True,
}  # fmt: skip
LIKE_GEMMA = {
    **LIKE_QWEN3, "qk_norm": False, "activation": "geglu", "norm_placement": "around",
    "zero_centered_gains": True, "embedding_scale": 768**0.5, "window": 512,
}  # fmt: skip
SLIDING = {"layer_pattern": ("sliding", "full")}
CAPS = {"score_softcap": 50.0, "logit_softcap": 30.0}
OWN = {
    "relu2": (
        Model(activation="relu2"),
        None,
        ". Train one with activation gelu or gelu_exact, which is gpt2, or use to_hugging_face.",
    ),
    "a family that is ours alone": (
        Model(),
        "popxl_gpt",
        "--family: got popxl_gpt; expected one that GGUF has and the model is of: gpt2. Give one",
    ),
    "dynamic": (
        Model(**LIKE_QWEN3, rotary_scaling="dynamic", rotary_original_positions=8),
        None,
        "rotary_scaling: got dynamic; expected none, linear or yarn, or llama3 in a family of",
    ),
    "windows in Mistral": (
        Model(**{**LIKE_QWEN3, "qk_norm": False}, layer_pattern=("sliding",), window=512),
        "mistral",
        "layer_pattern: got sliding with window 512; expected full, which llama.cpp has in this "
        "family, or windows as long as texts of 1024 tokens, and one rotary_base, scaled in full",
    ),
    "llama3 in Qwen3": (
        Model(**LIKE_QWEN3, rotary_scaling="llama3", rotary_original_positions=8),
        None,
        "rotary_scaling: got llama3; expected none, linear or yarn, or llama3 in a family of",
    ),
    "Gemma 2 without bounds": (
        Model(**LIKE_GEMMA, **SLIDING, logit_softcap=30.0),
        None,
        "score_softcap, logit_softcap: got 0, 30; expected both, which llama.cpp has in this family",
    ),
    "Gemma 2 with a head of its own": (
        Model(**LIKE_GEMMA, **SLIDING, **CAPS, tied_head=False),
        None,
        "tied_head: got false; expected true, which llama.cpp has in this family",
    ),
    "Gemma 3 with bounds of scores": (
        Model(**{**LIKE_GEMMA, "qk_norm": True}, layer_pattern=(*["sliding"] * 5, "full"), **CAPS),
        None,
        "to_gguf: got a model of an architecture of our own; expected one of those that GGUF has",
    ),
    "wider heads in OLMo 2": (
        Model(**LIKE_QWEN3, norm_placement="after", qk_norm_over="all", head_size=96),
        None,
        "head_size: got 96; expected hidden_size / heads = 64, which llama.cpp has in this family",
    ),
    "wider heads in Qwen2": (
        Model(**{**LIKE_QWEN3, "qk_norm": False}, qkv_biases=True, head_size=96),
        None,
        "head_size: got 96; expected hidden_size / heads = 64",
    ),
    "wider heads in Phi-3": (
        Model(**{**LIKE_QWEN3, "qk_norm": False}, head_size=96),
        "phi3",
        "head_size: got 96; expected hidden_size / heads = 64",
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_a_model_that_gguf_has_not_is_refused(name, tmp_path):
    model, family, words = OWN[name]
    with pytest.raises(UserError) as found:
        as_there = gguf_family(model, family)
        write_gguf(tmp_path / "out.gguf", model, as_there, iter(()), "f32", {})
    assert words in str(found.value)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    file, _ = exported(tmp_path, "gpt2")
    before = file.read_bytes()
    ask = ["to_gguf", str(tmp_path / "ours"), str(file)]
    with pytest.raises(
        UserError, match=r"out\.gguf: got a file that is there; expected a new name"
    ):
        convert(ask)
    convert([*ask, "--overwrite", "--type", "q8_0"])
    assert before != file.read_bytes()
    convert([*ask, "--overwrite"])
    assert before == file.read_bytes()
    (tmp_path / "Modelfile").write_text("FROM mine\n")
    with pytest.raises(UserError, match="Modelfile: got what this command has not made"):
        convert([*ask, "--overwrite"])
    (tmp_path / "Modelfile").unlink()
    (tmp_path / "ours/checkpoints/tokenizer.json").rename(tmp_path / "kept")
    with pytest.raises(
        UserError, match=r"checkpoints: got no tokenizer\.json; expected one, for a"
    ):
        convert([*ask, "--overwrite"])
    (tmp_path / "kept").rename(tmp_path / "ours/checkpoints/tokenizer.json")
    limit = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)); import runpy; "
    )
    limit += "import sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    asked = [sys.executable, "-c", limit, ROOT / "demo/convert.py", *ask, "--overwrite"]
    found = subprocess.run(asked, capture_output=True, text=True)
    assert found.returncode == 2 and "while writing; expected a folder" in found.stderr, found
    assert before == file.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "ours", "out.gguf"}


@pytest.mark.slow
def test_numbers_beyond_a_type_are_refused(tmp_path):
    exported(tmp_path, "gpt2")
    monster = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        monster.transformer.h[0].mlp.c_fc.weight[0, 0] = 1e5
    monster.save_pretrained(tmp_path / "theirs")
    convert(["from_hugging_face", str(tmp_path / "theirs"), str(tmp_path / "large")])
    ask = ["to_gguf", str(tmp_path / "large"), str(tmp_path / "large/out.gguf"), "--type"]
    with pytest.raises(
        UserError, match="--type: got f16 for decoder.0.feed_forward.up.weight, which"
    ):
        convert([*ask, "f16"])
    convert([*ask, "bf16"])


def test_without_the_package_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match="without the package gguf .*Run `pip install gguf`"):
        exported(tmp_path, "gpt2")
