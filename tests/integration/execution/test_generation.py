"""Texts by keys and values that are kept, against Hugging Face's GPT-2 and against formulas."""

import numpy as np
import pytest
import torch
from helpers.quick import Later, cases
from popxl_engine.planner.sequence import sequence
from tokenizers import Tokenizer

from popxl_gpt.data.text_tokenizer import TextTokenizer
from popxl_gpt.data.tokenisation import END_OF_TEXT, train_tokenizer
from popxl_gpt.demo.job.writing import TextStream, write
from popxl_gpt.execution.inference.cache import CacheSizes
from popxl_gpt.execution.inference.generation import CachedModel, cached_session
from popxl_gpt.execution.inference.sampling import Sampling, choose, probabilities
from popxl_gpt.execution.variables import write_whole_weights
from popxl_gpt.utils.errors import NotFiniteError
from popxl_gpt.utils.runtime import planner
from tests.integration.gpt_oracle import hugging_face, random_weights, small

transformers = Later("transformers")
ODD = {"layers": 3, "hidden_size": 39, "vocabulary_size": 101, "max_positions": 230}
PROMPTS = (1, 5, 29)
"""Tokens of prompts."""
MARGIN = 1e-4
"""Two logits closer than this may change their order by rounding."""


def prompts_of(lengths, vocabulary, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocabulary, length).tolist() for length in lengths]


def started(config, texts, longest, tokens, weights=None):
    model = CachedModel(config, texts, longest, tokens)
    whole = random_weights(config.model) if weights is None else weights
    write_whole_weights(model.session, model.config, whole.items())
    return model


def greedy(config, prompts, tokens):
    """The likeliest tokens after each prompt, and their logits: [texts, tokens], [.., vocabulary]."""
    model = started(config, len(prompts), max(map(len, prompts)), tokens)
    found = []
    with model.session:
        logits = model.start(prompts)
        for _ in range(tokens):
            found.append(logits.copy())
            logits = model.append(logits.argmax(axis=1).tolist())
    every = np.stack(found, axis=1)
    return every.argmax(axis=2), every


@pytest.mark.slow
def test_greedy_tokens_are_those_that_hugging_face_generates():
    config, tokens = small(**ODD), 200
    prompts = prompts_of(PROMPTS, 101)
    got, _ = greedy(config, prompts, tokens)
    gpt = hugging_face(config.model, random_weights(config.model)).float()
    close = 0
    for prompt, ours in zip(prompts, got):
        done = gpt.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=tokens,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            eos_token_id=None,
            pad_token_id=0,
        )
        theirs = done.sequences[0, len(prompt) :].numpy()
        top = torch.stack(done.scores)[:, 0].topk(2).values
        margins = (top[:, 0] - top[:, 1]).numpy()
        different = np.flatnonzero(theirs != ours)
        if different.size:  # texts go other ways from there on
            close += 1
            assert margins[different[0]] < MARGIN, different[0]
    print(f"{close} of {len(prompts)} texts differ, from a margin below {MARGIN} on")
    assert close < len(prompts)


LAYOUTS = [
    {"data_parallel": 2},
    {"tensor_parallel_1": 3},
    {"tensor_parallel_2": 2},
    {"data_parallel": 2, "tensor_parallel_1": 3, "tensor_parallel_2": 2},
    {"data_parallel": 2, "tensor_parallel_1": 3, "replicated_tensor_sharding": False},
    {"device_memory": 300_000},
    {"host_memory": 300_000},
]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("changes", cases(LAYOUTS, lambda changes: len(changes) == 3))
def test_layouts_and_memories_agree(changes, tmp_path):
    prompts = prompts_of((9, 2, 4), 37)
    if "host_memory" in changes:
        changes = {**changes, "memmap_dir": str(tmp_path)}
    alone, expected = greedy(small(layers=4, max_positions=40), prompts, 12)
    got, logits = greedy(small(layers=4, max_positions=40, **changes), prompts, 12)
    np.testing.assert_array_equal(got, alone)
    np.testing.assert_allclose(logits, expected, atol=2e-5)


@pytest.mark.slow
def test_rows_come_in_an_order_that_is_known_whichever_tokens_a_run_takes():
    model = CachedModel(small(layers=5), 2, 6, 4)
    events = list(sequence(model.session.ir))
    rows = [event.row for event in events if event.kind == "load"]
    assert max(rows) == 4 and rows[-1] == 0
    assert sum(event.kind == "store" for event in events) == 2 * 5


@pytest.mark.slow
def test_a_text_beyond_the_positions_goes_on_from_the_second_half_of_what_was_seen():
    config = small(max_positions=16)
    prompts = prompts_of((20, 13, 3), 37)
    gpt = hugging_face(config.model, random_weights(config.model))
    model = started(config, 3, 20, 40)
    seen = [list(prompt[-16:]) for prompt in prompts]
    with model.session:
        logits = model.start(prompts)
        for step in range(40):
            for text, row in zip(seen, logits):
                expected = gpt(torch.tensor([text])).logits[0, -1].detach().numpy()
                np.testing.assert_allclose(row, expected, atol=2e-5, err_msg=str(step))
            tokens = logits.argmax(axis=1).tolist()
            for number, token in enumerate(tokens):
                seen[number].append(token)
                if len(seen[number]) > 16:
                    seen[number] = seen[number][-8:]
            logits = model.append(tokens)


@pytest.mark.slow
def test_a_text_is_not_read_again_before_it_has_all_positions(monkeypatch):
    config, reads = small(max_positions=16), []
    model = started(config, 2, 16, 40)
    read = model._read
    monkeypatch.setattr(model, "_read", lambda: reads.append(0) or read())
    with model.session:
        model.start([[1, 2, 3], [4]])
        for _ in range(13):
            model.append([5, 6])
        assert len(reads) == 1
        model.append([5, 6])
    assert len(reads) == 2


def test_prompts_are_read_in_parts_that_are_as_equal_as_can_be():
    config = small(max_positions=1000)
    assert CacheSizes.of(config, 3, 600, 50) == CacheSizes(texts=3, prompt=200, columns=650)
    assert CacheSizes.of(config, 1, 257, 900) == CacheSizes(texts=1, prompt=129, columns=1128)
    assert CacheSizes.of(config, 1, 1000, 9) == CacheSizes(texts=1, prompt=250, columns=1009)
    assert CacheSizes.of(small(data_parallel=2), 3, 5, 4) == CacheSizes(
        texts=2, prompt=5, columns=9
    )


def test_parts_of_a_prompt_give_what_the_whole_gives(monkeypatch):
    prompts = prompts_of((14, 9), 37)
    _, whole = greedy(small(max_positions=30), prompts, 5)
    monkeypatch.setattr("popxl_gpt.execution.inference.cache.PROMPT_TOKENS", 4)
    _, parts = greedy(small(max_positions=30), prompts, 5)
    np.testing.assert_allclose(parts, whole, atol=2e-5)


def test_layers_with_windows_keep_no_more_of_a_long_text_than_their_windows():
    positions, window = 32768, 1024
    model = {"layers": 3, "max_positions": positions, "position_embedding": "rotary"}
    sizes = CacheSizes(texts=1, prompt=256, columns=positions)
    full, both = (
        planner().plan(cached_session(small(**model, **changes), sizes).ir, with_peaks=False)
        for changes in ({}, {"layer_pattern": ("sliding", "sliding", "full"), "window": window})
    )
    kept = [name for name in both.buffers if "[1, 3, " in name]  # keys and values of heads
    assert kept == [
        *(f"{n}: 2 x float32[1, 3, 1024, 8]" for n in (1, 2)),
        *(f"{n}: 1 x float32[1, 3, 32768, 8]" for n in (3, 4)),
    ]
    saved = 2 * 2 * (positions - window) * 3 * 8 * 4  # keys and values of two layers
    assert full.remote_memory_bytes - both.remote_memory_bytes == saved


# Choosing


@pytest.mark.slow
@pytest.mark.parametrize("top_p", [1.0, 0.7, 0.01])
@pytest.mark.parametrize("top_k", [None, 1, 12, 1000])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_probabilities_are_hugging_faces(temperature, top_k, top_p):
    logits = np.random.default_rng(5).normal(0, 2, 97).astype(np.float32)
    scores = torch.from_numpy(logits).double()[None]
    warpers = [transformers.TemperatureLogitsWarper(temperature)]
    if top_k is not None:
        warpers.append(transformers.TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(transformers.TopPLogitsWarper(top_p))
    for warper in warpers:
        scores = warper(None, scores)
    got = np.zeros(97)
    tokens, weights = probabilities(
        logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    )
    got[tokens] = weights
    np.testing.assert_allclose(got, scores.softmax(-1)[0].numpy(), atol=1e-12)


@pytest.mark.slow
def test_draws_have_the_probabilities():
    logits, sampling = np.log(np.arange(1, 21, dtype=np.float32)), Sampling(temperature=1.0, seed=3)
    random, draws = sampling.random(0), 20000
    counts = np.bincount([choose(logits, sampling, random) for _ in range(draws)], minlength=20)
    expected = np.arange(1, 21) / 210 * draws
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 36.2  # 0.99 of chi-squared with 19 degrees of freedom


def test_no_temperature_takes_the_likeliest_and_the_first_of_equal_ones():
    sampling = Sampling(temperature=0)
    logits = np.array([0.0, 7.0, 7.0, -1.0], np.float32)
    assert choose(logits, sampling, sampling.random(0)) == 1


# Text


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the cat sat on the mat. äöü 猫は座った 🐈\n"] * 20, 290)


def streamed(tokenizer, text, stop=()):
    stream = TextStream(tokenizer, tokenizer.encode("the ").ids, stop)
    pieces = []
    for token in tokenizer.encode(text).ids:
        pieces.append(stream.append(token))
        if stream.is_stopped:
            break
    pieces.append(stream.end())
    assert "".join(pieces) == stream.text
    return pieces


def test_text_comes_in_whole_characters(tokenizer):
    text = "猫 sat, ö🐈🐈\u0301 x"
    pieces = streamed(tokenizer, text)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_are_no_character_come_at_the_end(tokenizer):
    half = tokenizer.encode("é").ids[:1]
    stream = TextStream(tokenizer, [])
    assert [stream.append(half[0]), stream.end()] == ["", "\ufffd"]


@pytest.mark.parametrize("stop", ["cat", "at on", ".", "\n", "the mat"])
def test_a_stop_ends_the_text_and_is_never_shown(tokenizer, stop):
    text = "a cat sat on the mmat. the mat.\nthe"
    pieces = streamed(tokenizer, text, ("never there", stop))
    assert "".join(pieces) == text[: text.index(stop)]


def written(config, tokenizer, prompts, tokens, sampling, weights=None, **more):
    model = started(config, len(prompts), max(map(len, prompts)), tokens, weights)
    with model.session:
        return write(model, TextTokenizer(tokenizer), prompts, tokens, sampling, **more)


@pytest.mark.slow
def test_a_seed_gives_a_text_its_text_whatever_others_there_are(tokenizer):
    config = small(vocabulary_size=300, max_positions=40)
    prompts, sampling = prompts_of((3, 8, 8), 290), Sampling(temperature=2.0, seed=5)
    together = written(config, tokenizer, prompts, 20, sampling)
    assert together == written(config, tokenizer, prompts, 20, sampling)
    assert together[:1] == written(config, tokenizer, prompts[:1], 20, sampling)
    assert together != written(config, tokenizer, prompts, 20, Sampling(temperature=2.0, seed=6))
    told = {0: "", 1: "", 2: ""}
    written(
        config, tokenizer, prompts, 20, sampling, on_text=lambda n, t: told.update({n: told[n] + t})
    )
    assert list(told.values()) == together


@pytest.mark.parametrize("name, end", [(END_OF_TEXT, 0), ("</s>", 7)])  # ours, and Llama's
def test_the_end_of_a_document_ends_a_text(tokenizer, name, end):
    config = small(vocabulary_size=300, end_of_text=7)
    named = Tokenizer.from_str(tokenizer.to_str().replace(END_OF_TEXT, name))
    weights = random_weights(config.model)
    weights["head.norm.weight"][:] = 0  # logits are the bias by the word's row
    weights["head.norm.bias"][:] = weights["embedding.word.weight"][end] * 100
    ended = []
    texts = written(
        config, named, [[1], [2, 3]], 9, Sampling(temperature=0), weights, on_end=ended.append
    )
    assert texts == ["", ""] and ended == [0, 1]


def test_a_text_ends_at_any_of_several_tokens(tokenizer):
    config = small(vocabulary_size=300)
    for end in (7, 9):
        weights = random_weights(config.model)
        weights["head.norm.weight"][:] = 0
        weights["head.norm.bias"][:] = weights["embedding.word.weight"][end] * 100
        run = config, tokenizer, [[1]], 9, Sampling(temperature=0), weights
        assert written(*run, ends=[7, 9]) == [""] != written(*run, ends=[8])


@pytest.mark.parametrize("convolution_size", [1, 3])
@pytest.mark.parametrize("weight", ["attention.qkv", "attention.output", "feed_forward.down"])
def test_logits_that_are_not_finite_end_with_the_place_where_they_began(
    weight, convolution_size, tokenizer
):
    config = small(vocabulary_size=300, convolution_size=convolution_size)
    weights = random_weights(config.model)
    weights[f"decoder.1.{weight}.weight"][:] = 3e38
    with pytest.raises(NotFiniteError) as told:
        written(config, tokenizer, [[1]], 9, Sampling(), weights)
    assert "logits: got numbers that are not finite after 0 tokens" in str(told.value)
    assert "modelling/" in str(told.value)


def test_a_prompt_that_is_longer_than_the_context_keeps_its_last_tokens():
    config = small(max_positions=16)
    (prompt,) = prompts_of((50,), 37)
    long, short = (greedy(config, [text], 1)[1] for text in (prompt, prompt[-16:]))
    np.testing.assert_array_equal(long, short)
