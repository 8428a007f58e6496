"""Models that none of transformers' families is, in transformers: by the code that lies beside the
weights.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.quick import Later

from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.data.tokenisation import train_tokenizer
from popxl_gpt.demo.convert import main as convert
from popxl_gpt.execution.checkpoints.checkpoint_folder import TOKENIZER, folder_name
from popxl_gpt.execution.checkpoints.finding import find_trained
from popxl_gpt.execution.exchange.hugging_face import HuggingFaceFolder, write_hugging_face
from tests.integration.architectures import (
    EXPORTED,
    doubles,
    leaves,
    logits_by_formula,
    small_model,
    token_losses_by_formula,
)
from tests.integration.gpt_oracle import random_weights
from tests.integration.runs import run_job

transformers = Later("transformers")
own_family = Later("popxl_gpt.modelling.modeling_popxl_gpt")

TEXTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5], [35, 8, 9, 7]]
PADDING = 36


@pytest.fixture(params=EXPORTED)
def exported(request, tmp_path) -> "tuple[Config, dict[str, np.ndarray], Path]":
    """A configuration, its weights and the folder with them."""
    config = small_model(request.param, head_serialisation=1, attention_serialisation=1)
    weights, folder = random_weights(config.model), tmp_path / "theirs"
    folder.mkdir()
    write_hugging_face(folder, config.model, iter(weights.items()), None, 20_000)
    return config, weights, folder


def load(folder: Path) -> torch.nn.Module:
    return own_family.PopxlGPTForCausalLM.from_pretrained(folder).double().eval()


def expected_logits(config: Config, weights: "dict[str, np.ndarray]", text: "list[int]"):
    single = override(config, sequence_length=len(text), max_positions=16)
    return logits_by_formula(single, doubles(weights), np.array(text)).numpy()


def padded(on_the_left: bool) -> "tuple[torch.Tensor, torch.Tensor]":
    """The texts as one batch, and where they are."""
    longest = max(map(len, TEXTS))
    words = torch.full((len(TEXTS), longest), PADDING)
    mask = torch.zeros_like(words)
    for row, text in enumerate(TEXTS):
        place = slice(longest - len(text), None) if on_the_left else slice(0, len(text))
        words[row, place], mask[row, place] = torch.tensor(text), 1
    return words, mask


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("on_the_left", [True, False])
def test_logits_of_texts_with_padding_are_those_of_the_formula(exported, on_the_left):
    config, weights, folder = exported
    words, mask = padded(on_the_left)
    with torch.no_grad():
        logits = load(folder)(words, attention_mask=mask).logits
    for row, text in enumerate(TEXTS):
        found = logits[row][mask[row].bool()].numpy()
        np.testing.assert_allclose(found, expected_logits(config, weights, text), atol=1e-5)


@pytest.mark.slow
def test_texts_that_it_writes_and_the_loss_are_those_of_the_formula(exported):
    config, weights, folder = exported
    model, (words, mask) = load(folder), padded(on_the_left=True)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": PADDING}
    found = model.generate(words, attention_mask=mask, max_new_tokens=5, **options)
    for row, text in enumerate(TEXTS):
        whole = list(text)
        for _ in range(5):
            whole.append(int(expected_logits(config, weights, whole)[-1].argmax()))
        assert found[row, -5:].tolist() == whole[-5:]
    text = torch.tensor(TEXTS[0])
    rows = torch.from_numpy(expected_logits(config, weights, TEXTS[0]))[:-1]
    loss = model(text[None], labels=text[None]).loss
    assert loss.item() == pytest.approx(torch.nn.functional.cross_entropy(rows, text[1:]).item())


@pytest.mark.slow
def test_the_model_and_every_bit_come_back(exported):
    config, weights, folder = exported
    theirs = HuggingFaceFolder(folder)
    again = dict(theirs.weights())
    assert list(again) == list(weights)
    assert all(np.array_equal(again[name], array) for name, array in weights.items())
    kept = {name: getattr(config.model, name) for name in ("positions", "key_value", "head_width")}
    assert {name: getattr(theirs.model, name) for name in kept} == kept
    same = set(theirs.model.__dataclass_fields__) - {
        *("sequence_length", "max_positions", "key_value_heads", "feed_forward_size"),
    }
    assert all(getattr(theirs.model, n) == getattr(config.model, n) for n in same)


@pytest.mark.slow
def test_what_is_saved_by_transformers_is_read(exported, tmp_path):
    _, weights, folder = exported
    own_family.PopxlGPTForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "again")
    again = dict(HuggingFaceFolder(tmp_path / "again").weights())
    assert all(np.array_equal(again[name], array) for name, array in weights.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "places",
    [
        {"": "cpu"},
        {"embedding": "cpu", "norm": "cpu", "lm_head": "cpu", "decoder": "disk"},
        {"embedding": "disk", "norm": "disk", "lm_head": "disk", "decoder": "cpu"},
        "auto",
    ],
    ids=["whole", "layers on disk", "all but layers on disk", "auto"],
)
def test_wherever_parts_lie_it_is_the_same_model(exported, tmp_path, places):
    _, _, folder = exported
    text = torch.tensor(TEXTS[:1])
    model = own_family.PopxlGPTForCausalLM.from_pretrained(
        folder, device_map=places, offload_folder=tmp_path / "offloaded"
    )
    with torch.no_grad():
        expected = own_family.PopxlGPTForCausalLM.from_pretrained(folder)(text).logits
        torch.testing.assert_close(model(text).logits, expected, rtol=0, atol=0)


@pytest.mark.slow
def test_fresh_weights_make_a_model_that_knows_nothing(exported):
    _, _, folder = exported
    config = own_family.PopxlGPTConfig.from_pretrained(folder)
    torch.manual_seed(0)
    model = own_family.PopxlGPTForCausalLM(config)
    text = torch.tensor(TEXTS[:1])
    assert model(text, labels=text).loss.item() == pytest.approx(np.log(37), rel=0.05)


@pytest.mark.sampled(2)
@pytest.mark.slow
# Its new name is not known to the older of the versions that are pinned.
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")
def test_a_step_of_transformers_trainer_is_the_formula_s_and_comes_back(exported, tmp_path):
    """Over the two gradients of sequences of unequal lengths, with recomputation."""
    config, weights, folder = exported
    texts = [TEXTS[0], TEXTS[2]]
    options = transformers.TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=1,
        max_grad_norm=0.0,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    model = own_family.PopxlGPTForCausalLM.from_pretrained(folder)
    model.gradient_checkpointing_enable()
    data = [{"input_ids": text, "labels": text} for text in texts]
    trainer = transformers.Trainer(model, options, train_dataset=data)
    trainer.train()
    trainer.save_model(str(tmp_path / "after"))
    ours, losses = leaves(weights), []
    for text in texts:
        single = override(config, sequence_length=len(text) - 1, max_positions=16)
        words, labels = np.array(text[:-1]), np.array(text[1:])
        losses.append(token_losses_by_formula(single, ours, words, labels))
    torch.cat(losses).mean().backward()
    found = dict(HuggingFaceFolder(tmp_path / "after").weights())
    assert found.keys() == ours.keys()
    for name, weight in ours.items():
        expected = (weight - 0.5 * weight.grad).detach().numpy()
        np.testing.assert_allclose(found[name], expected, atol=2e-6, err_msg=name)


USE = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
words = tokenizer("def f():", return_tensors="pt")
found = model.generate(**words, max_new_tokens=4, do_sample=False)
print(type(model).__name__, found.shape[1] - words["input_ids"].shape[1])
print(model(**words).logits[0, -1].tolist())
"""


@pytest.mark.slow
def test_preset_modern_is_used_as_the_command_says_without_this_program(tmp_path, capsys):
    """From a folder that has neither it nor a network."""
    flags = "--hidden_size 16 --heads 2 --layers 2 --vocabulary_size 300 --sequence_length 16"
    run_job(
        *("--config", "modern", *flags.split(), "--steps", 3, "--validate_every", 0),
        *("--run_folder", tmp_path, "--name", "run", "--learning_rate", 0.01),
    )
    saved = find_trained(tmp_path / "run")
    tokenizer = train_tokenizer(["def f():\n    return 1\n"], 300)
    tokenizer.save(str(saved.folder.parent / TOKENIZER))
    convert(["to_hugging_face", str(tmp_path / "run"), str(tmp_path / "theirs")])
    said = capsys.readouterr().out
    assert (
        f"AutoModelForCausalLM.from_pretrained('{tmp_path / 'theirs'}', trust_remote_code=True)"
        in said
    )
    values = json.loads((tmp_path / "theirs/config.json").read_text())
    assert values["auto_map"]["AutoModelForCausalLM"] == "modeling_popxl_gpt.PopxlGPTForCausalLM"
    away = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    job = subprocess.run(
        [sys.executable, "-P", "-c", USE, str(tmp_path / "theirs")],
        cwd=tmp_path,
        env={**away, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert job.returncode == 0, job.stderr
    kind, row = job.stdout.splitlines()[-2:]
    assert kind == "PopxlGPTForCausalLM 4"
    text = tokenizer.encode("def f():").ids
    expected = expected_logits(saved.config, dict(saved.weights()), text)[-1]
    np.testing.assert_allclose(json.loads(row), expected, atol=1e-5)


@pytest.mark.slow
def test_the_code_of_a_folder_is_not_run_to_read_it(exported, tmp_path):
    _, _, folder = exported
    (folder / "modeling_popxl_gpt.py").write_text("raise SystemExit('run')\n")
    convert(["from_hugging_face", str(folder), str(tmp_path / "ours")])
    assert find_trained(tmp_path / "ours").folder.name == folder_name(0)
