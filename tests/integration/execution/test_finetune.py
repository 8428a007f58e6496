"""Fine-tuning, as docs/finetune.md has it: a small model learns to answer what it never saw."""

import itertools
import json

import numpy as np
import pytest

from popxl_gpt.data.prepare import main as prepare
from popxl_gpt.demo.generate import generate
from popxl_gpt.execution.inference.sampling import Sampling
from tests.integration.runs import run_job

LETTERS = "abcdefghijklm"


@pytest.mark.slow
def test_a_model_that_is_fine_tuned_answers_what_it_was_never_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pairs = list(map("".join, itertools.product(LETTERS, repeat=2)))
    np.random.default_rng(0).shuffle(pairs)
    asked, taught = pairs[:30], pairs[30:] * 6
    with open("taught.jsonl", "w") as file:
        file.writelines(json.dumps({"prompt": f"{p}: ", "answer": p[::-1]}) + "\n" for p in taught)
    words = ["--sequence_length", "32", "--workers", "1", "--validation", "0"]
    prepare(
        ["conversations", "taught.jsonl", "--tokenizer", "characters", "--output", "data", *words]
    )
    sizes = [
        "--config", "tiny", "--data_parallel", "1", "--tensor_parallel_1", "1", "--sequence_length",
        "32", "--tensor_parallel_2", "1", "--micro_batch_size", "8", "--recomputation", "false",
        "--vocabulary_size", "32", "--samples", "0", "--input_files", "data/train-*.tfrecord",
        "--tokenizer", "data/tokenizer.json", "--masked_labels", "--document_attention",
    ]  # fmt: skip
    run_job(*sizes, "--name", "base", "--steps", "2")
    run_job(*sizes, "--name", "fine", "--steps", "300", "--init_from", "runs/base",
            "--learning_rate", "4e-3", "--schedule", "cosine", "--warmup_steps", "20")  # fmt: skip
    right = {}
    for run in ("base", "fine"):
        prompts = [f"{pair}: " for pair in asked]
        answers = generate(f"runs/{run}", prompts, tokens=4, sampling=Sampling(temperature=0.0))
        right[run] = sum(answer == pair[::-1] for answer, pair in zip(answers, asked))
    assert right["base"] == 0 and right["fine"] >= 27, right
